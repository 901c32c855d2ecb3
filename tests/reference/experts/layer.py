"""A sparse layer put together as a model does, and random weights for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.experts import Router, Routing, Shared, moe, route
from reference.feedforward import ACTIVATIONS, Function, gated_mlp
from reference.weights import linear
from tests.oracle.arrays import Float32

Weights = tuple[Float32, Float32, Float32]
"""gate, up and down of an expert."""

INF, NAN = np.inf, np.nan


@dataclass(frozen=True)
class MoE:
    """A router and its experts, put together as a model does."""

    logits: Function
    router: Router
    experts: tuple[Function, ...]
    shared: Shared | None = None

    def __call__(self, x: Float32, trace: Callable[[Routing], object] | None = None) -> Float32:
        """(T, K) float32 -> (T, K) float32; `trace` is shown the routing."""
        routing = route(self.logits(x), self.router)
        if trace is not None:
            trace(routing)
        return moe(x, routing, self.experts, self.shared)


def normal(seed: int, *shape: int, spread: float = 1.0) -> Float32:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def weights(seed: int, count: int, width: int, inner: int) -> list[Weights]:
    gates, ups = (normal(seed + i, count, inner, width) for i in (0, 1))
    return list(zip(gates, ups, normal(seed + 2, count, width, inner), strict=True))


def expert(gate: Float32, up: Float32, down: Float32, mode: Any = "float32") -> Function:
    gate_up = linear(np.concatenate([gate, up]), None, mode, "exact")
    last = linear(down, None, mode, "exact")
    return lambda x: gated_mlp(x, gate_up, last, ACTIVATIONS["silu"])
