"""Mistakes of scores: soft cap, heads and scale (SPEC 8.2)."""

from __future__ import annotations

import numpy as np

from conformance.faults.attention.mistake import Attention
from reference.arithmetic import F32


class SoftcapDropped(Attention):
    """The soft cap on scores is not applied."""

    name = "attention-softcap-dropped"
    reports = ("kekzl/imp/pull/688", "sgl-project/sgl-kernel-xpu/pull/491")
    severity = "wrong"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """Scores as they are."""
        return t


class SoftcapUncapped(Attention):
    """The soft cap multiplies the score by its tanh instead of the cap."""

    name = "attention-softcap-uncapped"
    reports = ("unslothai/unsloth-zoo/pull/593",)
    severity = "wrong"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """t tanh(t / c)."""
        return t if softcap is None else t * self.tanh(t / softcap)


class SoftcapOfQuotient(Attention):
    """The score over the soft cap, instead of the cap, multiplies its own tanh."""

    name = "attention-softcap-of-the-quotient"
    reports = ("Dao-AILab/flash-attention/pull/2402",)
    severity = "wrong"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """t / c tanh(t / c)."""
        return t if softcap is None else t / softcap * self.tanh(t / softcap)


class SoftcapNotDivided(Attention):
    """The score is not divided by the soft cap before its tanh."""

    name = "attention-softcap-not-divided"
    reports = ()
    severity = "broken"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """c tanh(t)."""
        return t if softcap is None else softcap * self.tanh(t)


class SoftcapHidesOverflow(Attention):
    """Scores are tested for overflow after the soft cap, which makes them the cap itself."""

    name = "attention-softcap-hides-overflow"
    reports = ()
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Of a cap's scores none is infinite: the largest number gives the same tanh."""
        t, most = super().scores(q, k, scale), np.finfo(np.float32).max
        return t if self.about.softcap is None else np.clip(t, -most, most)


class SoftcapBeforeScale(Attention):
    """The soft cap comes before the scale."""

    name = "attention-softcap-before-scale"
    reports = ("huggingface/trl/pull/5691",)
    severity = "wrong"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """The scale undone, and done again after the cap."""
        scale = self.about.scale
        return t if softcap is None else super().capped(t / scale, softcap) * scale


class HeadsTiled(Attention):
    """Query heads take key-value heads in turn instead of in groups."""

    name = "attention-heads-tiled"
    reports = ("onnx/onnx/pull/7274",)
    severity = "broken"

    def key_value_head(self, head: int, heads: int, kv_heads: int) -> int:
        """0, 1, 0, 1 instead of 0, 0, 1, 1."""
        return head % kv_heads


class HeadsSquare(Attention):
    """The group's size stands for the number of key-value heads, right where they agree."""

    name = "attention-heads-square"
    reports = ("HazyResearch/HipKittens/pull/22",)
    severity = "broken"

    def key_value_head(self, head: int, heads: int, kv_heads: int) -> int:
        """Divided by the wrong one of two."""
        return head // kv_heads % kv_heads


class ScaleIgnored(Attention):
    """A given scale is ignored for 1 / sqrt(head_dim)."""

    name = "attention-scale-ignored"
    reports = ("ml-explore/mlx-swift-examples/pull/99",)
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """The default scale."""
        return super().scores(q, k, np.float32(1 / np.sqrt(np.float64(q.shape[-1]))))


class ScaleOf224(Attention):
    """The scale is 1 / sqrt(224) where 1 / sqrt(256) is due: all scores 6.9 % too large."""

    name = "attention-scale-7-percent"
    reports = ("ggml-org/llama.cpp/pull/8444",)
    severity = "subtle"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """sqrt(256 / 224) too much."""
        return super().scores(q, k, np.float32(scale * np.sqrt(256 / 224)))
