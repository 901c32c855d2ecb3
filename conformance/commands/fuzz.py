"""`bitforbit fuzz`: judge a backend by cases that are drawn at random."""

from __future__ import annotations

import argparse
import secrets
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.commands.common import (
    FAILED,
    OK,
    add_json,
    count,
    json_writer,
    progress_bar,
    seconds,
    standard_output,
)
from conformance.commands.opening import opening_of
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.fuzzing.case import Case
    from conformance.fuzzing.running import Fuzzer

CASES = 100
"""Cases of each operation where neither their number nor a time is given."""

DESCRIPTION = """\
Judge a backend by cases that are drawn at random, whose answers are computed on the spot.

Goldens are fixed and public; drawn cases are not. Shapes lie on both sides of what kernels are cut
into, parameters anywhere in an operation's domain, data are normal, of heavy tails, with outlier
channels, tied, cancelling, zero, subnormal, and where bits are asked also huge or not finite. The
reference answers, with a bound where the backend rounds, and the rules are those of `bitforbit
check`: bits of a backend that declares the accumulator `exact`, its bounds of any other.

  bitforbit fuzz my_backend.py
  bitforbit fuzz my_backend.py --op attention --op rope -n 1000 --seed 7
  bitforbit fuzz my_backend.py --time 600 --save found
  bitforbit fuzz --process ./my_backend --json -

The first failure of an operation is made small, choice by choice, and named where it is one of the
known faults. Its line repeats just that case; --save keeps it as a golden:

  bitforbit fuzz my_backend.py --case 'attention/7/12 rows=1'
  bitforbit check my_backend.py --goldens found --case '*fuzz*'

Exit code: 0 all passed, 1 something failed or nothing passed, 2 could not run (docs/fuzz.md).
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    fuzz = commands.add_parser(
        "fuzz", help="judge a backend by random cases", description=DESCRIPTION, **style
    )
    fuzz.add_argument("backend", nargs="?", metavar="BACKEND", help="as of check (default numpy)")
    fuzz.add_argument(
        "--process", metavar="COMMAND", help="judge the program that this command line starts"
    )
    fuzz.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="for each call of a program (default 60)"
    )
    fuzz.add_argument("--device", choices=("cpu", "cuda"), help="for torch")
    fuzz.add_argument(
        "--op", action="append", default=[], metavar="NAME", help="only this; may be repeated"
    )
    fuzz.add_argument(
        "-n",
        dest="cases",
        type=count,
        metavar="CASES",
        help=f"of each operation (default {CASES}; with --time, no limit)",
    )
    fuzz.add_argument("--seed", type=seed, metavar="S", help="(default: another one every time)")
    fuzz.add_argument("--time", type=seconds, metavar="SECONDS", help="stop after so long")
    fuzz.add_argument("--case", metavar="CASE", help="one case, as a failure's line names it")
    fuzz.add_argument(
        "--shrink",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make failing cases small (default: yes)",
    )
    fuzz.add_argument("--save", type=Path, metavar="DIR", help="keep failing cases as goldens")
    add_json(fuzz, "the record")
    fuzz.set_defaults(run=run)


def seed(text: str) -> int:
    """A whole number from 0, below 2^64."""
    if not (text.isascii() and text.isdigit() and int(text[:21]) < 2**64):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0, below 2^64")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Judge the backend that was asked for, and report."""
    from conformance.fuzzing.report import as_json, show
    from conformance.fuzzing.running import Fuzzer
    from conformance.fuzzing.saving import Folder

    one, opening = _case(options), opening_of(options)
    names = [one.operation] if one is not None else _operations(options.op)
    write = json_writer(options.json)
    folder = None if options.save is None else Folder(options.save)
    start = one.seed if one is not None else options.seed
    start = secrets.randbits(32) if start is None else start
    # What a backend prints must not come between the lines of the report.
    with redirect_stdout(sys.stderr), opening.opened() as backend:
        fuzzer = Fuzzer(backend, names, options.shrink)
        interrupted = False
        try:
            _judge(fuzzer, one, options, start)
        except KeyboardInterrupt:  # what was found so far is not lost
            interrupted = True
    tallies, name = list(fuzzer.tallies.values()), str(opening)
    if folder is not None:
        for failure in (failure for tally in tallies for failure in tally.failures):
            folder.add(failure.least.golden)
    if write is not None:
        write(as_json(name, fuzzer.numerics, start, tallies, interrupted))
    if options.json != "-":
        show(standard_output(), name, start, tallies)
    if interrupted:
        raise KeyboardInterrupt
    passed, failed = (any(getattr(t, name) for t in tallies) for name in ("passed", "failed"))
    return OK if passed and not failed else FAILED


def _judge(fuzzer: Fuzzer, one: Case | None, options: argparse.Namespace, start: int) -> None:
    """Take one case, or many with a progress bar."""
    if one is not None:
        for name in one.refused(fuzzer.asked_of(one.operation)):
            raise RequestError(f"--case: {name}={one.given[name]} is no choice of {one.operation}")
        fuzzer.take(one)
        return
    cases = options.cases or (None if options.time else CASES)
    there = sum(tally.offered for tally in fuzzer.tallies.values())
    with progress_bar() as progress:
        task = progress.add_task("drawing", total=cases and cases * there)
        for operation in fuzzer.run(start, cases, options.time):
            progress.update(task, advance=1, description=operation)


def _case(options: argparse.Namespace) -> Case | None:
    """The one case that is asked for. Raises RequestError."""
    from conformance.fuzzing.case import Case

    if options.case is None:
        return None
    if options.op or options.cases or options.time or options.seed is not None:
        raise RequestError("--case: it names all; leave --op, -n, --seed and --time out")
    return Case.read(options.case)


def _operations(names: list[str]) -> list[str]:
    """The operations that are asked for. Raises RequestError for one that is not drawn."""
    from conformance.fuzzing.case import OPERATIONS

    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise RequestError(f"--op: {unknown[0]!r} is none of {', '.join(OPERATIONS)}")
    return list(dict.fromkeys(names))
