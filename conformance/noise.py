"""How far a whole model strays at a precision: the exact engine, disturbed at random (SPEC 16.5).

Every step of the forward pass is moved, up or down at random, by the root mean square that its own
rounding errors may have at unit roundoff u. What that does to a logit, as a root mean square over
several runs, is the standard deviation of the noise that a legitimate computation at that precision
makes, to first order: the sizes are those of the undisturbed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from conformance import gauges
from conformance.generator import seed_of, words
from reference.arithmetic import F32, align, matmul, to_float32
from reference.attention import Scores
from reference.feedforward import Function
from reference.model import EXACT, Model, Operations, Rows
from reference.weights import ExactInt4Linear, ExactLinear, Linear

RUNS = 16
"""Disturbed runs: the root mean square of 16 normal deviates is within a third of the truth."""

UNIT = 2.0**-20
"""The roundoff at which the model is disturbed: coarse enough to stand clear of float32's grid."""

F64 = NDArray[np.float64]


def root_mean_square(term: str) -> float:
    """The root mean square of a step's error in units of its gauge, at roundoff UNIT (SPEC 16.5).

    One rounding of v errs uniformly within u |v|. In a sum of K products, in any order, the sums so
    far are at most k / K of the gauge on average, so their roundings add up to K / 9 in square.
    """
    name, count = term.rstrip(")").split("(")
    return UNIT * math.sqrt(int(count) / 9 + 1 if name == "dot" else int(count) / 3)


Move = Callable[[F32, Callable[[], F64 | F32]], F32]
"""From a step's result and what its size would be, to the result that is passed on."""


def recording(sizes: list[F64]) -> Move:
    """Pass results on as they are, and note the size of each step's disturbance."""

    def move(y: F32, size: Callable[[], F64 | F32]) -> F32:
        sizes.append(np.asarray(size(), np.float64))
        return y

    return move


def disturbing(sizes: list[F64], name: str) -> Move:
    """Move every step's result by its noted size, up or down at random, element by element."""
    left = iter(enumerate(sizes))

    def move(y: F32, size: Callable[[], F64 | F32]) -> F32:
        step, noted = next(left)
        up = words(seed_of(f"{name}/{step}"), y.size).reshape(y.shape) >> np.uint64(63)
        return to_float32(y.astype(np.float64) + np.where(up, noted, -noted))

    return move


def moved(move: Move) -> Operations:
    """The exact operations, the result of each going through `move`."""

    def rms_norm(x: F32, weight: F32, eps: float) -> F32:
        y = EXACT.rms_norm(x, weight, eps)
        each = root_mean_square("ops(4)") + root_mean_square(f"dot({x.shape[-1]})") / 2
        return move(y, lambda: each * np.abs(y))

    def linear(layer: Linear, x: F32) -> F32:
        model = root_mean_square(f"dot({x.shape[-1]})")
        return move(layer(x), lambda: model * _products(layer, x))

    def attend(q: F32, parts: Sequence[Rows], scores: Scores) -> F32:
        y = EXACT.attend(q, parts, scores)
        (layer,) = (part.layer for part in parts)

        def size() -> F64:
            seen = layer.plain().read(0, layer.length)[:2]
            k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in seen)
            gauge = gauges.attention(q, k, v, y, float(scores.scale), scores.window)
            sizes = [root_mean_square(gauge.models[t]) * g for t, g in gauge.terms.items()]
            return np.asarray(sum(sizes))

        return move(y, size)

    def add(x: F32, y: F32) -> F32:
        total = EXACT.add(x, y)
        return move(total, lambda: root_mean_square("ops(1)") * np.abs(total))

    def activation(function: Function) -> Function:
        return lambda x: move(function(x), lambda: root_mean_square("ops(9)") * np.abs(x))

    activations = {name: activation(function) for name, function in EXACT.activations.items()}
    return Operations(
        rms_norm, linear, attend, activations, add, by_rows=lambda work, *rows: work(*rows)
    )


def _products(layer: Linear, x: F32) -> F32:
    """Sum |x_k| |w_k| for a linear layer of the exact lane, (T, N)."""
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
    sizes: list[F64] = []
    exact = _forward(model, recording(sizes), tokens, last)
    squares = np.zeros_like(exact)
    for run in range(RUNS):
        squares += (_forward(model, disturbing(sizes, f"{name}/{run}"), tokens, last) - exact) ** 2
    own = np.sqrt(squares / RUNS)
    row = np.sqrt(np.add.accumulate(squares, axis=1)[:, -1:] / (RUNS * squares.shape[1]))
    noise: F32 = (np.maximum(own, row) / UNIT).astype(np.float32)
    return noise


def _forward(model: Model, move: Move, tokens: NDArray[np.int64], last: int) -> F64:
    return replace(model, operations=moved(move)).forward(tokens)[-last:].astype(np.float64)
