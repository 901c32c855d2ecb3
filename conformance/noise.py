"""How far a whole model strays at a precision: the exact engine, disturbed at random (SPEC 16.5).

Every step of the forward pass is moved by a random sign times what its own gauge and error model
allow at unit roundoff u. The root mean square of what that does to a logit, over several runs, is
the noise that legitimate computations at that precision make, to first order: their rounding errors
are no larger than the disturbances, and as independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from conformance import gauges
from conformance.generator import seed_of, words
from conformance.rules import error_model
from reference.arithmetic import F32, align, matmul, to_float32
from reference.attention import Scores
from reference.cache import LayerCache
from reference.model import EXACT, AttentionKind, Model, Operations
from reference.weights import ExactInt4Linear, ExactLinear, Linear

RUNS = 16
"""Disturbed runs. The root mean square of 16 normal deviates is within a third of its true value."""

UNIT = 2.0**-20
"""The roundoff at which the model is disturbed: coarse enough to stand clear of float32's own grid."""

F64 = NDArray[np.float64]


class Disturbance:
    """A stream of random signs, and the operations that it disturbs."""

    def __init__(self, name: str) -> None:
        self._name, self._calls = name, 0

    def _moved(self, y: F32, size: F64 | F32) -> F32:
        """y plus or minus `size`, element by element."""
        self._calls += 1
        signs = words(seed_of(f"{self._name}/{self._calls}"), y.size) >> np.uint64(63)
        return to_float32(y + np.where(signs.reshape(y.shape), size, -np.asarray(size)))

    def operations(self) -> Operations:
        """The exact operations, each followed by a disturbance of its own size."""

        def rms_norm(x: F32, weight: F32, eps: float) -> F32:
            y = EXACT.rms_norm(x, weight, eps)
            per_row = error_model("ops(4)", UNIT) + error_model(f"dot({x.shape[-1]})", UNIT) / 2
            return self._moved(y, per_row * np.abs(y))

        def linear(layer: Linear, x: F32) -> F32:
            y = layer(x)
            return self._moved(y, error_model(f"dot({x.shape[-1]})", UNIT) * _products(layer, x))

        def attend(
            q: F32, cache: LayerCache, length: int, scores: Scores, kind: AttentionKind
        ) -> F32:
            y = EXACT.attend(q, cache, length, scores, "exact")
            seen = cache.plain(length)
            k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (seen.k, seen.v))
            gauge = gauges.attention(q, k, v, y, float(scores.scale), scores.window)
            size = sum(error_model(gauge.models[t], UNIT) * g for t, g in gauge.terms.items())
            return self._moved(y, np.asarray(size))

        def add(x: F32, y: F32) -> F32:
            total = EXACT.add(x, y)
            return self._moved(total, UNIT * np.abs(total))

        def activation(function: Callable[[F32], F32]) -> Callable[[F32], F32]:
            return lambda x: self._moved(function(x), 9 * UNIT * np.abs(x))

        return Operations(
            rms_norm,
            linear,
            attend,
            {name: activation(f) for name, f in EXACT.activations.items()},
            add,
        )


def _products(layer: Linear, x: F32) -> F32:
    """sum |x_k| |w_k| for a linear layer of the exact lane, (T, N)."""
    if isinstance(layer, ExactLinear):
        weight = replace(layer.weight, values=np.abs(layer.weight.values))
        return matmul(align(np.abs(x)), weight)
    if isinstance(layer, ExactInt4Linear):
        return matmul(np.abs(x), np.abs(layer.weight).astype(np.float32))
    raise TypeError(f"{type(layer).__name__} is no layer of the exact lane")


def spread(model: Model, name: str, tokens: NDArray[np.int64], last: int) -> F32:
    """The noise of each of the last rows' logits, divided by u, (last, V) float32 (SPEC 16.5).

    An element's own root mean square, or its row's where that is larger.
    """
    exact = model.forward(tokens)[-last:].astype(np.float64)
    squares = np.zeros_like(exact)
    for run in range(RUNS):
        disturbed = replace(model, operations=Disturbance(f"{name}/{run}").operations())
        squares += (disturbed.forward(tokens)[-last:] - exact) ** 2
    own = np.sqrt(squares / RUNS)
    row = np.sqrt(np.add.accumulate(squares, axis=1)[:, -1:] / (RUNS * squares.shape[1]))
    return (np.maximum(own, row) / UNIT).astype(np.float32)
