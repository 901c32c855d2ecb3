"""Mistakes of precision: what attention rounds, cuts off or flushes undeclared (SPEC 8.2)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.attention.mistake import Attention
from conformance.faults.fault import bfloat16, cut_to_bfloat16, half
from reference.arithmetic import F32


class AccumulatorHalf(Attention):
    """The weighted sum of values is held in float16."""

    name = "attention-accumulator-half"
    reports = ("ggml-org/llama.cpp/pull/17746",)
    severity = "wrong"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Rounded to float16."""
        num, den = super().weighted(p, v)
        return half(num.astype(np.float32)), den.astype(np.float32)


class SmallWeightsFlushed(Attention):
    """Weights below float16's normal range are flushed to zero."""

    name = "attention-small-weights-flushed"
    reports = ("ggml-org/llama.cpp/pull/13991",)
    severity = "subtle"

    def shares(self, u: F32, m: F32) -> F32:
        """Nothing below 2^-14."""
        p = super().shares(u, m)
        return np.where(p < 2.0**-14, np.float32(0), p)


class WeightsBfloat16(Attention):
    """Weights are rounded to bfloat16 before they meet the values, but not in the denominator."""

    name = "attention-weights-bfloat16"
    reports = ("NVIDIA/Megatron-LM/pull/6400",)
    severity = "subtle"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """The numerator from rounded weights."""
        return super().weighted(bfloat16(p), v)[0], super().weighted(p, v)[1]


class WeightsHalf(Attention):
    """Weights are rounded to float16 before they meet the values, undeclared."""

    name = "attention-weights-half"
    reports = ()
    severity = "subtle"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """The numerator from rounded weights."""
        return super().weighted(half(p), v)[0], super().weighted(p, v)[1]


class WeightsCut(Attention):
    """Weights are cut off to bfloat16 before they meet the values, but not in the denominator."""

    name = "attention-weights-cut-to-bfloat16"
    reports = ()
    severity = "wrong"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """The numerator from the upper half of the bits."""
        return super().weighted(cut_to_bfloat16(p), v)[0], super().weighted(p, v)[1]


class QueriesAndKeysCut(Attention):
    """Queries and keys are cut off to bfloat16 instead of rounded."""

    name = "attention-operands-cut-to-bfloat16"
    reports = ("mmastrac/diffgemma/pull/18",)
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Of the upper half of the bits."""
        return super().scores(cut_to_bfloat16(q), cut_to_bfloat16(k), scale)


class ValuesHalf(Attention):
    """Values are held in float16, undeclared."""

    name = "attention-values-half"
    reports = ()
    severity = "subtle"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Rounded values; what is beyond float16 is its largest number."""
        return super().weighted(p, half(np.clip(v, -65504, 65504)))


class ScoresHalf(Attention):
    """Scores are held in float16, where large ones overflow."""

    name = "attention-scores-half"
    reports = ("ggml-org/llama.cpp/issues/7805",)
    severity = "broken"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Rounded to float16 before the scale."""
        return half(self.product(q, k)) * scale
