"""Mistakes of what is done to logits: penalty and temperature (SPEC 13.1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance.backends.reference import Ints, Source
from conformance.faults.sampling.mistake import Sampling
from reference.arithmetic import F32
from reference.sampling import WEIGHT_ONE
from reference.sampling import Sampling as Options


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


class DividedFirst(Sampling):
    """Logits are divided by the temperature before the largest is taken from them."""

    name = "sampling-temperature-before-the-difference"
    reports = ()
    severity = "subtle"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Rounded in the other order."""
        scaled = logits / temperature
        z: F32 = scaled - scaled.max()
        return z


class Reciprocal(Sampling):
    """Logits are multiplied by the reciprocal of the temperature, a float32."""

    name = "sampling-temperature-reciprocal"
    reports = ()
    severity = "subtle"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Rounded twice; where a tiny temperature has no reciprocal, divided."""
        reciprocal = np.float32(1) / temperature
        if not np.isfinite(reciprocal):
            return super().tempered(logits, temperature)
        z: F32 = (logits - logits.max()) * reciprocal
        return z


class TemperedFloat64(Sampling):
    """The quotient by the temperature stays a float64 up to the exponential."""

    name = "sampling-temperature-float64"
    reports = ()
    severity = "subtle"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """And the float64 is kept."""
        self._z = (logits - logits.max()).astype(np.float64) / np.float64(temperature)
        return super().tempered(logits, temperature)

    def weights(self, z: F32) -> Ints:
        """Of the float64."""
        p: F32 = np.exp(self._z).astype(np.float32)
        return np.rint(p.astype(np.float64) * WEIGHT_ONE).astype(np.int64)


class GreedyUnpenalised(Sampling):
    """The greedy choice is of the logits before the repetition penalty."""

    name = "sampling-greedy-before-penalty"
    reports = ()
    severity = "wrong"

    def _token(self, logits: F32, sampling: Options, previous: Ints, source: Source) -> int:
        """Nothing has occurred."""
        seen = previous[:0] if sampling.temperature == 0 else previous
        return super()._token(logits, sampling, seen, source)


class ZeroIsOne(Sampling):
    """A temperature of 0 is taken for one that was not given, and is 1."""

    name = "sampling-temperature-zero-is-one"
    reports = ()
    severity = "broken"

    def _token(self, logits: F32, sampling: Options, previous: Ints, source: Source) -> int:
        """A number that is false."""
        asked = replace(sampling, temperature=sampling.temperature or 1.0)
        return super()._token(logits, asked, previous, source)
