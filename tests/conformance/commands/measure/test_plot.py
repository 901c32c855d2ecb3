"""Pictures: everything that a panel says is drawn, and what cannot be drawn is known before."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.commands.measure.plot import (
    Line,
    Panel,
    check_plot,
    draw,
    grouped,
    series,
    write_and_draw,
)
from conformance.commands.measure.rows import Row
from reference.errors import RequestError


@pytest.mark.parametrize("kind", ["line", "points", "bars", "stack"])
def test_a_panel_is_drawn_with_its_words(tmp_path: Path, kind: Any) -> None:
    pytest.importorskip("matplotlib")
    lines = [Line(f"label-{i}", [1, 2, 4], [i, 2, 3], [0, 1, 1], [3, 4, 5], kind) for i in (1, 2)]
    panel = Panel("a title", "an x", "a y", lines, "", {"a mark": 2}, {"a level": 1})
    path = tmp_path / "x.svg"
    draw([panel, panel], path)
    text = path.read_text()
    words = ("a title", "an x", "a y", "label-1", "label-2", "a mark", "a level")
    assert [text.count(f"<!-- {word} -->") for word in words] == [2] * len(words)
    draw([panel], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["x.gif", "x", "missing/x.svg"])
def test_what_cannot_be_drawn_is_known_before(tmp_path: Path, name: str) -> None:
    def rows() -> Iterator[dict[str, int]]:
        pytest.fail("it ran")
        yield {}

    with pytest.raises(RequestError, match=r"^--plot: .* is no \.png or \.svg in a folder"):
        write_and_draw("json", tmp_path / name, {}, (), rows(), lambda rows: [])


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "conformance.commands.measure.plot.find_spec",
        lambda name: None if name == "matplotlib" else found(name),
    )
    with pytest.raises(RequestError, match=r"pip install 'bitforbit\[plot\]'$"):
        check_plot(tmp_path / "x.svg")
    check_plot(None)


def test_an_interrupt_leaves_a_picture_of_what_was_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def rows() -> Iterator[dict[str, int]]:
        yield {"a": 1, "b": 2}
        raise KeyboardInterrupt

    def panels(rows: list[Any]) -> list[Panel]:
        return [Panel(f"{len(rows)} rows", "a", "b", [series("", rows, "a", "b")])]

    path = tmp_path / "x.svg"
    assert write_and_draw("json", path, {}, (), rows(), panels) == 2
    assert json.loads(capsys.readouterr().out) == [{"a": 1, "b": 2}]
    assert "<!-- 1 rows -->" in path.read_text()


def test_a_series_has_the_spread_where_there_is_one() -> None:
    spread: list[Row] = [{"n": n, "y_median": 2, "y_least": 1, "y_most": n} for n in (3, 4)]
    assert series("s", [*spread, {"n": 5}], "n", "y") == Line("s", [3, 4], [2, 2], [1, 1], [3, 4])
    plain: list[Row] = [{"n": 1, "y": 2}, {"n": 2, "y": None}, {"n": 3, "y": 4}]
    assert series("s", plain, "n", "y") == Line("s", [1, 3], [2, 4])


def test_groups_are_named_by_what_differs() -> None:
    rows = [{"a": 1, "b": "x", "c": 0}, {"a": 1, "b": "y", "c": 0}, {"a": 1, "b": "x", "c": 0}]
    groups = grouped(rows, "a", "b", "c")
    assert groups == {"x": [rows[0], rows[2]], "y": [rows[1]]}
