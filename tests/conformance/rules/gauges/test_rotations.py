"""What the bounds of a rotation excuse, and what they do not (SPEC 16.4)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.rules import gauges, judge, unit_roundoff
from reference.rotary import rotate, turn
from tests.conformance.rules.gauges.margins import F32, U, fault, golden, normal

BFLOAT16 = unit_roundoff({"operands": "bfloat16", "accumulator": "float32"})


def turned(
    x: F32,
    positions: NDArray[np.int64],
    inv_freq: F32,
    factor: float,
    interleaved: bool,
    sign: float = 1.0,
    late: int = 0,
) -> F32:
    angle = (positions + late).astype(np.float32)[:, None] * inv_freq
    cos, sin = turn(angle, np.float32(factor))
    return rotate(x, cos, np.float32(sign) * sin, interleaved)


def stored(x: F32) -> F32:
    return np.asarray(x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_faults_of_rope() -> None:
    assert fault("kernel/rope/half", turned) == 0
    coarse = golden("kernel/rope/half").inputs["inv_freq"].view(np.uint32) & np.uint32(0xFFFF0000)
    faults: dict[str, dict[str, Any]] = {
        "pairs swapped": {"interleaved": True},
        "the other way round": {"sign": -1.0},
        "one position late": {"late": 1},
        "bfloat16 inv_freq": {"inv_freq": coarse.view(np.float32)},
    }
    for name, changed in faults.items():
        assert fault("kernel/rope/half", turned, **changed) > 100, name
    assert fault("kernel/rope/factor", turned, factor=1.0) > 1000


@pytest.mark.parametrize("name", ["partial_half", "partial_interleaved", "gap"])
def test_what_does_not_turn_may_be_stored(name: str) -> None:
    """It errs by half a unit of bfloat16 where that is declared, and by nothing where not."""
    made = golden(f"kernel/rope/{name}")
    x = {**made.inputs, **made.parameters}
    y = stored(turned(**{**x, "x": stored(made.inputs["x"])}))
    assert judge("gauge", made, {"y": y}, BFLOAT16).outcome == "pass"
    rest = 2 * len(made.inputs["inv_freq"])
    kept = np.array(made.outputs["y"])
    kept[..., rest:] = stored(kept[..., rest:])
    assert judge("gauge", made, {"y": kept}, BFLOAT16).worst > 0.9  # type: ignore[operator]
    assert judge("gauge", made, {"y": kept}, U).worst > 1000  # type: ignore[operator]
    kept[..., rest:] = made.inputs["x"][..., rest:] * np.float32(1 + 2.0**-7)
    assert judge("gauge", made, {"y": kept}, BFLOAT16).worst > 1.5  # type: ignore[operator]


def test_terms_of_a_rotation() -> None:
    """A rest only where there is one, and an angle that no declaration makes coarser."""
    x, angle = normal(1, 2, 1, 8), np.array([[1, 2], [3, 4]], np.float32)
    cos, sin = turn(angle, np.float32(1))
    partial = gauges.rope(x, cos, sin, angle, False)
    assert partial.models == {"products": "ops(5)", "angle": "float32(1)", "rest": "stored(1)"}
    assert np.array_equal(partial.terms["rest"][..., 4:], np.abs(x[..., 4:]))
    assert not partial.terms["rest"][..., :4].any()
    assert not partial.terms["products"][..., 4:].any()
    whole = gauges.rope(np.ascontiguousarray(x[..., :4]), cos, sin, angle, False)
    assert set(whole.terms) == {"products", "angle"}


@pytest.mark.parametrize("accumulator", ["float32", "bfloat16", "tf32"])
def test_no_declaration_excuses_positions_in_bfloat16(accumulator: str) -> None:
    made = golden("kernel/rope/half")
    given = {**made.inputs, **made.parameters}
    u = unit_roundoff({"operands": "bfloat16", "accumulator": accumulator})
    assert judge("gauge", made, {"y": stored(turned(**given))}, u).outcome == "pass"
    cut = given["positions"].astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    for wrong in (
        {"positions": cut.view(np.float32)},
        {"inv_freq": stored(given["inv_freq"])},
        {"positions": stored(given["positions"].astype(np.float32))},
    ):
        y = turned(**{**given, **wrong})
        assert judge("gauge", made, {"y": y}, u).outcome == "fail", list(wrong)


@pytest.mark.parametrize("name", ["from_37", "decode_at_300", "gap"])
def test_positions_counted_from_a_calls_own_first_fail(name: str) -> None:
    made = golden(f"kernel/rope/{name}")
    given = {**made.inputs, **made.parameters}
    y = turned(**{**given, "positions": given["positions"] - given["positions"][0]})
    assert judge("gauge", made, {"y": y}, BFLOAT16).worst > 10  # type: ignore[operator]
