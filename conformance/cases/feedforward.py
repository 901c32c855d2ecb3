"""The gated feed-forward layer (SPEC 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conformance.cases.contraction import mlp_forms
from conformance.cases.recipe import BOTH, Recipe, array32
from conformance.generator import normal
from conformance.golden import Array
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import matmul
from reference.feedforward import ACTIVATIONS


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    x, gate, up, down = (arguments[name] for name in ("x", "gate", "up", "down"))
    g, u = matmul(x, gate), matmul(x, up)
    return gauges.gated_mlp(x, gate, up, down, g, ACTIVATIONS[arguments["activation"]](g), u)


def recipes() -> Iterator[Recipe]:
    """Both activations, widths at the edges of blocks."""
    for activation in ("silu", "gelu_tanh"):
        for width, inner in ((32, 64), (33, 65), (48, 96)):
            name = f"kernel/gated_mlp/{activation}_{width}_{inner}"
            inputs = {
                "x": normal(f"{name}/x", 5, width),
                "gate": normal(f"{name}/gate", inner, width) * np.float32(0.25),
                "up": normal(f"{name}/up", inner, width) * np.float32(0.25),
                "down": normal(f"{name}/down", width, inner) * np.float32(0.25),
            }
            # No result of the widest layer shows how gelu_tanh was contracted.
            shows = activation == "gelu_tanh" and width < 48
            yield Recipe(
                name,
                "9",
                {"activation": activation},
                inputs,
                ("bits", "gauge", "either") if shows else BOTH,
                _gauge,
                forms=mlp_forms if shows else None,
            )
    for activation in ("silu", "gelu_tanh"):
        name = f"kernel/gated_mlp/{activation}_saturated"
        steps = np.arange(-30, 31, dtype=np.float32)[:, None] * np.float32(5)
        inputs = {
            "x": np.concatenate([steps, np.ones_like(steps)], axis=1),
            "gate": array32([[1, 0]]),
            "up": array32([[0, 1]]),
            "down": array32([[1], [-0.5]]),
        }
        note = "the activation itself, from -150 to 150"
        about = {"activation": activation}
        yield Recipe(name, "9", about, inputs, BOTH, _gauge, note)
