"""Speculation: guess several tokens, and verify them in one pass (SPEC 13.3 to 13.6).

A draft changes how many tokens a forward pass gives, and never the law by which they are chosen.
With greedy decoding, tokens and logits are those of plain decoding, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from reference.arithmetic import F32
from reference.cache import PAGE_SIZE, KVCache
from reference.errors import RequestError
from reference.model import Model
from reference.sampling import Ints, Law, Sampling, draw, law_of, philox

DRAFT, ACCEPTANCE, RESIDUAL = 1, 2, 3
"""Streams of random words beside that of plain draws, 0 (SPEC 13.2)."""


# ------------------------------------------------------------------------------------------ drafts


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens, and the law that each was drawn from (SPEC 13.3).

    Raises RequestError if there are not as many laws as tokens, or a law gives its token no weight.
    """

    tokens: Sequence[int] = ()
    laws: Sequence[Law] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.laws):
            raise RequestError(
                f"draft: {len(self.tokens)} tokens and {len(self.laws)} laws; give one law a token"
            )
        for token, law in zip(self.tokens, self.laws, strict=True):
            if not weight_of(law, token) > 0:
                raise RequestError(
                    f"draft: token {token} has no weight in its own law; give the law that it was "
                    "drawn from"
                )


class Draft(Protocol):
    """Anything that guesses tokens, for one sequence at a time (SPEC 13.3)."""

    def propose(
        self, context: Ints, count: int, sampling: Sampling, seed: int = 0, request: int = 0
    ) -> Proposal:
        """Up to `count` tokens that may follow a context (T,) int64, prompt and output so far."""
        ...


@dataclass(frozen=True)
class NgramDraft:
    """Proposes what followed the latest earlier occurrence of the context's end (SPEC 13.3).

    longest, shortest: how many tokens of the end are looked up, the longest first. Raises
    RequestError for lengths that contradict each other.
    """

    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise RequestError(
                f"draft: an n-gram of {self.shortest} to {self.longest} tokens; the shortest must "
                "be 1 or more, and not above the longest"
            )

    def propose(
        self, context: Ints, count: int, sampling: Sampling, seed: int = 0, request: int = 0
    ) -> Proposal:
        """As `Draft`; nothing is proposed where no end of the context occurred before."""
        for size in range(min(self.longest, len(context) - 1), self.shortest - 1, -1):
            earlier = sliding_window_view(context[:-1], size)
            found = np.flatnonzero((earlier == context[-size:]).all(axis=1))
            if len(found):
                followed = context[found[-1] + size :]
                tokens = np.resize(followed, max(count, 0)).tolist()
                return Proposal(tokens, [point_mass(token) for token in tokens])
        return Proposal()


class ModelDraft:
    """Proposes what a smaller model draws, under the request's own sampling (SPEC 13.3).

    It keeps a cache of its own in step with one sequence, so each sequence needs an object of its
    own, made by `fresh`. cache_bytes: what the caches of all of them may hold, None for no limit.
    Where there is no room, caches are given up, the least recently used first; what they held is
    computed again when it is needed. Raises RequestError for a draft model whose vocabulary is not
    the target's, and CacheError for more bytes than the machine can give.
    """

    def __init__(
        self,
        model: Model,
        target: Model,
        cache_bytes: int | None = None,
        page_size: int = PAGE_SIZE,
    ) -> None:
        sizes = model.config.vocab_size, target.config.vocab_size
        if sizes[0] != sizes[1]:
            raise RequestError(
                f"draft model: its vocabulary has {sizes[0]} tokens, the target's {sizes[1]}; "
                "choose a draft model made for the target"
            )
        if _names(model) != _names(target):
            raise RequestError(
                "draft model: its tokenizer is not the target's; choose a draft model made for "
                "the target"
            )
        self._model, self.pool = model, model.new_pool(cache_bytes, page_size)
        self._recent = list[KVCache]()  # of all sequences, the one used last at the end
        self.pool.reclaim, self.pool.reclaimable = self._give_up, self._reclaimable
        self._cache, self._fed = KVCache(self.pool), np.zeros(0, np.int64)

    def fresh(self) -> ModelDraft:
        """The same draft for another sequence."""
        other = copy(self)
        other._cache, other._fed = KVCache(self.pool), np.zeros(0, np.int64)
        return other

    def check(self, positions: int) -> None:
        """Raise RequestError if a sequence of so many positions exceeds the whole pool."""
        most = self.pool.most_positions
        if min(positions, self._model.config.max_positions) > most:
            raise RequestError(
                f"cache: {positions} positions are more than the {most} that the draft model's "
                "share of the cache has room for; raise cache_bytes, draft without a model, or ask "
                "for fewer tokens"
            )

    def end(self) -> None:
        """Give up its cache, as the sequence is done."""
        if self._cache in self._recent:
            self._recent.remove(self._cache)
        self._cache.free()

    def _reclaimable(self) -> int:
        """Bytes of the caches of all sequences but the one in use."""
        return sum(cache.bytes for cache in self._recent[:-1])

    def _give_up(self, size: int) -> None:
        """Empty caches, the least recently used first, until they have freed `size` bytes."""
        target = self.pool.used_bytes - size
        for cache in self._recent[:-1]:
            if self.pool.used_bytes > target:
                cache.free()

    def propose(
        self, context: Ints, count: int, sampling: Sampling, seed: int = 0, request: int = 0
    ) -> Proposal:
        """As `Draft`; fewer tokens if the draft model's own context ends before."""
        start = len(context)
        stop = min(start + count, self._model.config.max_positions + 1)
        text, laws = context, []
        for position in range(start, stop):
            laws.append(law_of(self._logits(text), sampling, text))
            text = np.append(text, draw(laws[-1], seed, request, position, DRAFT))
        return Proposal(text[start:].tolist(), laws)

    def _logits(self, text: Ints) -> F32:
        """The draft model's logits (V,) after a text; what its cache holds of that is reused."""
        if self._cache in self._recent:
            self._recent.remove(self._cache)
        self._recent.append(self._cache)
        held = min(self._cache.length, len(text) - 1)
        differs = np.flatnonzero(self._fed[:held] != text[:held])
        common = int(differs[0]) if len(differs) else held
        self._cache.truncate(common)
        self._fed = text
        logits: F32 = self._model.forward(text[common:], self._cache, last_only=True)[-1]
        return logits


