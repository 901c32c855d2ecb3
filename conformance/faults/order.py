"""Block sums that are not added one by one, ascending (SPEC 2.2).

Each is legitimate float64 and no less accurate, so that no bound sees it; but its bits depend on
its tiles, splits or lanes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from conformance.backends.composed import Floats
from conformance.backends.composed.cache import CacheBackend
from conformance.backends.composed.experts import ExpertsBackend
from conformance.faults.fault import Fault
from reference.arithmetic import (
    BLOCK,
    F32,
    F64,
    NAN,
    Aligned,
    add_block_sums,
    added,
    align,
    align_rows,
    to_float32,
    weights_of,
)
from reference.experts import Router

# ------------------------------------------------------------------ orders


class Order(Fault):
    """Another way to add up block sums."""

    reports = ()
    severity = "subtle"
    contract = True

    def together(self, sums: F64) -> F64:
        """Block sums (B, ...) to their total (...)."""
        return added(sums)


class Descending(Order):
    """The last block first."""

    def together(self, sums: F64) -> F64:
        """From the other end."""
        return added(sums[::-1])


class Pairwise(Order):
    """Neighbours, then neighbours of these, as in a tree."""

    def together(self, sums: F64) -> F64:
        """Pairs until one is left; an odd one waits."""
        while len(sums) > 1:
            paired = sums[: len(sums) // 2 * 2]
            sums = np.concatenate([paired[::2] + paired[1::2], sums[len(paired) :]])
        return added(sums)


class Halves(Order):
    """Two halves apart, then the two, as split-K does."""

    def together(self, sums: F64) -> F64:
        """The first half is the larger."""
        middle = -(-len(sums) // 2)
        return added(sums[:middle]) + added(sums[middle:])


class Lanes(Order):
    """Even and odd blocks apart, then the two, as with two accumulators."""

    def together(self, sums: F64) -> F64:
        """Every second one."""
        return added(sums[::2]) + added(sums[1::2])


class Compensated(Order):
    """What float64 rounds off is kept, and added last."""

    def together(self, sums: F64) -> F64:
        """Neumaier's sum (1974)."""
        total, rest = np.zeros(sums.shape[1:]), np.zeros(sums.shape[1:])
        for block_sum in sums:
            total, lost = _two_sum(total, block_sum)
            rest += lost
        return np.asarray(total + rest)


class Extended(Order):
    """An accumulator of 64 bits, as long double has on x86."""

    def together(self, sums: F64) -> F64:
        """Held as the nearest float64, and what that lacks in 11 bits more."""
        high, low = np.zeros(sums.shape[1:]), np.zeros(sums.shape[1:])
        for block_sum in sums:
            near, lost = _two_sum(high, block_sum)
            high, rest = _two_sum(near, lost + low)
            unit = np.ldexp(1.0, np.frexp(high)[1] - 64)
            low = np.rint(rest / unit) * unit
        return high


def _two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """A + b rounded, and what that lost, exactly (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _flat(x: Aligned) -> F64:
    """Aligned rows as they were before they were cut into blocks, (B, R, 32) -> (R, 32 B)."""
    values = np.moveaxis(x.values, 0, -2)
    return values.reshape(*values.shape[:-2], -1)


# ------------------------------------------------------------------ dot products


class Products(Order):
    """Dot products: of linear layers, and of queries with keys."""

    operations = ("linear", "linear_w4a16", "gated_mlp", "attention")

    def product(self, x: F32, w: F32) -> F32:
        """By block sums."""
        a, b = align(x), align(w)
        y = to_float32(self.products(a, b))
        y[~(a.finite[:, None] & b.finite)] = NAN
        return y

    def products(self, a: Aligned, b: Aligned) -> F64:
        """All dot products before rounding, (T, N)."""
        return self.together(np.matmul(a.values, b.values.swapaxes(1, 2)))


class DotDescending(Descending, Products):
    """Block sums of a dot product are added from the last to the first."""

    name = "dot-blocks-descending"


class DotPairwise(Pairwise, Products):
    """Block sums of a dot product are added in a tree."""

    name = "dot-blocks-pairwise"


class DotHalves(Halves, Products):
    """A dot product is split along K, and the sums of the two halves' blocks are added."""

    name = "dot-split-k"


class DotLanes(Lanes, Products):
    """Block sums of a dot product are added in two accumulators, in turns."""

    name = "dot-two-accumulators"


class DotCompensated(Compensated, Products):
    """Block sums of a dot product are added with compensation for what is rounded off."""

    name = "dot-compensated"


class DotExtended(Extended, Products):
    """Block sums of a dot product are added in an accumulator of 64 bits."""

    name = "dot-extended-accumulator"


class DotOneGemm(Products):
    """One float64 GEMM runs over all blocks of its dot products."""

    name = "dot-one-gemm"

    def products(self, a: Aligned, b: Aligned) -> F64:
        """In whatever order BLAS has."""
        return np.asarray(_flat(a) @ _flat(b).T)


class DotRunningSum(Products):
    """The terms of a dot product go into one running float64 sum, with or without FMA."""

    name = "dot-running-sum"

    def products(self, a: Aligned, b: Aligned) -> F64:
        """Term by term: a product of 24 bits by 24 is exact, so that FMA changes nothing."""
        total = np.zeros((a.values.shape[1], b.values.shape[1]))
        for left, right in zip(a.values, b.values, strict=True):
            for k in range(BLOCK):
                total += left[:, k, None] * right[:, k]
        return total


# ------------------------------------------------------------------ norms and softmax


