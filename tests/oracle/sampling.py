"""Sampling and its random numbers (SPEC 13)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from tests.oracle import elementary
from tests.oracle.numbers import INF, divide, multiply, power, rint, subtract

MASK = 0xFFFFFFFF


class RefusedError(Exception):
    """The logits cannot be sampled from."""


def philox4x32(counter: Sequence[int], key: Sequence[int], rounds: int = 10) -> tuple[int, ...]:
    """Philox4x32 of Salmon, Moraes, Dror and Shaw (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & MASK,
            (first >> 32) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def philox(seed: int, request: int, position: int) -> int:
    out = philox4x32((position, request, 0, 0), (seed & MASK, seed >> 32))
    return out[0] + (out[1] << 32)


def penalize(logits: Sequence[float], penalty: float, previous: Iterable[int]) -> list[float]:
    """Step 1; `penalty` is a float32."""
    seen = set(previous)
    return [
        (divide(v, penalty) if v > 0 else multiply(v, penalty)) if i in seen else v
        for i, v in enumerate(logits)
    ]


def weights_of(logits: Sequence[float], temperature: float) -> list[int]:
    """Steps 2 and 3; `temperature` is a positive float32."""
    largest = max(logits)
    scaled = [divide(subtract(v, largest), temperature) for v in logits]
    return [rint(Fraction(elementary.exp(z)) * power(40)) for z in scaled]


def kept_tokens(weights: Sequence[int], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Steps 4 to 6: the kept token ids, ranked."""
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k > 0:
        ranked = ranked[:top_k]
    goal = Fraction(top_p) * sum(weights[i] for i in ranked)
    prefix: list[int] = []
    reached = 0
    for i in ranked:
        if reached >= goal and prefix:
            break
        prefix.append(i)
        reached += weights[i]
    floor = Fraction(min_p) * weights[ranked[0]]
    return [i for i in prefix if weights[i] >= floor or i == ranked[0]]


def draw(weights: Sequence[int], kept: Iterable[int], x: int) -> int:
    """Step 7."""
    chosen = sorted(kept)
    threshold = (x * sum(weights[i] for i in chosen)) >> 64
    cumulative = 0
    for i in chosen:
        cumulative += weights[i]
        if cumulative > threshold:
            return i
    raise AssertionError("the threshold lies below the total")


def check(logits: Sequence[float]) -> None:
    if any(math.isnan(v) or v == INF for v in logits) or all(v == -INF for v in logits):
        raise RefusedError


def sample(
    logits: Sequence[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    previous: Iterable[int],
    x: int,
) -> int:
    """All steps, with the random word given."""
    check(logits)
    logits = penalize(logits, penalty, previous)
    if temperature == 0:
        return logits.index(max(logits))
    weights = weights_of(logits, temperature)
    return draw(weights, kept_tokens(weights, top_k, top_p, min_p), x)
