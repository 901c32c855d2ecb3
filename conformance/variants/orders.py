"""Other orders of the sums of float32 (SPEC 3)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import Floats
from conformance.backends.plain import spread_nan
from conformance.variants.variant import Bounded
from reference.arithmetic import F32, Order, matmul_float32


class Ordered(Bounded):
    """A named order of SPEC 3."""

    order: Order = "sequential"
    fma = False

    def product(self, x: F32, w: F32) -> F32:
        """By the named order."""
        return spread_nan(matmul_float32(x, w, self.order, self.fma), x, w)


class Sequential(Ordered):
    """One accumulator, k ascending."""

    name = "sequential"


class SequentialFma(Ordered):
    """One accumulator, k ascending, multiply-add fused."""

    name, fma, kernels_only = "sequential-fma", True, True


class Pairwise(Ordered):
    """Halves, recursively."""

    name, order = "pairwise", "pairwise"


class PairwiseFma(Ordered):
    """Halves, recursively, the last pair fused."""

    name, order, fma, kernels_only = "pairwise-fma", "pairwise", True, True


class Lanes(Ordered):
    """Eight accumulators, added in a tree."""

    name, order = "lanes8", "lanes8"


class LanesFma(Ordered):
    """Eight accumulators with fused multiply-add."""

    name, order, fma, kernels_only = "lanes8-fma", "lanes8", True, True


class Blas(Ordered):
    """One float32 GEMM of this machine's BLAS."""

    name, order = "blas", "blas"


class Float64Accumulator(Ordered):
    """float32 operands, a float64 accumulator, rounded once."""

    name, order = "float64-accumulator", "float64"


class Split(Bounded):
    """The sum over k in parts, each a GEMM, added afterwards."""

    parts = 2

    def product(self, x: F32, w: F32) -> F32:
        """Equal parts."""
        step = max(1, -(-x.shape[1] // self.parts))
        with np.errstate(all="ignore"):
            y = np.zeros((len(x), len(w)), np.float32)
            for first in range(0, x.shape[1], step):
                y = y + x[:, first : first + step] @ w[:, first : first + step].T
        return spread_nan(y, x, w)


class SplitTwo(Split):
    """Split-K by 2."""

    name = "split-k-2"


class SplitFour(Split):
    """Split-K by 4."""

    name, parts = "split-k-4", 4


class SplitSixteen(Split):
    """Split-K by 16."""

    name, parts = "split-k-16", 16


class Tiles(Bounded):
    """Tiles along k, each a GEMM, added to the accumulator one by one."""

    tile = 16

    def product(self, x: F32, w: F32) -> F32:
        """From the first tile to the last."""
        with np.errstate(all="ignore"):
            y = np.zeros((len(x), len(w)), np.float32)
            for first in range(0, x.shape[1], self.tile):
                here = slice(first, first + self.tile)
                y += x[:, here] @ w[:, here].T
        return spread_nan(y, x, w)


class TilesOf16(Tiles):
    """Tiles of 16 along k."""

    name = "tiles-16"


class TilesOf128(Tiles):
    """Tiles of 128 along k."""

    name, tile = "tiles-128", 128


class Reversed(Bounded):
    """k descending."""

    name = "reversed"

    def product(self, x: F32, w: F32) -> F32:
        """A GEMM on reversed rows."""
        with np.errstate(all="ignore"):
            y = np.ascontiguousarray(x[:, ::-1]) @ np.ascontiguousarray(w[:, ::-1]).T
        return spread_nan(y, x, w)


class Strided(Bounded):
    """Four strided parts, as warps share out a row."""

    name = "strided-4"

    def product(self, x: F32, w: F32) -> F32:
        """Every fourth k together."""
        with np.errstate(all="ignore"):
            parts = [
                np.ascontiguousarray(x[:, i::4]) @ np.ascontiguousarray(w[:, i::4]).T
                for i in range(4)
            ]
            y = (parts[0] + parts[1]) + (parts[2] + parts[3])
        return spread_nan(y, x, w)


class Compensated(Bounded):
    """Tiles of 8 along k, with compensated (Kahan) addition."""

    name = "compensated"

    def product(self, x: F32, w: F32) -> F32:
        """What an addition loses is added to the next."""
        with np.errstate(all="ignore"):
            y, lost = (np.zeros((len(x), len(w)), np.float32) for _ in range(2))
            for first in range(0, x.shape[1], 8):
                term = x[:, first : first + 8] @ w[:, first : first + 8].T - lost
                total = y + term
                lost = np.where(np.isfinite(total), (total - y) - term, np.float32(0))
                y = total
        return spread_nan(y, x, w)


class ByRow(Bounded):
    """Every row of every call by itself: matrix-vector kernels alone."""

    name = "row-by-row"

    def product(self, x: F32, w: F32) -> F32:
        """One row at a time."""
        rows = [super(ByRow, self).product(x[i : i + 1], w) for i in range(len(x))]
        return np.concatenate(rows) if rows else super().product(x, w)


class SequentialSums(Bounded):
    """Sums of squares and of exponentials one by one."""

    name, kernels_only = "sequential-sums", True

    def total(self, p: F32) -> Floats:
        """A running sum."""
        return np.add.accumulate(p, axis=-1, dtype=np.float32)[..., -1]

    def mean_square(self, x: F32) -> Floats:
        """A running sum."""
        return self.total(x * x) / np.float32(x.shape[-1])
