"""`bitforbit quantization`: forms, the picture, the check that can fail, and refusals."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference.measure import group_order
from reference.measure.formats import FORMATS
from reference.measure.quantization import Experiment
from tests.conformance.command_line import MODEL, Run

SMALL = ("quantization", "-m", MODEL, "-c", "32", "--positions", "40", "-t", "1")
FEW = (*SMALL, "--formats", "int4,int4-row")


def test_all_forms_and_the_picture(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "x.svg"
    code, out, err = run(*SMALL, "-o", "jsonl", "--plot", str(plot))
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["format"] for row in rows] == ["float32", *FORMATS]
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert {"cpu", "cores", "blas", "threads", "repetitions", "rate_least"} <= set(row)
        assert (row["positions"], row["repetitions"], row["prompt_n"]) == (45, 3, 93)
        assert row["exact_changed"] in (0, None)
    assert len({row["digest"] for row in rows}) == len(rows)
    drawn = plot.read_text()
    for words in ("divergence from float32", "outputs that another order changes"):
        assert f"<!-- {words} -->" in drawn
    code, out, _ = run(*FEW, "-o", "csv")
    cells = list(csv.DictReader(io.StringIO(out)))
    assert (code, len(cells), list(cells[0])) == (0, 3, list(rows[0]))
    code, out, _ = run(*FEW, "-o", "json")
    assert [row["kl"] for row in json.loads(out)] == [row["kl"] for row in (*rows[:2], rows[3])]
    code, out, _ = run(*FEW)
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert (code, len(table)) == (0, 5)
    assert len({line.count("|") for line in table}) == 1
    assert out.startswith("cpu: ")


def test_wide_rows_show_the_order_that_narrow_ones_hide(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "x.svg"
    wide = ("quantization", "--widths", "96,4096", "--formats", "int4,int4-row-max", "-t", "1")
    code, out, err = run(*wide, "-o", "jsonl", "--plot", str(plot))
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["width"], row["format"]) for row in rows] == [
        (width, kind) for width in (96, 4096) for kind in ("int4", "int4-row-max")
    ]
    narrow, narrow_row, group, row = (row["float32_changed"] for row in rows)
    assert narrow < 0.01 < 0.3 < group
    assert (narrow_row, row) == (0, 0)
    assert {row["exact_changed"] for row in rows} == {0}
    assert {row["outputs"] for row in rows} == {8 * 256}
    assert "<!-- outputs that another order changes, ours -->" in plot.read_text()
    code, out, _ = run(*wide)
    assert (code, out.count("\n|")) == (0, 6)


def test_exact_sums_with_an_order_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that are no float16 numbers, as if a kernel had kept them in float64."""
    lanes = group_order.lanes

    def wrong(*arguments: Any) -> Any:
        found = lanes(*arguments)
        terms = found["exact"].terms
        return found | {"exact": group_order.Lane(terms / 3, found["exact"].after)}

    monkeypatch.setattr(group_order, "lanes", wrong)
    code, _, err = run(*FEW)
    assert code == 1
    assert err.startswith("bitforbit: exact sums have an order: int4: ")
    assert err.count("\n") == 1


def test_an_interrupt_keeps_the_windows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Experiment.run

    def interrupted(experiment: Experiment) -> Iterator[Any]:
        yield next(whole(experiment))
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "run", interrupted)
    code, out, err = run(*FEW, "-o", "json")
    assert (code, err) == (2, "bitforbit: interrupted; 3 rows were kept\n")
    assert {row["positions"] for row in json.loads(out)} == {15}

    def at_once(experiment: Experiment) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Experiment, "run", at_once)
    code, out, err = run(*FEW, "-o", "json")
    assert (code, out, err) == (2, "", "bitforbit: interrupted; 0 rows were kept\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--formats", "int3"), "formats: 'int3' is none of int4"),
        (("--formats", ","), "--formats: there is none"),
        (("--positions", "99999"), "positions: 99999 are wanted, and the text has"),
        (("-c", "5000"), "context: 5000 is out of range"),
        (("-f", "/nowhere"), "--file: cannot read /nowhere"),
        (("--seed", "-1"), "--seed: -1 is below 0"),
        (("--widths", "100"), "widths: 100 is no multiple of 32"),
        (("--widths", "0"), "widths: 0 is no multiple of 32"),
        (("-m", "families/mixtral"), "it has no tokenizer.json"),
        (("-t", "4096"), "-t: threads: 4096"),
        (("--plot", "x.gif"), "--plot: x.gif is no .png or .svg"),
    ],
)
def test_bad_values_are_refused(run: Run, arguments: tuple[str, ...], part: str) -> None:
    assert part in run.refused(*SMALL, *arguments)


@pytest.mark.parametrize("arguments", [("--positions", "0"), ("-c", "x")])
def test_what_the_grammar_lacks(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*SMALL, *arguments)
    assert (code, out) == (2, "")
    assert err.endswith(" --help`\n")
