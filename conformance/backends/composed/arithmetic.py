"""Sums, products and quotients: what the steps of every operation are made of (SPEC 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backends.reference import ReferenceBackend
from reference.arithmetic import (
    F32,
    Aligned,
    align,
    align_rows,
    dot64,
    matmul,
    sum64,
    to_float32,
    weighted_sum,
)

Floats = NDArray[np.floating[Any]]


class ArithmeticSteps(ReferenceBackend):
    """How numbers are added, multiplied and divided; a variant's order of its own is put here."""

    def product(self, x: F32, w: F32) -> F32:
        """x (T, K) times w (N, K) -> (T, N) (SPEC 2.2)."""
        return matmul(x, _aligned(w))

    def total(self, p: F32) -> Floats:
        """The sum over the last axis (SPEC 2.4)."""
        return sum64(p)

    def mean_square(self, x: F32) -> Floats:
        """The mean of squares over the last axis (SPEC 6)."""
        return np.asarray(dot64(x, x) / x.shape[-1])

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Rows v (S, D) with weights p (T, S): their sum (T, D) and that of p (T,) (SPEC 2.5)."""
        return weighted_sum(p, align_rows(v))

    def divide(self, a: Floats, b: Floats) -> F32:
        """RN32(a / b)."""
        with np.errstate(all="ignore"):
            return to_float32(np.asarray(a / b))


_ALIGNED: dict[int, tuple[F32, Aligned]] = {}


def _aligned(w: F32) -> F32 | Aligned:
    """A read-only matrix is aligned once; it is kept with the result, so that its id stays its."""
    if w.flags.writeable:
        return w
    if id(w) not in _ALIGNED:
        _ALIGNED[id(w)] = (w, align(w))
    return _ALIGNED[id(w)][1]
