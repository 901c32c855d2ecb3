"""Mistakes of the softmax: its maximum, its parts, its order (SPEC 8.2, 8.3)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.attention.mistake import Attention
from reference.arithmetic import F32


class MaximumNotSubtracted(Attention):
    """Scores go into the exponential as they are, and large ones overflow."""

    name = "attention-maximum-not-subtracted"
    reports = ("pytorch/executorch/pull/18407",)
    severity = "broken"

    def peak(self, u: F32, sink: np.float32) -> F32:
        """Nothing."""
        return np.zeros(len(u), np.float32)


class FiniteSentinel(Attention):
    """The running maximum starts at -50,000, so that a row of lower scores gives zeros."""

    name = "attention-finite-sentinel"
    reports = ("flashinfer-ai/flashinfer/issues/4267",)
    severity = "broken"

    def peak(self, u: F32, sink: np.float32) -> F32:
        """Never below -50,000."""
        return np.maximum(super().peak(u, sink), np.float32(-5e4))


class RescaleForgotten(Attention):
    """An online softmax over blocks of 64 does not rescale its sum when the maximum rises."""

    name = "attention-rescale-forgotten"
    reports = ("Dao-AILab/flash-attention/pull/2174",)
    severity = "broken"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Each block keeps the maximum that ran when it was added."""
        _, den = super().sums(u, v, sink)
        running = np.full((len(u), 1), sink, np.float32)
        parts = []
        for first in range(0, u.shape[1], 64):
            block = u[:, first : first + 64]
            running = np.maximum(running, block.max(axis=1, keepdims=True))
            parts.append(self.exp(block - np.where(running == -np.inf, np.float32(0), running)))
        return self.weighted(np.concatenate(parts, axis=1), v)[0], den


class SplitsAveraged(Attention):
    """The parts of a split over keys are averaged instead of weighted by their sums."""

    name = "attention-splits-averaged"
    reports = ("flashinfer-ai/flashinfer/pull/58", "sgl-project/sglang/issues/2465")
    severity = "broken"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Mean over the splits of 64 keys that have something to see."""
        if u.shape[1] <= 64:
            return super().sums(u, v, sink)
        total, count = np.zeros((len(u), v.shape[1])), np.zeros((len(u), 1))
        for first in range(0, u.shape[1], 64):
            here = slice(first, first + 64)
            num, den = super().sums(u[:, here], v[here], sink)
            seen = (u[:, here] > -np.inf).any(axis=1, keepdims=True)
            total += np.where(seen, num / den, 0)
            count += seen
        return total, np.maximum(count, 1)


class FastForExact(Attention):
    """Fast attention answers where exact attention was asked for."""

    name = "attention-fast-for-exact"
    reports = ("vllm-project/vllm/issues/53257",)
    severity = "subtle"
    contract = True

    def attends_fast(self, mode: str) -> bool:
        """Always."""
        return True


class OrderByRows(Attention):
    """The order of the sum over keys depends on the number of rows in the call."""

    name = "attention-order-by-rows"
    reports = ("vllm-project/vllm/issues/53257",)
    severity = "subtle"
    contract = True

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Alone, a row is summed in two halves."""
        half_way = len(v) // 2
        if len(p) > 1 or half_way == 0:
            return super().weighted(p, v)
        first, second = slice(None, half_way), slice(half_way, None)
        (a, c), (b, d) = (super().weighted(p[:, s], v[s]) for s in (first, second))
        return a + b, c + d


class MaskedTileResets(Attention):
    """A tile of 32 keys that a row sees nothing of sets its running maximum to zero."""

    name = "attention-masked-tile-resets-maximum"
    reports = ("flashinfer-ai/flashinfer/issues/4267",)
    severity = "broken"

    def peak(self, u: F32, sink: np.float32) -> F32:
        """Zero at least, where such a tile comes first."""
        first = (u[:, :32] == -np.inf).all(axis=1) & (u.shape[1] > 32)
        return np.where(first, np.maximum(super().peak(u, sink), 0), super().peak(u, sink))
