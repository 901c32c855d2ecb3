"""What one long prompt does to others, with chunked prefill and without (SPEC 14.2).

A few users are in the middle of their answers when a long prompt comes. Three arms: it never comes;
it is computed in one pass, for which all others wait; it is computed in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reference.engine import Engine
from reference.errors import RequestError
from reference.model import Model
from reference.request import Result
from reference.trace import Latency, Pass, Trace, draw_traces

USER_PROMPT = 16
"""Tokens of a user's prompt."""

BEFORE = 16
"""Tokens that each user has when the long prompt comes."""

AFTER = 48
"""Tokens that each user still waits for then, at least."""

LONG_OUTPUT = 8
"""Tokens that follow the long prompt."""


@dataclass(frozen=True)
class Arm:
    """One run. All times are in seconds.

    budget: tokens of a pass at most. users: time between tokens, over all users' tokens after the
    long prompt came. long: what its request gave, None where it never came. tokens: each user's.
    came: when the long prompt came, or would have, on the trace's clock.
    """

    name: str
    budget: int
    users: Latency
    long: Result | None
    tokens: tuple[tuple[int, ...], ...]
    trace: Trace
    came: float

    @property
    def throughput(self) -> float:
        """Tokens computed a second from when the long prompt came, its own included.

        What came before is left out: a new engine's first pass is slow, for it writes to memory
        that nobody has touched.
        """
        since = [done for done in self.trace.passes if done.started >= self.came]
        return sum(map(computed, since)) / (since[-1].ended - since[0].started)

    def figures(self) -> dict[str, Any]:
        """What can be written as JSON, times in seconds."""
        return {
            "name": self.name,
            "max_batched_tokens": self.budget,
            "between_tokens": vars(self.users),
            "time_to_first_token": self.long and self.long.timings.time_to_first_token,
            "tokens_a_second": self.throughput,
            "tokens": self.tokens,
            "passes": [vars(done) for done in self.trace.passes],
        }


def computed(done: Pass) -> int:
    """Tokens of a pass."""
    return sum(count for _, _, count in done.shares)


@dataclass(frozen=True)
class Experiment:
    """Who asks for what. long, chunk: tokens; chunk beside one token of each user.

    Raises RequestError for what cannot be run.
    """

    model: Model
    long: int = 4000
    users: int = 4
    chunk: int = 256

    def __post_init__(self) -> None:
        for name in ("long", "users", "chunk"):
            value = getattr(self, name)
            if value < 1:
                raise RequestError(f"{name}: {value} is out of range; it must be 1 or more")
        context = self.model.config.max_positions
        longest = max(self.long + LONG_OUTPUT, USER_PROMPT + self.answer)
        if longest > context:
            raise RequestError(
                f"long: {longest} positions are needed, and the model's context has {context}; "
                "lower long, or raise chunk"
            )

    @property
    def answer(self) -> int:
        """Tokens of each user: enough to decode beside every chunk."""
        return BEFORE + max(AFTER, 2 * -(-self.long // self.chunk))

    @property
    def work(self) -> int:
        """Tokens that all arms compute together."""
        of_users = self.users * (USER_PROMPT + self.answer - 1)
        return 3 * of_users + 2 * (self.long + LONG_OUTPUT - 1)

    def arms(self, on_pass: Callable[[Pass], object] = lambda done: None) -> Iterator[Arm]:
        """Run the arms one after another, each on a fresh engine, after a short run to warm up.

        on_pass is told of each pass.
        """
        Engine(self.model).generate([0] * USER_PROMPT, BEFORE, stop_tokens=())
        yield self._arm("no long prompt", self.chunk, False, on_pass)
        yield self._arm("in one pass", self.long, True, on_pass)
        yield self._arm(f"chunks of {self.chunk}", self.chunk, True, on_pass)

    def _arm(self, name: str, size: int, comes: bool, on_pass: Callable[[Pass], object]) -> Arm:
        """One run; a pass has at most `size` tokens of prompts beside the users'."""
        engine, trace = Engine(self.model, max_batched_tokens=size + self.users), Trace()

        def seen(done: Pass) -> None:
            trace.add(done)
            on_pass(done)

        engine.on_pass = seen
        rng = np.random.default_rng(0)
        lengths = [USER_PROMPT] * self.users + [self.long]
        *prompts, last = (
            rng.integers(0, self.model.config.vocab_size, n).tolist() for n in lengths
        )
        users = [engine.submit(prompt, self.answer, stop_tokens=()) for prompt in prompts]
        while min(len(user.chosen) for user in users) < BEFORE:
            engine.step()
        came = trace.passes[-1].ended
        long = engine.submit(last, LONG_OUTPUT, stop_tokens=()) if comes else None
        while engine.busy:
            engine.step()
        return Arm(
            name,
            engine.scheduler.max_batched_tokens,
            trace.latency([user.task.number for user in users], came),
            None if long is None else long.result(),
            tuple(tuple(user.result().tokens) for user in users),
            trace,
            came,
        )


def draw(arms: Sequence[Arm], path: Path) -> None:
    """Draw who ran when in each arm, as PNG or SVG by the file's name; needs the extra `plot`."""
    draw_traces({arm.name: arm.trace for arm in arms}, path)
