"""Mistakes of sampling (SPEC 13)."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar

import numpy as np

from conformance.backends.reference import Ints
from conformance.faults.fault import Fault
from reference.arithmetic import F32
from reference.sampling import Words


class Sampling(Fault):
    """A mistake in the operation `sample`."""

    operations: ClassVar[tuple[str, ...]] = ("sample",)


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


class SeedIgnored(Sampling):
    """The seed of a request is ignored."""

    name = "sampling-seed-ignored"
    reports = ("vllm-project/vllm/issues/51226",)
    severity = "wrong"
    operations = ("philox", "sample")

    def key(self, seed: int) -> tuple[int, int]:
        """One seed for all."""
        return super().key(0)


class RequestIgnored(Sampling):
    """Requests share one stream of random numbers."""

    name = "sampling-request-ignored"
    reports = ("vllm-project/vllm/issues/51226",)
    severity = "wrong"
    operations = ("philox", "sample")

    def counter(self, request: int, positions: Ints, stream: int) -> list[Words]:
        """Request 0 for all."""
        return super().counter(0, positions, stream)


class WordsRepeat(Sampling):
    """Random numbers repeat: the counter takes only the low eight bits of the position."""

    name = "sampling-random-words-repeat"
    reports = ("ROCm/composable_kernel/pull/574",)
    severity = "wrong"
    operations = ("philox",)

    def counter(self, request: int, positions: Ints, stream: int) -> list[Words]:
        """Positions modulo 256."""
        return super().counter(request, positions % 256, stream)


class TieToHighest(Sampling):
    """Greedy choice takes the last of equal logits."""

    name = "sampling-greedy-takes-last-tie"
    reports = ("vllm-project/vllm/issues/7627", "Pushkinist/rMLX/issues/373")
    severity = "subtle"

    def greedy(self, logits: F32) -> int:
        """From the end."""
        return len(logits) - 1 - int(logits[::-1].argmax())


class GreedyOnProbabilities(Sampling):
    """Greedy choice looks at probabilities, where neighbouring logits are equal."""

    name = "sampling-greedy-on-probabilities"
    reports = ("vllm-project/vllm/pull/13312",)
    severity = "subtle"

    def greedy(self, logits: F32) -> int:
        """After softmax."""
        return int(self.softmax(logits[None])[0].argmax())
