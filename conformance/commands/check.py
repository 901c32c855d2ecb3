"""`bitforbit check`: judge a backend."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conformance.commands.common import seconds
from conformance.commands.judging import add_expect, add_selection, follow, patterns, selected
from conformance.commands.listing import listed
from conformance.commands.opening import opening_of
from conformance.commands.reporting import add_reports
from conformance.commands.workers import add_workers, crew_of
from conformance.paths import data_folder
from conformance.results import Answers, Result
from conformance.rules import UNIT
from conformance.selection import Selection
from reference.errors import RequestError

LLAMA_CPP = "llama_cpp"

DESCRIPTION = """\
Judge a backend by the goldens and the invariances.

BACKEND is a Python file that defines a class `Backend` (SPEC 17), or one of numpy (the reference
on this machine; the default), numpy-float32, torch, torch-float32, and, as others made them,
transformers (whole models), onnxruntime (kernels) and llama_cpp (by its server, on tiny-dense; as
it is by default with --precision float16). With --process it is instead a program in any language
that answers frames of safetensors over its standard input and output (docs/protocol.md; examples/c
and examples/node have elementary operations and kernels, examples/rust is a whole engine), with
--server a server of completions that serves one of the fixtures (docs/doors.md). `bitforbit export`
and `judge` are for backends that live elsewhere. With --goldens it is judged by goldens of a model
of yours, which `bitforbit goldens make` makes.

What a backend declares says what it is asked: one whose accumulator is `exact` everything, bits
before all, any other one the bounds, and bits of codes, constants and tokens (--contract, SPEC 18).
A case is named <level>/<operation>/<name>:<rule>, for example kernel/linear/k33_t5:bits; a pattern
may leave out the rule. Exit code: 0 all passed that are implemented, 1 something failed or nothing
passed, 2 could not run.

A backend of yours, from its first kernel to a CI:

  bitforbit check my_backend.py --case 'kernel/rope/*' --list   what it would be asked, or why not
  bitforbit check my_backend.py --case 'kernel/rope/*' --case 'kernel/attention/*'
  bitforbit check my_backend.py --level kernel                  one level; no failure: what it lacks
  bitforbit check my_backend.py --contract exact                bits, whatever it declares
  bitforbit check my_backend.py --expect known_failures.txt     0 where nothing else fails
  bitforbit check my_backend.py --json now.json --track last.json   what changed since
  bitforbit check my_backend.py --html report.html --junit junit.xml
  bitforbit check my_backend.py --goldens my-goldens --workers 4   your model, by 4 processes

