"""From a prompt to text: prefill, decode, and what a caller is told of both (SPEC 14)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from reference.arithmetic import F32
from reference.errors import RequestError
from reference.model import AttentionKind, Model
from reference.sampling import Sampling, sample
from reference.tokenizer import TextStream

FAST_FLOOR = 512
"""Prompt tokens to compute from which a request's prefill is fast (SPEC 8.4)."""


def prefill_attention(prompt_n: int, exact_prefill: bool) -> AttentionKind:
    """Which attention a request's prefill gets, from the tokens it must compute (SPEC 8.4)."""
    return "exact" if exact_prefill or prompt_n < FAST_FLOOR else "fast"


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
    """What a request gave (SPEC 14).

    tokens: the chosen ids, a stop token included. text: what they decode to, a stop token or stop
    string and what follows left out. prompt_n: prompt tokens computed; cache_n: reused. stop:
    `length`, `token`, `string` or `context`.
    """

    tokens: list[int]
    text: str
    prompt_n: int
    cache_n: int
    stop: str
    timings: Timings


class Engine:
    """A model and the decision how to prefill it (SPEC 8.4, 14)."""

    def __init__(self, model: Model, exact_prefill: bool = False) -> None:
        self.model = model
        self.exact_prefill = exact_prefill

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
        request: int = 0,
        stop: str | Sequence[str] = (),
        stop_tokens: Iterable[int] | None = None,
        on_text: Callable[[str], object] | None = None,
    ) -> Result:
        """Generate up to max_new_tokens tokens after a prompt of text or token ids (SPEC 14).

        sampling: greedy by default. stop_tokens: the model's own by default. on_text is given each
        piece of final text as it comes. Raises RequestError.
        """
        started = perf_counter()
        ids = self._encode(prompt)
        if max_new_tokens < 1:
            raise RequestError(
                f"max_new_tokens: {max_new_tokens} is out of range; it must be 1 or more"
            )
        ends = frozenset(self.model.eos_tokens if stop_tokens is None else stop_tokens)
        stops = (stop,) if isinstance(stop, str) else stop
        text = _Text(self.model, stops, on_text or (lambda piece: None))
        tokens: list[int] = []
        reason = "length"
        first = perf_counter()
        for logits in self.steps(ids, tokens, max_new_tokens):
            position = len(ids) + len(tokens)
            previous = np.array([*ids, *tokens], np.int64)
            token = sample(logits, sampling or Sampling(), previous, seed, request, position)
            tokens.append(token)
            if len(tokens) == 1:
                first = perf_counter()
            if token in ends:
                reason = "token"
                break
            if text.feed(token):
                reason = "string"
                break
        else:
            if len(tokens) < max_new_tokens:
                reason = "context"
        ended = perf_counter()
        whole = text.finish()
        reason = "string" if text.stopped else reason
        timings = _timings(started, first, ended, ids, tokens)
        return Result(tokens, whole, len(ids), 0, reason, timings)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in self.model.token_ids(prompt)]
        if self.model.tokenizer is None:
            raise RequestError("prompt: the model has no tokenizer.json; give token ids")
        ids = self.model.tokenizer.encode(prompt)
        if not ids:
            raise RequestError("prompt: the text gives no token; at least one is needed")
        return ids

    def steps(self, ids: Sequence[int], tokens: list[int], count: int) -> Iterator[F32]:
        """Logits (V,) of the prompt's end, then of each token that the caller appends to `tokens`.

        Ends once `tokens` holds `count`, or the context is full.
        """
        cache = self.model.new_cache()
        attention = prefill_attention(len(ids), self.exact_prefill)
        yield self.model.forward(ids, cache, attention, last_only=True)[-1]
        while len(tokens) < count and cache.length < self.model.config.max_positions:
            yield self.model.forward(tokens[-1:], cache)[-1]


class _Text:
    """Text as it becomes final: whole characters, and nothing that a stop string may yet take."""

    def __init__(self, model: Model, stop: Sequence[str], on_text: Callable[[str], object]) -> None:
        self._stream = None if model.tokenizer is None else TextStream(model.tokenizer)
        self._stop = tuple(s for s in stop if s)
        self._on_text = on_text
        self._text, self._sent, self.stopped = "", 0, False

    def feed(self, token: int) -> bool:
        """Take a token; True once a stop string has come."""
        return self._stream is not None and self._take(self._stream.feed(token))

    def finish(self) -> str:
        """Send what was held back, and return the whole text."""
        if self._stream is not None and not self.stopped:
            self._take(self._stream.finish())
            self._send(len(self._text))
        return self._text

    def _take(self, piece: str) -> bool:
        if self.stopped:
            return True
        self._text += piece
        found = [
            at for at in (self._text.find(s, max(0, self._sent)) for s in self._stop) if at >= 0
        ]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
            self._send(len(self._text))
            return True
        self._send(len(self._text) - self._held())
        return False

    def _held(self) -> int:
        """How many characters at the end could begin a stop string."""
        longest = max((len(s) for s in self._stop), default=0)
        for length in range(min(longest - 1, len(self._text) - self._sent), 0, -1):
            if any(s.startswith(self._text[-length:]) for s in self._stop):
                return length
        return 0

    def _send(self, upto: int) -> None:
        if upto > self._sent:
            self._on_text(self._text[self._sent : upto])
            self._sent = upto


def _timings(
    started: float, first: float, ended: float, ids: list[int], tokens: list[int]
) -> Timings:
    prefill, decode = first - started, ended - first
    return Timings(
        prefill,
        decode,
        len(ids) / prefill if prefill > 0 else 0.0,
        (len(tokens) - 1) / decode if decode > 0 else 0.0,
    )
