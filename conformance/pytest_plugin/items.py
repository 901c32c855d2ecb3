"""Cases of the suite as pytest items, behind `conformance.pytest_plugin` (SPEC 18)."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from conformance import rules
from conformance.backends import BUILT_IN, resolve, resolve_process, strangers
from conformance.cases.checks import Caller, Invariance
from conformance.cases.invariances import invariances
from conformance.diagnosis import U32, explain, wrong_part
from conformance.diagnosis.differences import under_rule, worst_line
from conformance.expectations import first_of, lines_of
from conformance.golden import Golden, read_all
from conformance.operations import Outputs, Sessions
from conformance.paths import data_folder
from conformance.results import Result, guarded
from conformance.rules import Contract, Verdict
from conformance.runner import attempt, cases
from conformance.selection import LEVELS, Selection
from reference.errors import BitforbitError

PROCESS = "process:"
"""What precedes the command line of a program."""


class Suite:
    """The cases that a run of pytest has, and the backend that they are for, opened when needed.

    With xdist every worker has its own.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Read the options. Raises UsageError where they cannot be meant."""
        option = config.getoption
        self.name, self._device = option("bitforbit_backend"), option("bitforbit_device")
        self._timeout, self.diagnoses = option("bitforbit_timeout"), option("bitforbit_diagnose")
        self._warns = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0"
        self._opened: Any = None
        self._error: str | None = None
        unknown = [level for level in option("bitforbit_level") if level not in LEVELS]
        if unknown:
            raise pytest.UsageError(
                f"--bitforbit-level: {unknown[0]!r} is none of {', '.join(LEVELS)}"
            )
        if self._timeout is not None and not self._timeout > 0:
            raise pytest.UsageError("--bitforbit-timeout: it must be a number of seconds above 0")
        globs = tuple(option("bitforbit_case")) or ("*",)
        self._selection = Selection(tuple(option("bitforbit_level")), globs)
        self._contract: Contract | None = option("bitforbit_contract")
        if not self._is_process and self.name not in BUILT_IN and not Path(self.name).is_file():
            raise pytest.UsageError(
                f"--bitforbit-backend: {self.name} is neither a Python file, one of "
                f"{', '.join(BUILT_IN)}, nor process:COMMAND"
            )
        try:
            self._skipped, self._failing, self._may_fail = (
                lines_of(option(f"bitforbit_{name}")) for name in ("skip", "xfail", "expect")
            )
            self.folder = data_folder("goldens")
            self._cases = {case.id: case for case in cases(self.folder)}
        except BitforbitError as error:
            raise pytest.UsageError(str(error)) from error
        self._ids = list(self._cases)
        for glob in globs:
            if not any(map(replace(self._selection, patterns=(glob,)).takes, self._ids)):
                raise pytest.UsageError(f"no case matches --bitforbit-case {glob!r}")

    @property
    def _is_process(self) -> bool:
        return bool(self.name.startswith(PROCESS))

    @property
    def command(self) -> str:
        """The words that judge this backend on the command line."""
        asked = f" --contract {self._contract}" if self._contract else ""
        if self._is_process:
            program = shlex.quote(self.name.removeprefix(PROCESS))
            limit = f" --timeout {self._timeout:g}" if self._timeout else ""
            return f"bitforbit check --process {program}{limit}{asked}"
        device = f" --device {self._device}" if self._device else ""
        return f"bitforbit check {shlex.quote(self.name)}{device}{asked}"

    def collector(self, session: pytest.Session) -> Cases:
        """The cases as a node of pytest's tree."""
        cases: Cases = Cases.from_parent(session, name="bitforbit", suite=self)
        return cases

    def items(self, parent: Cases) -> Iterator[Case]:
        """Every selected case, in the order of the suite."""
        if self._warns:
            for line in self._skipped + self._failing + self._may_fail:
                if not any(map(line.takes, self._ids)):
                    warnings.warn(
                        pytest.PytestWarning(f"{line.place}: no case matches {line.glob!r}"),
                        stacklevel=2,
                    )
        for case_id in filter(self._selection.takes, self._ids):
            item: Case = Case.from_parent(parent, name=case_id, suite=self)
            skipped, failing, may_fail = (
                first_of(lines, case_id) for lines in (self._skipped, self._failing, self._may_fail)
            )
            if skipped is not None:
                item.add_marker(pytest.mark.skip(reason=skipped.reason))
            elif failing is not None:
                item.add_marker(pytest.mark.xfail(reason=failing.reason, strict=True))
            elif may_fail is not None:
                item.add_marker(pytest.mark.xfail(reason=may_fail.reason, strict=False))
            yield item

    def open(self) -> None:
        """Open the backend, once. Raises BitforbitError where it cannot be, every time."""
        if self._opened is None and self._error is None:
            try:
                if self._is_process:
                    program = self.name.removeprefix(PROCESS)
                    self._opened = resolve_process(program, self._timeout)
                else:
                    self._opened = resolve(self.name, self._device)
                for line in strangers(self._opened):
                    warnings.warn(pytest.PytestWarning(f"{self.name}: {line}"), stacklevel=2)
            except BitforbitError as error:
                self._error = str(error)
        if self._error is not None:
            raise BitforbitError(self._error)

    def close(self) -> None:
        """End a program."""
        if self._is_process and self._opened is not None:
            self._opened.close()

    @property
    def backend(self) -> Any:
        """The backend, opened."""
        return self._opened

    def demand_asked(self, case_id: str) -> None:
        """Skip a case that the contract leaves out, or in whose place another one is asked."""
        numerics = self._opened.numerics
        case = self._cases[case_id]
        contract = self._contract or rules.contract_of(numerics)
        if case.rule in rules.asked(case, numerics, contract):
            return
        own = rules.numerics_of(numerics, case.operation)
        if "bounds" in (contract, rules.contract_of(own)):
            pytest.skip(f"not asked of {own.get('accumulator')} (contract bounds, SPEC 18)")
        if case.rule == "either":
            pytest.skip("not asked: `either` is for an exact backend that declares `fma`")
        pytest.skip("not asked: `either` stands for it, as the backend declares `fma`")

    @cached_property
    def sessions(self) -> Sessions:
        """Models that the backend has loaded."""
        return Sessions(self._opened)

    @cached_property
    def caller(self) -> Caller:
        """How invariances call the backend."""
        return Caller(self._opened, self.sessions)

    @cached_property
    def invariances(self) -> dict[str, Invariance]:
        """Cases without a golden, by id."""
        return {f"{one.id}:bits": one for one in invariances()}


