"""Mistakes with what no row sees, and with rows that see nothing (SPEC 8.2)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.attention.mistake import Attention
from reference.arithmetic import F32, Bools
from reference.attention import Scores


class MaskIsANumber(Attention):
    """Masked scores become -10,000 and take part where the others are lower."""

    name = "attention-mask-is-a-number"
    reports = ("ml-explore/mlx/issues/2395",)
    severity = "broken"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """A finite number for minus infinity."""
        return super().sums(np.where(u == -np.inf, np.float32(-1e4), u), v, sink)


class BlindRowIsMean(Attention):
    """A row that sees nothing gets the mean of all values instead of zero."""

    name = "attention-blind-row-is-mean"
    reports = ("ml-explore/mlx/issues/2395",)
    severity = "wrong"

    def blinded(self, out: F32, visible: Bools, v: F32) -> F32:
        """Equal weights."""
        out = super().blinded(out, visible, v)
        out[~visible.any(axis=-1)] = v.mean(axis=0)
        return out


class BlindRowIsNaN(Attention):
    """A row that sees nothing is NaN instead of zero."""

    name = "attention-blind-row-is-nan"
    reports = ("pytorch/pytorch/issues/103749",)
    severity = "broken"

    def blinded(self, out: F32, visible: Bools, v: F32) -> F32:
        """0 / 0."""
        out = super().blinded(out, visible, v)
        out[~visible.any(axis=-1)] = np.nan
        return out


class BlindQueryIsNaN(Attention):
    """A row that sees nothing is NaN where its query is not finite."""

    name = "attention-blind-query-is-nan"
    reports = ()
    severity = "subtle"

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """The query is tested last."""
        y = super().head(q, k, v, about, sink)
        y[~np.isfinite(q).all(axis=-1)] = np.nan
        return y


class PoisonLeaks(Attention):
    """NaN in keys or values that no row may see makes rows NaN: zero times NaN."""

    name = "attention-masked-nan-leaks"
    reports = ("vllm-project/vllm/pull/936", "Dao-AILab/flash-attention/issues/2374")
    severity = "broken"

    def touched(self, visible: Bools, broken: Bools) -> Bools:
        """Whether seen or not."""
        return np.asarray(np.broadcast_to(broken, visible.shape).any(axis=-1))


class PaddingCounted(Attention):
    """The last block of 64 keys is filled up with zeros that count as keys."""

    name = "attention-padding-counted"
    reports = ("flashinfer-ai/flashinfer/pull/5090",)
    severity = "wrong"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Scores of zero beside the others, values of zero."""
        missing = -u.shape[1] % 64
        u, v = np.pad(u, [(0, 0), (0, missing)]), np.pad(v, [(0, missing), (0, 0)])
        return super().sums(u, v, sink)