Programs, servers and libraries:

  bitforbit check --process './my_backend --flag' --timeout 10
  bitforbit check --process examples/c/build/backend            after `make -C examples/c`
  bitforbit check --process 'node examples/node/backend.mjs'
  bitforbit check --process examples/rust/target/release/engine --level generation
  bitforbit check --server http://127.0.0.1:8080 --precision float16
  bitforbit check transformers --level model
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    check = commands.add_parser("check", help="judge a backend", description=DESCRIPTION, **style)
    check.add_argument("backend", nargs="?", metavar="BACKEND", help="a file or name (numpy)")
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
    check.add_argument("--device", choices=("cpu", "cuda"), help="for torch and transformers")
    check.add_argument(
        "--goldens", type=Path, metavar="DIR", help="goldens of a model of yours, not the suite's"
    )
    add_workers(check)
    add_selection(check)
    check.add_argument(
        "--list",
        action="store_true",
        help="list the cases that the backend would be asked, by what it declares, and those that "
        "it would not, with the reason (--json too); no operation is called",
    )
    add_expect(check)
    add_reports(check)
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Judge the backend that was asked for, and report."""
    from conformance.making import demand_unchanged
    from conformance.runner import run, run_shared

    if options.server is not None or options.backend == LLAMA_CPP:
        return _run_server(options)
    folder = options.goldens or data_folder("goldens")
    selection, total = selected(options, folder)
    if options.api or options.model or options.precision:
        raise RequestError("--api, --model, --precision: they are for --server")
    opening = opening_of(options, "--process and --server")
    name = str(opening)
    if options.goldens is not None:
        demand_unchanged(options.goldens)
        name += f" --goldens {shlex.quote(str(options.goldens))}"
    if options.list:
        return listed(options, name, opening, folder, selection)
    with crew_of(options) as crew:

        def results(backend: Any, asked: Selection, answers: Answers) -> Iterator[Result]:
            if crew is None:
                return run(backend, folder, asked, answers)
            return run_shared(crew, opening, folder, asked, answers)

        return follow(options, lambda: (name, opening.opened()), results, selection, total, folder)


def _run_server(options: argparse.Namespace) -> int:
    """Judge a server by the cases that are for servers."""
    own = options.backend == LLAMA_CPP
    _demand_server(options, own)
    from conformance.backends.server import TIMEOUT, Server
    from conformance.cases.server import LEVEL, Book, judged
    from conformance.cases.server import selected as cases_of

    if set(options.level) - {LEVEL}:
        raise RequestError(f"--level: a server has the cases of {LEVEL!r} alone")
    selection = Selection((LEVEL,), patterns(options))
    chosen = cases_of(selection)
    if not chosen:
        given = " ".join(map(repr, selection.patterns))
        raise RequestError(f"--case: no case of servers matches {given} (docs/doors.md)")
    model, api = options.model or "tiny-dense", options.api or "llama"
    precision, limit = options.precision or "float32", options.timeout or TIMEOUT
    book = Book.load(model)

    @contextmanager
    def server() -> Iterator[Server]:
        with _address(options, precision) as address:
            server = Server(address, api, book.vocabulary, precision, limit)
            with closing(server):
                yield server

    def opened() -> tuple[str, AbstractContextManager[Any]]:
        at = ["--server", options.server, "--api", api, "--model", model]
        late = [] if options.timeout is None else ["--timeout", f"{options.timeout:g}"]
        words = [*([LLAMA_CPP] if own else at), "--precision", precision, *late]
        return shlex.join(words), server()

    total = len({case.id.rsplit(":", 1)[0] for case in chosen})
    folder = data_folder("goldens")

    def results(server: Server, asked: Selection, answers: Answers) -> Iterator[Result]:
        return judged(server, book, asked)

    return follow(options, opened, results, selection, total, folder)


def _demand_server(options: argparse.Namespace, own: bool) -> None:
    """Raise RequestError for what no server can be asked, and where a package is not installed.

    own: whether it is llama.cpp's, which is started for this run.
    """
    if options.list:
        raise RequestError("--list: docs/doors.md lists the cases of servers")
    if own and (options.server or options.model or options.api):
        raise RequestError(f"{LLAMA_CPP}: no --server, --model or --api goes with it")
    if (not own and options.backend) or options.process or options.device or options.goldens:
        raise RequestError("--server: no BACKEND, --process, --device or --goldens goes with it")
    if options.workers or options.scheduler:
        raise RequestError("--server: its cases are not shared out; leave --workers out")
    if options.contract == "exact":
        raise RequestError("--contract: HTTP shows no bits, so that a server is asked the bounds")
    needed = {"httpx": "http"} | ({"gguf": LLAMA_CPP, "xllamacpp": LLAMA_CPP} if own else {})
    for package, extra in needed.items():
        if find_spec(package) is None:
            what = LLAMA_CPP if own else "--server"
            raise RequestError(f"{what}: it needs {package}; pip install 'bitforbit[{extra}]'")


def _address(options: argparse.Namespace, precision: str) -> AbstractContextManager[str]:
    """Where the server is: one that is there, or llama.cpp's, started for this run."""
    if options.server is not None:
        return nullcontext(options.server)
    from conformance.backends.llama_cpp import serving

    return serving(defaults=precision != "float32")