def _names(model: Model) -> list[str | None] | None:
    """The name of each token id; None for a model without a tokenizer."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    return [tokenizer.token(id_) for id_ in range(tokenizer.vocab_size)]


# ------------------------------------------------------------------------------------ verification


@dataclass(frozen=True)
class Verdict:
    """The tokens that a pass gave: `accepted` drafted ones, and one of the target's (SPEC 13.4)."""

    tokens: list[int]
    accepted: int


def verify(
    logits: F32,
    proposal: Proposal,
    sampling: Sampling,
    previous: Ints,
    seed: int = 0,
    request: int = 0,
    position: int = 0,
) -> Verdict:
    """Verify a draft of n tokens by the target's logits, (n + 1, V) float32 (SPEC 13.4).

    Row i follows the first i drafted tokens. previous: the token ids before the draft, prompt and
    output. position: the index of the first drafted token. Raises RequestError as `sample` does.
    """
    tokens: list[int] = []
    for token, drafted in zip(proposal.tokens, proposal.laws, strict=True):
        here = position + len(tokens)
        target = law_of(logits[len(tokens)], sampling, _with(previous, tokens))
        word = int(philox(seed, request, np.array([here]), ACCEPTANCE)[0])
        share, of = acceptance(target, drafted, token)
        if not word * of < share << 64:
            correction = draw(residual(target, drafted), seed, request, here, RESIDUAL)
            return Verdict([*tokens, correction], len(tokens))
        tokens.append(token)
    law = law_of(logits[len(tokens)], sampling, _with(previous, tokens))
    bonus = draw(law, seed, request, position + len(tokens))
    return Verdict([*tokens, bonus], len(tokens))


def _with(previous: Ints, tokens: Sequence[int]) -> Ints:
    """The token ids so far, followed by accepted ones."""
    return np.append(previous, np.array(tokens, np.int64))


def acceptance(target: Law, drafted: Law, token: int) -> tuple[int, int]:
    """The probability that a token is accepted, as the ratio `(w Q, q W)`, or 1 (SPEC 13.4)."""
    w, q = weight_of(target, token), weight_of(drafted, token)
    return w * total(drafted), q * total(target)


def residual(target: Law, drafted: Law) -> Law:
    """What a token is drawn from after a rejection: `max(w Q - q W, 0)`, exactly (SPEC 13.4).

    Weights of 40 bits times totals of 57 exceed int64, so these are Python's integers.
    """
    q = np.zeros(len(target.ids), object)
    _, here, there = np.intersect1d(target.ids, drafted.ids, True, return_indices=True)
    q[here] = drafted.weights[there]
    excess = target.weights.astype(object) * total(drafted) - q * total(target)
    return Law(target.ids, np.maximum(excess, 0))


def point_mass(token: int) -> Law:
    """The law of a token that was not drawn at random."""
    return Law(np.array([token]), np.array([1]))


def weight_of(law: Law, token: int) -> int:
    """A token's weight, 0 where it cannot be drawn."""
    return sum(law.weights[law.ids == token].tolist())


def total(law: Law) -> int:
    """The weight of all tokens together."""
    return int(law.weights.sum())


# ----------------------------------------------------------------------------------------- figures


@dataclass
class Tally:
    """What speculation gained: passes after the prompt's, and their drafted tokens (SPEC 13.5)."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, proposal: Proposal, verdict: Verdict) -> None:
        """Count one pass."""
        self.passes += 1
        self.drafted += len(proposal.tokens)
        self.accepted += verdict.accepted

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted, 0 where none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass gave, accepted ones and its own; 0 if there was no pass."""
        return 1 + self.accepted / self.passes if self.passes else 0.0
