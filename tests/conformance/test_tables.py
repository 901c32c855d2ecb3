"""Tables at any width: no figure is cut, and no line is longer than the terminal."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.tables import print_table

WIDE = 10_000


def printed(width: int, headings: list[str], figures: list[bool], rows: list[list[str]]) -> str:
    """What is printed of a table, as text."""
    table = Table(title="a title", caption="a caption")
    for heading, figure in zip(headings, figures, strict=True):
        table.add_column(escape(heading), justify="right" if figure else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(file=io.StringIO(), width=width)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


FIGURES = st.from_regex(r"\A-?[0-9]{1,5}\.[0-9]{1,4}( \([0-9.]{3,7} to [0-9.]{3,7}\))?\Z")
WORDS = st.from_regex(r"\A[a-z/_-]{1,30}( [a-z]{1,12}){0,6}\Z")


@given(st.data(), st.integers(20, 200))
@settings(max_examples=60)
def test_no_figure_is_cut_at_any_width(data: st.DataObject, width: int) -> None:
    figures = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    headings = [data.draw(WORDS) for _ in figures]
    rows = [
        [data.draw(FIGURES if figure else WORDS) for figure in figures]
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    text = printed(width, headings, figures, rows)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = re.findall(r"[^\s│┃]+", text)
    for row in rows:
        for figure, cell in zip(figures, row, strict=True):
            assert not figure or set(cell.split()) <= set(words)


HEADINGS, SIDES = ["area", "passed", "worst margin"], [False, True, True]
ROWS = [["kernel/rope_constants", "27", "0.123"], ["kernel/route", "50", "12.5"]]


def test_where_there_is_room_a_row_is_a_line() -> None:
    lines = printed(WIDE, HEADINGS, SIDES, ROWS).splitlines()
    assert [line.strip() for line in lines][1:] == [
        "┏━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━┓",
        "┃ area                  ┃ passed ┃ worst margin ┃",
        "┡━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━┩",
        "│ kernel/rope_constants │     27 │        0.123 │",
        "│ kernel/route          │     50 │         12.5 │",
        "└───────────────────────┴────────┴──────────────┘",
        "a caption",
    ]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (48, ["┃ area                  ┃ passed ┃      margin ┃"]),
        (36, ["area                  passed  margin", "kernel/rope_constants     27   0.123"]),
        (27, ["area         passed  margin", "kernel/rope_     27   0.123", "constants"]),
        (22, ["area         sed     n", "kernel/rope_  27 0.123"]),
        (16, ["kernel/rope_cons", "worst margin:", "0.123"]),
    ],
)
def test_what_gives_way_where_it_is_narrow(width: int, lines: list[str]) -> None:
    """Lines between words, then the frame, then words and headings, then the table."""
    text = printed(width, HEADINGS, SIDES, ROWS)
    told = [line.rstrip() for line in text.splitlines()]
    assert set(lines) <= set(told), text
