"""Mistakes of a decode step, or beyond the sizes that a kernel has (SPEC 8.2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.attention.mistake import Attention
from reference.arithmetic import F32, Bools
from reference.attention import Scores, default_scale


class OnePartition(Attention):
    """A decode step sees the newest 256 keys alone: one partition of those that share the work."""

    name = "attention-decode-one-partition"
    reports = ()
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Of one row."""
        seen = super().visible(rows, keys, window)
        return seen & (np.arange(keys) >= keys - 256) if rows == 1 else seen


class PartitionsAveraged(Attention):
    """The partitions of 256 keys of a decode step are averaged instead of weighted."""

    name = "attention-decode-partitions-averaged"
    reports = ("flashinfer-ai/flashinfer/pull/58",)
    severity = "wrong"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """The mean over them."""
        if len(u) > 1 or u.shape[1] <= 256:
            return super().sums(u, v, sink)
        steps = super().sums
        firsts = range(0, u.shape[1], 256)
        parts = [steps(u[:, i : i + 256], v[i : i + 256], sink) for i in firsts]
        total = np.asarray(sum(num / den for num, den in parts))
        return total, np.full((1, 1), float(len(parts)))


class DecodeForgets(Attention):
    """A decode step is not given one of its options."""

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """Left out for one row."""
        if len(q) == 1:
            about, sink = self.left(about, sink, q.shape[1])
        return super().head(q, k, v, about, sink)

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """What reaches the step, for heads of that width."""
        return about, sink


class DecodeSoftcap(DecodeForgets):
    """A decode step does not apply the soft cap."""

    name = "attention-decode-softcap-ignored"
    reports = ("vllm-project/vllm-metal/pull/666",)
    severity = "wrong"

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """No soft cap."""
        return replace(about, softcap=None), sink


class DecodeWindow(DecodeForgets):
    """A decode step does not apply the window."""

    name = "attention-decode-window-ignored"
    reports = ("EricLBuehler/mistral.rs/issues/2094",)
    severity = "wrong"

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """No window."""
        return replace(about, window=None), sink


class DecodeSinks(DecodeForgets):
    """A decode step has no sinks."""

    name = "attention-decode-sinks-ignored"
    reports = ("vllm-project/vllm-metal/pull/550",)
    severity = "wrong"

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """No sink."""
        return about, np.float32(-np.inf)


class DecodeScale(DecodeForgets):
    """A decode step divides by the root of head_dim whatever scale is given."""

    name = "attention-decode-scale-ignored"
    reports = ()
    severity = "wrong"

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """The default."""
        return replace(about, scale=default_scale(width)), sink


class WidthOf128(Attention):
    """Scores are over the first 128 elements of a head."""

    name = "attention-head-dim-of-128"
    reports = ("gittensor-ai-lab/sparkinfer/issues/330", "triton-lang/triton/issues/621")
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """The rest is left out."""
        return super().scores(q[:, :128].copy(), k[:, :128].copy(), scale)


class GroupsOfEight(Attention):
    """A group of more than eight query heads goes on with the next key-value head."""

    name = "attention-groups-of-eight"
    reports = ("HazyResearch/HipKittens/pull/22",)
    severity = "broken"

    def key_value_head(self, head: int, heads: int, kv_heads: int) -> int:
        """Eight to each, in turns."""
        return head // min(heads // kv_heads, 8) % kv_heads
