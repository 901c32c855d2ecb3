"""Elementary functions and softmax (SPEC 4)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

from conformance.cases.contraction import gelu_forms
from conformance.cases.recipe import BOTH, Recipe, array32
from conformance.generator import normal, uniform, words
from conformance.golden import Array
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32

SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        2.0**-149,
        -(2.0**-149),
        2.0**-126,
        3.4e38,
        -3.4e38,
    ],
    np.float32,
)
CUTS = {
    "exp": [88.722839, 88.72284, -87.33655, -103.97208, -103.972084, -104.0],
    "log": [1.0000001, 0.99999994, 1e-45, 3.4028235e38],
    "sin": [3.1415927, 1.5707964, 1e22, 16777216.0],
    "cos": [3.1415927, 1.5707964, 1e22, 16777216.0],
    "tanh": [9.010913, 9.01091, 1e-4, 0.00034526698],
}


def _hard(function: str) -> F32:
    table = json.loads(resources.files("reference").joinpath("hard_cases.json").read_text())
    return np.array([int(bits, 16) for bits in table[function]], np.uint32).view(np.float32)


def _activation_gauge(
    size: str, roundings: int, arguments: Mapping[str, Any], outputs: Mapping[str, Array]
) -> Gauge:
    """Roundings of values as large as the result, or as the argument where steps may cancel."""
    y, x = outputs["y"], arguments["x"]
    return gauges.elementwise(
        y, {**arguments, **outputs}[size], roundings, x if size == "y" else None
    )


def recipes() -> Iterator[Recipe]:
    """Every golden of this level."""
    for function, cuts in CUTS.items():
        name = f"elementary/{function}/all"
        any_bits = (words(len(function), 1024) >> np.uint64(32)).astype(np.uint32).view(np.float32)
        near = normal(f"{name}/x", 1024) * np.float32(8)
        x = np.concatenate([SPECIAL, array32(cuts), _hard(function), any_bits, near])
        yield Recipe(
            name,
            "4.1",
            {},
            {"x": x},
            ("bits", "ulp(4)"),
            note="specials, brinks, hard inputs, any bits",
        )
    for function, roundings in {"sigmoid": 3, "silu": 4, "gelu_tanh": 8}.items():
        name = f"elementary/{function}/all"
        far = array32([-88.8, -100, -104, 88.8, 100])
        x = np.concatenate([SPECIAL[:4], far, normal(f"{name}/x", 1024) * 4])
        gauge = partial(_activation_gauge, "y" if function == "sigmoid" else "x", roundings)
        if function == "gelu_tanh":
            yield Recipe(name, "4.2", {}, {"x": x}, (*BOTH, "either"), gauge, forms=gelu_forms)
        else:
            yield Recipe(name, "4.2", {}, {"x": x}, BOTH, gauge)
        yield Recipe(f"elementary/{function}/special", "4.2", {}, {"x": SPECIAL})
    for width in (1, 2, 31, 32, 33, 64, 65, 1000):
        name = f"elementary/softmax/k{width}"
        x = normal(f"{name}/x", 4, width) * array32([[1], [4], [0], [16]])
        yield Recipe(name, "4.3", {}, {"x": x}, BOTH, lambda a, o: gauges.softmax(a["x"], o["y"]))
    for width in (131, 1025):
        name = f"elementary/softmax/k{width}"
        x = normal(f"{name}/x", 1, width) * array32([4])
        x[0, -1] = 9
        note = "a width that no vector divides, beyond whole tiles"
        yield Recipe(
            name, "4.3", {}, {"x": x}, BOTH, lambda a, o: gauges.softmax(a["x"], o["y"]), note
        )
    x = normal("elementary/softmax/large/x", 4, 65) * array32([[100], [1000], [-300], [1]])
    x[3] -= 1000
    note = "beyond what exp can take without its maximum"
    yield Recipe(
        "elementary/softmax/large",
        "4.3",
        {},
        {"x": x},
        BOTH,
        lambda a, o: gauges.softmax(a["x"], o["y"]),
        note,
    )
    x = normal("elementary/softmax/low/x", 4, 12) - array32([[80], [95], [200], [30_000]])
    note = "narrow rows, far below zero"
    yield Recipe(
        "elementary/softmax/low",
        "4.3",
        {},
        {"x": x},
        BOTH,
        lambda a, o: gauges.softmax(a["x"], o["y"]),
        note,
    )
    x = uniform("elementary/softmax/special/x", 6, 40)
    x[0, ::2], x[1], x[2, 7], x[3, 9], x[4] = -np.inf, -np.inf, np.nan, np.inf, 3e38
    yield Recipe(
        "elementary/softmax/special", "4.3", {}, {"x": x}, note="-inf, NaN, +inf, huge and equal"
    )
