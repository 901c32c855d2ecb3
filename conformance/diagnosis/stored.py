"""Whether a float32 answer holds numbers of a narrower type alone (SPEC 19.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from conformance.golden import Array
from conformance.rules import UNIT

F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]

DISTINCT = 16
"""Different values that an answer must have, so that a constant or a few integers say nothing."""


def _as(dtype: type) -> Callable[[F32], Bools]:
    return lambda x: np.asarray(x.astype(dtype).astype(np.float32) == x)


NUMBERS: Mapping[str, Callable[[F32], Bools]] = {
    "bfloat16": _as(ml_dtypes.bfloat16),
    "float16": _as(np.float16),
    "tf32": lambda x: (x.view(np.uint32) & 0x1FFF) == 0,
}
"""Which float32 are numbers of a type, the narrowest significand first."""


def stored_as(mine: Mapping[str, Array], expected: Mapping[str, Array], declared: float) -> str:
    """What the report says where all of an output are numbers of a type, and the golden's are not.

    declared: the unit roundoff of operands as declared; a type no wider than these says nothing.
    """
    for name, wanted in expected.items():
        x = mine[name]
        if not x.dtype == wanted.dtype == np.float32:
            continue
        values, own = (np.unique(y[np.isfinite(y) & (y != 0)]) for y in (x, wanted))
        for kind, are in NUMBERS.items():
            if len(values) < DISTINCT or UNIT[kind] <= declared or not _all(are, values):
                continue
            if not _all(are, own):
                return (
                    f"all values of {name} are {kind} numbers: if results are stored so, "
                    f"declare operands as {kind} (SPEC 17)"
                )
    return ""


def _all(are: Callable[[F32], Bools], values: F32) -> bool:
    with np.errstate(over="ignore"):  # of what float16 does not hold
        return bool(are(values).all())
