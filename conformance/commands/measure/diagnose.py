"""`bitforbit diagnose`: which of prefill and decode is the problem, from a bench."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from conformance.commands.common import count
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, write

DESCRIPTION = """\
Say from a bench whether prefill or decode is what a request waits for, and what would and would not
help. It needs rows pp and tg of the same arm and depth.

  bitforbit bench --model PATH -o jsonl > bench.jsonl
  bitforbit diagnose bench.jsonl
  bitforbit diagnose bench.jsonl -n 1000      of a longer output
"""

ABOUT = ("cpu", "server", "model")
COLUMNS: Columns = {
    "digest": lambda row: (row["digest"] or "-")[:12],
    **{name: partial(shown, name=name) for name in ("arithmetic", "weights", "attention")},
    **{name: partial(shown, name=name) for name in ("threads", "cache_n", "prompt_n")},
    "runs": partial(shown, name="repetitions"),
    "prefill, ms": lambda row: f"{1000 * row['prefill_seconds']:.1f}",
    "decode, ms": lambda row: f"{1000 * row['decode_seconds']:.1f}",
    "decode's share": partial(span, name="decode_share", form=".0%"),
    "problem": lambda row: row["sentence"],
    "would help": partial(shown, name="helps"),
    "would not": partial(shown, name="helps_not"),
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "diagnose", help="prefill or decode: which is the problem", description=DESCRIPTION, **style
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="json or jsonl of a bench")
    parser.add_argument(
        "-n", type=count, metavar="N", help="tokens of the output (as many as were measured)"
    )
    add_form(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one row for each prompt."""
    return write(options.output, COLUMNS, ABOUT, _rows(options))


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    from reference.measure.bench import read_rows
    from reference.measure.problem import problems

    found = list(problems(read_rows(options.file), options.n))
    yield from (problem.figures() for problem in found)
