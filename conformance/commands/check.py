"""`bitforbit check`: judge a backend."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, redirect_stdout
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from conformance.commands.common import FAILED, OK, json_writer, progress_bar, seconds
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.runner import Answers, Result

DESCRIPTION = """\
Judge a backend by the goldens and the invariances.

BACKEND is a Python file that defines a class `Backend` (SPEC 17), or one of numpy (the reference
on this machine; the default), numpy-float32, torch, torch-float32. With --process it is instead
a program in any language that answers frames of safetensors over its standard input and output
(docs/protocol.md; examples/c and examples/node are two such programs).

A case is named <level>/<operation>/<name>:<rule>, for example kernel/linear/k33_t5:bits; a pattern
may leave out the rule. Exit code: 0 all passed that are implemented, 1 something failed or nothing
passed, 2 could not run.

  bitforbit check my_backend.py --level kernel
  bitforbit check my_backend.py --case 'kernel/attention/*'
  bitforbit check my_backend.py --case '*:gauge' --json report.json
  bitforbit check --process './my_backend --flag' --timeout 10
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    check = commands.add_parser("check", help="judge a backend", description=DESCRIPTION, **style)
    check.add_argument("backend", nargs="?", metavar="BACKEND")
    check.add_argument(
        "--process", metavar="COMMAND", help="judge the program that this command line starts"
    )
    check.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="for each call of the program (default 60); a late one fails and is started again",
    )
    check.add_argument(
        "--level", action="append", default=[], help="only this level; may be repeated"
    )
    check.add_argument("--case", default="*", metavar="GLOB", help="only cases whose id matches")
    check.add_argument("--device", choices=("cpu", "cuda"), help="for the torch backends")
    check.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - is standard output"
    )
    check.add_argument(
        "--no-diagnosis", action="store_true", help="do not compare failures with known faults"
    )
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Judge the backend that was asked for, and report."""
    from conformance.paths import data_folder
    from conformance.runner import LEVELS, Selection, count, run

    unknown = [level for level in options.level if level not in LEVELS]
    if unknown:
        raise RequestError(f"--level: {unknown[0]!r} is none of {', '.join(LEVELS)}")
    folder = data_folder("goldens")
    selection = Selection(tuple(options.level), options.case)
    nothing = f"--case: no case matches {options.case!r}; `bitforbit check --json -` lists all ids"
    total = count(folder, selection)
    if total == 0:
        raise RequestError(nothing)
    return follow(
        options,
        lambda: _backend(options),
        lambda backend, answers: run(backend, folder, selection, answers),
        total,
        nothing,
    )


def follow(
    options: argparse.Namespace,
    opened_by: Callable[[], tuple[str, AbstractContextManager[Any]]],
    run: Callable[[Any, Answers], Iterator[Result]],
    total: int,
    nothing: str,
) -> int:
    """Go through the cases of a backend with a progress bar, and report as the options say.

    opened_by: gives the words that name the backend on the command line, and the backend, to be
    closed at the end. run: gives its results. total: how many cases without their rules.
    nothing: what to say where there is no result.
    """
    from conformance.diagnosis import explain
    from conformance.paths import data_folder
    from conformance.reports import terminal
    from conformance.runner import report as as_json

    write = json_writer(options.json)
    to_stdout = options.json == "-"
    console = Console(stderr=to_stdout)
    results, started, seen = [], perf_counter(), set()
    answers: Answers = {}
    name, opened = opened_by()
    try:
        # What a backend prints must not come between the lines of the report.
        with (
            opened as backend,
            _sigterm_interrupts(),
            redirect_stdout(sys.stderr),
            progress_bar(Console(stderr=True)) as progress,
        ):
            task = progress.add_task("checking", total=total)
            for result in run(backend, answers):
                results.append(result)
                seen.add(result.id.rsplit(":", 1)[0])
                progress.update(task, completed=len(seen), description=result.level)
            numerics = backend.numerics
            progress.update(task, description="comparing with known faults")
            explanations = (
                {}
                if options.no_diagnosis
                else explain(results, answers, data_folder("goldens"), numerics)
            )
    except KeyboardInterrupt:  # what was found so far is not lost
        if write is not None:
            write({**as_json(results), "interrupted": True})
        raise
    if not results:
        raise RequestError(nothing)
    if not to_stdout:
        terminal.show(console, name, results, perf_counter() - started, explanations)
    if write is not None:
        write(as_json(results, explanations))
    outcomes = {r.outcome for r in results}
    return OK if "pass" in outcomes and outcomes <= {"pass", "not implemented"} else FAILED


def _backend(options: argparse.Namespace) -> tuple[str, AbstractContextManager[Any]]:
    """The backend that was asked for, to be closed at the end, and the options that name it."""
    from conformance.backends import resolve, resolve_process

    if options.process is None:
        if options.timeout is not None:
            raise RequestError("--timeout: only programs have one; use it with --process")
        name = options.backend or "numpy"
        return name, nullcontext(resolve(name, options.device))
    if options.backend is not None or options.device is not None:
        raise RequestError("--process: it goes neither with a BACKEND nor with --device")
    name = f"--process {shlex.quote(options.process)}"
    if options.timeout is not None:
        name += f" --timeout {options.timeout:g}"
    return name, closing(resolve_process(options.process, options.timeout))


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
