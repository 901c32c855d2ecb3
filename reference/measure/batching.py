"""Rates of users who decode together, in total and each one's, by how many they are.

A pass reads the weights once for all of them, so the total grows with the batch until something
other than reading weights takes longest: the roofline says from which batch on (`ceiling`). Rates
are taken from the trace of an engine whose users all decode in every pass. Batches take turns; the
first runs twice, and its ratio to itself is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from reference.engine import Engine
from reference.errors import RequestError
from reference.measure.ceiling import EXACT, Ceiling, Hardware
from reference.measure.machine import Machine, Spread
from reference.measure.turns import check_repetitions, fields, in_turns
from reference.model import Model
from reference.threads import limited_to
from reference.trace import Trace

FLAT = 0.9
"""The total is flat from the smallest batch on that reaches this share of the largest total."""

FIRST = 1
"""Passes of a full batch that are left out: the first one writes to memory for the first time."""


@dataclass(frozen=True)
class Run:
    """Passes in which all users of an engine decoded, one token each. seconds: of each pass."""

    batch: int
    seconds: tuple[float, ...]

    @property
    def single(self) -> float:
        """Tokens a second of each user."""
        return len(self.seconds) / sum(self.seconds)

    @property
    def total(self) -> float:
        """Tokens a second of all users."""
        return self.batch * self.single


def together(model: Model, batch: int, depth: int, output: int) -> Run:
    """`batch` users with different prompts of `depth` tokens, all computed in the first pass.

    Then come FIRST passes that are left out, and `output` that count. Raises RequestError where
    the cache has no room for so many.
    """
    engine, trace = Engine(model, max_batched_tokens=batch * depth), Trace()
    engine.on_pass = trace.add
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, depth))
    for prompt in prompts.tolist():
        engine.submit(prompt, 1 + FIRST + output, stop_tokens=(), cache_prompt=False)
    while engine.busy:
        engine.step()
    full = [
        done.ended - done.started
        for done in trace.passes
        if [kind for _, kind, _ in done.shares] == ["decode"] * batch
    ]
    if len(full) != FIRST + output:
        raise RequestError(
            f"batch: the engine's cache has no room for {batch} users of {depth + output} tokens; "
            "lower batch or depth"
        )
    return Run(batch, tuple(full[FIRST:]))


@dataclass(frozen=True)
class Batching:
    """Batches of users. depth: tokens of each one's prompt. output: passes that are measured.

    Raises RequestError for what cannot be run.
    """

    model: Model
    batches: Sequence[int]
    threads: int
    depth: int = 64
    output: int = 16
    repetitions: int = 3
    warm_up: int = 1

    def __post_init__(self) -> None:
        check_repetitions(self.repetitions)
        for name, value in (
            ("batch", min(self.batches, default=0)),
            ("depth", self.depth),
            ("output", self.output),
        ):
            if value < 1:
                raise RequestError(f"{name}: {value} is out of range; it must be 1 or more")
        needed, context = self.depth + FIRST + self.output, self.model.config.max_positions
        if needed > context:
            raise RequestError(
                f"depth: {needed} positions are needed, and the model's context has {context}; "
                "lower it, or the output"
            )

    @property
    def runs(self) -> int:
        """Runs in all."""
        return (len(self.batches) + 1) * (self.repetitions + self.warm_up)

    def rows(
        self,
        machine: Machine,
        hardware: Hardware,
        on_run: Callable[[], object] = lambda: None,
    ) -> Iterator[dict[str, Any]]:
        """A row for each batch, and the first once more, beside what the roofline predicts.

        The prediction is for the depth in the middle of what is measured.
        """
        batches = [*self.batches, self.batches[0]]
        with limited_to(self.threads):
            runs = [partial(together, self.model, n, self.depth, self.output) for n in batches]
            turns = in_turns(runs, self.repetitions, self.warm_up, on_run)
        totals = [Spread.of([turn[index].total for turn in turns]) for index in range(len(batches))]
        flat = flat_from(self.batches, [spread.median for spread in totals[:-1]])
        ceiling = Ceiling(self.model.config, EXACT, hardware)
        for index, batch in enumerate(batches):
            predicted = ceiling.row(batch, 1, self.depth + FIRST + self.output // 2)
            ratios = [turn[index].total / turn[0].total for turn in turns]
            yield {
                **asdict(machine),
                "digest": self.model.digest,
                "threads": self.threads,
                "test": f"tg{self.output} @ d{self.depth}",
                "batch": batch,
                "role": {0: "first", len(batches) - 1: "do nothing"}.get(index, ""),
                "cache_n": 0,
                "prompt_n": self.depth,
                "repetitions": self.repetitions,
                **fields("total", totals[index]),
                **fields("single", Spread.of([turn[index].single for turn in turns])),
                **fields("gain", Spread.of(ratios) if index else None),
                "hardware": hardware.source,
                "ceiling_total": predicted["rate"],
                "ceiling_bound": predicted["bound"],
                "flat_predicted": predicted["turning_batch"],
                "flat_measured": flat,
            }


def flat_from(batches: Sequence[int], totals: Sequence[float]) -> int | None:
    """The smallest batch whose total is FLAT of the largest; None where that is the last one."""
    enough = FLAT * max(totals)
    found = min(batch for batch, total in zip(batches, totals, strict=True) if total >= enough)
    return None if found == max(batches) else found
