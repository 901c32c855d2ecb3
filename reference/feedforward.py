"""The gated feed-forward layer (SPEC 9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reference.arithmetic import F32, one_nan
from reference.elementary import gelu_tanh, sigmoid, silu

Function = Callable[[F32], F32]

_GAIN = np.float32(1.702)
"""The slope with which a sigmoid is nearest to GELU's factor (Hendrycks and Gimpel, 2016)."""


def quick_gelu(x: F32) -> F32:
    """RN32(x * sigmoid(RN32(1.702 x))), (...) float32 -> (...) float32 (SPEC 9.1)."""
    with np.errstate(all="ignore"):
        return one_nan(x * sigmoid(_GAIN * x))


ACTIVATIONS: dict[str, Function] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}
"""The exact activations by name (SPEC 4.2, 9.1)."""


def gated_mlp(
    x: F32,
    gate_up: Function,
    down: Function,
    activation: Function,
    limit: float | None = None,
) -> F32:
    """down(RN32(act(gate(x)) * up(x))), x (T, K) float32 -> (T, K) float32 (SPEC 9.1).

    gate_up: gate and up as one linear layer, (T, K) -> (T, 2 I), gate first. activation: returns a
    new array. down: (T, I) -> (T, K). limit: if there is one, gate and up are clamped by it, and 1
    is added to up.
    """
    both = gate_up(x)
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    with np.errstate(all="ignore"):
        if limit is not None:
            most = np.float32(limit)
            gate, up = np.minimum(gate, most), np.clip(up, -most, most) + np.float32(1)
        h = activation(gate)
        h *= up
    return down(one_nan(h))


def silu_float32(x: F32) -> F32:
    """silu in plain float32 (SPEC 1.4)."""
    with np.errstate(over="ignore"):
        y: F32 = np.negative(x)
        np.exp(y, out=y)
        y += np.float32(1)
        return np.divide(x, y, out=y)


def gelu_tanh_float32(x: F32) -> F32:
    """gelu_tanh in plain float32 (SPEC 1.4)."""
    y: F32 = np.square(x)
    y *= np.float32(0.044715 * 0.7978846)
    y += np.float32(0.7978846)
    y *= x
    np.tanh(y, out=y)
    y += np.float32(1)
    y *= np.float32(0.5)
    y *= x
    return y


def quick_gelu_float32(x: F32) -> F32:
    """quick_gelu in plain float32 (SPEC 1.4)."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (np.float32(1) + np.exp(-_GAIN * x)))


ACTIVATIONS_FLOAT32: dict[str, Function] = {
    "silu": silu_float32,
    "gelu_tanh": gelu_tanh_float32,
    "quick_gelu": quick_gelu_float32,
}
"""The same in plain float32, by the same names."""
