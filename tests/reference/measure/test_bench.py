"""Benches counted and not timed: a clock that ticks makes every figure a known number."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.attention import AlignedKeyValues
from reference.errors import RequestError
from reference.measure.bench import Bench, Local, Row, Sample, Trial, read_rows
from reference.measure.machine import Spread, this_machine
from reference.model import AttentionKind, Model, load_model
from tests.reference.models import QWEN2_SMALL, TINY, small


def ticking() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: float(next(ticks))


def local(model: Model | None = None, **changes: Any) -> Local:
    arm = Local(model or small(QWEN2_SMALL), "it", "exact", "float32", "fast", 1, ticking())
    return replace(arm, **changes)


@dataclass
class Passes:
    """The passes that a model computes: tokens, tokens held before, and attention."""

    seen: list[tuple[int, int, AttentionKind]] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = Model.forward

        def watched(
            model: Model, tokens: Sequence[int], cache: Any, attention: Any = "exact", **rest: Any
        ) -> Any:
            self.seen.append((len(tokens), cache.length, attention))
            return forward(model, tokens, cache, attention, **rest)

        monkeypatch.setattr(Model, "forward", watched)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    seen = Passes()
    seen.watch(monkeypatch)
    return seen


@pytest.mark.parametrize(
    ("trial", "name"),
    [
        (Trial(512, 0), "pp512"),
        (Trial(0, 128), "tg128"),
        (Trial(512, 128), "pp512+tg128"),
        (Trial(512, 0, 4096), "pp512 @ d4096"),
    ],
)
def test_names_are_llama_benchs(trial: Trial, name: str) -> None:
    assert trial.name == name


def test_a_trial_computes_what_its_name_says(passes: Passes) -> None:
    cases: list[tuple[Trial, list[tuple[int, int, str]]]] = [
        (Trial(9, 0), [(9, 0, "fast")]),
        (Trial(0, 3), [(1, 0, "exact"), (1, 1, "exact"), (1, 2, "exact")]),
        (Trial(9, 2), [(9, 0, "fast"), (1, 9, "exact"), (1, 10, "exact")]),
    ]
    for trial, expected in cases:
        for depth in (0, 5):
            deep = replace(trial, depth=depth)
            run = local().of(deep).ready(deep)
            assert [(count, held) for count, held, _ in passes.seen] == ([(5, 0)] if depth else [])
            passes.seen.clear()
            for _ in range(2):  # the second run finds the cache as the first one did
                sample = run()
                assert passes.seen == [(n, held + depth, kind) for n, held, kind in expected]
                passes.seen.clear()
                assert (sample.cache_n, sample.prompt_n) == (depth, max(trial.prompt, 1))
                assert (sample.first, sample.seconds) == (1.0, 2.0)
                assert sample.rate(deep) == (trial.prompt + trial.output) / 2


def test_prompts_are_cut_into_passes(passes: Passes) -> None:
    local(most=4).ready(Trial(10, 0, 6))()
    assert [(count, held) for count, held, _ in passes.seen] == [
        (4, 0),
        (2, 4),
        (4, 6),
        (4, 10),
        (2, 14),
    ]


def test_a_pass_is_as_long_as_the_memory_has_room_for(passes: Passes) -> None:
    model = load_model(TINY, memory="8GiB")
    assert model.memory is not None
    limit = model.memory._pass_bytes([(5, 1)])
    model.memory._room = limit
    local(model, most=7, memory="8GiB").ready(Trial(12, 0))()
    assert [count for count, *_ in passes.seen] == [5, 5, 2]
    passes.seen.clear()
    model.memory._room = 1 << 33
    local(model, most=7).ready(Trial(12, 0))()
    assert [count for count, *_ in passes.seen] == [7, 5]


def test_no_bit_depends_on_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no pass of the exact arithmetic, whether it computes a prompt or one token."""
    logits: dict[str | None, list[Any]] = {}
    forward = Model.forward
    for memory in (None, "8GiB"):
        found = logits.setdefault(memory, [])

        def kept(model: Model, *arguments: Any, found: Any = found, **rest: Any) -> Any:
            found.append(forward(model, *arguments, **rest))
            return found[-1]

        monkeypatch.setattr(Model, "forward", kept)
        model = load_model(TINY, memory=memory)
        local(model, attention="exact", memory=memory).ready(Trial(40, 3))()
    assert len(logits[None]) == len(logits["8GiB"]) == 4
    for whole, limited in zip(logits[None], logits["8GiB"], strict=True):
        assert whole.tobytes() == limited.tobytes()


