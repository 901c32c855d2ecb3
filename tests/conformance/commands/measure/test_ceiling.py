"""`bitforbit ceiling`: rows, shares of a bench, and its refusals."""

from __future__ import annotations

import csv
import io
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from conformance.commands.measure import ceiling as command
from conformance.commands.measure.models import TYPES, config_of
from reference.measure import ceiling as module
from reference.measure.ceiling import FAST, PRESETS, Ceiling, Hardware
from reference.measure.machine import Spread, this_machine
from tests.conformance.command_line import MODEL, ROOT, Run

CARD = ("ceiling", "-m", MODEL, "--card", "h100-sxm")
GIVEN = ("--bandwidth", "1e9", "--rate", "float64=2e9", "--rate", "float32=4e9")


def rows(run: Run, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(*arguments, "-o", "json")
    assert (code, err) == (0, "")
    told: list[dict[str, Any]] = json.loads(out)
    return told


def test_prefills_and_decode_steps_at_each_depth(run: Run) -> None:
    told = rows(run, *CARD, "-p", "8,64", "-d", "0,100", "-b", "1,4")
    assert [(row["test"], row["batch"]) for row in told] == [
        ("pp8", 1),
        ("pp64", 1),
        ("pp8 @ d100", 1),
        ("pp64 @ d100", 1),
        ("tg1", 1),
        ("tg1", 4),
        ("tg1 @ d100", 1),
        ("tg1 @ d100", 4),
    ]
    for row in told:
        assert row["source"].startswith("NVIDIA H100")
        assert (row["bandwidth_median"], row["weights"], row["threads"]) == (
            3.35e12,
            "float16",
            None,
        )
        assert len(row["digest"]) == 64
    code, out, _ = run(*CARD)
    assert code == 0
    assert "h100-sxm" in out
    code, out, _ = run(*CARD, "-o", "csv")
    assert len(list(csv.DictReader(io.StringIO(out)))) == 6


def test_storage_is_what_is_told(run: Run) -> None:
    (row,) = rows(run, *CARD, "-p", "0", "-d", "0", "--weights", "int4", "--compute", "int8")
    assert {row[k] for k in ("head", "kv")} == {"float16"}
    assert (row["weights"], row["compute"], row["attention"]) == ("int4", "int8", "int8")
    assert row["compute_rate_median"] == 1978.9e12
    (row,) = rows(run, "ceiling", "-m", MODEL, *GIVEN, "-p", "0", "-d", "0", "--compute", "float32")
    assert (row["hardware"], row["bandwidth_median"]) == ("as given", 1e9)


def test_a_configuration_is_enough(run: Run, tmp_path: Path) -> None:
    shutil.copy(Path(MODEL) / "config.json", tmp_path)
    here = rows(run, "ceiling", "-m", str(tmp_path), "--card", "l40s")
    there = rows(run, "ceiling", "-m", MODEL, "--card", "l40s")
    assert [row["bytes"] for row in here] == [row["bytes"] for row in there]
    assert here[0]["digest"] == there[0]["digest"]


@pytest.mark.parametrize(
    ("context", "given", "expected"),
    [
        (4096, {}, ([512, 2048], [0, 1024])),
        (2048, {}, ([512], [0, 1024])),
        (256, {}, ([256], [0])),
        (256, {"d": [100]}, ([156], [100])),
        (2000, {"p": [1000]}, ([1000], [0])),
        (256, {"p": [512], "d": [1024]}, ([512], [1024])),
    ],
)
def test_what_nobody_asked_for_fits_the_context(
    context: int, given: dict[str, list[int]], expected: tuple[list[int], list[int]]
) -> None:
    options = Namespace(**({"p": None, "d": None} | given))
    assert command.lengths_of(options, context) == expected


def test_a_short_context_has_a_roofline(run: Run) -> None:
    model = str(ROOT / "fixtures" / "random-llama")  # of a context of 256
    told = rows(run, "ceiling", "-m", model, "--card", "l40s")
    assert [row["test"] for row in told] == ["pp256", "tg1"]


def test_a_share_above_one_is_remarked_on(run: Run, bench: Path) -> None:
    for bandwidth, remarked in (("1e3", True), ("1e30", False)):
        given = ("--bandwidth", bandwidth, "--rate", "float64=1e30", "--rate", "float32=1e30")
        code, out, err = run("ceiling", "-m", MODEL, *given, "--bench", str(bench), "-o", "json")
        assert code == 0
        assert {row["share_median"] > 1 for row in json.loads(out)} == {remarked}
        assert err.startswith("bitforbit: a share above 100 %") == remarked
        assert err.count("\n") == remarked


def measured(threads: int, **options: Any) -> Hardware:
    spread = Spread.of([float(threads)] * 3)
    spreads = dict.fromkeys(("bandwidth", "float32", "float64"), spread)
    rates = {"float32": 1e9 * threads, "float64": 1e9 * threads}
    return Hardware(this_machine().cpu, 1e9 * threads, rates, f"{threads}", spreads)


def test_this_machine_is_measured_with_the_threads_asked_for(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "measured_here", measured)
    for threads in (1, 2):
        told = rows(run, "ceiling", "-m", MODEL, "-t", str(threads))
        assert {(row["threads"], row["source"]) for row in told} == {(threads, str(threads))}
        assert {row["repetitions"] for row in told} == {3}
        assert {row["compute"] for row in told} == {"float64"}


@pytest.fixture
def bench(run: Run, tmp_path: Path) -> Path:
    small = ("-p", "6", "-n", "3", "-r", "2", "-t", "1,2", "-d", "4")
    path = tmp_path / "bench.jsonl"
    code, out, _ = run("bench", "-m", MODEL, *small, "-o", "jsonl")
    assert code == 0
    path.write_text(out)
    return path


def test_shares_of_a_bench(run: Run, bench: Path) -> None:
    told = rows(run, "ceiling", "-m", MODEL, *GIVEN, "--bench", str(bench))
    before = [json.loads(line) for line in bench.read_text().splitlines()]
    assert [row["test"] for row in told] == [row["test"] for row in before]
    config = config_of(Path(MODEL))
    hardware = Hardware("as given", 1e9, {"float64": 2e9, "float32": 4e9}, "given")
    exact = Ceiling(config, module.EXACT, hardware)
    expected = {
        "pp6 @ d4": 6 / Ceiling(config, FAST, hardware).seconds(6, 4),
        "tg3 @ d4": 3 / sum(exact.seconds(1, depth) for depth in (4, 5, 6)),
    }
    for row, old in zip(told, before, strict=True):
        assert {key: row[key] for key in old} == old
        assert row["ceiling_rate"] == pytest.approx(expected[row["test"]])
        for part in ("median", "least", "most"):
            assert row[f"share_{part}"] == pytest.approx(old[f"rate_{part}"] / row["ceiling_rate"])
    code, out, _ = run("ceiling", "-m", MODEL, *GIVEN, "--bench", str(bench))
    assert code == 0
    assert "| share |" in out


def test_a_row_is_held_against_as_many_threads(run: Run, bench: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "measured_here", measured)
    told = rows(run, "ceiling", "-m", MODEL, "--bench", str(bench))
    assert [row["source"] for row in told] == [str(row["threads"]) for row in told]
    assert {row["source"] for row in told} == {"1", "2"}


def test_a_bench_of_something_else_is_refused(run: Run, bench: Path) -> None:
    def changed(**keys: Any) -> tuple[str, ...]:
        row = json.loads(bench.read_text().splitlines()[0]) | keys
        bench.write_text(json.dumps({k: v for k, v in row.items() if v is not ...}))
        return ("ceiling", "-m", MODEL, *GIVEN, "--bench", str(bench))

    whole = bench.read_text()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"digest": "0" * 64}, "row 1 is not of the model tiny-draft"),
        ({"version": 7}, "row 1 is of version 7; this program reads 1"),
        ({"rate_median": ...}, "row 1 is incomplete or wrong: rate_median is missing"),
        ({"cache_n": -1}, "row 1 is incomplete or wrong: cache_n is -1"),
        ({"prompt_n": 0}, "row 1 is incomplete or wrong (no token was computed)"),
        ({"weights": "int2"}, "weights: 'int2' is none of"),
        ({"arithmetic": "odd"}, "row 1 is incomplete or wrong"),
        ({"cache_n": 10**6}, "positions are needed"),
    ]
    for keys, part in cases:
        assert part in run.refused(*changed(**keys))
        bench.write_text(whole)
    silent = changed(server="http://it", digest=None, prompt_n=None, cache_n=None, threads=None)
    (told,) = rows(run, *silent, "--compute", "float32")
    assert told["share_median"] > 0


