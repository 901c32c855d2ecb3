"""How tokens choose experts: laws, and the batches of a real router.

A pass reads the experts that its tokens hit: `sum over experts of 1 - (1 - p)^T` for T independent
tokens that choose an expert with probability p each, which is `E (1 - (1 - k/E)^T)` where all are
alike. Real tokens are neither alike nor independent: traces of a real router show by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F64, Bools
from reference.errors import RequestError
from reference.experts import Routing

Ints = NDArray[np.int64]

SLICE = 64
"""Tokens that are drawn together, of one pass until every expert is hit, or of several passes."""


@dataclass(frozen=True, eq=False)
class Law:
    """How tokens choose experts, each independently.

    shares: (E,), the probability that an expert is among a token's k. Their sum is k.
    """

    shares: F64

    def distinct(self, tokens: Ints) -> F64:
        """Expected number of experts that so many tokens hit, (n,) -> (n,)."""
        several, at = np.unique(tokens, return_inverse=True)  # decode steps are all alike
        missed = (1 - self.shares) ** several[:, None]
        return np.asarray((1 - missed).sum(axis=1)[at])

    def drawn(self, rng: np.random.Generator, tokens: int) -> Bools:
        """The experts of each token, (T, E): k each, by these shares.

        Experts in random order lie along a line, as long as their shares, and points at distance 1
        from each other, begun at random, fall on k of them (Madow's systematic sampling, 1949).
        """
        order = rng.random((tokens, len(self.shares))).argsort(axis=1)
        ends = np.cumsum(self.shares[order], axis=1)
        ends[:, -1] = round(ends[0, -1])
        points = np.ceil(ends - rng.random((tokens, 1)))
        chosen = np.zeros(order.shape, np.bool_)
        np.put_along_axis(chosen, order, np.diff(points, axis=1, prepend=0) > 0, axis=1)
        return chosen

    def hit(self, rng: np.random.Generator, passes: int, tokens: int) -> Ints:
        """How many experts each of some passes over so many tokens hits, (passes,)."""
        counts, together = [], max(1, SLICE // tokens)
        for first in range(0, passes, together):
            alike = min(together, passes - first)
            seen, left = np.zeros((alike, len(self.shares)), np.bool_), tokens
            while left and not seen[:, self.shares > 0].all():
                some = min(left, SLICE)
                seen |= self.drawn(rng, alike * some).reshape(alike, some, -1).any(axis=1)
                left -= some
            counts.append(seen.sum(axis=1))
        return np.concatenate(counts)


def uniform(experts: int, chosen: int) -> Law:
    """All experts alike."""
    return Law(np.full(experts, chosen / experts))


def zipf(experts: int, chosen: int, exponent: float) -> Law:
    """The expert of rank r is called as often as `r^-exponent`; none by more than every token."""
    ranks = np.arange(1.0, experts + 1)
    for full in range(chosen + 1):  # experts that every token calls: the others share the rest
        weights = (ranks[full:] / ranks[full]) ** -exponent  # the first is 1, and never underflows
        most = (chosen - full) / weights.sum()
        if most <= 1:
            break
    return Law(np.concatenate([np.ones(full), most * weights]))


def traced(routing: Routing, experts: int) -> Law:
    """The loads of a real router in one layer."""
    calls = np.bincount(routing.experts.ravel(), minlength=experts)
    return Law(calls / len(routing.experts))


def zipf_exponent(calls: Sequence[Sequence[int]]) -> float:
    """The likeliest exponent s of calls that follow `r^-s / sum r^-s`, r the rank within a layer.

    calls: of each expert, by layer. The likelihood is at its largest where the mean of ln r is the
    expected one, which falls as s grows. Ranks are those of the same calls: few calls look uneven.
    Raises RequestError where there is none, as all calls are of one expert.
    """
    ranked = np.sort(np.array(calls), axis=1)[:, ::-1].sum(axis=0)
    logs = np.log(np.arange(1, len(ranked) + 1))
    wanted = float((ranked * logs).sum() / ranked.sum())

    def mean_log(s: float) -> float:
        weights = np.exp(-s * logs)
        return float((weights * logs).sum() / weights.sum())

    low, high = 0.0, 64.0
    if wanted <= mean_log(high):
        raise RequestError("routing: one expert has all calls, which no exponent tells")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_log(middle) > wanted else (low, middle)
    return low


def distinct_in(routing: Routing, experts: int, tokens: int, together: bool) -> Ints:
    """How many experts real batches of so many tokens hit, (batches,).

    together: tokens that follow one another, as in a prefill; else from places far apart, as
    requests that decode together. Raises RequestError where the trace is shorter.
    """
    count, k = len(routing.experts) // tokens, routing.experts.shape[1]
    if not count:
        raise RequestError(f"batch: {tokens} tokens are wanted, and {len(routing.experts)} traced")
    shape = (count, tokens, k) if together else (tokens, count, k)
    batches = routing.experts[: count * tokens].reshape(shape)
    if not together:
        batches = batches.swapaxes(0, 1)
    hit = np.zeros((count, experts), np.bool_)
    np.put_along_axis(hit, batches.reshape(count, -1), True, axis=1)
    return np.asarray(hit.sum(axis=1))
