"""What a declaration stands for, and the error models at it (SPEC 16.3, 16.5, 17)."""

from __future__ import annotations

import math

import pytest

from conformance.errors import BackendError, GoldenError
from conformance.rules import UNIT, error_model, unit_roundoff

U = 2.0**-24


@pytest.mark.parametrize(
    ("term", "factor"),
    [
        ("dot(1)", 2),
        ("dot(32)", 33),
        ("dot(48)", 49),
        ("dot(50)", 7 * math.sqrt(50) + 1),
        ("dot(64)", 57),
        ("dot(4096)", 449),
        ("ops(1)", 1),
        ("ops(9)", 9),
        ("dot(0)", 1),
    ],
)
def test_error_models(term: str, factor: float) -> None:
    for u in UNIT.values():
        assert error_model(term, u) == u * factor


@pytest.mark.parametrize(
    ("term", "factor"),
    [
        ("dot(64)", 57 * 2.0**-24 + 3 * 2.0**-8),
        ("ops(5)", 5 * 2.0**-8),
        ("stored(2)", 2 * 2.0**-8),
        ("float32(3)", 3 * 2.0**-24),
        ("noise(7)", 7 * 2.0**-8),
    ],
)
def test_operands_are_rounded_beside_the_sums(term: str, factor: float) -> None:
    declared = {"accumulator": "float32", "operands": "bfloat16"}
    assert error_model(term, unit_roundoff(declared)) == factor


@pytest.mark.parametrize("declared", UNIT)
def test_what_is_float32_in_every_backend_is_never_coarser(declared: str) -> None:
    for operands in UNIT:
        u = unit_roundoff({"accumulator": declared, "operands": operands})
        assert error_model("float32(3)", u) == 3 * min(UNIT[declared], 2.0**-24)


@pytest.mark.parametrize("c", [6, 4.5])
def test_the_noise_of_a_model_is_never_below_the_exact_engines_own(c: float) -> None:
    for u in UNIT.values():
        assert error_model(f"noise({c})", u) == c * max(u, 2.0**-24)


def test_the_statistical_bound_takes_over_from_50() -> None:
    """K + 1 and 7 sqrt(K) + 1 meet at 49."""
    for k in range(1, 200):
        assert error_model(f"dot({k})", 1.0) == (k + 1 if k < 50 else 7 * math.sqrt(k) + 1)


@pytest.mark.parametrize(
    "term", ["", "dot", "dot()", "dot(x)", "dot(-1)", "sum(3)", "dot(3) ", "dot(3", "ops(1)+ops(1)"]
)
def test_an_unknown_error_model_is_refused(term: str) -> None:
    with pytest.raises(GoldenError, match="is none of dot"):
        error_model(term, U)


def test_units() -> None:
    assert UNIT == {
        "exact": 2.0**-24,
        "float64": 2.0**-53,
        "float32": 2.0**-24,
        "tf32": 2.0**-11,
        "float16": 2.0**-11,
        "bfloat16": 2.0**-8,
    }
    for name, u in UNIT.items():
        assert unit_roundoff({"accumulator": name}) == u
    assert unit_roundoff({}) == 2.0**-24


@pytest.mark.parametrize("declared", ["fp32", "FLOAT32", "", None, 32, ["float32"], {"a": 1}])
def test_an_unknown_declaration_is_refused(declared: object) -> None:
    with pytest.raises(BackendError, match=r"numerics: accumulator .* is none of exact, float64"):
        unit_roundoff({"accumulator": declared})


def test_a_cache_of_no_known_type_is_refused() -> None:
    assert unit_roundoff({"accumulator": "float32", "kv": "bfloat16"}).kv == 2.0**-8
    assert unit_roundoff({"accumulator": "float32", "kv": "int8"}).kv == 0
    for wrong in ("int9", 16, None):
        with pytest.raises(BackendError, match=r"numerics: kv .* is none of exact"):
            unit_roundoff({"accumulator": "float32", "kv": wrong})
