"""What a declaration says in numbers: unit roundoffs, underflow, range (SPEC 16.3, 17)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from conformance.errors import BackendError

UNIT = {
    "exact": 2.0**-24,
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Unit roundoff by declared type (SPEC 16.3); exact lies within float32's bounds."""

LANE = 2.0**-150
"""Eta of the exact lane, which rounds its steps to float32 (SPEC 16.4)."""

LEAST = {"float64": -1022, "float16": -14}
"""Exponent of the least normal number; -126 for all other types."""

LARGEST = {
    "tf32": (2 - 2.0**-10) * 2.0**127,
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
}
"""The largest number of a type that holds less than float32."""


class Precision(float):
    """The unit roundoff of sums, and what else bounds depend on (SPEC 16.3).

    A bare float stands for sums of that roundoff, of operands as they are. operands: the unit
    roundoff of operands and stored results. kv: that of a cache. underflow: eta of SPEC 16.4.
    largest: the largest operand that can be stored.
    """

    operands: float
    kv: float
    underflow: float
    largest: float

    def __new__(
        cls,
        sums: float,
        operands: float = 0.0,
        kv: float = 0.0,
        underflow: float = 0.0,
        largest: float = math.inf,
    ) -> Precision:
        """Of sums and, where they are rounded, of the others."""
        made = super().__new__(cls, sums)
        made.operands, made.kv, made.underflow, made.largest = operands, kv, underflow, largest
        return made

    @property
    def stored(self) -> float:
        """The roundoff of operands where they are less than float32, else 0: v of SPEC 16.4."""
        return self.operands if self.operands > 2.0**-24 else 0.0

    @property
    def coarsest(self) -> float:
        """The largest of the three."""
        return max(float(self), self.operands, self.kv)


def unit_roundoff(numerics: Mapping[str, Any]) -> Precision:
    """The precision that a backend declares (SPEC 17). Raises BackendError for an unknown one."""
    declared = numerics.get("accumulator", "float32")
    operands = numerics.get("operands", declared)
    for name, value in (("accumulator", declared), ("operands", operands)):
        if not isinstance(value, str) or value not in UNIT:
            raise BackendError(f"numerics: {name} {value!r} is none of {', '.join(UNIT)}")
    flushes = bool(numerics.get("flush_to_zero", False))
    eta = max(_eta(declared, flushes), _eta(operands, flushes))
    stored = numerics.get("kv", declared)
    if not isinstance(stored, str) or stored not in (*UNIT, "int8"):
        raise BackendError(f"numerics: kv {stored!r} is none of {', '.join(UNIT)}, int8")
    kv, largest = UNIT.get(stored, 0.0), LARGEST.get(operands, math.inf)
    return Precision(UNIT[declared], UNIT[operands], kv, eta, largest)


def _eta(declared: str, flushes: bool) -> float:
    """What a rounding near underflow may err by: half the least subnormal, or the least normal."""
    least = math.ldexp(1.0, LEAST.get(declared, -126))
    return least if flushes else least * UNIT[declared]
