"""Attention: exact bit for bit, fast near it (SPEC 8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from conformance.backends import resolve
from conformance.backends.torch import attention
from conformance.golden import read_all
from conformance.operations import NotImplementedByBackendError
from conformance.rules import judge
from tests.conformance.backends.torch.side_by_side import (
    FIXTURES,
    REFERENCE,
    TORCH,
    Array,
    both,
    nasty,
    same,
)

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 1},
    {"window": 7},
    {"window": 40},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 33, "softcap": 30.0, "sinks": True},
)


def attention_case(rng: np.random.Generator, hard: bool, **options: Any) -> dict[str, Any]:
    """Arguments of one attention call."""
    s = int(rng.choice([1, 5, 32, 33, 70, 130]))
    t, d = int(rng.integers(1, min(s, 40) + 1)), int(rng.choice([1, 8, 32, 48]))
    kv = int(rng.choice([1, 2]))
    heads = kv * int(rng.choice([1, 3]))

    def draw(*shape: int) -> Array:
        return nasty(rng, *shape) if hard else rng.standard_normal(shape).astype(np.float32)

    if options.pop("sinks", False):
        sinks = rng.standard_normal(heads)
        sinks[0] = rng.choice([-np.inf, 50.0, 0.0])
        options["sinks"] = sinks.astype(np.float32)
    scale = np.float32(rng.choice([0.125, 1.0, 3.0]))
    settings = {"scale": scale, "window": None, "softcap": None, "sinks": None} | options
    return {"q": draw(t, heads, d), "k": draw(s, kv, d), "v": draw(s, kv, d)} | settings


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_exact(variant: dict[str, Any]) -> None:
    rng = np.random.default_rng(11)
    for i in range(40):
        both("attention", mode="exact", **attention_case(rng, i % 3 == 0, **variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_with_what_is_not_finite(variant: dict[str, Any]) -> None:
    rng = np.random.default_rng(12)
    for _ in range(25):
        case = attention_case(rng, False, **variant)
        for name in "qkv":
            bad = rng.random(case[name].shape) < 0.3 / case[name].shape[-1] / 4
            case[name][bad] = rng.choice([np.nan, np.inf, -np.inf], bad.sum())
        if case["sinks"] is not None:
            case["sinks"][-1] = rng.choice([np.nan, np.inf, -np.inf, 1.0])
        both("attention", mode="exact", **case)
        ours, theirs = (b.attention(mode="fast", **case) for b in (TORCH, REFERENCE))
        assert np.array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def test_invisible_values_are_never_read() -> None:
    rng = np.random.default_rng(13)
    q, k, v = (rng.standard_normal((70, 2, 16)).astype(np.float32) for _ in range(3))
    clean = TORCH.attention(q[-1:], k, v, window=35)
    k[:35], v[:35] = np.nan, np.inf
    same(TORCH.attention(q[-1:], k, v, window=35), clean)
    fast = TORCH.attention(q[-1:], k, v, window=35, mode="fast")
    np.testing.assert_allclose(fast, clean, rtol=1e-5, atol=1e-5)


def test_nothing_visible_is_zero() -> None:
    one = np.ones((1, 1, 4), np.float32)
    for mode in ("exact", "fast"):
        same(TORCH.attention(one, one, one, window=0, mode=mode), np.zeros_like(one))


def test_rows_do_not_depend_on_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(14)
    q, k, v = (rng.standard_normal((100, 2, 16)).astype(np.float32) for _ in range(3))
    whole = TORCH.attention(q, k, v, window=50)
    monkeypatch.setattr(attention, "TILE", 1400)
    same(TORCH.attention(q, k, v, window=50), whole)


def test_the_example_of_sdpa_is_within_its_bounds_where_nothing_is_poisoned() -> None:
    sdpa = resolve(str(FIXTURES.parent / "examples" / "torch_sdpa.py"))
    outcomes = {}
    for golden in read_all(FIXTURES.parent / "goldens"):
        if golden.operation == "attention" and "gauge" in golden.rules:
            arguments = {**golden.parameters, **golden.inputs}
            try:
                answer = {"y": sdpa.attention(**arguments, mode="fast")}
            except NotImplementedByBackendError:
                assert {"softcap", "sinks"} & {n for n, x in arguments.items() if x is not None}
                continue
            outcomes[golden.id] = judge("gauge", golden, answer, 2.0**-24).outcome
    assert len(outcomes) > 40
    assert all(outcome == "pass" for name, outcome in outcomes.items() if "poison" not in name)
