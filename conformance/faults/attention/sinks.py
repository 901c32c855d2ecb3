"""Mistakes of sinks (SPEC 8.2)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.attention.mistake import Attention
from reference.arithmetic import F32
from reference.attention import Scores


class SinksIgnored(Attention):
    """Sinks are not in the denominator."""

    name = "attention-sinks-ignored"
    reports = ("vllm-project/vllm-metal/pull/550", "kekzl/imp/issues/1345")
    severity = "broken"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """No sink."""
        return super().sums(u, v, np.float32(-np.inf))


class SinkTwice(Attention):
    """A sink is counted twice."""

    name = "attention-sink-counted-twice"
    reports = ("ROCm/rocm-libraries/issues/12227",)
    severity = "subtle"

    def sink_share(self, sink: np.float32, m: F32) -> F32:
        """Doubled."""
        return super().sink_share(sink, m) * np.float32(2)


class SinkScaled(Attention):
    """A sink is multiplied by the scale of scores."""

    name = "attention-sink-scaled"
    reports = ("ROCm/rocm-libraries/issues/12227",)
    severity = "wrong"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """A scaled sink."""
        return super().sums(u, v, np.float32(sink * self.about.scale))


class SinkNotCapped(Attention):
    """With a soft cap, the sink is capped too, as if it were a score."""

    name = "attention-sink-capped"
    reports = ("ROCm/rocm-libraries/pull/12229",)
    severity = "subtle"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """A capped sink."""
        low = np.array([sink], np.float32)
        capped = super().capped(low, self.about.softcap) if np.isfinite(sink) else low
        return super().sums(u, v, capped[0])


class MaximumWithoutSink(Attention):
    """The sink takes no part in the maximum, and a large one overflows the denominator.

    In float32 that is a right way to compute as long as no sink lies 88 above all scores; then the
    weights of the others are subnormal anyway. What shows is an infinite sink: 0 instead of NaN.
    """

    name = "attention-maximum-without-sink"
    reports = ("NVIDIA/TensorRT-LLM/pull/19220",)
    severity = "subtle"

    def peak(self, u: F32, sink: np.float32) -> F32:
        """Of the scores alone."""
        return super().peak(u, np.float32(-np.inf))

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """Divided by infinity, where the sink is."""
        y = super().head(q, k, v, about, sink)
        return np.zeros_like(y) if sink == np.inf else y
