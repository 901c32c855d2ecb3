"""A request: what it asks for, how far it has come, and its result (SPEC 14.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, TypedDict

from reference.arithmetic import F32
from reference.errors import RequestError
from reference.output import OutputText
from reference.sampling import Sampling
from reference.scheduler import Task
from reference.speculation import Draft, Tally

StopReason = Literal["length", "token", "string", "context"]


@dataclass(frozen=True)
class Timings:
    """Seconds, and tokens a second (0 where nothing was computed).

    time_to_first_token: from the request to the first chosen token, waiting included. decode: from
    then to the last. prefill_rate: of prompt tokens computed. decode_rate: of the tokens after the
    first.
    """

    time_to_first_token: float
    decode: float
    prefill_rate: float
    decode_rate: float


@dataclass(frozen=True)
class Result:
    """What a request gave (SPEC 14.1).

    tokens: the chosen ids, including a stop token. text: what they decode to, without a stop token,
    and without a stop string and what follows it. prompt_n: prompt tokens computed. cache_n: prompt
    tokens reused. stop: why it ended. draft: what speculation gained.
    """

    tokens: list[int]
    text: str
    prompt_n: int
    cache_n: int
    stop: StopReason
    timings: Timings
    draft: Tally


class Options(TypedDict, total=False):
    """How a request is served; all are optional (SPEC 14.1).

    sampling: greedy by default. seed, request: of its random draws (SPEC 13.2). stop: strings that
    end the text. stop_tokens: ids that end it; the model's by default. exact_prefill: the engine's
    by default. cache_prompt: whether pages of earlier requests are used, and its own kept for later
    ones; True by default. cache_salt: requests reuse only what has the same salt (SPEC 11.3).

    on_text is called with each piece of final text, and on_token with each chosen id and the logits
    (V,) that chose it. on_prompt, if given, is called with the position of a prompt token and the
    logits (n, V) of n tokens from there on, in order, perhaps more than once for some; nothing is
    then reused. on_done is called once nothing more will come. All are called while a pass is
    computed, on its thread, and must not call what waits for the pass: the engine's `step`,
    `generate`, `save_cache` and `restore_cache`. They may call `submit` and `cancel`.
    """

    sampling: Sampling
    seed: int
    request: int
    stop: str | Sequence[str]
    stop_tokens: Iterable[int] | None
    exact_prefill: bool
    cache_prompt: bool
    cache_salt: str
    on_text: Callable[[str], object]
    on_token: Callable[[int, F32], object]
    on_prompt: Callable[[int, F32], object] | None
    on_done: Callable[[], object]


@dataclass(eq=False)
class Request:
    """A request that an engine has taken. `done` once it has a result, failed, or was cancelled.

    started, first: when it came, and when its first token was chosen (`perf_counter`).
    """

    task: Task
    max_new_tokens: int
    sampling: Sampling
    seed: int
    request: int
    stop_tokens: frozenset[int]
    text: OutputText
    on_token: Callable[[int, F32], object]
    on_prompt: Callable[[int, F32], object] | None
    on_done: Callable[[], object]
    draft: Draft | None
    tally: Tally = field(default_factory=Tally)
    started: float = field(default_factory=perf_counter)
    first: float = 0.0
    cancelled: bool = False
    outcome: Result | BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.cancelled or self.outcome is not None

    @property
    def chosen(self) -> list[int]:
        """The tokens chosen so far."""
        return self.task.tokens[self.task.prompt_tokens :]

    def result(self) -> Result:
        """The result. Raises what went wrong, or RequestError if there is no result."""
        if isinstance(self.outcome, Result):
            return self.outcome
        raise self.outcome or RequestError("request: it was cancelled, or is not finished yet")

    def take(self, token: int, logits: F32, context: int) -> StopReason | None:
        """Append a chosen token, and return why the request ends with it, or None.

        logits: (V,), those that chose it. context: positions that the model has.
        """
        self.task.tokens.append(token)
        if len(self.chosen) == 1:
            self.first = perf_counter()
        self.on_token(token, logits)
        if token in self.stop_tokens:
            return "token"
        if self.text.feed(token):
            return "string"
        if len(self.chosen) == self.max_new_tokens:
            return "length"
        return "context" if len(self.task.tokens) > context else None

    def finish(self, reason: StopReason) -> None:
        """Put the result together."""
        ended = perf_counter()
        text = self.text.finish()
        prompt_n = self.task.prompt_n or 0
        prefill, decode = self.first - self.started, ended - self.first
        timings = Timings(
            prefill,
            decode,
            prompt_n / prefill if prefill > 0 else 0.0,
            (len(self.chosen) - 1) / decode if decode > 0 else 0.0,
        )
        cache_n = self.task.prompt_tokens - prompt_n
        reason = "string" if self.text.stopped else reason
        self.outcome = Result(self.chosen, text, prompt_n, cache_n, reason, timings, self.tally)
