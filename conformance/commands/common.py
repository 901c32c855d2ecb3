"""What several commands share: exit codes, the progress bar, and kinds of arguments."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from conformance.reports.files import text_writer
from reference.errors import RequestError, reason

OK, FAILED, COULD_NOT_RUN = 0, 1, 2

MODES = ("float32", "int4", "int4-row", "native")
"""How linear layers are computed: as stored, quantized, or by a GGUF file's codes (SPEC 10.1)."""


WIDE = 10_000
"""Columns where no one looks."""


class _Output(Console):
    """A console that ends no process: who reads no further is told by the exit code."""

    def on_broken_pipe(self) -> None:
        """Raise what a closed pipe raises elsewhere."""
        raise BrokenPipeError


def standard_output() -> Console:
    """Standard output; no line is broken where it is no terminal, so that it can be pasted."""
    return _Output() if sys.stdout.isatty() else _Output(width=WIDE)


def standard_error() -> Console:
    """Standard error, which FORCE_COLOR makes no terminal: a bar would be moved in a file."""
    return Console(stderr=True, force_terminal=sys.stderr.isatty())


def progress_bar() -> Progress:
    """A bar on standard error with a description, a count and the time, where someone looks."""
    console = standard_error()
    return Progress(
        TextColumn("{task.description}", table_column=Column()),
        BarColumn(),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),  # the others give way to figures
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def text_of(given: str, option: str) -> str:
    """The text that an option gives; `@FILE` reads a file. Raises RequestError."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{option}: cannot read {given[1:]} as UTF-8 text ({reason(error)})"
        ) from error


def count(text: str) -> int:
    """A limit: a whole number above 0."""
    if not (text.isascii() and text.isdigit() and 0 < int(text[:20]) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def numbers(text: str) -> list[int]:
    """A list of whole numbers, each once."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, as 0,1024")
    return list(dict.fromkeys(map(int, parts)))


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def older_name(parser: Any, name: str, dest: str, kind: Callable[[str], Any]) -> None:
    """Let an option have the name that it had before, too, which no help shows."""
    parser.add_argument(
        name, dest=dest, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def seconds(text: str) -> float:
    """A time limit: positive, and one that a clock can count."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def add_json(command: Any, what: str) -> None:
    """Add `--json FILE|-`; without a value it is `-`."""
    command.add_argument(
        "--json",
        metavar="FILE|-",
        nargs="?",
        const="-",
        help=f"write {what} as JSON; -, or nothing, is standard output",
    )


def json_writer(target: str | None, indent: int | None = 1) -> Callable[[Any], None] | None:
    """A writer of JSON to a file or to standard output, checked before the work is done."""
    if target is None:
        return None
    write = text_writer(target, "--json")
    return lambda data: write(json.dumps(data, indent=indent) + "\n")
