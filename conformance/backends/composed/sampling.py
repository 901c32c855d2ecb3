"""Random words and sampling in steps (SPEC 13.1, 13.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from conformance.backends.composed.arithmetic import ArithmeticSteps
from conformance.backends.reference import Ints, Source
from reference.arithmetic import F32
from reference.errors import RequestError
from reference.sampling import WEIGHT_ONE, Sampling, Words, philox4x32


class SamplingSteps(ArithmeticSteps):
    """`philox` and `sample` one step at a time."""

    def counter(self, request: int, positions: Ints, stream: int) -> list[Words]:
        """The counter of SPEC 13.2."""
        zeros = np.zeros(positions.shape, np.uint64)
        low = positions.astype(np.uint64) & np.uint64(0xFFFFFFFF)
        return [low, zeros + np.uint64(request), zeros + np.uint64(stream), zeros]

    def key(self, seed: int) -> tuple[int, int]:
        """The key of SPEC 13.2."""
        return seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF

    def word(self, out: Sequence[Words]) -> Words:
        """The 64 bits that are used (SPEC 13.2)."""
        return out[0] | out[1] << np.uint64(32)

    def philox(self, seed: int, request: int, positions: Ints, stream: int = 0) -> Words:
        """SPEC 13.2."""
        return self.word(philox4x32(self.counter(request, positions, stream), self.key(seed)))

    def drawn_by(self, source: Source) -> Source:
        """The seed, the request and the position that words are drawn by (SPEC 13.2)."""
        return source

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """Step 1 of SPEC 13.1."""
        if penalty == 1:
            return logits
        out, seen = logits.copy(), np.unique(previous)
        out[seen] = self.made_less_likely(out[seen], penalty)
        return out

    def made_less_likely(self, x: F32, penalty: np.float32) -> F32:
        """A penalised logit (SPEC 13.1)."""
        return np.where(x > 0, x / penalty, x * penalty)

    def greedy(self, logits: F32) -> int:
        """The likeliest token, of equal ones the lowest id (SPEC 13.1)."""
        return int(logits.argmax())

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Step 2 of SPEC 13.1."""
        z: F32 = (logits - logits.max()) / temperature
        return z

    def weights(self, z: F32) -> Ints:
        """Step 3 of SPEC 13.1."""
        return np.rint(self.exp(z).astype(np.float64) * WEIGHT_ONE).astype(np.int64)

    def ranked(self, weights: Ints) -> Ints:
        """Step 4 of SPEC 13.1."""
        return np.argsort(-weights, kind="stable")

    def keep_top_k(self, ranked: Ints, weights: Ints, top_k: int) -> Ints:
        """Step 4 of SPEC 13.1."""
        return ranked[:top_k] if top_k else ranked

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Step 5 of SPEC 13.1."""
        cumulative = np.cumsum(weights[ranked])
        needed = math.ceil(Fraction(top_p) * int(cumulative[-1]))
        return ranked[: int(np.searchsorted(cumulative, needed)) + 1]

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """Step 6 of SPEC 13.1."""
        least = math.ceil(Fraction(min_p) * int(weights[ranked[0]]))
        return ranked[weights[ranked] >= least]

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """Step 7 of SPEC 13.1."""
        kept = np.sort(kept)
        cumulative = np.cumsum(weights[kept])
        target = word * int(cumulative[-1]) >> 64
        return int(kept[np.searchsorted(cumulative, target, side="right")])

    def _token(self, logits: F32, sampling: Sampling, previous: Ints, source: Source) -> int:
        """SPEC 13.1."""
        temperature = np.float32(sampling.temperature)
        seed, request, position = self.drawn_by(source)
        with np.errstate(all="ignore"):
            logits = self.penalised(logits, previous, np.float32(sampling.repetition_penalty))
            if np.isnan(logits).any() or not np.isfinite(logits).any():
                raise RequestError("logits: NaN or nothing finite; there is no token to choose")
            if temperature == 0:
                return self.greedy(logits)
            weights = self.weights(self.tempered(logits, temperature))
            kept = self.keep_top_k(self.ranked(weights), weights, sampling.top_k)
            kept = self.keep_top_p(kept, weights, sampling.top_p)
            kept = self.keep_min_p(kept, weights, sampling.min_p)
            word = int(self.philox(seed=seed, request=request, positions=np.array([position]))[0])
            return self.drawn(kept, weights, word)
