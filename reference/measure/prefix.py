"""What reuse saves a conversation, and what moved chunks do to its logits (SPEC 11.3, 11.5).

A conversation is computed cold, goes on, and is then edited in the middle, at several places. After
an edit the rest is computed again, which is exact, or moved, which is not: the logits tell how far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from reference.arithmetic import F32
from reference.engine import Engine
from reference.errors import RequestError
from reference.measure.perplexity import log_probabilities
from reference.model import Model

REMOVED, INSERTED = 10, 5
"""Tokens that an edit takes away, and those that it puts in their place."""


@dataclass(frozen=True)
class Turn:
    """One prompt's computation. seconds: to the first token. logits (V,): those that chose it."""

    prompt_n: int
    cache_n: int
    seconds: float
    logits: F32


@dataclass(frozen=True)
class Change:
    """What moving chunks did to the logits after one edit, against computing all anew.

    at: where the edit was. largest: the largest change of a logit. divergence: Kullback-Leibler, in
    nats. same_top: whether the likeliest token is the same.
    """

    at: int
    largest: float
    divergence: float
    same_top: bool


@dataclass(frozen=True)
class Figures:
    """All turns by name, each repeated, and the changes, one an edit."""

    turns: dict[str, list[Turn]]
    changes: list[Change]

    def seconds(self, name: str) -> float:
        """Median time to the first token of a kind of turn."""
        return median(turn.seconds for turn in self.turns[name])


COLD, NEXT, EDITED, MOVED = "cold", "next turn", "edited", "edited, chunks moved"


@dataclass(frozen=True)
class Experiment:
    """tokens: of a text (n,). held: of the first turn. new: of each later one. edits: how many.

    minimum: least length of a moved chunk. Raises RequestError for what cannot be run.
    """

    model: Model
    tokens: Sequence[int]
    held: int = 1500
    new: int = 60
    edits: int = 6
    minimum: int = 64

    def __post_init__(self) -> None:
        for name in ("held", "new", "edits", "minimum"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name}: it must be 1 or more")
        if self.held < 2 * self.minimum + REMOVED:
            raise RequestError(
                f"held: {self.held} tokens leave no chunk of {self.minimum} behind an edit; "
                "hold more, or lower the minimum"
            )
        needed = self.held + self.new
        if len(self.tokens) < needed or self.model.config.max_positions <= needed:
            raise RequestError(
                f"held: {needed} tokens are needed; the text has {len(self.tokens)} and the "
                f"model's context {self.model.config.max_positions}; hold fewer"
            )

    def run(self) -> Iterator[Figures]:
        """Run everything; yields what is known after each edit.

        Prefill is exact, but that of the sequence from which chunks are moved: an engine that moves
        chunks does so only where nothing exact is due.
        """
        text = list(self.tokens)
        first, second = text[: self.held], text[: self.held + self.new]
        places = np.linspace(self.minimum, self.held - self.minimum - REMOVED, self.edits)
        turns: dict[str, list[Turn]] = {COLD: [], NEXT: [], EDITED: [], MOVED: []}
        changes: list[Change] = []
        for place in places.astype(int).tolist():
            put_in = [text[-1 - i] for i in range(INSERTED)]
            edited = second[:place] + put_in + second[place + REMOVED :]
            plain = Engine(self.model, exact_prefill=True)
            turns[COLD].append(_turn(plain, first))
            turns[NEXT].append(_turn(plain, second))
            turns[EDITED].append(_turn(plain, edited))
            moving = Engine(self.model, cache_reuse=self.minimum)
            _turn(moving, second)
            turns[MOVED].append(_turn(moving, edited))
            changes.append(change(place, turns[EDITED][-1].logits, turns[MOVED][-1].logits))
            yield Figures(turns, changes)


def _turn(engine: Engine, tokens: list[int]) -> Turn:
    rows: list[F32] = []
    result = engine.generate(
        tokens, 1, stop_tokens=(), on_token=lambda token, logits: rows.append(logits)
    )
    seconds = result.timings.time_to_first_token
    return Turn(result.prompt_n, result.cache_n, seconds, rows[0])


def change(at: int, exact: F32, moved: F32) -> Change:
    """How two rows of logits (V,) differ; the divergence is that of `moved` from `exact`."""
    p, q = log_probabilities(exact), log_probabilities(moved)
    return Change(
        at,
        float(np.abs(exact.astype(np.float64) - moved).max()),
        float((np.exp(p) * (p - q)).sum()),
        bool(exact.argmax() == moved.argmax()),
    )
