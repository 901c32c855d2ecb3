"""`bitforbit check`: judge a backend."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, redirect_stdout
from datetime import UTC, datetime
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from conformance.commands.common import FAILED, OK, progress_bar, seconds
from conformance.commands.reporting import Reports, add_reports
from conformance.rules import UNIT
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.diagnosis import Explanation
    from conformance.runner import Answers, Result, Selection

DESCRIPTION = """\
Judge a backend by the goldens and the invariances.

BACKEND is a Python file that defines a class `Backend` (SPEC 17), or one of numpy (the reference
on this machine; the default), numpy-float32, torch, torch-float32. With --process it is instead
a program in any language that answers frames of safetensors over its standard input and output
(docs/protocol.md; examples/c and examples/node are two such programs), with --server a server of
completions that serves one of the fixtures (docs/doors.md). `bitforbit export` and `judge` are for
backends that live elsewhere.

A case is named <level>/<operation>/<name>:<rule>, for example kernel/linear/k33_t5:bits; a pattern
may leave out the rule. Exit code: 0 all passed that are implemented, 1 something failed or nothing
passed, 2 could not run.

  bitforbit check my_backend.py --level kernel
  bitforbit check my_backend.py --case 'kernel/attention/*'
  bitforbit check my_backend.py --case '*:gauge' --json report.json
  bitforbit check my_backend.py --html report.html --junit junit.xml --track last.json
  bitforbit check --process './my_backend --flag' --timeout 10
  bitforbit check --server http://127.0.0.1:8080 --precision float16
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    check = commands.add_parser("check", help="judge a backend", description=DESCRIPTION, **style)
    check.add_argument("backend", nargs="?", metavar="BACKEND")
    check.add_argument(
        "--process", metavar="COMMAND", help="judge the program that this command line starts"
    )
    check.add_argument(
        "--server", metavar="URL", help="judge the server there, which serves one of the fixtures"
    )
    check.add_argument(
        "--api", choices=("llama", "openai"), help="what the server speaks (default llama)"
    )
    check.add_argument(
        "--model", metavar="PATH", help="what the server serves (default tiny-dense)"
    )
    check.add_argument(
        "--precision",
        choices=tuple(UNIT),
        help="what the server computes in, its cache too (default float32); it sets the bounds",
    )
    check.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="for each call of a program or server (default 60); a late one fails its case",
    )
    check.add_argument("--device", choices=("cpu", "cuda"), help="for the torch backends")
    add_selection(check)
    add_reports(check)
    check.set_defaults(run=run)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases."""
    parser.add_argument(
        "--level", action="append", default=[], help="only this level; may be repeated"
    )
    parser.add_argument("--case", default="*", metavar="GLOB", help="only cases whose id matches")


def run(options: argparse.Namespace) -> int:
    """Judge the backend that was asked for, and report."""
    from conformance.paths import data_folder
    from conformance.runner import run

    if options.server is not None:
        return _run_server(options)
    selection, total = selected(options)
    folder = data_folder("goldens")
    return follow(
        options,
        lambda: _backend(options),
        lambda backend, answers: run(backend, folder, selection, answers),
        total,
    )


def _run_server(options: argparse.Namespace) -> int:
    """Judge a server by the cases that are for servers."""
    if options.backend or options.process or options.device:
        raise RequestError("--server: it goes neither with a BACKEND, --process nor --device")
    if find_spec("httpx") is None:
        raise RequestError("--server: it needs httpx; install bitforbit[http]")
    from conformance.backends.server import TIMEOUT, Server
    from conformance.cases.server import LEVEL, Book, judged, selected
    from conformance.runner import Selection

    if set(options.level) - {LEVEL}:
        raise RequestError(f"--level: a server has the cases of {LEVEL!r} alone")
    selection = Selection(tuple(options.level), options.case)
    chosen = selected(selection)
    if not chosen:
        raise RequestError(f"--case: no case of servers matches {options.case!r} (docs/doors.md)")
    model, api = options.model or "tiny-dense", options.api or "llama"
    precision, limit = options.precision or "float32", options.timeout or TIMEOUT
    book = Book.load(model)

    def opened() -> tuple[str, AbstractContextManager[Any]]:
        words = ["--server", options.server, "--api", api, "--model", model]
        name = shlex.join([*words, "--precision", precision])
        return name, closing(Server(options.server, api, book.vocabulary, precision, limit))

    total = len({case.id.rsplit(":", 1)[0] for case in chosen})
    return follow(options, opened, lambda server, _: judged(server, book, selection), total)


def selected(options: argparse.Namespace) -> tuple[Selection, int]:
    """The cases that the options choose, and how many without their rules. Raises RequestError."""
    from conformance.paths import data_folder
    from conformance.runner import LEVELS, Selection, count

    unknown = [level for level in options.level if level not in LEVELS]
    if unknown:
        raise RequestError(f"--level: {unknown[0]!r} is none of {', '.join(LEVELS)}")
    selection = Selection(tuple(options.level), options.case)
    total = count(data_folder("goldens"), selection)
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
) -> int:
    """Go through the cases of a backend with a progress bar, and report as the options say.

    opened_by: gives the words that name the backend on the command line, and the backend, to be
    closed at the end. run: gives its results. total: how many cases without their rules.
    """
    from conformance.diagnosis import explain
    from conformance.paths import data_folder
    from conformance.reports.outputs import outputs
    from conformance.reports.record import Run, record

    reports, folder = Reports(options), data_folder("goldens")
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
                {} if options.no_diagnosis else explain(results, answers, folder, numerics, backend)
            )
    except KeyboardInterrupt:  # what was found so far is not lost
        give({}, interrupted=True)
        raise
    if not results:
        raise nothing(options)
    give(explanations)
    outcomes = {r.outcome for r in results}
    return OK if "pass" in outcomes and outcomes <= {"pass", "not implemented"} else FAILED


def _backend(options: argparse.Namespace) -> tuple[str, AbstractContextManager[Any]]:
    """The backend that was asked for, to be closed at the end, and the options that name it."""
    from conformance.backends import resolve, resolve_process

    if options.api or options.model or options.precision:
        raise RequestError("--api, --model, --precision: they are for --server")
    if options.process is None:
        if options.timeout is not None:
            raise RequestError("--timeout: it is for --process and --server")
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
