"""Cases of the suite as pytest items, behind `conformance.pytest_plugin` (SPEC 18)."""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from conformance import rules
from conformance.backends import BUILT_IN, resolve, resolve_process
from conformance.cases.checks import Caller, Invariance
from conformance.cases.invariances import invariances
from conformance.diagnosis import U32, explain, worst_element, wrong_part
from conformance.golden import Golden, read_all, read_manifest
from conformance.operations import Outputs, Sessions
from conformance.paths import data_folder
from conformance.rules import Verdict
from conformance.runner import LEVELS, Result, Selection, attempt, guarded
from reference.errors import BitforbitError

PROCESS = "process:"
"""What precedes the command line of a program."""


@dataclass(frozen=True)
class Line:
    """A glob of a skip or xfail file, why it is there, and where."""

    glob: str
    reason: str
    place: str

    def takes(self, case_id: str) -> bool:
        """Whether a case is meant; a glob may leave out the rule."""
        return Selection(pattern=self.glob).takes(case_id)


def lines_of(paths: Sequence[str]) -> list[Line]:
    """What files of globs say. Raises UsageError for one that cannot be read or understood."""
    found = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise pytest.UsageError(f"{path}: cannot be read ({error})") from error
        for number, line in enumerate(text.splitlines(), 1):
            glob, _, reason = (part.strip() for part in line.partition("#"))
            place = f"{path}:{number}"
            if len(glob.split()) > 1:
                raise pytest.UsageError(f"{place}: {glob!r} is not one glob; a reason follows a #")
            if glob:
                found.append(Line(glob, reason or place, place))
    return found


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
        self._selection = Selection(tuple(option("bitforbit_level")), option("bitforbit_case"))
        self._skipped = lines_of(option("bitforbit_skip"))
        self._failing = lines_of(option("bitforbit_xfail"))
        if not self._is_process and self.name not in BUILT_IN and not Path(self.name).is_file():
            raise pytest.UsageError(
                f"--bitforbit-backend: {self.name} is neither a Python file, one of "
                f"{', '.join(BUILT_IN)}, nor process:COMMAND"
            )
        try:
            self.folder = data_folder("goldens")
            self._ids = case_ids(self.folder)
        except BitforbitError as error:
            raise pytest.UsageError(str(error)) from error
        if not any(map(self._selection.takes, self._ids)):
            raise pytest.UsageError(f"no case matches --bitforbit-case {self._selection.pattern!r}")

    @property
    def _is_process(self) -> bool:
        return bool(self.name.startswith(PROCESS))

    @property
    def command(self) -> str:
        """The words that judge this backend on the command line."""
        if self._is_process:
            program = shlex.quote(self.name.removeprefix(PROCESS))
            return f"bitforbit check --process {program}" + (
                f" --timeout {self._timeout:g}" if self._timeout else ""
            )
        device = f" --device {self._device}" if self._device else ""
        return f"bitforbit check {shlex.quote(self.name)}{device}"

    def collector(self, session: pytest.Session) -> Cases:
        """The cases as a node of pytest's tree."""
        cases: Cases = Cases.from_parent(session, name="bitforbit", suite=self)
        return cases

    def items(self, parent: Cases) -> Iterator[Case]:
        """Every selected case, in the order of the suite."""
        if self._warns:
            for line in self._skipped + self._failing:
                if not any(map(line.takes, self._ids)):
                    warnings.warn(
                        pytest.PytestWarning(f"{line.place}: no case matches {line.glob!r}"),
                        stacklevel=2,
                    )
        for case_id in filter(self._selection.takes, self._ids):
            item: Case = Case.from_parent(parent, name=case_id, suite=self)
            skipped, failing = (
                next((line for line in lines if line.takes(case_id)), None)
                for lines in (self._skipped, self._failing)
            )
            if skipped is not None:
                item.add_marker(pytest.mark.skip(reason=skipped.reason))
            elif failing is not None:
                item.add_marker(pytest.mark.xfail(reason=failing.reason, strict=True))
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


def case_ids(folder: Path) -> list[str]:
    """The id of every case, from the headers of the goldens. Raises GoldenError."""
    found = []
    for name in read_manifest(folder):
        try:
            with safe_open(folder / name, "np") as file:
                about = json.loads((file.metadata() or {})["golden"])
            found += [f"{about['id']}:{rule}" for rule in about["rules"]]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            golden_id = name.removesuffix(".safetensors")
            next(read_all(folder, {golden_id}))  # says what is wrong
    return found + [f"{one.id}:bits" for one in invariances()]


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
        invariance = self._suite.invariances.get(self.name)
        golden, outputs = None, None
        if invariance is not None:
            verdict = guarded(lambda: invariance.check(self._suite.caller))
            section = invariance.section
        else:
            golden = next(read_all(self._suite.folder, {golden_id}))
            section = golden.section
            numerics = self._suite.backend.numerics
            if rule not in rules.asked(golden, numerics):
                pytest.skip("not asked: `either` stands for it, as the backend declares `fma`")
            u = rules.unit_roundoff(numerics)
            verdict, outputs = attempt(self._suite.backend, self._suite.sessions, golden, rule, u)
        self.user_properties.append(("section", section))
        if verdict.worst is not None:
            self.user_properties.append(("worst", verdict.worst))
        if verdict.outcome == "not implemented":
            pytest.skip(f"not implemented: {verdict.message}")
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
        u = U32 if rule in rules.ASK_BITS else rules.unit_roundoff(numerics)
        worst = worst_element(golden, outputs, u)
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
