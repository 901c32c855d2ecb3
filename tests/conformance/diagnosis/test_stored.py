"""An answer that was stored in a narrower type is known by its bits (SPEC 19.1)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.diagnosis.stored import stored_as

U32 = 2.0**-24
Y = np.random.default_rng(5).standard_normal((8, 16)).astype(np.float32)


def told(y: NDArray[Any], declared: float = U32, expected: NDArray[Any] = Y) -> str:
    return stored_as({"y": y}, {"y": expected}, declared)


def tf32(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cut off, which is a number of the type too."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


KINDS = {
    "bfloat16": Y.astype(ml_dtypes.bfloat16).astype(np.float32),
    "float16": Y.astype(np.float16).astype(np.float32),
    "tf32": tf32(Y * np.float32(1e6)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_type_is_named(kind: str) -> None:
    assert f"all values of y are {kind} numbers" in told(KINDS[kind])
    special = KINDS[kind].copy()
    special[0, :4] = [np.nan, np.inf, 0.0, -0.0]
    assert f"are {kind} numbers" in told(special)


def test_what_is_declared_is_not_told() -> None:
    assert told(KINDS["float16"], declared=2.0**-11) == ""
    assert told(KINDS["bfloat16"], declared=2.0**-8) == ""
    assert "bfloat16" in told(KINDS["bfloat16"], declared=2.0**-11)


def test_one_other_value_tells_of_no_type() -> None:
    mixed = KINDS["bfloat16"].copy()
    mixed[7, 15] = Y[7, 15]
    assert told(mixed) == ""


def test_nothing_is_told_of_a_few_values_or_of_numbers_that_were_expected() -> None:
    assert told(np.ones_like(Y)) == ""
    assert told(np.arange(128, dtype=np.float32).reshape(8, 16) % 16) == ""
    assert told(KINDS["float16"], expected=KINDS["float16"]) == ""
    assert told(Y) == ""


def test_the_output_that_is_narrow_is_named_beside_integers() -> None:
    codes: NDArray[Any] = np.arange(128)
    mine = {"experts": codes, "gates": KINDS["float16"]}
    wanted = {"experts": codes, "gates": Y}
    assert "all values of gates" in stored_as(mine, wanted, U32)
