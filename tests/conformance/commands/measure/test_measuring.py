"""profile, attention, orders, speedup, schedule --batch: forms, pictures, refusals, interrupts."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.commands.measure import ceiling as ceiling_command
from reference.measure.attention import Comparison
from reference.measure.batching import Batching
from reference.measure.ceiling import Hardware
from reference.measure.orders import Orders
from reference.measure.profile import Profile
from reference.measure.speedup import Speedup
from tests.conformance.command_line import MODEL, Run

SIZES = "layers=2,hidden=32,heads=2,kv=1,head_dim=16,ffn=32,vocab=32,context=64"
COMMANDS: dict[str, tuple[str, ...]] = {
    "profile": ("-p", "4,8,12", "-r", "1", "--layers", "1", "-t", "1", "--no-warmup"),
    "attention": ("-p", "4,8", "-r", "1", "--layers", "1", "-t", "1", "--no-warmup"),
    "orders": ("--ties", "1", "-p", "8", "-n", "2", "--search", "64", "-t", "1"),
    "speedup": ("-w", "1", "--only", "threads", "-p", "8", "-r", "1"),
    "schedule": ("--batch", "1,2", "-d", "4", "-n", "2", "-r", "1", "-t", "1"),
}
WHAT = {"profile": 11, "attention": 4, "orders": 4, "speedup": 2, "schedule": 3}
"""How many rows each gives."""

ALL = ("cpu", "cores", "blas", "model", "digest", "threads", "cache_n", "prompt_n", "repetitions")
"""What every row says."""


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own rates take a GiB to measure."""
    here = Hardware("it", 1e10, {"float64": 1e10, "float32": 2e10}, "given")
    monkeypatch.setattr("reference.measure.ceiling.measured_here", lambda *a, **k: here)


