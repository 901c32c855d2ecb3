"""Legitimate variants pass, and are what they say they are (SPEC 20)."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from conformance.backends.composed import ComposedBackend
from conformance.backends.composed.verification import VerifyBackend
from conformance.calibration.trials import judged, runs
from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from conformance.rules import ASK_BITS, asked, bounded_rules
from conformance.variants import AnyVariant, variants

QUICK = ("elementary", "kernel")


@cache
def goldens() -> tuple[Golden, ...]:
    """The smaller half of the kernels' goldens."""
    found = [g for g in read_all(data_folder("goldens")) if g.level in QUICK]
    size = lambda g: sum(a.size for a in g.inputs.values())  # noqa: E731
    return tuple(sorted(found, key=size)[: len(found) // 2])


def test_there_are_many() -> None:
    assert len(variants()) >= 40
    assert len({v.name for v in variants()}) == len(variants())
    assert all(v.__doc__ and v.__doc__.split("\n")[0].endswith(".") for v in variants())


@pytest.mark.parametrize("variant", variants(), ids=lambda v: v.name)
def test_a_variant_passes(variant: AnyVariant) -> None:
    backend = variant()
    if variant.exact:
        trial = judged(backend, goldens(), partial(asked, numerics=backend.numerics))
        assert not trial.failed
    else:
        bounded = [g for g in goldens() if any(rule not in ASK_BITS for rule in g.rules)]
        assert not judged(backend, bounded, bounded_rules).failed
    assert trial.passed if variant.exact else True


def test_a_variant_runs_what_its_own_steps_compute() -> None:
    """A step that took another name would silently take its operation's cases away."""
    named = {v.name: v for v in variants()}
    assert runs(named["head-by-head"], "sample")
    assert not runs(named["head-by-head"], "route")
    assert runs(named["stored-bfloat16"], "route")
    assert runs(VerifyBackend, "verify_draft")


def test_a_bounded_variant_does_have_other_bits() -> None:
    """Otherwise it would try nothing: each differs from the exact lane in some case."""
    same = []
    for variant in variants():
        if not variant.exact:
            trial = judged(variant(), goldens(), lambda g: [r for r in g.rules if r == "bits"])
            same += [] if trial.failed else [variant.name]
    assert not same


def test_reduced_precisions_say_so() -> None:
    named = {v.name: v().numerics for v in variants()}
    declared = {name: (n["operands"], n["accumulator"]) for name, n in named.items()}
    assert declared["bfloat16"] == ("bfloat16", "float32")
    assert declared["bfloat16-sums"] == ("bfloat16", "bfloat16")
    assert declared["stored-bfloat16"] == ("bfloat16", "float32")
    assert declared["stored-float16"] == ("float16", "float32")
    assert declared["tf32"] == ("tf32", "float32")
    assert declared["float64"] == ("float64", "float64")
    assert declared["float64-angles"] == ("float32", "float64")
    assert declared["sequential"] == ("float32", "float32")
    assert named["kv-bfloat16"]["kv"] == "bfloat16"


def test_slices_of_eight_bits_are_whole() -> None:
    from conformance.variants.exact import _sliced

    digits = np.array([[2.0**24 - 1, -(2.0**24) + 1, 0, 128, -129, 8388608]])
    parts = list(_sliced(digits))
    assert all(np.abs(part).max() <= 256 for part in parts)
    total = sum(part * 256.0**i for i, part in enumerate(parts))
    assert np.array_equal(np.asarray(total), digits)
    assert ComposedBackend.name == "composed"


@pytest.mark.parametrize("name", ["stored-bfloat16", "stored-float16"])
def test_what_is_stored_is_of_the_declared_type(name: str) -> None:
    """Every kernel answers with numbers of that type alone."""
    backend = next(v for v in variants() if v.name == name)()
    kernels = {"elementary/softmax/k33", "elementary/silu/all", "kernel/linear/bias"}
    kernels |= {"kernel/linear_int4/k33_group", "kernel/linear_q4_0/k32_t5", "kernel/moe/decode_k3"}
    kernels |= {"kernel/rms_norm/k33", "kernel/rope/gap", "kernel/attention/decode_33"}
    kernels |= {"kernel/gated_mlp/silu_33_65"}
    for golden in read_all(data_folder("goldens"), kernels):
        y = judged(backend, [golden], lambda g: ["gauge"]).answers[golden.id]["y"]
        assert np.array_equal(backend.rounded(y), y, equal_nan=True), golden.id
        kernels.remove(golden.id)
    assert not kernels


def in_long_doubles() -> dict[str, tuple[dict[str, Any], Any]]:
    """Arguments of operations, and their results of 64 bits."""
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    def wide(x: Any) -> Any:
        return x.astype(np.longdouble)

    def softmax(u: Any) -> Any:
        p = np.exp(u - u.max(axis=-1, keepdims=True))
        return p / p.sum(axis=-1, keepdims=True)

    x, weight, gate, up, down = draw(40, 48), draw(48), draw(64, 48), draw(64, 48), draw(48, 64)
    q, k, v = draw(40, 1, 48), draw(40, 1, 48), draw(40, 1, 48)
    g = wide(x) @ gate.T
    hidden = g / (1 + np.exp(-g)) * (wide(x) @ up.T)
    seen = np.tril(np.ones((40, 40), bool))
    scores = np.where(seen, wide(q[:, 0]) @ k[:, 0].T * np.longdouble(0.125), -np.inf)
    root = np.sqrt(np.square(wide(x)).mean(axis=1, keepdims=True) + np.longdouble(1e-6))
    layer = {"x": x, "gate": gate, "up": up, "down": down, "activation": "silu"}
    heads = {"q": q, "k": k, "v": v, "scale": 0.125, "mode": "fast"}
    return {
        "softmax": ({"x": x}, softmax(wide(x))),
        "rms_norm": ({"x": x, "weight": weight, "eps": 1e-6}, wide(x) / root * weight),
        "gated_mlp": (layer, hidden @ wide(down.T)),
        "attention": (heads, (softmax(scores) @ wide(v[:, 0]))[:, None]),
    }


@pytest.mark.parametrize("operation", ["softmax", "rms_norm", "gated_mlp", "attention"])
def test_who_declares_float64_rounds_no_step_to_float32(operation: str) -> None:
    """Results are the float32 nearest to those of 64 bits; with a rounded step, many are not."""
    arguments, expected = in_long_doubles()[operation]
    equal = {}
    for variant in variants():
        if variant.name in ("float64", "float64-angles"):
            y = getattr(variant(), operation)(**arguments)
            equal[variant.name] = float((y == expected.astype(np.float32)).mean())
    assert equal["float64"] > 0.999
    assert equal["float64-angles"] < 0.95
