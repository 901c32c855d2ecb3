"""Signed errors do not add up where rounding is to nearest (SPEC 16.8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backends.composed import OwnOrderBackend
from conformance.cases import one_sided
from conformance.errors import GoldenError
from conformance.faults import applied, fault
from conformance.faults.fault import bfloat16, cut_to_bfloat16
from conformance.golden import Golden
from conformance.operations import Sessions, call
from conformance.rules import gauges, judge, judging, numerics_of, unit_roundoff
from conformance.variants import variants

F32 = NDArray[np.float32]
GOLDENS = {recipe.id.removeprefix("kernel/"): recipe.make() for recipe in one_sided.recipes()}


class Stored(OwnOrderBackend):
    """float32 sums, results stored in bfloat16 by `store`."""

    numerics: Mapping[str, Any] = {"operands": "bfloat16", "accumulator": "float32"}

    def __init__(self, store: Callable[[F32], F32]) -> None:
        self.store = store

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        return self.store(super().linear(x, w, bias))

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        return self.store(super().rms_norm(x, weight, eps))


def margins(backend: Any, golden: Golden) -> tuple[float, float]:
    """Of the elementwise rule, and of bias."""
    outputs = call(
        backend, Sessions(backend), golden.operation, {**golden.parameters, **golden.inputs}
    )
    u = unit_roundoff(numerics_of(backend.numerics, golden.operation))
    found = [judge(rule, golden, outputs, u).worst for rule in golden.rules[1:]]
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


@pytest.mark.parametrize("name", ["linear/stored_k2", "linear/stored_k16", "rms_norm/stored"])
def test_a_store_that_cuts_off_is_seen_by_the_sum_alone(name: str) -> None:
    elementwise, bias = margins(Stored(cut_to_bfloat16), GOLDENS[name])
    assert elementwise < 1
    assert bias > 1.3
    elementwise, bias = margins(Stored(bfloat16), GOLDENS[name])
    assert elementwise < 1
    assert bias < 0.4


@pytest.mark.parametrize("name", ["linear/many_k16", "linear/many_k64"])
def test_sums_that_are_cut_off_are_seen_by_the_sum_alone(name: str) -> None:
    wrong = applied(fault("linear-sums-towards-zero"), OwnOrderBackend)
    elementwise, bias = margins(wrong, GOLDENS[name])
    assert elementwise < 1
    assert bias > 2


def test_the_side_is_named() -> None:
    golden = GOLDENS["linear/stored_k2"]
    y = golden.outputs["y"]
    u = unit_roundoff(Stored.numerics)
    for answer, way in (
        (cut_to_bfloat16(y), "towards zero"),
        (y + np.abs(y) * np.float32(2**-9), "upwards"),
    ):
        verdict = judge("bias(1)", golden, {"y": answer}, u)
        assert verdict.outcome == "fail"
        assert f"err {way} by" in verdict.message


def test_no_variant_is_accused() -> None:
    for variant in variants():
        if variant.exact:
            continue
        backend = variant()
        for name, golden in GOLDENS.items():
            elementwise, bias = margins(backend, golden)
            assert elementwise < 1, (variant.name, name)
            assert bias < 0.5, (variant.name, name, bias)


def test_operands_that_are_rounded_are_shared_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What x loses moves a whole row one way; no such sum is held against a backend."""
    x = np.full((64, 4), 1 + 2.0**-9, np.float32)
    w = np.tile(np.array([1, 1.5, 1.25, 1], np.float32), (64, 1))
    y = (x @ w.T).astype(np.float32)
    gauge = gauges.linear(x, w, None, y)
    golden = Golden(
        "kernel/linear/x", "2.2", "linear", {}, {"x": x, "w": w}, {"y": y}, ("bias(1)",),
        gauge.terms, gauge.models, gauge.distance,
    )  # fmt: skip
    answer, u = {"y": bfloat16(x) @ bfloat16(w).T}, unit_roundoff(Stored.numerics)
    assert judge("gauge", golden, answer, u).outcome == "pass"
    assert judge("bias(1)", golden, answer, u).outcome == "pass"
    monkeypatch.setattr(judging, "_rounds_operands", lambda golden, u: False)
    assert judge("bias(1)", golden, answer, u).outcome == "fail", "these data show nothing"


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize(
    ("x", "numerics", "model", "unit"),
    [
        (1.0, {}, "dot(18)", 2.0**-24 * math.sqrt(3)),
        (1.0, {}, "ops(12)", 2.0**-24 * 2),
        (1.0, {"accumulator": "float64"}, "dot(18)", 2.0**-53 * math.sqrt(3)),
        (1.0, {"operands": "bfloat16"}, "dot(18)", 2.0**-24 * math.sqrt(3)),
        (1.0, {"operands": "bfloat16"}, "ops(12)", 2.0**-8 * 2),
        (1 + 2.0**-8, {"operands": "bfloat16"}, "dot(18)", 2.0**-24 * math.sqrt(3) + 2.0**-8),
    ],
)
def test_what_a_sum_may_come_to(
    x: float, numerics: dict[str, Any], model: str, unit: float, run: int
) -> None:
    """20 results of 2, by a gauge of 3, that all err upwards by 2^-20, and one that is 0."""
    y = np.full((3, 7), 2, np.float32)
    y[2, 6] = 0
    gauge = np.where(y > 0, np.float32(3), np.float32(0))
    golden = Golden(
        "kernel/linear/x", "2.2", "linear", {}, {"x": np.full((1, 1), x, np.float32)}, {"y": y},
        ("bias(1)",), {"products": gauge}, {"products": model},
    )  # fmt: skip
    u = unit_roundoff({"accumulator": "float32", **numerics})
    stored = 2 * (max(u.operands, 2.0**-24) + 2.0**-24) / math.sqrt(3)
    sharing = 21 if x != 1 else run
    allowed = 7 * sharing * math.sqrt(math.ceil(21 / sharing))
    verdict = judge(f"bias({run})", golden, {"y": y + gauge * np.float32(2.0**-20 / 3)}, u)
    total = 20 * 2.0**-20 / math.hypot(3 * unit, stored)
    assert verdict.worst == pytest.approx(total / allowed, rel=1e-6)
    assert verdict.outcome == ("pass" if total <= allowed else "fail")


def test_a_model_whose_typical_error_is_not_known_is_refused() -> None:
    y = np.ones(2, np.float32)
    golden = Golden(
        "model/forward/x", "10", "forward", {}, {}, {"y": y}, ("bias(1)",), {"noise": y},
        {"noise": "noise(7)"},
    )  # fmt: skip
    with pytest.raises(GoldenError, match="model/forward/x: the rule bias knows no error model no"):
        judge("bias(1)", golden, {"y": y}, 2.0**-24)


def test_goldens_lose_nothing_to_alignment() -> None:
    for golden in GOLDENS.values():
        if golden.operation == "linear":
            x, w = (golden.inputs[name].astype(np.float64) for name in ("x", "w"))
            assert np.array_equal(golden.outputs["y"], (x @ w.T).astype(np.float32))
