"""How answers are judged: bits, either, ulp and gauge (SPEC 16)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.bits import shown
from conformance.errors import GoldenError
from conformance.golden import Golden
from conformance.rules import (
    OWN_DISTANCE,
    UNIT,
    Verdict,
    bound,
    error_model,
    judge,
    same_bits,
    unit_roundoff,
)

Array = NDArray[Any]
U = 2.0**-24
MAX = float(np.finfo(np.float32).max)
TINY = 2.0**-149
ANY_BITS = st.integers(0, 2**32 - 1)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def f32(*values: Any) -> Array:
    return np.array(values, np.float32)


def raw(*words: int) -> Array:
    return np.array(words, np.uint32).view(np.float32)


def golden(
    *outputs: Array,
    gauge: Array | None = None,
    model: str = "ops(1)",
    distance: Array | None = None,
) -> Golden:
    names = [f"y{i}" if i else "y" for i in range(len(outputs))]
    return Golden(
        "kernel/test/one",
        "16",
        "test",
        {},
        {},
        dict(zip(names, outputs, strict=True)),
        ("bits", "ulp(4)", "gauge"),
        {} if gauge is None else {"size": gauge},
        {} if gauge is None else {"size": model},
        distance,
    )


def bits(expected: Array, answer: Array) -> Verdict:
    return judge("bits", golden(expected), {"y": answer}, U)


def ulp(limit: int, expected: Array, answer: Array) -> Verdict:
    return judge(f"ulp({limit})", golden(expected), {"y": answer}, U)


def gauge(expected: Array, answer: Array, u: float = U, **about: Any) -> Verdict:
    return judge("gauge", golden(expected, **about), {"y": answer}, u)


# Shape and dtype come before any rule.


@pytest.mark.parametrize("rule", ["bits", "ulp(4)", "gauge"])
@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (np.zeros(3, np.float64), "float64 (3,)"),
        (np.zeros(3, np.float16), "float16 (3,)"),
        (np.zeros(3, ">f4"), ">f4 (3,)"),
        (np.zeros(3, np.int32), "int32 (3,)"),
        (np.zeros(3, object), "object (3,)"),
        (np.zeros((3, 1), np.float32), "float32 (3, 1)"),
        (np.zeros(4, np.float32), "float32 (4,)"),
        (np.zeros((), np.float32), "float32 ()"),
        (np.zeros(0, np.float32), "float32 (0,)"),
    ],
)
def test_another_shape_or_dtype_fails_and_says_both(rule: str, answer: Array, got: str) -> None:
    verdict = judge(rule, golden(f32(0, 0, 0)), {"y": answer}, U)
    assert verdict == Verdict("fail", None, f"y: expected float32 (3,), got {got}")


def test_every_output_is_compared() -> None:
    about = golden(f32(1), np.array([3], np.int8))
    good = {"y": f32(1), "y1": np.array([3], np.int8)}
    assert judge("bits", about, good, U).outcome == "pass"
    verdict = judge("bits", about, {**good, "y1": np.array([4], np.int8)}, U)
    assert verdict.outcome == "fail"
    assert verdict.message == (
        "y1: 1 of 1 elements differ, first at [0]: 3 (0x03) expected, 4 (0x04) got"
    )


@pytest.mark.parametrize("rule", ["ulp", "ulp(x)", "ulp(4) ", "exactly", ""])
def test_an_unknown_rule_is_refused(rule: str) -> None:
    with pytest.raises(GoldenError, match="kernel/test/one: unknown rule"):
        judge(rule, golden(f32(1)), {"y": f32(1)}, U)


# bits


@given(st.lists(ANY_BITS, min_size=1, max_size=8), st.integers(0, 7), ANY_BITS)
def test_bits_is_equality_of_words(words: list[int], at: int, word: int) -> None:
    changed = list(words)
    changed[at % len(words)] = word
    verdict = bits(raw(*words), raw(*changed))
    assert (verdict.outcome == "pass") == (words == changed)
    assert verdict.worst == sum(a != b for a, b in zip(words, changed, strict=True)) / len(words)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (f32(0.0), f32(-0.0)),
        (f32(-0.0), f32(0.0)),
        (raw(0x7FC00000), raw(0x7FC00001)),
        (raw(0x7FC00000), raw(0xFFC00000)),
        (raw(0x7FC00000), raw(0x7F800001)),
        (f32(math.inf), f32(-math.inf)),
        (f32(TINY), f32(0.0)),
        (f32(1.0), raw(0x3F800001)),
    ],
)
def test_bits_sees_what_equality_does_not(expected: Array, answer: Array) -> None:
    assert bits(expected, expected.copy()) == Verdict("pass", 0.0)
    verdict = bits(expected, answer)
    assert verdict.outcome == "fail"
    assert f"(0x{int(answer.view(np.uint32)[0]):08x}) got" in verdict.message


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.int64, np.uint64, np.float64])
def test_bits_of_every_dtype(dtype: type) -> None:
    expected: Array = np.arange(6).reshape(2, 3).astype(dtype)
    other = expected.copy()
    other[1, 2] = 0
    assert bits(expected, expected.copy()).outcome == "pass"
    verdict = bits(expected, other)
    assert verdict.worst == 1 / 6
    assert "1 of 6 elements differ, first at [1, 2]" in verdict.message


def test_bits_does_not_mind_the_memory_order() -> None:
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert bits(expected, np.asfortranarray(expected)).outcome == "pass"
    other = np.asfortranarray(expected).copy(order="F")
    other[0, 2] = -1
    assert "first at [0, 2]: 2.0 (0x40000000) expected" in bits(expected, other).message


def test_no_bound_excuses_an_integer() -> None:
    """Nor is there one where all outputs are integers."""
    codes = np.array([3, 4], np.int8)
    about = golden(f32(1, 1), codes, gauge=f32(1, 1))
    for rule in ("gauge", "ulp(4)"):
        assert judge(rule, about, {"y": f32(1, 1), "y1": codes}, U).outcome == "pass"
        verdict = judge(rule, about, {"y": f32(1, 1), "y1": codes + np.int8(1)}, U)
        assert verdict.outcome == "fail"
        assert verdict.message.startswith("y1: 2 of 2 elements differ, first at [0]: 3 (0x03)")
    with pytest.raises(GoldenError, match="kernel/test/one: no output is a float"):
        judge("gauge", golden(codes), {"y": codes}, U)


# either


def test_either_takes_one_form_throughout_and_names_the_nearest() -> None:
    plain = f32(1, 2, 3, 4)
    other, third = plain.copy(), plain.copy()
    other[:2], third[2:] = 9, 8
    about = replace(golden(plain), forms={"other": {"y": other}, "third": {"y": third}})
    for name, form in (("unfused", plain), ("other", other), ("third", third)):
        wanted = Verdict("pass", 0.0, f"equals the form {name!r} in all bits")
        assert judge("either", about, {"y": form}, U) == wanted
    verdict = judge("either", about, {"y": f32(1, 2, 8, -8)}, U)
    assert (verdict.outcome, verdict.worst) == ("fail", 0.25)
    assert verdict.message.startswith("none of 3 forms; nearest is 'third': y: 1 of 4 elements")
    with pytest.raises(GoldenError, match="kernel/test/one: no other form is stored"):
        judge("either", golden(plain), {"y": plain}, U)


def test_same_bits() -> None:
    one = {"a": f32(0.0), "b": f32(1.0)}
    assert same_bits(one, {"a": f32(0.0), "b": f32(1.0)})
    assert not same_bits(one, {"a": f32(-0.0), "b": f32(1.0)})


# ulp


def steps(x: float, count: int) -> np.float32:
    value = np.float32(x)
    towards = np.float32(math.inf if count > 0 else -math.inf)
    for _ in range(abs(count)):
        value = np.nextafter(value, towards)
    return value


@pytest.mark.parametrize("count", [-5, -4, -1, 0, 1, 4, 5])
@pytest.mark.parametrize(
    "x", [1.0, 1 - 2.0**-24, -1.0, 2.0**-126, TINY, 3 * TINY, -TINY, 0.0, 1e30]
)
def test_ulp_counts_neighbours_across_binades_and_zero(x: float, count: int) -> None:
    verdict = ulp(4, f32(x), f32(steps(x, count)))
    assert verdict.outcome == ("pass" if abs(count) <= 4 else "fail")
    assert verdict.worst == abs(count) / 4


def test_ulp_takes_the_zeros_for_one_number() -> None:
    assert ulp(1, f32(0.0), f32(-0.0)) == Verdict("pass", 0.0)
    assert ulp(1, f32(-0.0), f32(TINY)).worst == 1
    assert ulp(1, f32(-TINY), f32(TINY)).outcome == "fail"
    assert ulp(2, f32(-TINY), f32(TINY)) == Verdict("pass", 1.0)


def test_ulp_reports_the_worst_element() -> None:
    verdict = ulp(4, f32(1, 1, 1), f32(steps(1, 2), steps(1, 9), steps(1, 5)))
    assert verdict.worst == 9 / 4
    assert verdict.message.startswith("9 ulp at [1], 4 allowed: 1.0 (0x3f800000) expected")


@pytest.mark.parametrize("rule", ["ulp(4)", "gauge"])
@pytest.mark.parametrize(
    ("expected", "answer", "passes"),
    [
        (math.inf, math.inf, True),
        (-math.inf, -math.inf, True),
        (math.nan, math.nan, True),
        (math.inf, -math.inf, False),
        (math.inf, MAX, False),
        (-math.inf, -MAX, False),
        (MAX, math.inf, False),
        (-MAX, -math.inf, False),
        (0.0, math.nan, False),
        (1.0, math.nan, False),
        (math.nan, 1.0, False),
        (math.nan, math.inf, False),
        (math.inf, math.nan, False),
    ],
)
def test_what_is_not_finite_must_be_the_same(
    rule: str, expected: float, answer: float, passes: bool
) -> None:
    about = golden(f32(1, expected), gauge=f32(1, MAX), model="ops(1)", distance=np.ones(2))
    verdict = judge(rule, about, {"y": f32(1, answer)}, 1.0)
    assert verdict.outcome == ("pass" if passes else "fail")
    if not passes:
        assert verdict.worst == math.inf
        values = f"{shown(f32(expected), 0)} expected, {shown(f32(answer), 0)} got"
        assert verdict.message == f"at [1]: {values}"


@pytest.mark.parametrize("rule", ["ulp(4)", "gauge"])
@pytest.mark.parametrize("word", [0x7FC00001, 0xFFC00000, 0x7F800001, 0x7FFFFFFF])
def test_a_bound_takes_a_nan_of_any_bits(rule: str, word: int) -> None:
    """x86 makes 0xffc00000 of infinity less infinity, ARM 0x7fc00000; only bits tell them apart."""
    about = golden(f32(math.nan), gauge=f32(1))
    assert judge(rule, about, {"y": raw(word)}, U).outcome == "pass"
    assert judge("bits", about, {"y": raw(word)}, U).outcome == "fail"
    assert judge(rule, about, {"y": f32(1.0)}, U).outcome == "fail"


@given(ANY_BITS, ANY_BITS)
def test_ulp_agrees_with_counting_in_integers(a: int, b: int) -> None:
    x, y = raw(a), raw(b)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return

    def index(word: int) -> int:
        return -(word & 0x7FFFFFFF) if word >> 31 else word

    apart = abs(index(a) - index(b))
    assert ulp(4, x, y).outcome == ("pass" if apart <= 4 else "fail")
    assert ulp(1 << 33, x, y).outcome == "pass"


# gauge


def test_the_bound_is_terms_times_models_plus_distance() -> None:
    about = golden(f32(0, 0), gauge=f32(2, 3), model="dot(8)", distance=np.array([0.5, 0.0]))
    assert bound(about, U).tolist() == [0.5 + 2 * 9 * U, 3 * 9 * U]
    assert bound(about, 2.0**-8).tolist() == [0.5 + 2 * 9 / 256, 3 * 9 / 256]


def test_the_bound_includes_the_rounding_of_the_answer() -> None:
    assert bound(golden(f32(8, math.inf, math.nan)), U).tolist() == [8 * U, 0, 0]


def test_the_brink_of_a_bound() -> None:
    about: dict[str, Any] = {"gauge": f32(1.0), "model": "ops(3)", "distance": np.zeros(1)}
    assert gauge(f32(0), f32(3 * U), **about) == Verdict("pass", 1.0)
    over = gauge(f32(0), f32(steps(3 * U, 1)), **about)
    assert over.outcome == "fail"
    assert over.worst is not None
    assert 1 < over.worst < 1.000001
    assert f"error {3 * U:.3g}, bound {3 * U:.3g}" in over.message


def test_where_the_bound_is_zero_the_answer_must_be_zero() -> None:
    about: dict[str, Any] = {"gauge": f32(0), "distance": np.zeros(1)}
    assert gauge(f32(0.0), f32(0.0), **about) == Verdict("pass", 0.0)
    assert gauge(f32(0.0), f32(-0.0), **about) == Verdict("pass", 0.0)
    for wrong in (TINY, -TINY, 1.0):
        verdict = gauge(f32(0.0), f32(wrong), **about)
        assert verdict.outcome == "fail"
        assert verdict.worst == math.inf


def test_the_worst_element_decides() -> None:
    about: dict[str, Any] = {"gauge": f32(1, 1, 1), "model": "ops(4)"}
    verdict = gauge(f32(0, 0, 0), f32(U, -8 * U, 2 * U), **about)
    assert verdict.outcome == "fail"
    assert verdict.worst == 2.0
    assert verdict.message.startswith("at [1]: 0.0 (0x00000000) expected")


def test_a_margin_that_is_no_number_fails() -> None:
    about: dict[str, Any] = {"gauge": f32(math.nan)}
    assert gauge(f32(1), f32(1.5), **about).outcome == "fail"


@given(FINITE, FINITE, st.floats(0, 1e6, width=32), st.floats(0, 1e6), st.integers(1, 5000))
def test_a_gauge_passes_just_where_the_inequality_holds(
    expected: float, answer: float, size: float, distance: float, terms: int
) -> None:
    about = golden(
        f32(expected), gauge=f32(size), model=f"dot({terms})", distance=np.array([distance])
    )
    allowed = float(bound(about, U)[0])
    assert allowed >= distance
    assert allowed == pytest.approx(
        error_model(f"dot({terms})", U) * size + distance + U * abs(expected), rel=1e-12
    )
    error = abs(answer - expected)
    verdict = judge("gauge", about, {"y": f32(answer)}, U)
    margin = error / allowed if allowed else (math.inf if error else 0.0)
    assert verdict.outcome == ("pass" if margin <= 1 else "fail")
    assert verdict.worst == margin


@given(FINITE, st.floats(0.125, 8))
def test_a_coarser_declaration_never_turns_a_pass_into_a_failure(x: float, by: float) -> None:
    answer = f32(np.float32(x * (1 + by * U)))
    if not np.isfinite(answer).all():
        return
    about = golden(f32(x), gauge=f32(abs(x)), model="ops(4)")
    outcomes = [
        judge("gauge", about, {"y": answer}, UNIT[name]).outcome
        for name in ("float64", "float32", "float16", "bfloat16")
    ]
    assert outcomes == sorted(outcomes)  # fail sorts before pass


# What a narrow type cannot hold (SPEC 16.3).

HALF = unit_roundoff({"operands": "float16", "accumulator": "float32"})


def bounded_golden(x: list[float], y: list[float]) -> Golden:
    gauges = {"value": np.nan_to_num(np.abs(f32(*y)), posinf=0)}
    return Golden(
        "a/b/c", "16", "b", {}, {"x": f32(*x)}, {"y": f32(*y)}, ("gauge",), gauges,
        {"value": "ops(1)"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "answer", "outcome"),
    [
        (70000.0, np.inf, "pass"),
        (-70000.0, -np.inf, "pass"),
        (70000.0, 70000.0, "pass"),
        (65500.0, np.inf, "pass"),  # rounding may bring it over the edge
        (70000.0, -np.inf, "fail"),
        (60000.0, np.inf, "fail"),
        (70000.0, np.nan, "fail"),
        (np.inf, np.inf, "pass"),
        (np.inf, 65504.0, "fail"),
    ],
)
def test_a_result_that_float16_does_not_hold_may_be_infinite(
    expected: float, answer: float, outcome: str
) -> None:
    golden = bounded_golden([1.0], [expected])
    assert judge("gauge", golden, {"y": f32(answer)}, HALF).outcome == outcome
    if np.isinf(answer) and np.isfinite(expected):
        assert judge("gauge", golden, {"y": f32(answer)}, U).outcome == "fail"


def test_an_input_that_float16_does_not_hold_is_no_verdict() -> None:
    golden = bounded_golden([1.0, 65505.0, np.inf], [1.0])
    answer = {"y": f32(np.nan)}
    verdict = judge("gauge", golden, answer, HALF)
    assert verdict.outcome == "not judged"
    assert "an operand is beyond 65504" in verdict.message
    golden.inputs["x"][1] = 65504.0
    assert judge("gauge", golden, answer, HALF).outcome == "fail"
    wide = unit_roundoff({"operands": "bfloat16"})
    assert wide.largest == float(np.array(0x7F7F, np.uint16).view(ml_dtypes.bfloat16))
    assert unit_roundoff({"operands": "tf32"}).largest == raw(0x7F7FE000)[0]


def test_a_weight_that_float16_does_not_hold_is_no_verdict() -> None:
    """Of int4 weights with zero points, (15 - 0) * 5000 where the codes are 15, 45,000 for 9."""
    inputs = {
        "x": f32([0, 0]), "packed": np.array([[0xFF]], np.uint8),
        "scales": np.array([[5000]], np.float16), "zeros": np.array([[0]], np.uint8),
    }  # fmt: skip
    about = replace(
        bounded_golden([1.0], [1.0]), operation="linear_w4a16", inputs=inputs,
        parameters={"group": 2}, outputs={"y": f32([0])}, gauges={"value": f32([0])},
    )  # fmt: skip
    assert judge("gauge", about, {"y": f32([0])}, HALF).outcome == "not judged"
    assert judge("gauge", about, {"y": f32([0])}, U).outcome == "pass"
    inputs["packed"][:] = 0x99
    assert judge("gauge", about, {"y": f32([0])}, HALF).outcome == "pass"


# Where rounding may choose other experts.


def test_rows_whose_routing_is_not_sure_are_left_out_and_counted() -> None:
    y, noise = np.zeros((3, 2), np.float32), np.ones((3, 2), np.float32)
    steady = np.repeat(f32(1e-2, 1e-5, 1e-7)[:, None], 2, axis=1)
    routed = replace(
        golden(y),
        gauges={"noise": noise, "steady": steady},
        terms={"noise": "noise(7)", "steady": "steady(7)"},
    )
    answer = np.array([[0, 0], [0, 9], [9, 9]], np.float32)
    verdict = judge("gauge", routed, {"y": answer}, 2.0**-11)
    assert verdict.outcome == "pass"
    assert "judged in 1 of 3 rows" in verdict.message
    finer = judge("gauge", routed, {"y": answer}, U)
    assert finer.outcome == "fail"
    assert "[1, 1]" in finer.message
    assert judge("gauge", routed, {"y": answer}, 2.0**-8).outcome == "not judged"
    sure = judge("gauge", replace(routed, gauges={"noise": noise, "steady": noise}), {"y": y}, U)
    assert (sure.outcome, sure.message) == ("pass", "")


def test_a_margin_of_the_exact_lanes_own_distance_says_so() -> None:
    y = f32(1.0, 1.0)
    own = replace(golden(y), distance=np.array([1e-3, 1e-9]))
    verdict = judge("gauge", own, {"y": f32(1.0009, 1.0)}, U)
    assert verdict.outcome == "pass"
    assert verdict.worst == pytest.approx(0.9, rel=1e-2)
    assert OWN_DISTANCE in verdict.message
    small = golden(y, gauge=y, model="ops(4)", distance=np.array([1e-9, 1e-9]))
    verdict = judge("gauge", small, {"y": np.nextafter(y, np.float32(2))}, U)
    assert (verdict.outcome, verdict.message) == ("pass", "")
    assert judge("gauge", own, {"y": y}, U).message == ""
