"""The oracle's laws of a target and a draft, and faults planted in the code that keeps to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, cast

import numpy as np

from reference import speculation
from reference.model import Model
from reference.sampling import Law, Sampling
from tests.oracle import sampling as oracle
from tests.oracle.nasty import tolist
from tests.reference.speculation.loop import GREEDY, WARM, ids

OPTIONS = [
    GREEDY,
    Sampling(0.0, repetition_penalty=1.5),
    WARM,
    Sampling(0.6, top_k=3),
    Sampling(1.4, top_p=0.7, repetition_penalty=1.3),
    Sampling(1.0, min_p=0.2),
]


def shares_of(law: Law) -> oracle.Shares:
    weights = [int(w) for w in law.weights]
    return oracle.shares(dict(zip(law.ids.tolist(), weights, strict=True)))


@dataclass
class World:
    """Two tables, and the oracle's laws of both."""

    target: Model
    drafter: Model
    options: Sampling
    vocab_size: int
    prompt: tuple[int, ...] = (0,)

    def law(self, model: Model, text: tuple[int, ...]) -> oracle.Shares:
        o = self.options
        temperature, penalty = (float(np.float32(x)) for x in (o.temperature, o.repetition_penalty))
        logits = tolist(cast(Any, model).row(text))
        return oracle.law(logits, temperature, (o.top_k, o.top_p, o.min_p), penalty, text)

    def target_law(self, text: tuple[int, ...]) -> oracle.Shares:
        return cached_law(self, "target", text)

    def draft_law(self, text: tuple[int, ...]) -> oracle.Shares:
        return cached_law(self, "drafter", text)

    def texts(self, length: int) -> Iterator[tuple[int, ...]]:
        """Every text of that length which begins with the prompt."""
        extra = length - len(self.prompt)
        for index in np.ndindex(*(self.vocab_size,) * extra):
            yield (*self.prompt, *map(int, index))

    def __hash__(self) -> int:
        return id(self)


@cache
def cached_law(world: World, name: str, text: tuple[int, ...]) -> oracle.Shares:
    return world.law(getattr(world, name), text)


Joint = dict[tuple[int, ...], Fraction]


def target_joint(world: World, steps: int) -> Joint:
    joint: Joint = {(): Fraction(1)}
    for _ in range(steps):
        joint = {
            (*tokens, token): p * share
            for tokens, p in joint.items()
            for token, share in world.target_law((*world.prompt, *tokens)).items()
        }
    return joint


def from_the_target(target: Law, drafted: Law) -> Law:
    """A wrong residual: after a rejection the target's own law."""
    return target


def unweighted(target: Law, drafted: Law) -> Law:
    """A wrong residual: totals that differ are taken as equal."""
    q = dict(zip(drafted.ids.tolist(), drafted.weights.tolist(), strict=True))
    excess = [max(w - q.get(i, 0), 0) for i, w in zip(*map(np.ndarray.tolist, target), strict=True)]
    return Law(target.ids, ids(excess if any(excess) else target.weights.tolist()))


def without_the_draft(target: Law, drafted: Law, token: int) -> tuple[int, int]:
    """A wrong acceptance: the draft's probability is left out."""
    return speculation.weight_of(target, token), speculation.total(target)


PLANTED = {
    "from_the_target": ("residual", from_the_target),
    "unweighted": ("residual", unweighted),
    "without_the_draft": ("acceptance", without_the_draft),
}
