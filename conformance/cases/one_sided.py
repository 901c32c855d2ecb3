"""Many results of one kind, whose signed errors must not add up (SPEC 16.8).

`many`: multiples of 2^-20 that alignment takes nothing off, for backends with float32 operands.
`stored`: bfloat16 numbers, so that no declared precision rounds an operand; what is left are the
roundings of sums and of stored results.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.cases.recipe import Recipe
from conformance.generator import normal
from conformance.rules import gauges
from reference.arithmetic import F32


def _fine(x: F32) -> F32:
    """Multiples of 2^-20."""
    return np.asarray(np.rint(x * np.float32(2**20)) / np.float32(2**20))


def _coarse(x: F32) -> F32:
    """The upper 16 bits of each number."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def recipes() -> Iterator[Recipe]:
    """Sums, and rows that share the roundings of their norm."""
    for kind, width, rows, columns in (
        ("many", 16, 512, 8),
        ("many", 64, 128, 16),
        ("stored", 2, 256, 8),
        ("stored", 16, 256, 8),
    ):
        name, given = f"kernel/linear/{kind}_k{width}", _fine if kind == "many" else _coarse
        yield Recipe(
            name,
            "2.2",
            {},
            {
                "x": given(normal(f"{name}/x", rows, width)),
                "w": given(normal(f"{name}/w", columns, width)),
            },
            ("bits", "gauge", "bias(1)"),
            lambda a, o: gauges.linear(a["x"], a["w"], None, o["y"]),
            "no bit of an operand is lost; results are independent",
        )
    for kind, given in (("many", _fine), ("stored", _coarse)):
        name, width = f"kernel/rms_norm/{kind}", 32
        yield Recipe(
            name,
            "6",
            {"eps": 2.0**-20},
            {
                "x": given(normal(f"{name}/x", 384, width)),
                "weight": _coarse(normal(f"{name}/weight", width)),
            },
            ("bits", "gauge", f"bias({width})"),
            lambda a, o: gauges.rms_norm(a["x"], o["y"]),
            "no bit of an operand is lost; a row shares the rounding of its root",
        )
