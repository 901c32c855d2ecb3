"""Mistakes of what is done to logits: penalty and temperature (SPEC 13.1)."""

from __future__ import annotations

import numpy as np

from conformance.backends.reference import Ints
from conformance.faults.sampling.mistake import Sampling
from reference.arithmetic import F32


class PenaltyDividesNegatives(Sampling):
    """The repetition penalty divides negative logits too, which makes them likelier."""

    name = "sampling-penalty-divides-negatives"
    reports = ("huggingface/transformers/issues/2302",)
    severity = "wrong"

    def made_less_likely(self, x: F32, penalty: np.float32) -> F32:
        """Always divided."""
        y: F32 = x / penalty
        return y


class PenaltyPerOccurrence(Sampling):
    """The repetition penalty is applied once for each time that a token has occurred."""

    name = "sampling-penalty-per-occurrence"
    reports = ("ohdearquant/lattice/issues/312",)
    severity = "wrong"

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """Again for every repetition."""
        for token in previous if penalty != 1 else previous[:0]:
            logits = super().penalised(logits, np.array([token]), penalty)
        return logits


class PenaltyTwice(Sampling):
    """The repetition penalty is applied twice, by two layers of the engine."""

    name = "sampling-penalty-twice"
    reports = ("sgl-project/sglang-omni/issues/1360",)
    severity = "wrong"

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """Once more."""
        return super().penalised(super().penalised(logits, previous, penalty), previous, penalty)


class TemperatureHalf(Sampling):
    """The temperature is held in float16, where a tiny one is zero."""

    name = "sampling-temperature-half"
    reports = ("microsoft/aici/issues/19",)
    severity = "broken"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Rounded."""
        return super().tempered(logits, np.float32(np.float16(temperature)))


class TemperatureLast(Sampling):
    """min_p looks at the distribution before the temperature."""

    name = "sampling-min-p-before-temperature"
    reports = ("ggml-org/llama.cpp/issues/4091", "SciSharp/LLamaSharp/issues/928")
    severity = "wrong"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Remember the logits."""
        self._logits = logits
        return super().tempered(logits, temperature)

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """By the weights at temperature 1."""
        plain = self.weights(super().tempered(self._logits, np.float32(1)))
        return super().keep_min_p(ranked, plain, min_p)


class TopPByPlainLogits(Sampling):
    """top_p looks at the distribution before the temperature."""

    name = "sampling-top-p-before-temperature"
    reports = ("vllm-project/tpu-inference/pull/1385", "sgl-project/sglang-jax/pull/1563")
    severity = "wrong"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Remember the logits."""
        self._logits = logits
        return super().tempered(logits, temperature)

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """By the weights at temperature 1."""
        plain = self.weights(super().tempered(self._logits, np.float32(1)))
        return super().keep_top_p(ranked, plain, top_p)


class PenaltyOf64(Sampling):
    """The repetition penalty looks at the last 64 tokens alone."""

    name = "sampling-penalty-of-64-tokens"
    reports = ("ohdearquant/lattice/issues/387",)
    severity = "wrong"

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """What came before is forgotten."""
        return super().penalised(logits, previous[-64:], penalty)


class PenaltyOfPadding(Sampling):
    """The repetition penalty counts the padding behind the tokens, which is token 0."""

    name = "sampling-penalty-of-padding"
    reports = ("huggingface/text-generation-inference/pull/1765",)
    severity = "wrong"

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """One more token."""
        return super().penalised(logits, np.append(previous, 0), penalty)


class PenaltyBelowOne(Sampling):
    """A repetition penalty below 1 is taken for none."""

    name = "sampling-penalty-below-one-ignored"
    reports = ()
    severity = "wrong"

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """At least 1."""
        return super().penalised(logits, previous, max(penalty, np.float32(1)))


class TemperatureFloor(Sampling):
    """Temperatures are at least 0.01."""

    name = "sampling-temperature-at-least-0.01"
    reports = ("NVIDIA/TensorRT-LLM/pull/15716",)
    severity = "subtle"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Raised."""
        return super().tempered(logits, max(temperature, np.float32(0.01)))


class ColdIsGreedy(Sampling):
    """A temperature below 10^-5 is taken for greedy, also between equal logits."""

    name = "sampling-cold-is-greedy"
    reports = ("turboderp/exllama/issues/226",)
    severity = "subtle"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """All but the first of the largest are forbidden."""
        z = super().tempered(logits, temperature)
        if temperature >= 1e-5:
            return z
        return np.where(np.arange(len(z)) == logits.argmax(), np.float32(0), np.float32(-np.inf))
