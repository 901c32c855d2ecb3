"""A request: what is asked, how far it is, and what it gave (SPEC 14.1)."""

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

    time_to_first_token: from the request to the first chosen token. decode: for all after it.
    """

    time_to_first_token: float
    decode: float
    prefill_rate: float
    decode_rate: float


@dataclass(frozen=True)
class Result:
    """What a request gave (SPEC 14.1).

    tokens: the chosen ids, a stop token included. text: what they decode to, a stop token or stop
    string and what follows left out. prompt_n: prompt tokens computed; cache_n: reused. draft: what
    speculation was worth.
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
    end the text. stop_tokens: the model's own by default. exact_prefill: the engine's own by
    default. cache_prompt: whether pages of earlier requests are used, and kept for later ones; yes
    by default. cache_salt: reuse is only among requests with the same. on_text is given each piece
    of final text as it comes, on_token each chosen id and the logits (V,) that chose it. on_prompt,
    where given, the logits (n, V) of prompt tokens and the position of the first, in order, perhaps
    more than once; nothing is then reused. on_done is called once nothing more will come. All are
    called while a pass is computed, on its thread, and must not call what waits for the pass: the
    engine's `step`, `generate`, `save_cache` and `restore_cache`. They may `submit` and `cancel`.
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
    """A request on its way. `done` once it has a result, failed, or was cancelled."""

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
        """The result. Raises what went wrong, or RequestError where there is none."""
        if isinstance(self.outcome, Result):
            return self.outcome
        raise self.outcome or RequestError("request: it was cancelled, or is not finished yet")

    def take(self, token: int, logits: F32, context: int) -> StopReason | None:
        """Append a chosen token; why the request ends with it, or None."""
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
