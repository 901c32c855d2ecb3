"""Tables for a person: where a terminal is narrow, words fold, and no figure is ever cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

WORD = 12
"""Characters of a word that stay together where words must be broken."""


def print_table(console: Console, table: Table) -> None:
    """Print a table that is no wider than the console. Columns on the right hold figures.

    Where it is too wide, its lines are broken between words; then it loses its frame; then words
    and headings are broken too, and at last each row is a paragraph of `heading: cell`.
    """
    cells = [[str(cell) for cell in (each.header, *each.cells)] for each in table.columns]
    plain = [[Text.from_markup(cell).plain for cell in column] for column in cells]
    natural = [max(map(len, column)) for column in plain]
    whole = [_longest(column) for column in plain]
    broken = [
        _longest(column[1:]) if each.justify == "right" else min(least, WORD)
        for each, column, least in zip(table.columns, plain, whole, strict=True)
    ]
    framed, bare = console.width - 3 * len(cells) - 1, console.width - len(cells) + 1
    for least, room in ((whole, framed), (whole, bare), (broken, bare)):
        if sum(least) <= room:
            for each, width in zip(table.columns, _widths(natural, least, room), strict=True):
                each.width, each.overflow = width, "fold"
            if room == bare:
                table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, (0, 0)
            console.print(table)
            return
    _print_paragraphs(console, table, zip(*cells, strict=True))


def _longest(cells: Iterable[str]) -> int:
    """The length of the longest word in a column."""
    return max((len(word) for cell in cells for word in cell.split()), default=1)


def _widths(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths of columns that fit in so much room: the widest is made narrower, one by one."""
    widths = list(natural)
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda at: (widths[at] > least[at], widths[at]))
        widths[widest] -= 1
    return widths


def _print_paragraphs(console: Console, table: Table, rows: Iterable[tuple[str, ...]]) -> None:
    """Print each row as lines of `heading: cell`, beneath the title and above the caption."""
    headings, *rest = rows
    if table.title:
        console.print(table.title, style="table.title")
    for row in rest:
        for heading, cell in zip(headings, row, strict=True):
            if cell:
                console.print(f"{heading}: {cell}" if heading else cell, highlight=False)
        console.print()
    if table.caption:
        console.print(table.caption, style="table.caption")