class Cases(pytest.Collector):
    """The collector of all cases."""

    def __init__(self, *, suite: Suite, **others: Any) -> None:
        super().__init__(**others, nodeid="bitforbit")
        self._suite = suite

    def collect(self) -> Iterator[Case]:
        """The selected cases."""
        return self._suite.items(self)


class CaseError(Exception):
    """A case did not pass; the text is what the report says."""


class Case(pytest.Item):
    """One case: a golden and a rule, or an invariance."""

    def __init__(self, *, suite: Suite, **others: Any) -> None:
        super().__init__(**others)
        self._suite = suite

    def setup(self) -> None:
        """Open the backend. An error here is one of the run, not of the case."""
        try:
            self._suite.open()
        except BitforbitError as error:
            pytest.fail(str(error), pytrace=False)

    def runtest(self) -> None:
        """Judge the backend by the case."""
        golden_id, _, rule = self.name.rpartition(":")
        self._suite.demand_asked(self.name)
        invariance = self._suite.invariances.get(self.name)
        golden, outputs = None, None
        if invariance is not None:
            verdict = guarded(lambda: invariance.check(self._suite.caller))
            section = invariance.section
        else:
            golden = next(read_all(self._suite.folder, {golden_id}))
            section = golden.section
            numerics = self._suite.backend.numerics
            u = rules.unit_roundoff(rules.numerics_of(numerics, golden.operation))
            verdict, outputs = attempt(self._suite.backend, self._suite.sessions, golden, rule, u)
        self.user_properties.append(("section", section))
        if verdict.worst is not None:
            self.user_properties.append(("worst", verdict.worst))
        if verdict.outcome == "not implemented":
            pytest.skip(f"not implemented: {verdict.message}")
        if verdict.outcome == "not judged":
            pytest.skip(f"not judged: {verdict.message}")
        if verdict.outcome != "pass":
            more = self._explained(golden, outputs, rule, verdict)
            repeat = f"{self._suite.command} --case {shlex.quote(self.name)}"
            unusable = "cannot evaluate: " if verdict.outcome == "cannot evaluate" else ""
            title = f"{unusable}{verdict.message}  (SPEC {section})"
            raise CaseError("\n     ".join([title, *more, repeat]))

    def _explained(
        self, golden: Golden | None, outputs: Outputs | None, rule: str, verdict: Verdict
    ) -> list[str]:
        """The lines between the message and the one that repeats the case."""
        if golden is None or outputs is None:
            return []
        numerics = self._suite.backend.numerics
        own = rules.numerics_of(numerics, golden.operation)
        u = U32 if rule in rules.ASK_BITS else rules.unit_roundoff(own)
        worst = worst_line(under_rule(golden, rule, outputs, numerics), verdict.message)
        if self._suite.diagnoses:
            result = Result(
                self.name, golden.level, golden.section, rule, "fail", None, verdict.message
            )
            answers = {(golden.id, rule): outputs}
            found = explain([result], answers, self._suite.folder, numerics, self._suite.backend)[
                self.name
            ]
            lines = [worst, *found.lines()]
        else:
            lines = [worst, wrong_part(golden, outputs, u, rule in rules.ASK_BITS)]
        return [line for line in lines if line]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What the report says, without a traceback; anything else as pytest shows it."""
        if isinstance(excinfo.value, (CaseError, BitforbitError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int, str]:
        """Where pytest says that the test is: in the suite."""
        return "bitforbit", 0, self.name