class Squares(Order):
    """Sums of squares."""

    operations = ("rms_norm",)

    def mean_square(self, x: F32) -> Floats:
        """By block sums."""
        a = align(x)
        return np.asarray(self.squares(a) / x.shape[-1])

    def squares(self, a: Aligned) -> F64:
        """The sum over each row's blocks."""
        return self.together(np.vecdot(a.values, a.values))


class NormDescending(Descending, Squares):
    """Block sums of a norm's squares are added from the last to the first."""

    name = "norm-blocks-descending"


class NormPairwise(Pairwise, Squares):
    """Block sums of a norm's squares are added in a tree."""

    name = "norm-blocks-pairwise"


class NormHalves(Halves, Squares):
    """A norm's squares are summed in two halves."""

    name = "norm-split-in-two"


class NormExtended(Extended, Squares):
    """Block sums of a norm's squares are added in an accumulator of 64 bits."""

    name = "norm-extended-accumulator"


class NormOneSum(Squares):
    """A norm's squares are one float64 sum, without blocks."""

    name = "norm-one-sum"

    def squares(self, a: Aligned) -> F64:
        """In whatever order numpy has."""
        return np.asarray((_flat(a) ** 2).sum(axis=-1))


class Exponentials(Order, ExpertsBackend):
    """Sums of exponentials."""

    operations = ("softmax", "route")

    def total(self, p: F32) -> Floats:
        """By block sums."""
        return np.where(np.isfinite(p).all(axis=-1), self.sum_of(align(p)), np.nan)

    def sum_of(self, a: Aligned) -> F64:
        """The sum over each row's blocks."""
        return self.together(a.values.sum(axis=-1))


class SoftmaxDescending(Descending, Exponentials):
    """Block sums of softmax are added from the last to the first."""

    name = "softmax-blocks-descending"


class SoftmaxPairwise(Pairwise, Exponentials):
    """Block sums of softmax are added in a tree."""

    name = "softmax-blocks-pairwise"


class SoftmaxHalves(Halves, Exponentials):
    """Softmax's exponentials are summed in two halves."""

    name = "softmax-split-in-two"


class SoftmaxExtended(Extended, Exponentials):
    """Block sums of softmax are added in an accumulator of 64 bits."""

    name = "softmax-extended-accumulator"


class SoftmaxOneSum(Exponentials):
    """Softmax's exponentials are one float64 sum, without blocks."""

    name = "softmax-one-sum"

    def sum_of(self, a: Aligned) -> F64:
        """In whatever order numpy has."""
        return np.asarray(_flat(a).sum(axis=-1))


class GatesLastFirst(Order, ExpertsBackend):
    """A router's gates are renormalised by their sum from the last rank to the first."""

    name = "route-gates-summed-last-first"
    operations = ("route",)

    def renormalised(self, gates: F32, router: Router) -> F32:
        """The smallest gate first, where ranks go by the gate itself."""
        if not router.renormalise:
            return gates
        total = added(gates.T[::-1].astype(np.float64)) + router.epsilon
        return to_float32(gates / total[:, None])


# ------------------------------------------------------------------ attention


class Weighted(Order, CacheBackend):
    """Sums of values and of their weights."""

    operations: ClassVar[tuple[str, ...]] = ("attention", "paged_attention")

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """By block sums of both."""
        rows = align_rows(v)
        weights, _ = weights_of(p, rows.scale)
        sums = np.zeros((weights.shape[1], len(p), v.shape[1]))
        add_block_sums(sums, weights, rows.digits, [(slice(0, len(v)),) * 2])
        return self.together(sums), self.together(align(p).values.sum(axis=-1))


class AttentionDescending(Descending, Weighted):
    """Attention's block sums are added from the last keys to the first."""

    name = "attention-blocks-descending"


class AttentionPairwise(Pairwise, Weighted):
    """Attention's block sums are added in a tree."""

    name = "attention-blocks-pairwise"


class AttentionHalves(Halves, Weighted):
    """Keys are split in two, and the partial sums of both halves are added."""

    name = "attention-split-keys"


class AttentionExtended(Extended, Weighted):
    """Attention's block sums are added in an accumulator of 64 bits."""

    name = "attention-extended-accumulator"


class AttentionOneSum(Weighted):
    """One float64 GEMM runs over all keys of attention, without blocks."""

    name = "attention-one-gemm"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Weights and values on their grids, summed in whatever order BLAS has."""
        rows = align_rows(v)
        weights = weights_of(p, rows.scale)[0].reshape(len(p), -1)[:, : len(v)]
        return weights @ rows.digits, _flat(align(p)).sum(axis=-1)


class SinkFirst(Weighted):
    """The sink's share is added to attention's denominator first instead of last."""

    name = "attention-sink-first"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Before the first block."""
        m = self.peak(u, sink)
        p = self.shares(u, m)
        share = self.sink_share(sink, m).astype(np.float64)
        blocks = align(p).values.sum(axis=-1)
        return self.weighted(p, v)[0], added(np.concatenate([share[None], blocks]))[:, None]


class SumsByPage(Weighted):
    """A page's values are summed and added, instead of a block's, where pages are no blocks."""

    name = "paged-attention-sums-by-page"
    operations = ("paged_attention",)
    _page = BLOCK

    def paged_attention(self, q: F32, k_pages: F32, *others: Any, **options: Any) -> F32:
        """Remember the size of a page."""
        self._page = k_pages.shape[1]
        return super().paged_attention(q, k_pages, *others, **options)

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Sums of a page each, ascending."""
        rows = align_rows(v)
        weights = weights_of(p, rows.scale)[0].reshape(len(p), -1)[:, : len(v)]
        pages = [slice(i, i + self._page) for i in range(0, len(v), self._page)]
        sums = np.stack([weights[:, page] @ rows.digits[page] for page in pages])
        return added(sums), super().weighted(p, v)[1]
