"""Exact against fast: differences computed by hand, memory and operations counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.errors import RequestError
from reference.measure import attention as module
from reference.measure.attention import (
    Comparison,
    Prefill,
    differences,
    expert_flips,
    memory,
    peak,
    prefill,
)
from reference.measure.machine import this_machine
from reference.model import load_model
from reference.threads import limited_to
from tests.reference.models import LLAMA_SMALL, QWEN2_SMALL, small, tokens_of

MOE = Path(__file__).parents[3] / "fixtures" / "families" / "qwen3-moe"


def test_differences_are_those_of_the_rows() -> None:
    exact = np.log(np.array([[1, 3], [1, 1]], np.float32))
    fast = np.log(np.array([[3, 1], [1, 1]], np.float32))
    told = differences(exact, fast)
    assert told["rows"] == 2
    assert told["top_flips"] == 1
    assert told["logit_change"] == pytest.approx(np.log(3), rel=1e-6)
    assert told["kl_most"] == pytest.approx(np.log(3) / 2, rel=1e-6)  # 1/4 log 1/3 + 3/4 log 3
    assert told["kl_mean"] == pytest.approx(np.log(3) / 4, rel=1e-6)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 1, 9)).astype(np.float32)
    cosine = float(a[0] @ b[0] / np.linalg.norm(a) / np.linalg.norm(b))
    assert differences(a, b)["cosine_least"] == pytest.approx(cosine, rel=1e-5)
    assert differences(a, a)["cosine_least"] == pytest.approx(1)
    assert differences(a, a)["kl_most"] == 0


def test_flips_of_experts_are_counted_over_layers() -> None:
    model = load_model(MOE)
    tokens = tokens_of(30, 48).tolist()
    exact = prefill(model, tokens, "exact")
    layers = [n for n in range(model.config.layers) if n != 1]  # layer 1 is dense
    assert sorted(exact.routed) == layers
    told = expert_flips(exact.routed, exact.routed)
    assert told == {"expert_decisions": 60, "expert_flips": 0, "expert_flip_margin": None}
    other = prefill(model, list(reversed(tokens)), "exact")
    assert expert_flips(exact.routed, other.routed)["expert_flips"] > 0
    assert set(expert_flips({}, {}).values()) == {None}


def test_a_prefill_compares_the_last_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST", 7)
    model, tokens = small(QWEN2_SMALL), tokens_of(20, 32).tolist()
    for kind in module.KINDS:
        expected = model.forward(tokens, None, kind)[-7:]
        assert np.array_equal(prefill(model, tokens, kind).logits, expected)
    assert prefill(model, tokens[:3], "exact").logits.shape[0] == 3


def test_peaks_are_of_arrays() -> None:
    def work() -> None:
        first = np.ones(1 << 20)
        del first
        np.ones(1 << 19)

    assert 8 << 20 <= peak(work) < 9 << 20


@pytest.mark.parametrize("kind", module.KINDS)
def test_held_attention_needs_more_memory_for_the_same_operations(kind: Any) -> None:
    model = small(LLAMA_SMALL)
    with limited_to(1):
        told = {length: memory(model, length, kind) for length in (1024, 2048)}
    for found in told.values():
        assert found[f"{kind}_held_operations"] == found[f"{kind}_by_step_operations"]
        assert found[f"{kind}_by_step_operations"]

    def size(name: str, length: int) -> int:
        return told[length][f"{kind}_{name}_bytes"] or 0

    kept = [size("held", n) - size("by_step", n) for n in (1024, 2048)]
    assert kept[1] > 3.3 * kept[0] > 0  # scores grow with the square
    assert size("tiled", 2048) < 2.5 * size("tiled", 1024)


def test_too_much_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HELD", 4 * 4 * 32 * 32 // 2)
    model = small(LLAMA_SMALL)
    assert model.config.heads == 4
    assert memory(model, 32, "fast")["fast_held_bytes"] is not None
    told = memory(model, 33, "fast")
    assert told["fast_held_bytes"] is told["fast_held_operations"] is None
    assert told["fast_tiled_bytes"] is not None


def test_ratios_are_those_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([4.0, 1.0, 8.0, 3.0, 4.0, 6.0])  # exact fast again; fast again exact
    real = module.prefill
    seen: list[Any] = []

    def timed(model: Any, tokens: Any, kind: Any) -> Prefill:
        done = real(model, tokens, kind)
        seen.append((kind, len(tokens)))
        return Prefill(next(times, 1.0), done.logits, done.routed)

    monkeypatch.setattr(module, "prefill", timed)
    counted: list[int] = []
    comparison = Comparison(small(QWEN2_SMALL), tokens_of(16, 32).tolist(), [8], 1, (), 2, 0)
    (row,) = comparison.rows(this_machine(), lambda: counted.append(1))
    assert len(counted) == comparison.runs
    kinds = ("exact", "fast", "exact", "fast", "exact", "exact")
    assert seen[:6] == [(kind, 8) for kind in kinds]
    assert (row["gain_least"], row["gain_most"], row["gain_median"]) == (2.0, 4.0, 3.0)
    assert (row["do_nothing_least"], row["do_nothing_most"]) == (0.5, 1.5)
    assert (row["exact_seconds_median"], row["fast_seconds_median"]) == (5.0, 2.0)
    assert row["repetitions"] == 2


def test_rows_say_what_is_a_slice_and_where_the_floor_is() -> None:
    model = small(LLAMA_SMALL)
    tokens = tokens_of(40, 32).tolist()
    rows = list(Comparison(model, tokens, [8, 16], 1, [1], 1, 0).rows(this_machine()))
    assert json.loads(json.dumps(rows)) == rows
    told = [(row["test"], row["scope"], row["layers"], row["of_layers"]) for row in rows]
    layers = model.config.layers
    arms = [("whole", layers, layers), ("slice", 1, layers)]
    assert told == [(f"pp{n}", *arm) for n in (8, 16) for arm in arms]
    for row in rows:
        assert (row["floor"], row["above_floor"], row["rows"]) == (512, False, row["prompt_n"])
        assert row["cache_n"] == 0
        for name in ("exact_pass_bytes", "fast_pass_bytes", "exact_tiled_bytes"):
            assert row[name] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [257]}, "^lengths: 257 positions are needed, .* has 256"),
        ({"repetitions": 0}, "^repetitions: 0 is out of range"),
        ({"slices": [99]}, "^layers: 99 is no slice"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], message: str) -> None:
    plain = {"model": small(QWEN2_SMALL), "tokens": [1] * 9, "lengths": [4], "threads": 1}
    with pytest.raises(RequestError, match=message):
        Comparison(**{**plain, **options})
