"""Mistakes of what is kept: ranks, top_k, top_p, min_p (SPEC 13.1)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from conformance.backends.reference import Ints
from conformance.faults.fault import bfloat16
from conformance.faults.sampling.mistake import Sampling
from reference.arithmetic import F32


class CrossingExcluded(Sampling):
    """top_p leaves out the token that crosses the threshold."""

    name = "sampling-top-p-excludes-crossing"
    reports = ("ggml-org/llama.cpp/pull/1953",)
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """One less, but never none."""
        kept = super().keep_top_p(ranked, weights, top_p)
        return kept if top_p == 1 else kept[: max(1, len(kept) - 1)]


class NotRenormalised(Sampling):
    """top_p after top_k measures against the weight of all tokens."""

    name = "sampling-top-p-not-renormalised"
    reports = ("ml-explore/mlx-lm/pull/388",)
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """The threshold of the whole distribution."""
        cumulative = np.cumsum(weights[ranked])
        needed = math.ceil(Fraction(top_p) * int(weights.sum()))
        return ranked[: int(np.searchsorted(cumulative, needed)) + 1]


class TopPUnsorted(Sampling):
    """top_p adds up tokens in order of their ids instead of their weights."""

    name = "sampling-top-p-unsorted"
    reports = ("dmlc/gluon-nlp/issues/1481",)
    severity = "broken"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """By id."""
        return super().keep_top_p(np.sort(ranked), weights, top_p)


class TiesKept(Sampling):
    """top_k keeps every token that ties with the last one kept."""

    name = "sampling-top-k-keeps-ties"
    reports = ("flashinfer-ai/flashinfer/pull/3774",)
    severity = "subtle"

    def keep_top_k(self, ranked: Ints, weights: Ints, top_k: int) -> Ints:
        """By value alone."""
        kept = super().keep_top_k(ranked, weights, top_k)
        tied: Ints = ranked[weights[ranked] >= weights[kept[-1]]]
        return tied


class TopPExceeds(Sampling):
    """top_p keeps tokens until their weight exceeds the threshold, not reaches it."""

    name = "sampling-top-p-exceeds"
    reports = ("huggingface/transformers/issues/18976", "BlinkDL/ChatRWKV/pull/170")
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """One more at equality."""
        sums = np.cumsum(weights[ranked])
        limit = math.floor(Fraction(top_p) * int(sums[-1]))
        return ranked[: int(np.searchsorted(sums, limit, side="right")) + 1]


class TopPFloat32(Sampling):
    """top_p is held in float32."""

    name = "sampling-top-p-float32"
    reports = ()
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Rounded."""
        return super().keep_top_p(ranked, weights, float(np.float32(top_p)))


class TopPSums(Sampling):
    """Shares are added in float32, so that a top_p of 1 is reached before the tail."""

    name = "sampling-top-p-float32-sums"
    reports = ("guoqingbao/attention.rs/pull/9",)
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Until the sum reaches it."""
        shares = (weights[ranked] / weights[ranked].sum()).astype(np.float32)
        sums = np.cumsum(shares, dtype=np.float32)
        return ranked[: int(np.searchsorted(sums, np.float32(top_p))) + 1]


class TopPSumsFloat64(Sampling):
    """Shares are added in float64, where two of ten tenths reach what is above 0.2."""

    name = "sampling-top-p-float64-sums"
    reports = ()
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Until the sum reaches it."""
        sums = np.cumsum(weights[ranked] / weights[ranked].sum())
        return ranked[: int(np.searchsorted(sums, top_p)) + 1]


class TopPKeepsTies(Sampling):
    """top_p keeps every token that ties with the one that crosses."""

    name = "sampling-top-p-keeps-ties"
    reports = ("flashinfer-ai/flashinfer/pull/3774",)
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """By weight alone."""
        kept = super().keep_top_p(ranked, weights, top_p)
        return np.asarray(ranked[weights[ranked] >= weights[kept[-1]]])


