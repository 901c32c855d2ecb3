"""Where a prefill's time goes: every second is counted once, and a slice says that it is one."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.arithmetic import F32
from reference.errors import RequestError
from reference.measure import profile as module
from reference.measure.machine import this_machine
from reference.measure.profile import (
    STEPS,
    Fit,
    Pass,
    Profile,
    Profiled,
    Stopwatch,
    inside,
    run,
    watched,
)
from reference.measure.stepwise import stepwise
from reference.model import Model, load_model
from reference.threads import limited_to
from tests.reference.models import LLAMA_SMALL, QWEN2_SMALL, small, tokens_of

MOE = Path(__file__).parents[3] / "fixtures" / "families" / "qwen3-moe"


@cache
def moe() -> Model:
    return load_model(MOE)


@pytest.mark.parametrize("name", ["exact", "float32", "moe"])
@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_a_watched_model_computes_the_same_bits(name: Any, kind: Any) -> None:
    plain = moe() if name == "moe" else small(LLAMA_SMALL, "float32", name)
    tokens = tokens_of(40, 32)
    expected, found = (m.forward(tokens, None, kind) for m in (plain, Profiled.of(plain)))
    assert np.array_equal(expected.view(np.int32), found.view(np.int32))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [5, 600])
def test_parts_are_counted_once(threads: int, length: int) -> None:
    """The rest is what is left: below 0 it would say that something was counted twice."""
    with limited_to(threads):
        done = run(Profiled.of(small(LLAMA_SMALL)), tokens_of(length, 32).tolist(), "fast")
    assert list(done.steps) == list(STEPS)
    assert sum(map(done.share, STEPS)) == pytest.approx(1, abs=1e-12)
    assert min(done.steps.values()) >= 0
    assert done.steps["experts"] == 0
    for step in ("attention", "projections", "feedforward", "norms", "head", "rest"):
        assert done.steps[step] > 0


def test_steps_are_told_apart() -> None:
    """A clock that ticks when it is read: a step has one second for each call of its own."""
    ticks = itertools.count()
    model = Profiled.of(moe(), lambda: float(next(ticks)))
    model.forward(tokens_of(9, 48), None, "exact", last_only=True)
    seen = model.watch.seconds
    layers, dense = model.config.layers, 1  # layer 1 is dense
    assert seen["attention"] == layers
    assert seen["head"] == 1
    assert seen["norms"] > seen["attention"]
    assert seen["feedforward"] > 0
    assert seen["experts"] >= 2 * (layers - dense)
    assert set(seen) <= set(STEPS)


def test_a_stretch_is_split_as_its_threads_are() -> None:
    """10 seconds in which two threads each worked 10, a quarter of that on norms."""
    times = iter([0.0, 10.0])
    watch = Stopwatch(lambda: next(times))

    def work() -> str:
        for _ in range(2):
            watch.add("tile", 10.0)
            watch.add("norms", 2.5)
        return "done"

    result, taken, within = watch.stretch(work)
    assert (result, taken, within) == ("done", 10.0, {"tile": 20.0, "norms": 5.0})
    assert watch.seconds == {}
    watch.add("head", 1.0)
    assert watch.seconds == {"head": 1.0}


def test_threads_that_work_at_once_take_the_time_of_one() -> None:
    """Two tiles at once, 4 seconds each, 1 of them on norms: norms take 1 of the 4 seconds."""
    now = [0.0]

    def norm(x: F32, weight: F32, eps: float) -> F32:
        now[0] += 1
        return x

    def work(x: F32) -> tuple[F32]:
        now[0] += 3
        return (do.rms_norm(x, x, 0.0),)

    def at_once(work: Any, x: F32) -> tuple[F32, ...]:
        started = now[0]
        work(x)
        now[0] = started  # the other thread began when this one did
        return tuple(work(x))

    model, watch = small(LLAMA_SMALL), Stopwatch(lambda: now[0])
    plain = replace(model.operations, rms_norm=norm, by_rows=at_once)
    do = watched(plain, model.weights, watch)
    do.by_rows(work, np.zeros((2, 2), np.float32))
    assert now == [4.0]
    assert watch.seconds == {"norms": 1.0}


def test_the_fit_finds_both_parts_and_tells_what_is_left() -> None:
    lengths = (1024, 2048, 4096, 8192)
    seconds = [2e-3 * n + 5e-7 * n * n for n in lengths]
    fit = Fit.of(lengths, seconds)
    assert fit.linear == pytest.approx(2e-3)
    assert fit.quadratic == pytest.approx(5e-7)
    assert max(map(abs, fit.residuals)) < 1e-9
    assert fit.share(4000) == pytest.approx(0.5)
    assert fit.figures()["fit_even"] == pytest.approx(4000)
    seconds[1] *= 1.3
    assert Fit.of(lengths, seconds).figures()["fit_largest_residual"] > 0.05
    fitted = Fit.of(lengths, [1.0, 1.0, 1.0, 1.0])
    assert fitted.figures()["fit_even"] is None
    assert list(fitted.figures()) == list(module.NO_FIT)


def test_inside_attention_each_window_is_measured_and_each_layer_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def once(q: Any, k: Any, v: Any, scores: Any, kind: Any, **named: Any) -> Any:
        out, measured = stepwise(q, k, v, scores, kind, **named)
        seen.append(scores.window)
        measured.seconds = {"qk": 1.0, "softmax": 2.0, "av": 4.0}
        return out, measured

    monkeypatch.setattr("reference.measure.profile.stepwise", once)
    model = small(QWEN2_SMALL)
    total = inside(model, 20, "fast", 3)
    layers, windows = model.config.layers, set(model.config.windows)
    assert total == {"qk": 1.0 * layers, "softmax": 2.0 * layers, "av": 4.0 * layers}
    assert len(seen) == 3 * len(windows)
    assert set(seen) == windows


def test_rows_say_what_is_a_slice_and_how_far_it_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(LLAMA_SMALL)
    whole = model.config.layers
    passes: dict[int, list[Pass]] = {}
    real = module.run

    def kept(arm: Profiled, tokens: list[int], kind: Any) -> Pass:
        passes.setdefault(arm.config.layers, []).append(real(arm, tokens, kind))
        return passes[arm.config.layers][-1]

    monkeypatch.setattr(module, "run", kept)
    counted: list[int] = []
    profile = Profile(model, [4, 8, 16], 1, [1], "fast", 1, 0)
    rows = list(profile.rows(this_machine(), lambda: counted.append(1)))
    assert len(counted) == profile.runs
    assert json.loads(json.dumps(rows)) == rows
    assert len({tuple(row) for row in rows}) == 1
    told = [
        (row["test"], row["scope"], row["layers"], row["of_layers"], row["role"]) for row in rows
    ]
    arms = [
        ("whole", whole, whole, ""),
        ("slice", 1, whole, ""),
        ("whole", whole, whole, "do nothing"),
    ]
    expected = [(f"pp{n}", *arm) for n in (4, 8, 16) for arm in arms]
    assert told == [*expected, ("fit", *arms[0]), ("fit", *arms[1])]
    assert rows[0]["digest"] == model.digest != rows[1]["digest"]
    for row in rows[:9]:
        shares = [row[f"{step}_share"] for step in STEPS]
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        inside = [row[f"{step}_share_stepwise"] for step in ("qk", "softmax", "av")]
        assert sum(inside) == pytest.approx(row["attention_share"], abs=1e-12)
        assert (row["cache_n"], row["prompt_n"]) == (0, int(row["test"][2:]))
    a_slice, a_whole = passes[1][0], passes[whole][0]
    assert rows[1]["scaled_median"] == whole * a_slice.seconds / a_whole.seconds
    shift = a_slice.share("attention") - a_whole.share("attention")
    assert rows[1]["attention_shift_median"] == shift
    assert rows[0]["scaled_median"] is None
    assert rows[9]["fit_lengths"] == [4, 8, 16]


def test_two_lengths_have_no_fit_and_no_slices_no_second_run() -> None:
    rows = list(Profile(small(LLAMA_SMALL), [4, 8], 1, (), "exact", 1, 0).rows(this_machine()))
    assert [row["test"] for row in rows] == ["pp4", "pp8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [257]}, "^lengths: 257 positions are needed, .* has 256"),
        ({"lengths": [0]}, "^lengths: a prompt has 1 token"),
        ({"lengths": []}, "^lengths: a prompt has 1 token"),
        ({"repetitions": 0}, "^repetitions: 0 is out of range"),
        ({"slices": [0]}, "^layers: 0 is no slice"),
        ({"slices": [99]}, "^layers: 99 is no slice of a model of . layers"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        Profile(**{"model": small(QWEN2_SMALL), "lengths": [4], "threads": 1, **options})
    assert "\n" not in str(error.value)
