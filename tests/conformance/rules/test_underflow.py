"""What underflow may take off, and that bounds without it would be violated (SPEC 16.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.fuzzing.case import Case
from conformance.fuzzing.draw import Asked
from conformance.golden import Golden
from conformance.operations import Sessions
from conformance.rules import Precision, bound, gauges, judge, unit_roundoff
from conformance.rules.underflow import losses
from conformance.runner import attempt
from conformance.variants import variants
from reference.arithmetic import matmul

F32 = NDArray[np.float32]
PAGES = ("k_pages", "v_pages")


def linear(x: F32, w: F32) -> Golden:
    y = matmul(x, w)
    gauge = gauges.linear(x, w, None, y)
    return Golden(
        "kernel/linear/x", "2.2", "linear", {}, {"x": x, "w": w}, {"y": y}, ("gauge",),
        gauge.terms, gauge.models, gauge.distance,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("numerics", "eta"),
    [
        ({"accumulator": "float32"}, 2.0**-150),
        ({"accumulator": "float32", "flush_to_zero": True}, 2.0**-126),
        ({"accumulator": "float32", "operands": "bfloat16"}, 2.0**-134),
        ({"accumulator": "float32", "operands": "float16"}, 2.0**-25),
        ({"accumulator": "float16", "flush_to_zero": True}, 2.0**-14),
        ({"accumulator": "float64"}, 0.0),
    ],
)
def test_eta(numerics: dict[str, Any], eta: float) -> None:
    assert unit_roundoff(numerics).underflow == eta


def test_flushed_operands_are_within_the_bound_of_who_declares_it() -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((4, 40)) * 2.0**-128).astype(np.float32)
    w = rng.standard_normal((6, 40)).astype(np.float32)
    golden = linear(x, w)
    kept = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)
    y = (kept.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32)
    y = np.where(np.abs(y) < 2.0**-126, np.float32(0), y)
    declared = {"operands": "bfloat16", "accumulator": "float32"}
    flushes = judge("gauge", golden, {"y": y}, unit_roundoff({**declared, "flush_to_zero": True}))
    assert flushes.outcome == "pass"
    keeps = judge("gauge", golden, {"y": y}, unit_roundoff(declared))
    assert keeps.outcome == "fail"


def test_small_numbers_of_float16() -> None:
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((4, 8)) * 2.0**-22).astype(np.float32)
    w = rng.standard_normal((5, 8)).astype(np.float32)
    golden = linear(x, w)
    y = (x.astype(np.float16).astype(np.float32) @ w.T).astype(np.float32)
    full = unit_roundoff({"operands": "float16", "accumulator": "float32"})
    assert judge("gauge", golden, {"y": y}, full).outcome == "pass"
    without = Precision(float(full), full.operands)
    assert judge("gauge", golden, {"y": y}, without).outcome == "fail"


def test_ordinary_numbers_lose_next_to_nothing() -> None:
    x, w = (np.random.default_rng(i).standard_normal((6, 64)).astype(np.float32) for i in (1, 2))
    golden = linear(x, w)
    plain = bound(golden, 2.0**-24)
    assert np.max(losses(golden)) < 400
    assert np.array_equal(bound(golden, unit_roundoff({"accumulator": "float32"})), plain)


def test_bfloat16_rounds_as_its_bound_says() -> None:
    x = np.ldexp(np.random.default_rng(3).random((1, 64), np.float32) + 1, -134)
    kept = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    eta = unit_roundoff({"accumulator": "float32", "operands": "bfloat16"}).underflow
    assert np.abs(kept - x).max() <= eta * 1.000001


def test_pages_lose_what_attention_over_their_positions_does() -> None:
    case = Case.read("paged_attention/1/69 page_size=16 rows=5 past=40 warm=true blind=0")
    paged = case.draw(Asked(exact=False)).golden({"accumulator": "float32"})
    about, a = dict(paged.parameters), paged.inputs
    length = about.pop("length")
    k, v = (a[n][a["block_table"]].reshape(-1, *a[n].shape[2:])[:length] for n in PAGES)
    inputs = {"q": a["q"], "k": k, "v": v}
    plain = replace(paged, operation="attention", parameters=about, inputs=inputs)
    assert length == 45
    assert np.all(losses(paged) > 0)
    assert np.array_equal(losses(paged), losses(plain))


@pytest.mark.parametrize("drawn", ["attention/1/3", "attention/1/54", "rms_norm/1/60"])
def test_what_only_the_exact_lane_loses_is_allowed_to_finer_arithmetic(drawn: str) -> None:
    backend = next(variant for variant in variants() if variant.name == "float64")()
    golden = Case.read(drawn).draw(Asked.of(backend.numerics)).golden(backend.numerics)
    declared = unit_roundoff(backend.numerics)
    verdict, answer = attempt(backend, Sessions(backend), golden, "gauge", declared)
    assert verdict.outcome == "pass"
    without = bound(golden, declared) - 2.0**-150 * losses(golden)
    assert answer is not None
    assert np.any(np.abs(answer["y"].astype(np.float64) - golden.outputs["y"]) > without)
