"""`bitforbit router`: its rows, its control, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.commands.measure import router as command
from reference.experts import Routing
from reference.measure import router
from reference.measure.router import ARMS, NOTHING, Tracing
from tests.conformance.command_line import Run

SMALL = ("router", "--tokens", "48", "-c", "32", "-t", "1")


def rows(run: Run, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(*SMALL, "-o", "jsonl", *arguments)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_a_row_for_each_layer_and_one_for_all(run: Run) -> None:
    told = rows(run)
    assert [(row["arm"], row["layer"]) for row in told] == [
        (arm.name, layer) for arm in ARMS for layer in (0, 1, 2, 3, "all")
    ]
    for at in range(0, len(told), 5):
        *layers, whole = told[at : at + 5]
        for name in ("decisions", "flips"):
            assert whole[name] == sum(row[name] for row in layers)
        for name in ("bin_decisions", "bin_flips"):
            each = zip(*(row[name] for row in layers), strict=True)
            assert whole[name] == [sum(values) for values in each]
        assert whole["calls"] == pytest.approx(sum(row["calls"] for row in layers) / 4)
        assert whole["load"] is None
        for row in layers:
            assert row["decisions"] == 48
            assert len(row["load"]) == row["experts"] == 16
            assert sum(row["load"]) == pytest.approx(1)
    assert {(row["flips"], row["moved"]) for row in told[:5]} == {(0, 0.0)}
    assert all(0 < row["moved"] < 1e-4 for row in told[10:15])
    assert told[-1]["flips"] > 0
    assert (told[0]["model"], told[0]["text"]) == ("tiny-moe", "held-out.txt")
    assert (told[0]["context"], told[0]["tokens"], told[0]["threads"]) == (32, 48, 1)


def test_the_table_says_how_many_of_how_many(run: Run) -> None:
    *_, last = rows(run)
    code, out, _ = run(*SMALL)
    assert code == 0
    line = out.splitlines()[-1]
    assert f"| int4-row weights | all | {last['decisions']} | {last['flips']} |" in line
    for flipped, among in zip(last["bin_flips"], last["bin_decisions"], strict=True):
        assert f"| {flipped} of {among} |" in line
    assert "| below 1e-06 | 1e-06 to 1e-05 |" in out
    assert "| 0.1 or more |" in out


def test_a_control_with_flips_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "ARMS", (replace(NOTHING, weights="int4"), *ARMS[1:2]))
    code, out, err = run(*SMALL)
    assert code == 1
    assert "| fast attention | all |" in out
    assert err.startswith("bitforbit: exact, in other chunks: ")
    assert err.endswith("; what should change nothing did\n")


def test_an_interrupt_keeps_the_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, runs = Tracing.run, []

    def interrupted(tracing: Tracing) -> Iterator[dict[int, Routing]]:
        runs.append(tracing)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return whole(tracing)

    monkeypatch.setattr(Tracing, "run", interrupted)
    code, out, err = run(*SMALL, "-o", "json")
    assert code == 2
    assert err == "bitforbit: interrupted; 5 rows were kept\n"
    assert {row["arm"] for row in json.loads(out)} == {NOTHING.name}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-m", "tiny-draft"), "model: it has no experts"),
        (("-m", "families/mixtral"), "it has no tokenizer.json"),
        (("-f", "/nowhere"), "--file: cannot read /nowhere"),
        (("-c", "1"), "context: 1 is out of range"),
        (("--tokens", "1"), "text: it has fewer than 2 tokens"),
        (("--tokens", "5000", "-c", "4097"), "context: 4097 is out of range"),
    ],
)
def test_bad_values_are_refused(run: Run, arguments: tuple[str, ...], part: str) -> None:
    assert part in run.refused(*SMALL, *arguments)


def test_a_short_text_is_routed_whole(run: Run, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("In the beginning")
    told = rows(run, "-f", str(short))
    assert told[0]["tokens"] == told[0]["context"] == told[0]["decisions"] < 32


def test_the_picture_has_a_line_for_each_arm(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "flips.svg"
    told = rows(run, "--plot", str(file))
    by_margin, by_layer = command.panels(told)
    assert [line.label for line in by_margin.lines] == [arm.name for arm in ARMS]
    assert {len(line.y) for line in by_margin.lines} == {len(told[0]["bin_flips"])}
    assert [list(line.x) for line in by_layer.lines] == [[0, 1, 2, 3]] * len(ARMS)
    assert file.read_text().startswith("<?xml")