class TinyTopPOff(Sampling):
    """A top_p that is nearly zero masks all tokens, and all may be drawn."""

    name = "sampling-top-p-tiny-keeps-all"
    reports = ("ml-explore/mlx-lm/pull/1912",)
    severity = "broken"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """1 - top_p is 1 in float32."""
        off = np.float32(1) - np.float32(top_p) == 1
        return ranked if off else super().keep_top_p(ranked, weights, top_p)


class TopKOf64(Sampling):
    """top_k is at most 64."""

    name = "sampling-top-k-at-most-64"
    reports = ("NVIDIA/FasterTransformer/issues/109",)
    severity = "wrong"

    def keep_top_k(self, ranked: Ints, weights: Ints, top_k: int) -> Ints:
        """What the kernel has room for."""
        return super().keep_top_k(ranked, weights, min(top_k, 64))


class TopKBeyond(Sampling):
    """A top_k beyond the vocabulary becomes one less than it."""

    name = "sampling-top-k-beyond-the-vocabulary"
    reports = ("vllm-project/vllm/pull/14234",)
    severity = "subtle"

    def keep_top_k(self, ranked: Ints, weights: Ints, top_k: int) -> Ints:
        """All but the last."""
        return ranked[:-1] if top_k > len(ranked) else super().keep_top_k(ranked, weights, top_k)


class RankedBfloat16(Sampling):
    """Tokens are ranked by weights in bfloat16, where near ones are equal."""

    name = "sampling-ranked-in-bfloat16"
    reports = ()
    severity = "subtle"

    def ranked(self, weights: Ints) -> Ints:
        """The lower id first."""
        return np.argsort(-bfloat16(weights.astype(np.float32)), kind="stable")


class MinPStrict(Sampling):
    """min_p keeps what is above the threshold, and not what is equal to it."""

    name = "sampling-min-p-strict"
    reports = ()
    severity = "subtle"

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """But always the first."""
        limit = math.floor(Fraction(min_p) * int(weights[ranked[0]]))
        above = weights[ranked] > limit if min_p > 0 else np.full(len(ranked), True)
        above[0] = True
        return np.asarray(ranked[above])


class MinPFloat32(Sampling):
    """min_p is held in float32."""

    name = "sampling-min-p-float32"
    reports = ()
    severity = "subtle"

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """Rounded."""
        return super().keep_min_p(ranked, weights, float(np.float32(min_p)))


class MinPFirst(Sampling):
    """min_p comes before top_p, which then measures less."""

    name = "sampling-min-p-before-top-p"
    reports = ("SciSharp/LLamaSharp/issues/928", "signalnine/q27/pull/43")
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Later."""
        self._top_p = top_p
        return ranked

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """And now."""
        kept = super().keep_min_p(ranked, weights, min_p)
        return super().keep_top_p(kept, weights, self._top_p)


class MinPOneOff(Sampling):
    """A min_p of 1 is taken for none."""

    name = "sampling-min-p-one-is-off"
    reports = ()
    severity = "wrong"

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """All."""
        return ranked if min_p >= 1 else super().keep_min_p(ranked, weights, min_p)


class RankedByLogits(Sampling):
    """Tokens are ranked by logits, and not the lower id first where weights are equal."""

    name = "sampling-ranked-by-logits"
    reports = ()
    severity = "subtle"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Remember the logits."""
        self._logits = logits
        return super().tempered(logits, temperature)

    def ranked(self, weights: Ints) -> Ints:
        """Of equal logits the lower id first."""
        return np.argsort(-self._logits, kind="stable")


class MinPOfAll(Sampling):
    """min_p is compared with a token's share itself, and not with its part of the largest."""

    name = "sampling-min-p-of-the-whole"
    reports = ()
    severity = "wrong"

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """But always the first."""
        kept = weights[ranked] >= math.ceil(Fraction(min_p) * int(weights[ranked].sum()))
        kept[0] = True
        return np.asarray(ranked[kept])