def called(command: str, *arguments: str) -> tuple[str, ...]:
    model = ("--model", MODEL) if command == "schedule" else ("--random", SIZES)
    return (command, *model, *COMMANDS[command], *arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_all_forms_and_the_picture(run: Run, tmp_path: Path, command: str) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "x.svg"
    code, out, err = run(*called(command, "-o", "jsonl", "--plot", str(plot)))
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == WHAT[command]
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert set(ALL) <= set(row)
        assert len(row["digest"]) == 64
        assert row["threads"] == 1
    assert any(key.endswith("_least") for key in rows[0])
    assert "<svg" in plot.read_text()
    code, out, _ = run(*called(command, "-o", "csv"))
    cells = list(csv.DictReader(io.StringIO(out)))
    assert (code, len(cells), list(cells[0])) == (0, len(rows), list(rows[0]))
    code, out, _ = run(*called(command, "-o", "json"))
    assert (code, len(json.loads(out))) == (0, len(rows))
    code, out, _ = run(*called(command))
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert (code, len(table)) == (0, len(rows) + 2)
    assert out.startswith("cpu: ")
    assert len({line.count("|") for line in table}) == 1


INTERRUPTED: dict[str, tuple[type[Any], str]] = {
    "profile": (Profile, "rows"),
    "attention": (Comparison, "rows"),
    "orders": (Orders, "rows"),
    "speedup": (Speedup, "rows"),
    "schedule": (Batching, "rows"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_keeps_the_rows(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    kind, name = INTERRUPTED[command]
    rows: Callable[..., Iterator[Any]] = getattr(kind, name)

    def interrupted(*arguments: Any, **named: Any) -> Iterator[Any]:
        yield next(rows(*arguments, **named))
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, name, interrupted)
    code, out, err = run(*called(command, "-o", "json"))
    assert (code, err) == (2, "bitforbit: interrupted; 1 row was kept\n")
    assert len(json.loads(out)) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_picture_that_cannot_be_is_refused(run: Run, command: str) -> None:
    assert "--plot: x.gif is no .png or .svg" in run.refused(*called(command, "--plot", "x.gif"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("profile", "-p", "65"), "lengths: 65 positions are needed"),
        (("profile", "-r", "0"), "repetitions: 0 is out of range"),
        (("profile", "--layers", "2"), "layers: 2 is no slice of a model of 2 layers"),
        (("profile", "-t", "4096"), "-t: threads: 4096 were asked for"),
        (("profile", "--arithmetic", "float32", "--attention", "exact"), "use fast"),
        (("attention", "-p", "65"), "lengths: 65 positions are needed"),
        (("attention", "-p", "0"), "a prompt has 1 token or more"),
        (("orders", "-p", "60", "-n", "9"), "prompt: 69 positions are needed"),
        (("orders", "-p", "3"), "prompt: 3 is out of range; it must be 8 or more"),
        (("orders", "-n", "0"), "output: 0 is out of range"),
        (("orders", "--ties", "-1"), "--ties: -1 is below 0"),
        (("orders", "--ties", "0", "--prompts", "0"), "there is no prompt"),
        (("speedup", "-p", "65"), "-p: 65 positions are needed"),
        (("speedup", "-p", "8", "-r", "0"), "repetitions: 0 is out of range"),
        (("speedup", "-p", "8", "-w", "0"), "workers: 0 of them"),
        (("speedup", "-p", "8", "-w", "9", "--only", "processes"), "9 processes have 4 prompts"),
    ],
)
def test_bad_values_are_refused(run: Run, arguments: tuple[str, ...], part: str) -> None:
    assert part in run.refused(arguments[0], "--random", SIZES, *arguments[1:])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("profile", "--random", "depth=3"), "random: 'depth' is none of layers"),
        (("profile", "-m", "/nowhere"), "/nowhere"),
        (("schedule", "--model", MODEL, "--batch", "0"), "batch: 0 is out of range"),
        (("schedule", "--model", MODEL, "--batch", "1", "-d", "5000"), "depth: 5017 positions"),
        (("schedule", "--model", MODEL, "--batch", "1", "-r", "0"), "repetitions: 0"),
        (("schedule", "-m", MODEL, "--batch", "1", "--json"), "they go with neither --batch"),
        (("schedule", "-m", MODEL, "--trace", "-o", "csv"), "they go with neither --batch"),
    ],
)
def test_wrong_names_and_depths_are_refused(
    run: Run, arguments: tuple[str, ...], part: str
) -> None:
    assert part in run.refused(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [("profile", "-p", "x"), ("attention", "--attention", "x"), ("speedup", "--only", "x")],
)
def test_what_the_grammar_lacks(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.endswith(" --help`\n")


def test_an_exact_lane_with_other_bits_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Orders.rows

    def wrong(*arguments: Any) -> Iterator[Any]:
        for row in rows(*arguments):
            yield {**row, "bits": 2}

    monkeypatch.setattr(Orders, "rows", wrong)
    code, _, err = run(*called("orders"))
    assert code == 1
    assert "the exact lane is not exact: prompt 1: 2 different bits" in err


def test_workers_with_other_bits_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Speedup.rows

    def wrong(*arguments: Any) -> Iterator[Any]:
        for row in rows(*arguments):
            yield {**row, "same_bits": row["role"] == "first"}

    monkeypatch.setattr(Speedup, "rows", wrong)
    code, _, err = run(*called("speedup"))
    assert (code, err) == (1, "bitforbit: other bits with 1 threads\n")


# pictures of commands that were there before


def test_pictures_of_bench_ceiling_and_prefix(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, rows = str(tmp_path / "x.svg"), tmp_path / "rows.jsonl"
    small = ("-m", MODEL, "-p", "4,8", "-n", "2", "-d", "0,3", "-r", "1", "-t", "1")
    arms = ("--arithmetic", "exact,float32", "-o", "jsonl", "--plot", plot)
    code, out, _ = run("bench", *small, *arms)
    assert code == 0
    drawn = Path(plot).read_text()
    for word in ("speed", "to the first arm, paired", "prefill by length", "generation by depth"):
        assert f"<!-- {word} -->" in drawn
    rows.write_text(out)
    code, _, _ = run("ceiling", "-m", MODEL, "--card", "h100-sxm", "--plot", plot)
    assert code == 0
    assert "<!-- roofline -->" in Path(plot).read_text()
    machine = ("--bandwidth", "1e10", "--rate", "float64=1e10", "--rate", "float32=1e10")
    code, _, _ = run("ceiling", "-m", MODEL, *machine, "--bench", str(rows), "--plot", plot)
    assert code == 0
    assert "<!-- share of the ceiling -->" in Path(plot).read_text()
    held = ("--held", "80", "--new", "8", "--edits", "2", "--minimum", "16")
    code, _, _ = run("prefix", "--model", MODEL, *held, "--plot", plot)
    assert code == 0
    assert "<!-- what moved chunks changed -->" in Path(plot).read_text()
    for command in ("bench", "ceiling", "prefix"):
        assert "--plot: x.gif" in run.refused(command, "--model", MODEL, "--plot", "x.gif")


def test_a_picture_of_perplexity(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, base = tmp_path / "x.svg", str(tmp_path / "base")
    small = ("perplexity", "-m", MODEL, "-c", "32", "--chunks", "3", "--plot", str(plot))
    code, out, _ = run(*small, "--save-logits", base, "-o", "json")
    assert code == 0
    drawn = plot.read_text()
    assert "<!-- perplexity -->" in drawn
    assert "<!-- divergence of tokens -->" not in drawn
    (row,) = json.loads(out)
    assert len(row["windows"]) == 3
    assert row["window_least"] == min(row["windows"])
    for weights, drawn_too in (("float32", False), ("int4", True)):  # from itself it is 0
        assert run(*small, "--kl-divergence", base, "--weights", weights)[0] == 0
        assert ("<!-- divergence of tokens -->" in plot.read_text()) == drawn_too


def test_the_roofline_has_each_pass_below_the_machine() -> None:
    row = {"bandwidth_median": 10.0, "compute_rate_median": 100.0, "test": "tg1", "batch": 1}
    passes = [
        {**row, "intensity": 2.0, "operations": 40.0, "seconds": 2.0},
        {**row, "intensity": 50.0, "operations": 500.0, "seconds": 5.0},
    ]
    (panel,) = ceiling_command.panels(passes)
    roof, *points = panel.lines
    assert dict(zip(roof.x, roof.y, strict=True)) == {1: 10, 2: 20, 10: 100, 50: 100, 100: 100}
    assert [(p.x[0], p.y[0]) for p in points] == [(2.0, 20.0), (50.0, 100.0)]


def test_prefix_gives_rows_with_the_machine(run: Run) -> None:
    small = ("--held", "96", "--new", "8", "--edits", "1", "--minimum", "16")
    code, out, _ = run("prefix", "--model", MODEL, *small, "-o", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    cold = next(row for row in rows if row["turn"] == "cold")
    assert cold["of_cold"] == 1
    assert cold["cache_n"] == 0
    assert {"digest", "threads", "repetitions"} <= set(cold)
    assert any(row["turn"] == "what moved chunks changed" for row in rows)
    assert run("prefix", "--model", MODEL, *small, "-o", "csv", "--json")[0] == 2


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("prefix", "--held", "96", "--new", "8", "--edits", "1", "--minimum", "16"), "turn"),
        (("schedule", "--long", "40", "--users", "1", "--chunk", "16"), "same tokens in all arms"),
    ],
)
def test_json_in_a_file_leaves_the_table(
    run: Run, tmp_path: Path, command: tuple[str, ...], shown: str
) -> None:
    target = tmp_path / "figures.json"
    code, out, _ = run(*command, "--model", MODEL, "--json", str(target))
    assert code == 0
    assert shown in out
    alone = json.loads(run(*command, "--model", MODEL, "--json")[1])
    assert len(json.loads(target.read_text())) == len(alone)
    wrong = ("--model", MODEL, "--json", "no/such/figures.json")
    assert "--json: cannot write" in run.refused(*command, *wrong)
