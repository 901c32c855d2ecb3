"""`ulp(n)` follows what is declared of stored numbers (SPEC 16.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import pytest

from conformance.backends.plain import PlainBackend
from conformance.faults import applied, fault
from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from conformance.rules import Verdict, judge, unit_roundoff
from conformance.rules.functions import coarse, legal
from conformance.variants import variants
from conformance.variants.storage import StoredBfloat16
from conformance.variants.variant import Bounded
from reference.arithmetic import F32

NAMES = ("exp", "log", "sin", "cos", "tanh")
FLOAT32: Mapping[str, Any] = {"operands": "float32", "accumulator": "float32"}


def goldens() -> dict[str, Golden]:
    """Those of the five functions, by operation."""
    wanted = {f"elementary/{name}/all" for name in NAMES}
    return {g.operation: g for g in read_all(data_folder("goldens"), wanted)}


GOLDENS = goldens()


def judged(golden: Golden, y: F32, numerics: Mapping[str, Any]) -> Verdict:
    return judge("ulp(4)", golden, {"y": y}, unit_roundoff(numerics))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", ["functions-bfloat16", "functions-float16"])
def test_stored_functions_pass_where_they_are_declared_and_only_there(
    name: str, variant: str
) -> None:
    backend = next(v for v in variants() if v.name == variant)()
    golden = GOLDENS[name]
    y = getattr(backend, name)(golden.inputs["x"].copy())
    assert judged(golden, y, backend.numerics).outcome == "pass"
    assert judged(golden, y, FLOAT32).outcome == "fail"


def test_an_operation_declares_its_own_type() -> None:
    """bfloat16 products beside float32 functions are held to float32 there."""
    from conformance.rules import numerics_of

    numerics = {"operands": "bfloat16", "accumulator": "float32"}
    numerics["operations"] = {"log": FLOAT32}  # type: ignore[assignment]
    golden = GOLDENS["log"]
    with np.errstate(all="ignore"):
        y = np.log(golden.inputs["x"].astype(ml_dtypes.bfloat16).astype(np.float32))
    assert judged(golden, y, numerics_of(numerics, "log")).outcome == "fail"


def test_the_fault_of_what_nothing_declares_is_caught() -> None:
    golden, known = GOLDENS["log"], fault("log-bfloat16")
    with np.errstate(all="ignore"):
        y = applied(known, Bounded).log(golden.inputs["x"].copy())
        assert judged(golden, y, FLOAT32).outcome == "fail"
        y = applied(known, StoredBfloat16).log(golden.inputs["x"].copy())
        assert judged(golden, y, StoredBfloat16.numerics).outcome == "pass"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("declared", ["float32", "tf32", "float16", "bfloat16"])
def test_float32_passes_whatever_is_declared(name: str, declared: str) -> None:
    golden = GOLDENS[name]
    y = getattr(PlainBackend(), name)(golden.inputs["x"].copy())
    verdict = judged(golden, y, {"operands": declared, "accumulator": "float32"})
    assert verdict.outcome == "pass"
    beyond = {"float32": 0, "tf32": 3.402e38, "float16": 65504, "bfloat16": 3.39e38}[declared]
    if beyond:
        count = int((np.abs(np.nan_to_num(golden.inputs["x"], posinf=0, neginf=0)) > beyond).sum())
        total = golden.inputs["x"].size
        said = f"judged in {total - count} of {total} elements" if count else ""
        assert name == "log" or verdict.message == said


@pytest.mark.parametrize("name", NAMES)
def test_a_few_percent_fail_as_bfloat16(name: str) -> None:
    """4 units of bfloat16 are 3 percent at most; an argument near 0 adds nothing."""
    golden = GOLDENS[name]
    x = golden.inputs["x"]
    y = golden.outputs["y"].copy()
    near = np.isfinite(y) & (np.abs(x) < 4) & (np.abs(x) > 2.0**-20) & (np.abs(y) > 2.0**-20)
    assert near.sum() > 100
    y[near] *= np.float32(1.15)
    assert judged(golden, y, {"operands": "bfloat16"}).outcome == "fail"


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_are_where_they_must_be(name: str) -> None:
    golden, numerics = GOLDENS[name], {"operands": "bfloat16", "accumulator": "float32"}
    y, x = golden.outputs["y"], golden.inputs["x"]
    judged_nowhere = (np.abs(x) < 2.0**-120) | ((np.abs(x) > 3.39e38) & np.isfinite(x))
    for at in np.flatnonzero(np.isnan(y) & ~judged_nowhere)[:5]:
        for wrong in (0.0, np.inf):
            answer = y.copy()
            answer[at] = wrong
            assert judged(golden, answer, numerics).outcome == "fail"
        answer = y.copy()
        answer.view(np.uint32)[at] = 0xFFC00000  # the NaN that x86 makes
        assert judged(golden, answer, numerics).outcome == "pass"
    for at in np.flatnonzero(np.isfinite(y) & (np.abs(x) < 50) & (np.abs(x) > 1e-30))[:5]:
        for wrong in (np.nan, np.inf, -np.inf):
            answer = y.copy()
            answer[at] = wrong
            assert judged(golden, answer, numerics).outcome == "fail"


@pytest.mark.parametrize("name", ["exp", "log"])
def test_flushed_subnormals_pass_where_they_are_declared(name: str) -> None:
    golden = GOLDENS[name]

    def flushed(x: F32) -> F32:
        return np.where(np.abs(x) < 2.0**-126, x * np.float32(0), x)

    with np.errstate(all="ignore"):
        y = flushed(getattr(PlainBackend(), name)(flushed(golden.inputs["x"])))
    assert judged(golden, y, {**FLOAT32, "flush_to_zero": True}).outcome == "pass"
    assert judged(golden, y, FLOAT32).outcome == "fail"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_legal_holds_the_function_of_every_argument_within_reach(name: str) -> None:
    """Of 50 digits, at both ends and in the middle of what may be stored."""
    golden, declared = GOLDENS[name], unit_roundoff({"operands": "float16"})
    with np.errstate(invalid="ignore"):
        x = golden.inputs["x"].astype(np.float64)
    low, high = legal(golden, 0, declared)
    function = getattr(mpmath, name)
    with mpmath.workdps(50):
        for at in np.flatnonzero(np.isfinite(x) & (np.abs(x) < 60000))[::7]:
            reach = declared.stored * abs(x[at]) + declared.underflow if x[at] else 0.0
            for stored in (x[at] - reach, x[at], x[at] + reach):
                if (name == "log" and stored <= 0) or not np.isfinite([low[at], high[at]]).all():
                    continue
                value = function(mpmath.mpf(stored))
                slack = abs(value) * mpmath.mpf(2) ** -23 + mpmath.mpf(2) ** -149
                assert low[at] - slack <= value <= high[at] + slack, (name, x[at])


@pytest.mark.parametrize(
    ("numerics", "w", "v", "eta"),
    [
        ({**FLOAT32, "flush_to_zero": True}, 2.0**-24, 0.0, 2.0**-126),
        ({"operands": "bfloat16", "accumulator": "float32"}, 2.0**-8, 2.0**-8, 2.0**-134),
        ({"operands": "float32", "accumulator": "float16"}, 2.0**-11, 0.0, 2.0**-25),
    ],
)
def test_beyond_what_is_within_reach_just_n_units_are_legal(
    numerics: dict[str, Any], w: float, v: float, eta: float
) -> None:
    x = np.array([0, -0.5, 3.25], np.float32)
    y = np.exp(x)
    golden = Golden("elementary/exp/x", "4.1", "exp", {}, {"x": x}, {"y": y}, ("ulp(3)",))
    declared = unit_roundoff(numerics)
    assert coarse(declared)
    low, high = legal(golden, 3, declared)
    for one, right, ends in zip(x.tolist(), y.tolist(), zip(low, high, strict=True), strict=True):
        reach = v * abs(one) + eta if one else 0.0
        least, most = min(math.exp(one - reach), right), max(math.exp(one + reach), right)
        beyond = least - ends[0], ends[1] - most
        assert beyond == pytest.approx([6 * (w * end + eta) for end in (least, most)], rel=1e-6)
    for end in (low, high):  # and a margin is the share of the way to there
        for share in (0.5, 0.9, 1.2, 2.0):
            answer = (y + share * (end - y)).astype(np.float32)
            verdict = judge("ulp(3)", golden, {"y": answer}, declared)
            margin = float(np.max((answer.astype(np.float64) - y) / (end - y)))
            assert verdict.worst == pytest.approx(margin, rel=1e-12)
            assert verdict.outcome == ("pass" if margin <= 1 else "fail")
            assert abs(margin - share) < 0.3


def test_zero_is_stored_as_it_is_and_what_must_be_nan_has_no_margin() -> None:
    zero = np.zeros(1, np.float32)
    golden = Golden("elementary/sin/x", "4.1", "sin", {}, {"x": zero}, {"y": zero}, ("ulp(4)",))
    ends = legal(golden, 0, unit_roundoff({"operands": "float16"}))
    assert [end.tolist() for end in ends] == [[0], [0]]
    nan = {"y": np.array([np.nan], np.float32)}
    golden = replace(golden, operation="log", inputs={"x": zero - 1}, outputs=nan)
    assert judged(golden, nan["y"], {"operands": "float16"}) == Verdict("pass", 0.0)


def test_float32_with_its_subnormals_is_not_coarse() -> None:
    for name in ("exact", "float32", "float64"):
        assert not coarse(unit_roundoff({"operands": name, "accumulator": name}))
    assert coarse(unit_roundoff({**FLOAT32, "kv": "float16"}))


def test_arguments_all_of_which_are_beyond_the_declared_type_give_no_verdict() -> None:
    x = np.array([1e5, -1e5], np.float32)
    golden = Golden("elementary/sin/x", "4.1", "sin", {}, {"x": x}, {"y": np.sin(x)}, ("ulp(4)",))
    verdict = judged(golden, np.sin(x), {"operands": "float16", "accumulator": "float32"})
    assert verdict == Verdict("not judged", None, "all operands are beyond 65504")
    assert judged(golden, np.sin(x), {"operands": "bfloat16"}).outcome == "pass"