def test_a_bench_of_another_machine_is_not_held_against_this_one(
    run: Run, bench: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "measured_here", measured)
    bench.write_text(bench.read_text().replace(this_machine().cpu, "another"))
    error = run.refused("ceiling", "-m", MODEL, "--bench", str(bench))
    assert "row 1 was measured on another" in error


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--card", "h1000"), "card: 'h1000' is none of"),
        (("--card", "l40s", "-d", "5000"), "positions are needed"),
        (("--card", "l40s", "--compute", "float64"), "the rate of l40s in float64 is not known"),
        (("--bandwidth", "1e9"), "--bandwidth, --rate: each needs the other"),
        (("--card", "l40s", "--rate", "int8=1"), "--bandwidth, --rate: each needs the other"),
        (("--bench", "/nowhere"), "/nowhere: it is no bench file"),
        (("-m", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_values_are_refused(
    run: Run, arguments: tuple[str, ...], part: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "measured_here", lambda *_, **__: pytest.fail("it was measured"))
    assert part in run.refused("ceiling", "-m", MODEL, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [("--bandwidth", "0"), ("--rate", "int3=1"), ("--rate", "int8"), ("--bandwidth", "nan")],
)
def test_what_the_grammar_lacks(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run("ceiling", *arguments)
    assert (code, out) == (2, "")
    assert err.endswith(" --help`\n")


def test_the_types_of_the_command_are_those_that_are_counted() -> None:
    assert tuple(module.BYTES) == TYPES
    assert all(name in command.DESCRIPTION or name in PRESETS for name in PRESETS)