def test_exact_attention_is_exact_and_fast_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is what the row says: `fast` never reads aligned keys for a prompt."""
    read: list[int] = []
    made = AlignedKeyValues.__init__

    def counted(*arguments: Any, **names: Any) -> None:
        read.append(1)
        made(*arguments, **names)

    monkeypatch.setattr(AlignedKeyValues, "__init__", counted)
    local(attention="fast").ready(Trial(40, 0))()
    assert read == []
    local(attention="exact").ready(Trial(40, 0))()
    assert read != []


@dataclass(frozen=True)
class Fake:
    """An arm whose runs take a known time, and are written down."""

    name: str
    log: list[str] = field(compare=False)
    speed: float = 1.0
    cache_n: int | None = 0

    @property
    def labels(self) -> Mapping[str, str | int | None]:
        return {"model": self.name, "digest": None}

    def of(self, trial: Trial) -> Fake:
        return self

    def ready(self, trial: Trial) -> Callable[[], Sample]:
        def run() -> Sample:
            self.log.append(self.name)
            # The machine gets slower with every run: turns differ, but not who is faster in one.
            slow = 1 + len(self.log) // 4
            prompt_n = None if self.cache_n is None else trial.given
            return Sample(slow / self.speed, slow / 2, self.cache_n, prompt_n, 1)

        return run


def test_arms_take_turns_and_ratios_are_paired() -> None:
    log: list[str] = []
    arms = [Fake("a", log), Fake("b", log, 3.0), Fake("c", log, 0.5)]
    bench = Bench(arms, [Trial(12, 0)], repetitions=5, warm_up=0)
    rows = list(bench.rows())
    assert bench.runs == len(log) == 20
    turns = [log[start : start + 4] for start in range(0, 20, 4)]
    assert all(sorted(turn) == ["a", "a", "b", "c"] for turn in turns)
    assert {turn[0] for turn in turns} == {"a", "b", "c"}
    assert [row.role for row in rows] == ["first", "", "", "do nothing"]
    assert rows[0].ratio is None
    times = [[sample.seconds for sample in row.samples] for row in rows]
    for row, seconds in zip(rows[1:], times[1:], strict=True):
        assert row.ratio is not None
        paired = [a / b for a, b in zip(times[0], seconds, strict=True)]
        assert row.ratio.median == pytest.approx(statistics.median(paired))
        assert row.ratio.repetitions == 5


def test_one_arm_has_no_ratio() -> None:
    (row,) = Bench([Fake("a", [])], [Trial(1, 0)], 2).rows()
    assert (row.role, row.ratio) == ("", None)
    assert "ratio_median" not in row.figures(this_machine())


def test_runs_that_warm_up_are_thrown_away() -> None:
    log: list[str] = []
    seen: list[int] = []
    bench = Bench([Fake("a", log)], [Trial(1, 0), Trial(0, 1)], 3, warm_up=2)
    rows = list(bench.rows(lambda: seen.append(1)))
    assert [len(row.samples) for row in rows] == [3, 3]
    assert len(log) == len(seen) == bench.runs == 10
    assert [sample.first for sample in rows[0].samples] == [0.5, 1.0, 1.0]


def test_attention_makes_no_second_arm_where_no_prompt_is() -> None:
    arms = [local(attention="exact"), local(attention="fast")]
    bench = Bench(arms, [Trial(4, 0), Trial(0, 4)], 1)
    assert [len(bench.arms_of(trial)) for trial in bench.trials] == [3, 1]
    assert bench.arms_of(Trial(0, 4))[0].labels["attention"] == "exact"


def test_what_a_server_does_not_say_is_unknown_and_one_warm_run_is_warm() -> None:
    def cache(*held: int | None) -> str:
        samples = tuple(Sample(1, 1, n, None, 1) for n in held)
        return Row(Trial(1, 0), {}, "", samples, None).cache

    assert cache(0, 0) == "cold"
    assert cache(0, 0, 7) == "warm"
    assert cache(None, 7) == "warm"
    assert cache(0, None) == "unknown"


def test_threads_are_those_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from reference.threads import thread_count

    counts: list[int] = []
    before, forward = thread_count(), Model.forward

    def watched(*arguments: Any, **names: Any) -> Any:
        counts.append(thread_count())
        return forward(*arguments, **names)

    monkeypatch.setattr(Model, "forward", watched)
    for threads in (1, 2):
        local(threads=threads).ready(Trial(3, 1, 2))()
    assert counts == [1] * 3 + [2] * 3
    assert thread_count() == before


def test_a_row_says_all_that_a_figure_needs() -> None:
    (row,) = Bench([local()], [Trial(8, 2, 4)], 3, 0).rows()
    told = row.figures(this_machine())
    assert json.loads(json.dumps(told)) == told
    assert told["digest"] == small(QWEN2_SMALL).digest
    expected = {
        "test": "pp8+tg2 @ d4",
        "threads": 1,
        "cache_n": 4,
        "prompt_n": 8,
        "repetitions": 3,
        "rate_median": 5.0,
        "rate_mean": 5.0,
        "rate_deviation": 0.0,
        "ttft_median": 1.0,
        "samples_seconds": [2.0] * 3,
        "cache": "warm",
    }
    assert {name: told[name] for name in expected} == expected
    assert told["cpu"]
    assert told["cores"] >= 1


def test_spreads_are_those_of_statistics() -> None:
    values = np.random.default_rng(0).standard_normal(7).tolist()
    spread = Spread.of(values)
    assert spread.deviation == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert (spread.median, spread.least, spread.most) == (
        sorted(values)[3],
        min(values),
        max(values),
    )
    assert Spread.of([2.0]) == Spread(1, 2.0, 0.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("trials", "repetitions", "message"),
    [
        ([Trial(200, 0, 57)], 1, "^pp200 @ d57: 257 positions are needed, .* has 256"),
        ([Trial(0, 257)], 1, "^tg257: 257 positions"),
        ([Trial(1, 0)], 0, "^repetitions: 0 is out of range"),
        ([], 1, "^bench: there is nothing to measure"),
    ],
)
def test_what_cannot_be_run_is_refused(
    trials: list[Trial], repetitions: int, message: str, passes: Passes
) -> None:
    with pytest.raises(RequestError, match=message):
        Bench([local()], trials, repetitions)
    assert passes.seen == []
    Bench([local()], [Trial(200, 0, 56), Trial(0, 256)], 1)


def test_a_trial_of_nothing_is_refused() -> None:
    for wrong in ((0, 0, 5), (-1, 2, 0), (1, 0, -1)):
        with pytest.raises(RequestError):
            Trial(*wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no row in it"),
        ("[]", "there is no row in it"),
        ("{", "it is no bench file"),
        ("1\n2", "row 1 is no row of bitforbit-bench"),
        ('{"format": "bitforbit-bench", "version": 1}\n{"format": "x"}', "row 2 is no row"),
        ('[{"format": "bitforbit-bench", "version": 2}]', "row 1 is of version 2; .* reads 1"),
        ('{"format": "bitforbit-bench"}', "row 1 is of version None"),
        ("[" * 100_000, "it is no bench file"),
        ('{"format": "bitforbit-bench", "version": 1}', "row 1 .*: model is missing"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows"
    path.write_text(text)
    with pytest.raises(RequestError, match=message) as error:
        read_rows(path)
    assert "\n" not in str(error.value)
    with pytest.raises(RequestError, match="it is no bench file"):
        read_rows(tmp_path / "missing")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu", ...),
        ("model", ["m"]),
        ("n_prompt", "4"),
        ("n_output", True),
        ("n_depth", -1),
        ("prompt_n", 10**400),
        ("ttft_median", None),
        ("ttft_least", float("nan")),
        ("rate_most", float("inf")),
        ("rate_least", 0),
        ("rate_median", 10**400),
    ],
)
def test_a_row_that_no_bench_gives_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "rows.jsonl"
    (row,) = Bench([local()], [Trial(8, 2, 4)], 1, 0).rows()
    told = row.figures(this_machine())
    path.write_text(json.dumps(told))
    assert read_rows(path) == [told]
    changed = {k: v for k, v in (told | {key: value}).items() if v is not ...}
    path.write_text(f"{json.dumps(told)}\n{json.dumps(changed)}")
    with pytest.raises(RequestError, match=f"row 2 is incomplete or wrong: {key} is .*; measure"):
        read_rows(path)
