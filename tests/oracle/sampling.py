"""Sampling and its random numbers (SPEC 13)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def philox(seed: int, request: int, position: int, stream: int = 0) -> int:
    out = philox4x32((position, request, stream, 0), (seed & MASK, seed >> 32))
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


# Speculation: laws are probabilities here, by token, and nothing is an integer weight.

Shares = dict[int, Fraction]
Filters = tuple[int, float, float]


def shares(weights: Mapping[int, int] | Mapping[int, Fraction]) -> Shares:
    """Probabilities from weights by token."""
    whole = Fraction(sum(weights.values()))
    return {token: Fraction(weight) / whole for token, weight in weights.items() if weight}


def law(
    logits: Sequence[float],
    temperature: float,
    filters: Filters,
    penalty: float,
    previous: Iterable[int],
) -> Shares:
    """Steps 1 to 6."""
    check(logits)
    logits = penalize(logits, penalty, previous)
    if temperature == 0:
        return {logits.index(max(logits)): Fraction(1)}
    weights = weights_of(logits, temperature)
    return shares({i: weights[i] for i in kept_tokens(weights, *filters)})


def acceptance(target: Shares, drafted: Shares, token: int) -> Fraction:
    return min(Fraction(1), target.get(token, Fraction(0)) / drafted[token])


def residual(target: Shares, drafted: Shares) -> Shares:
    over = {i: share - drafted.get(i, Fraction(0)) for i, share in target.items()}
    return shares({i: share for i, share in over.items() if share > 0})


def draw_share(law: Shares, u: Fraction) -> int:
    """The first token, by id, below whose end u lies."""
    end = Fraction(0)
    for token in sorted(law):
        end += law[token]
        if u < end:
            return token
    raise AssertionError("u lies below 1")


def verify(
    rows: Sequence[Sequence[float]],
    draft: Sequence[int],
    draft_laws: Sequence[Shares],
    temperature: float,
    filters: Filters,
    penalty: float,
    previous: Sequence[int],
    random: Callable[[int, int], Fraction],
) -> list[int]:
    """The tokens of one pass; `random` gives the number in [0, 1) of a row and a stream."""
    for i, (token, drafted) in enumerate(zip(draft, draft_laws, strict=True)):
        before = list(draft[:i])
        target = law(rows[i], temperature, filters, penalty, [*previous, *before])
        if random(i, 2) >= acceptance(target, drafted, token):
            return [*before, draw_share(residual(target, drafted), random(i, 3))]
    last = law(rows[len(draft)], temperature, filters, penalty, [*previous, *draft])
    return [*draft, draw_share(last, random(len(draft), 0))]
