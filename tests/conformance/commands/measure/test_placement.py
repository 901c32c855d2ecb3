"""`bitforbit placement`: what it shows, its forms and pictures, its check, and its refusals."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conformance.commands.measure.placement import TOLERANCE
from reference.measure import ceiling
from reference.measure.ceiling import Hardware
from reference.measure.machine import Spread, this_machine
from reference.measure.placement import Offload
from tests.conformance.command_line import Run

CPU = ("--cpu-bandwidth", "80e9", "--cpu-rate", "1.5e12")
SMALL = ("placement", *CPU, "--reply", "8", "-p", "16,600", "-n", "0,24,48:cpu", "-r", "2")
TINY = ("placement", *CPU, "-m", "tiny-moe", "--reply", "4", "-p", "64", "--tokens", "64")
SHOWN = {
    "placements": (*SMALL, "--gpu-memory", "16e9"),
    "crossovers": (*SMALL, "--show", "crossovers", "--gpu-memory", "16e9"),
    "experts": ("placement", "--show", "experts", "--tokens", "64", "--passes", "1,8,64"),
}
COUNT = {"placements": 2 * 2 * 3, "crossovers": 2 * 3, "experts": 2 * 3}
WORDS = {
    "placements": ("a reply of 8 tokens", "memory"),
    "crossovers": ("crossover",),
    "experts": ("experts hit, tiny-moe", "experts hit, qwen3-30b-a3b"),
}


def rows(run: Run, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(*arguments, "-o", "json")
    assert (code, err) == (0, "")
    told: list[dict[str, Any]] = json.loads(out)
    return told


@pytest.mark.parametrize("show", SHOWN)
def test_all_forms_and_the_picture(run: Run, tmp_path: Path, show: str) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "x.svg"
    code, out, err = run(*SHOWN[show], "-o", "jsonl", "--plot", str(plot))
    assert (code, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    assert len(told) == COUNT[show]
    assert len({tuple(row) for row in told}) == 1
    for row in told:
        assert {"cpu", "cores", "blas", "threads", "digest", "repetitions"} <= set(row)
        assert len(row["digest"]) == 64
        assert any(key.endswith("_least") for key in row)
    drawn = plot.read_text()
    for words in WORDS[show]:
        assert f"<!-- {words}" in drawn
    code, out, _ = run(*SHOWN[show], "-o", "csv")
    cells = list(csv.DictReader(io.StringIO(out)))
    assert (code, len(cells), list(cells[0])) == (0, len(told), list(told[0]))
    code, out, _ = run(*SHOWN[show])
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert (code, len(table)) == (0, len(told) + 2)
    assert len({line.count("|") for line in table}) == 1


def test_totals_are_prefill_and_steps_and_reuse_is_less(run: Run) -> None:
    told = rows(run, *SHOWN["placements"])
    assert [row["fits"] for row in told[:3]] == [False, True, True]
    for row in told:
        assert row["cache_n"] + row["prompt_n"] == row["prompt"]
        assert row["total_seconds"] > row["prefill_seconds"] + 7 * row["decode_seconds"]
        assert row["total_seconds"] == pytest.approx(row["simulated_median"], rel=TOLERANCE)
        assert row["repetitions"] == 2
    plain, reused = told[6:9], told[9:]
    assert {row["cache_n"] for row in plain} == {0}
    assert {row["cache_n"] for row in reused} == {540}
    for one, other in zip(plain, reused, strict=True):
        assert other["prefill_seconds"] < one["prefill_seconds"]
        assert other["decode_seconds"] == one["decode_seconds"]
    assert [row["shipped"] for row in plain] == [0, 0.5, 0]  # of 512 tokens and of 88


@pytest.mark.parametrize("times", [0.97, 1.03])
def test_a_total_that_was_not_simulated_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    whole = Offload.total_seconds

    def wrong(*arguments: Any) -> float:
        return times * whole(*arguments)

    monkeypatch.setattr(Offload, "total_seconds", wrong)
    code, _, err = run(*SMALL)
    assert code == 1
    assert err.startswith("bitforbit: not what was simulated: 0 at 16: ")
    assert err.count("\n") == 1


def test_the_cpu_is_measured_with_the_threads_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(threads: int, **options: Any) -> Hardware:
        spreads = dict.fromkeys(("bandwidth", "float32"), Spread.of([1e9, 2e9, 4e9]))
        return Hardware(this_machine().cpu, 2e9, {"float32": 2e9}, f"by {threads}", spreads)

    monkeypatch.setattr(ceiling, "measured_here", measured)
    for row in rows(run, "placement", *SMALL[5:], "-t", "1"):
        assert (row["threads"], row["cpu_source"], row["cpu_repetitions"]) == (1, "by 1", 3)
        assert [row[f"cpu_rate_{part}"] for part in ("least", "median", "most")] == [1e9, 2e9, 4e9]


def test_routing_is_uniform_or_fitted_or_measured(run: Run) -> None:
    names, hits = [], []
    for options in ((), ("--routing", "zipf"), ("--routing", "measured"), ("--zipf", "2")):
        zipf = ("--routing", "zipf") if options[:1] == ("--zipf",) else ()
        told = rows(run, *TINY, *options, *zipf, "--batch", "8")
        names.append(told[0]["routing"])
        hits.append(told[0]["experts_hit"])
    assert names[0] == "uniform"
    assert names[1].startswith("zipf 0.")
    assert names[1].endswith(", fitted to tiny-moe")
    assert names[2:] == ["measured, tiny-moe", "zipf 2"]
    assert hits[0] > max(hits[1:3])
    assert min(hits[1:3]) > hits[3]


def test_a_configuration_is_enough(run: Run, tmp_path: Path) -> None:
    shutil.copy(Path("fixtures/tiny-moe/config.json"), tmp_path)
    here, there = (rows(run, *TINY, "-m", name) for name in (str(tmp_path), "tiny-moe"))
    for one, other in zip(here, there, strict=True):
        assert one | {"model": ""} == other | {"model": ""}


def test_a_card_can_be_given(run: Run) -> None:
    given = ("--gpu-bandwidth", "1e12", "--gpu-rate", "1e14")
    (row, *_) = rows(run, *TINY, *given)
    assert (row["card"], row["gpu_memory"], row["fits"]) == ("as given", None, True)


def test_hits_of_a_real_router_are_fewer_than_uniform_ones(run: Run) -> None:
    told = rows(run, *SHOWN["experts"])
    assert [row["together_mean"] for row in told[:1]] == [4]
    assert told[1]["together_mean"] < told[1]["apart_mean"] < told[1]["uniform"]
    for row in told[:3]:
        assert row["loads"] <= row["uniform"] + 1e-9
        assert row["apart_least"] <= row["apart_mean"] <= row["apart_most"]
        assert row["repetitions"] == 4 * 64 // row["tokens"]
    assert [row["apart_mean"] for row in told[3:]] == [None] * 3
    assert [row["uniform"] for row in told[3:4]] == [8]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-m", "tiny-dense"), "model: it has no experts"),
        (("-m", "/nowhere"), "/nowhere"),
        (("-n", "49"), "-n: 49 is out of range; the model has 48 layers"),
        (("-n", "3:gpu"), "placement: '3:gpu' is none"),
        (("-n", ""), "placement: '' is none"),
        (("--show", "crossovers", "-n", "3"), "-n: a crossover is one of two placements"),
        (("-p", "40961"), "-p: prompts have 1 to 40952 tokens"),
        (("-p", "0"), "-p: prompts have 1 to 40952 tokens"),
        (("--reply", "40959"), "-p: prompts have 1 to 1 tokens"),
        (("--show", "crossovers", "--reply", "40960"), "--reply: the model's context has 40960"),
        (("--reuse", "1.5"), "reuse: 1.5 is out of range"),
        (("--reuse", "nan"), "reuse: nan is out of range"),
        (("--card", "h1000"), "card: 'h1000' is none of"),
        (("--compute", "float64"), "the rate of rtx-4090 in float64 is not known"),
        (("--gpu-rate", "1"), "--gpu-bandwidth, --gpu-rate: each needs the other"),
        (("--seed", "-1"), "--seed: -1 is below 0"),
        (("--routing", "measured", "--tokens", "32"), "has 4 of 16 experts in 4 layers, and the"),
        (("--routing", "zipf", "--traced", "tiny-draft"), "model: it has no experts"),
        (("--show", "experts", "--tokens", "8"), "--passes: a pass has 1 to 8 tokens"),
        (("--show", "experts", "-b", "0,4"), "--passes: a pass has 1 to 2048 tokens"),
        (("--plot", "x.gif"), "--plot: x.gif is no .png or .svg"),
    ],
)
def test_bad_values_are_refused(run: Run, arguments: tuple[str, ...], part: str) -> None:
    assert part in run.refused(*SMALL, *arguments)


def test_half_of_a_cpu_is_refused(run: Run) -> None:
    error = run.refused("placement", "--cpu-rate", "1e9")
    assert "--cpu-bandwidth, --cpu-rate: each needs the other" in error


@pytest.mark.parametrize("arguments", [("--link", "0"), ("--show", "x"), ("-r", "0"), ("-p", "x")])
def test_what_the_grammar_lacks(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run("placement", *arguments)
    assert (code, out) == (2, "")
    assert err.endswith(" --help`\n")
