"""The same steps in float32, in an order of its own (SPEC 17)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.backends.composed.arithmetic import Floats
from conformance.backends.composed.backend import ComposedBackend
from conformance.backends.plain import PlainBackend, spread_nan
from reference.arithmetic import F32


class OwnOrderBackend(ComposedBackend, PlainBackend):
    """The same steps in float32, every contraction in two halves: an order of its own."""

    name = "own-order"
    numerics: Mapping[str, Any] = {"operands": "float32", "accumulator": "float32", "kv": "float32"}

    def product(self, x: F32, w: F32) -> F32:
        """Two float32 GEMMs."""
        half = x.shape[-1] // 2
        with np.errstate(all="ignore"):
            y = x[:, half:] @ w[:, half:].T + x[:, :half] @ w[:, :half].T
        return spread_nan(y, x, w)

    def total(self, p: F32) -> Floats:
        """From the last to the first."""
        return np.asarray(p[..., ::-1].sum(axis=-1))

    def mean_square(self, x: F32) -> Floats:
        """The squares' float32 mean."""
        return np.asarray((x * x).sum(axis=-1) / np.float32(x.shape[-1]))

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """A float32 GEMM."""
        return self.product(p, np.ascontiguousarray(v.T)), self.total(p)

    def attends_fast(self, mode: str) -> bool:
        """Never: one float32 attention serves both."""
        return False

    def int4_sums(self, codes: F32, weights: F32) -> Floats:
        """A float32 GEMM on the codes."""
        return self.product(codes, weights)

    def softmax(self, x: F32) -> F32:
        """By the steps."""
        return ComposedBackend.softmax(self, x)
