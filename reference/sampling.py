"""Choosing a token: every step after the exponential is integer arithmetic (SPEC 13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.arguments import real, whole
from reference.arithmetic import F32
from reference.elementary import exp
from reference.errors import RequestError

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Weights = NDArray[np.int64] | NDArray[np.object_]
"""Integer weights: Python's own, as objects, where a sum may exceed int64 (SPEC 13.4)."""

WEIGHT_ONE = 2.0**40
"""The integer weight of the likeliest token (SPEC 13.1, step 3)."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen (SPEC 13.1). The defaults are greedy.

    temperature: 0 is greedy. top_k: 0 keeps all tokens, as do top_p 1 and min_p 0.
    repetition_penalty: 1 is none. Raises RequestError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, real(name, getattr(self, name)))
        object.__setattr__(self, "top_k", whole("top_k", self.top_k))
        largest = float(np.finfo(np.float32).max)
        ranges = {
            "temperature": (0 <= self.temperature <= largest, f"from 0 to {largest:g}"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (
                2**-149 <= self.repetition_penalty <= largest,
                f"from {2**-149:g} to {largest:g}",
            ),
        }
        for name, (good, wanted) in ranges.items():
            if not good:
                raise RequestError(
                    f"{name}: {getattr(self, name)!r} is out of range; it must be {wanted}"
                )


class Law(NamedTuple):
    """What a token is drawn from: the ids that may be drawn, (n,) ascending, and weights (n,).

    A token's probability is its weight's share of the total (SPEC 13.1, step 7).
    """

    ids: Ints
    weights: Weights


def philox(seed: int, request: int, positions: Ints, stream: int = 0) -> Words:
    """One random 64-bit word a position, (n,) int64 -> (n,) uint64 (SPEC 13.2).

    Philox4x32-10 (Salmon et al., SC 2011): the words depend on nothing but the four arguments.
    Raises RequestError for a seed or a request out of range.
    """
    seed, request = whole("seed", seed, 0, 2**64), whole("request", request, 0, 2**32)
    low = np.uint64(0xFFFFFFFF)
    zeros = np.zeros(positions.shape, np.uint64)
    counter = [
        positions.astype(np.uint64) & low,
        zeros + np.uint64(request & 0xFFFFFFFF),
        zeros + np.uint64(stream),
        zeros,
    ]
    out = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return out[0] | out[1] << np.uint64(32)


def philox4x32(counter: Sequence[Words], key: tuple[int, int]) -> list[Words]:
    """Ten rounds on four 32-bit words, each kept in a uint64 array (n,) (SPEC 13.2)."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (b >> half) ^ c1 ^ np.uint64(k0),
            b & low,
            (a >> half) ^ c3 ^ np.uint64(k1),
            a & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def sample(
    logits: F32,
    sampling: Sampling,
    previous: Ints,
    seed: int = 0,
    request: int = 0,
    position: int = 0,
) -> int:
    """Choose a token from logits (V,) float32 (SPEC 13.1).

    previous: the token ids so far, prompt and output. position: the index of the token to be drawn.
    Raises RequestError for logits that hold NaN or +inf, or nothing finite.
    """
    return draw(law_of(logits, sampling, previous), seed, request, position)


def law_of(logits: F32, sampling: Sampling, previous: Ints) -> Law:
    """Steps 1 to 6: the law of the next token; greedy, all weight is on one (SPEC 13.1).

    Arguments and errors are those of `sample`.
    """
    given, logits = logits, penalised(logits, previous, np.float32(sampling.repetition_penalty))
    if not _has_choice(logits):
        of_penalty = f"repetition_penalty: {sampling.repetition_penalty:g} makes logits "
        what, remedy = (
            (of_penalty, "give one nearer to 1")
            if _has_choice(given)
            else ("logits: ", "check the model's weights, or give another prompt")
        )
        raise RequestError(
            f"{what}NaN, +inf or nothing finite, so that there is no token to choose; {remedy}"
        )
    temperature = np.float32(sampling.temperature)
    if temperature == 0:
        return Law(np.array([logits.argmax()]), np.array([1]))
    return Law(*candidates(logits, sampling, temperature))


def _has_choice(logits: F32) -> bool:
    """Whether logits (V,) have no NaN, no +inf and something finite."""
    bad = np.isnan(logits).any() or (logits == np.inf).any()
    return not bad and bool(np.isfinite(logits).any())


def draw(law: Law, seed: int, request: int, position: int, stream: int = 0) -> int:
    """Step 7: the first token whose cumulative weight exceeds `floor(x * W / 2^64)` (SPEC 13.1).

    stream: of random words (SPEC 13.2). A law of one token needs no random word.
    """
    if len(law.ids) == 1:
        return int(law.ids[0])
    cumulative = np.cumsum(law.weights)
    word = int(philox(seed, request, np.array([position]), stream)[0])
    return int(law.ids[np.searchsorted(cumulative, word * int(cumulative[-1]) >> 64, side="right")])


def penalised(logits: F32, previous: Ints, penalty: np.float32) -> F32:
    """Step 1: logits (V,) with every token of `previous` made less likely, once (SPEC 13.1)."""
    if penalty == 1:
        return logits
    seen = np.unique(previous)
    out = logits.copy()
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
    return out


def candidates(logits: F32, sampling: Sampling, temperature: np.float32) -> tuple[Ints, Ints]:
    """Steps 2 to 6: the ids that may be drawn, ascending, and their integer weights (SPEC 13.1)."""
    with np.errstate(over="ignore"):
        z: F32 = (logits - logits.max()) / temperature
    weights = np.rint(exp(z) * WEIGHT_ONE).astype(np.int64)
    ranked = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    cumulative = np.cumsum(weights[ranked])
    needed = math.ceil(Fraction(sampling.top_p) * int(cumulative[-1]))
    ranked = ranked[: int(np.searchsorted(cumulative, needed)) + 1]
    least = math.ceil(Fraction(sampling.min_p) * int(weights[ranked[0]]))
    kept = np.sort(ranked[weights[ranked] >= least])
    return kept, weights[kept]
