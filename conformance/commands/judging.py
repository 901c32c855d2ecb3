"""What `check` and `judge` share: choosing cases, going through them, and reporting."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from conformance.commands.common import FAILED, OK, progress_bar
from conformance.commands.reporting import Reports
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.diagnosis import Explanation
    from conformance.runner import Answers, Result, Selection


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases."""
    parser.add_argument(
        "--level", action="append", default=[], help="only this level; may be repeated"
    )
    parser.add_argument("--case", default="*", metavar="GLOB", help="only cases whose id matches")


def selected(options: argparse.Namespace, folder: Path) -> tuple[Selection, int]:
    """The cases that the options choose, and how many without their rules. Raises RequestError.

    folder: of the goldens.
    """
    from conformance.runner import LEVELS, Selection, count

    unknown = [level for level in options.level if level not in LEVELS]
    if unknown:
        raise RequestError(f"--level: {unknown[0]!r} is none of {', '.join(LEVELS)}")
    selection = Selection(tuple(options.level), options.case)
    total = count(folder, selection)
    if total == 0:
        raise nothing(options)
    return selection, total


def nothing(options: argparse.Namespace) -> RequestError:
    """What to say where no case is chosen."""
    return RequestError(
        f"--case: no case matches {options.case!r}; `bitforbit check --json -` lists all ids"
    )


def follow(
    options: argparse.Namespace,
    opened_by: Callable[[], tuple[str, AbstractContextManager[Any]]],
    run: Callable[[Any, Answers], Iterator[Result]],
    total: int,
    folder: Path,
) -> int:
    """Go through the cases of a backend with a progress bar, and report as the options say.

    opened_by: gives the words that name the backend on the command line, and the backend, to be
    closed at the end. run: gives its results. total: how many cases without their rules.
    folder: of the goldens; known faults are tried on the suite's own alone.
    """
    from conformance.diagnosis import explain
    from conformance.golden import read_own
    from conformance.reports.outputs import outputs
    from conformance.reports.record import Run, record

    reports, compare = Reports(options), read_own(folder) is None
    results: list[Result] = []
    started, clock, seen = datetime.now(UTC), perf_counter(), set()
    answers: Answers = {}
    name, opened = opened_by()

    numerics: Mapping[str, Any] = {}

    def give(explanations: Mapping[str, Explanation], interrupted: bool = False) -> None:
        seconds, command = perf_counter() - clock, f"{options.command} {name}"
        about = Run(name, command, numerics, started, seconds, interrupted)
        found = outputs(results, answers, folder, numerics)
        reports.give(record(about, results, explanations, found))

    try:
        # What a backend prints must not come between the lines of the report.
        with (
            opened as backend,
            _sigterm_interrupts(),
            redirect_stdout(sys.stderr),
            progress_bar(Console(stderr=True)) as progress,
        ):
            numerics = backend.numerics
            task = progress.add_task("checking", total=total)
            for result in run(backend, answers):
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
        give({}, interrupted=True)
        raise
    if not results:
        raise nothing(options)
    give(explanations)
    outcomes = {r.outcome for r in results}
    return OK if "pass" in outcomes and outcomes <= {"pass", "not implemented"} else FAILED


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
