"""Rows of figures as they come: a table in Markdown, CSV, JSON, or JSON a line."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Literal, get_args

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from conformance.commands.common import COULD_NOT_RUN, OK, progress_bar, standard_output
from conformance.tables import print_table

Form = Literal["md", "csv", "json", "jsonl"]
Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]


def add_form(parser: Any) -> None:
    """Add `-o`."""
    parser.add_argument(
        "-o",
        "--output",
        choices=get_args(Form),
        default="md",
        help="form of the output (md; a terminal shows it once all is measured)",
    )


def write(form: Form, columns: Columns, about: Iterable[str], rows: Iterable[Row]) -> int:
    """Print rows as they come; an interrupt or an error ends them in good form.

    columns: what the Markdown table shows of a row, by heading. about: the keys of what is said of
    all rows, once, before the table. The other forms hold every key. In a terminal the table comes
    at the end.
    """
    looked_at = form == "md" and sys.stdout.isatty()
    print_row, end = (_terminal if looked_at else _FORMS[form])(columns, tuple(about))
    count, code = 0, OK
    try:
        for row in rows:
            print_row(row)
            sys.stdout.flush()
            count += 1
    except KeyboardInterrupt:
        print(
            f"bitforbit: interrupted; {count} row{'s were' if count != 1 else ' was'} kept",
            file=sys.stderr,
        )
        code = COULD_NOT_RUN
    finally:
        if count:
            end()
    return code


Printer = tuple[Callable[[Row], None], Callable[[], None]]


def _markdown(columns: Columns, about: tuple[str, ...]) -> Printer:
    said: list[tuple[Any, ...]] = []

    def row(row: Row) -> None:
        once = tuple(row.get(key) for key in about)
        if said[-1:] != [once]:
            print(*([""] if said else []), _said(zip(about, once, strict=True)), "", sep="\n")
            print(f"| {' | '.join(columns)} |")
            rules = (_rule([show(row)]) for show in columns.values())
            print(f"| {' | '.join(rules)} |")
            said.append(once)
        print(f"| {' | '.join(show(row) for show in columns.values())} |")

    return row, lambda: None


FIGURES, WORDS = "---:", "---"
"""What Markdown has below the heading of a column, for its side."""

_FIGURE = re.compile(r"([-+]?[\d.,]+(e[-+]?\d+)?%?( .*)?|[- ]*)")


def _rule(cells: Iterable[str]) -> str:
    """Figures stand on the right, words on the left."""
    return FIGURES if all(map(_FIGURE.fullmatch, cells)) else WORDS


def _said(values: Iterable[tuple[str, Any]]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values if value not in (None, "", "-"))


def _terminal(columns: Columns, about: tuple[str, ...]) -> Printer:
    """A table that fits a terminal better: what is the same in all rows is said once, above it."""
    kept: list[Row] = []

    def end() -> None:
        console = standard_output()
        for once, group in groupby(kept, lambda row: [row.get(key) for key in about]):
            rows = list(group)
            cells = {name: [show(row) for row in rows] for name, show in columns.items()}
            same = {name: each[0] for name, each in cells.items() if len(set(each)) == 1}
            for said in (_said(zip(about, once, strict=True)), _said(same.items())):
                console.print(said, markup=False, highlight=False)
            _print_cells(console, {name: each for name, each in cells.items() if name not in same})
            print()

    return kept.append, end


def _print_cells(console: Console, told: Mapping[str, Sequence[str]]) -> None:
    """A table of the cells by heading: in Markdown, or folded where that is too wide."""
    table = [[name, _rule(each), *each] for name, each in told.items()]
    sides = [str.rjust if column[1] == FIGURES else str.ljust for column in table]
    widths = [max(map(len, column)) for column in table]
    if sum(widths) + 3 * len(widths) + 1 <= console.width:
        for line in zip(*table, strict=True):
            padded = map(lambda to_side, cell, width: to_side(cell, width), sides, line, widths)
            print(f"| {' | '.join(padded)} |")
        return
    folded = Table()
    for name, rule, *_ in table:
        folded.add_column(escape(name), justify="right" if rule == FIGURES else "left")
    for row in zip(*told.values(), strict=True):
        folded.add_row(*map(escape, row))
    print_table(console, folded)


def _csv(columns: Columns, about: tuple[str, ...]) -> Printer:
    names: list[str] = []

    def row(row: Row) -> None:
        if not names:
            names.extend(row)
            print(_line(names))
        print(_line([row.get(name) for name in names]))

    return row, lambda: None


def _line(values: Iterable[Any]) -> str:
    text = io.StringIO()
    cells = (" ".join(map(str, v)) if isinstance(v, list) else v for v in values)
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _json(columns: Columns, about: tuple[str, ...]) -> Printer:
    first = [True]

    def row(row: Row) -> None:
        print("[" if first else ",", json.dumps(row, indent=1), sep="\n")
        first.clear()

    return row, lambda: print("]")


def _jsonl(columns: Columns, about: tuple[str, ...]) -> Printer:
    return lambda row: print(json.dumps(row)), lambda: None


_FORMS = {"md": _markdown, "csv": _csv, "json": _json, "jsonl": _jsonl}


@contextmanager
def watched(description: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error; what is given moves it by one."""
    with progress_bar() as progress:
        task: TaskID = progress.add_task(description, total=total)
        yield lambda: _advance(progress, task)


def _advance(progress: Progress, task: TaskID) -> None:
    progress.advance(task)


def span(row: Row, name: str, form: str = ".2f", unit: float = 1.0) -> str:
    """Median and range of a figure: `12.3 (11.9 to 13.0)`; of one value, that alone."""
    if f"{name}_median" not in row:
        return ""
    median, least, most = (unit * row[f"{name}_{part}"] for part in ("median", "least", "most"))
    if least == most:
        return f"{median:{form}}"
    return f"{median:{form}} ({least:{form}} to {most:{form}})"


def shown(row: Row, name: str) -> str:
    """A value; `-` for what is not known."""
    value = row.get(name)
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
