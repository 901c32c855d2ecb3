"""What `check`, `judge` and `export` share: choosing cases, going through them, reporting."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from conformance.commands.common import FAILED, OK, progress_bar
from conformance.commands.reporting import Reports
from conformance.expectations import Line, first_of, lines_of
from conformance.golden import read_own
from conformance.results import Answers, Result
from conformance.rules import contract_of
from conformance.rules.contract import CONTRACTS
from conformance.selection import LEVELS, Selection
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.diagnosis import Explanation
    from conformance.reports.record import Record


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases."""
    parser.add_argument(
        "--level",
        action="append",
        default=[],
        help=f"only this level, one of {', '.join(LEVELS)}; may be repeated",
    )
    add_case(parser, "cases")
    parser.add_argument(
        "--contract",
        choices=CONTRACTS,
        help="what is asked: all, bits too, or the bounds alone, with bits of what has one answer "
        "in any arithmetic (default: exact where that accumulator is declared, else bounds)",
    )


def add_case(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option that chooses by id."""
    parser.add_argument(
        "--case",
        action="append",
        metavar="GLOB",
        help=f"only {what} whose id matches; may be repeated, and one match is enough",
    )


def add_expect(parser: argparse.ArgumentParser) -> None:
    """Add the option that names known failures."""
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="FILE",
        help="cases that may fail: a glob a line, and # why; exit code 0 if nothing else fails",
    )


def patterns(options: argparse.Namespace) -> tuple[str, ...]:
    """The globs that are given, or the one that takes everything."""
    return tuple(options.case) if options.case else ("*",)


def selected(options: argparse.Namespace, folder: Path) -> tuple[Selection, int]:
    """The cases that the options choose, and how many without their rules. Raises RequestError.

    folder: of the goldens. Every glob must match a case.
    """
    from conformance.runner import cases

    unknown = [level for level in options.level if level not in LEVELS]
    if unknown:
        near = nearest(unknown[0], LEVELS)
        raise RequestError(f"--level: {unknown[0]!r} is none of {', '.join(LEVELS)}{near}")
    selection = Selection(tuple(options.level), patterns(options))
    every = list(cases(folder))
    for pattern in selection.patterns:
        one = replace(selection, patterns=(pattern,))
        if not any(one.takes(case.id) for case in every):
            raise RequestError(no_case(options.level, pattern, [case.id for case in every]))
    taken = {case.id.rsplit(":", 1)[0] for case in every if selection.takes(case.id)}
    return selection, len(taken)


def no_case(levels: Sequence[str], pattern: str, ids: Iterable[str]) -> str:
    """What to say where a glob and the levels together take no case; ids: those that there are."""
    chosen = " and ".join(
        ([f"--level {' '.join(levels)}"] if levels else [])
        + ([f"--case {pattern!r}"] if pattern != "*" else [])
    )
    names = {name for case in ids for name in (case, case.rsplit(":", 1)[0])}
    names |= {"/".join([*name.split("/")[:2], "*"]) for name in names}
    near = "" if pattern == "*" else nearest(pattern, sorted(names))
    return f"{chosen}: no case matches{near}; `bitforbit check --list` shows all"


def nearest(word: str, among: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing where no name is like the word."""
    found = get_close_matches(word, among, 2, 0.75)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def follow(
    options: argparse.Namespace,
    opened_by: Callable[[], tuple[str, AbstractContextManager[Any]]],
    run: Callable[[Any, Any, Answers], Iterator[Result]],
    selection: Selection,
    total: int,
    folder: Path,
) -> int:
    """Go through the cases of a backend with a progress bar, and report as the options say.

    opened_by: gives the words that name the backend on the command line, and the backend, to be
    closed at the end. run: gives its results. selection: the contract in it is what the options
    say, or what the backend declares. total: how many cases without their rules. folder: of the
    goldens; known faults are tried on the suite's own alone.
    """
    from conformance.backends import strangers
    from conformance.diagnosis import explain
    from conformance.runner import not_asked

    reports, compare = Reports(options), read_own(folder) is None
    followed = _Followed(options, reports, lines_of(options.expect), selection, folder)
    results, answers, seen = followed.results, followed.answers, set[str]()
    followed.name, opened = opened_by()
    try:
        # What a backend prints must not come between the lines of the report.
        with (
            opened as backend,
            _sigterm_interrupts(),
            redirect_stdout(sys.stderr),
            progress_bar() as progress,
        ):
            numerics = followed.numerics = backend.numerics
            for line in strangers(backend):
                print(f"bitforbit: {followed.name}: {line}", file=sys.stderr)
            contract = options.contract or contract_of(numerics)
            selection = followed.selection = replace(selection, contract=contract)
            followed.left_out = not_asked(folder, selection, numerics)
            task = progress.add_task("checking", total=total)
            for result in run(backend, selection, answers):
                results.append(result)
                seen.add(result.id.rsplit(":", 1)[0])
                progress.update(task, completed=len(seen), description=result.level)
            progress.update(task, description="comparing with known faults")
            explanations = (
                {}
                if options.no_diagnosis
                else explain(results, answers, folder, numerics, backend, compare)
            )
    except KeyboardInterrupt:  # what was found so far is not lost
        followed.give({}, interrupted=True)
        raise
    if not results and followed.left_out:
        raise RequestError(
            f"--case: what matches is not asked of what declares {numerics.get('accumulator')} "
            f"({len(followed.left_out)} cases); --contract exact asks for it"
        )
    if not results:
        raise RequestError(no_case(options.level, " ".join(patterns(options)), ()))
    counts = followed.give(explanations)["summary"]
    done = counts["passed"] or counts["expected"]
    return FAILED if counts["failed"] or counts["cannot_evaluate"] or not done else OK


@dataclass
class _Followed:
    """A run: what is known of it so far, and how it is reported, whole or interrupted."""

    options: argparse.Namespace
    reports: Reports
    lines: Sequence[Line]
    selection: Selection
    folder: Path
    name: str = ""
    numerics: Mapping[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: float = field(default_factory=perf_counter)

    def takes(self, case: str) -> bool:
        """Whether a case was asked for."""
        return self.selection.takes(case) and case not in self.left_out

    def give(self, explanations: Mapping[str, Explanation], interrupted: bool = False) -> Record:
        """Report what there is; the record of it."""
        from conformance.diagnosis.differences import outputs
        from conformance.reports.record import Run, record
        from conformance.runner import cases

        options, lines, results = self.options, self.lines, self.results
        about = Run(
            self.name,
            shlex.join(options.words),
            f"{options.command} {self.name}"
            + (f" --contract {options.contract}" if options.contract else ""),
            self.numerics,
            self.started,
            perf_counter() - self.clock,
            self.selection.contract,
            self.left_out,
            interrupted,
        )
        found = outputs(results, self.answers, self.folder, self.numerics)
        data = record(about, results, explanations, found, _expected(lines, results))
        if lines:
            data["now_passing"] = list(_now_passing(lines, results))
            ids = [r.id for r in results] + [c.id for c in cases(self.folder)]
            _warn_of_strangers(lines, ids)
        self.reports.give(data, self.takes)
        return data


def _expected(lines: Sequence[Line], results: Iterable[Result]) -> dict[str, str]:
    """By id of each failure that some line expects, the reason that the line gives."""
    failed = [r.id for r in results if r.outcome in ("fail", "cannot evaluate")]
    met = {case: first_of(lines, case) for case in failed}
    return {case: line.reason for case, line in met.items() if line is not None}


def _now_passing(lines: Sequence[Line], results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """The lines whose cases were judged and do not fail any more."""
    for line in lines:
        outcomes = [r.outcome for r in results if line.takes(r.id)]
        if "pass" in outcomes and set(outcomes) <= {"pass", "not implemented", "not judged"}:
            yield {"place": line.place, "glob": line.glob, "cases": outcomes.count("pass")}


def _warn_of_strangers(lines: Sequence[Line], ids: Sequence[str]) -> None:
    """Say on standard error which lines match no case."""
    for line in lines:
        if not any(map(line.takes, ids)):
            print(f"bitforbit: {line.place}: no case matches {line.glob!r}", file=sys.stderr)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM, which a CI sends, end a run as Ctrl-C does, with its report written."""
    if threading.current_thread() is not threading.main_thread():  # only there may one ask for it
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
