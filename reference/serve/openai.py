"""What OpenAI's two endpoints share: answers, whole and streamed."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from reference.config import show
from reference.request import Result
from reference.sampling import Sampling
from reference.serve.desk import Ask, Desk, Work
from reference.serve.fields import OpenAI
from reference.serve.llama import seed_of, timings
from reference.serve.logprobs import Scored
from reference.serve.refusal import RefusalError, to_json

DONE = b"[DONE]"


def check(desk: Desk, fields: OpenAI, prompts: int = 1) -> None:
    """Raise RefusalError for another model, too many sequences, or stream options without a stream.

    prompts: how many prompts the request has.
    """
    if fields.model is not None and fields.model != desk.name:
        raise RefusalError(
            404,
            f"model: {show(fields.model)} is not here; this server has {desk.name!a}",
            "model",
            "model_not_found",
        )
    count, most = prompts * fields.n, desk.limits.sequences
    if count > most:
        raise RefusalError(400, f"n: {count} sequences are more than this server's {most}", "n")
    if fields.stream_options is not None and not fields.stream:
        raise RefusalError(400, "stream_options: only with stream", "stream_options")


class Answer(ABC):
    """The answer to one request, whose `asks` are n sequences for each prompt, in order.

    Sequence i of a prompt is request i of the seed's random draws (SPEC 13.2). prefix: of the
    answer's id. kind, chunk_kind: what a whole answer and a piece of one call themselves.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self,
        desk: Desk,
        fields: OpenAI,
        prompts: Sequence[list[int]],
        param: str,
        most: int | None,
        top: int | None,
        score_prompt: bool = False,
    ) -> None:
        self.desk, self._fields = desk, fields
        sampling = Sampling(
            fields.temperature, fields.top_k, fields.top_p, fields.min_p, fields.repetition_penalty
        )
        seed = seed_of(fields.seed)
        stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
        self.asks = []
        for prompt in prompts:
            room = desk.room(prompt, param)
            count = room if most is None else min(most, room)
            self.asks += [
                Ask(
                    prompt,
                    count,
                    sampling,
                    seed,
                    number,
                    stop,
                    fields.ignore_eos,
                    fields.cache_prompt,
                    fields.cache_salt,
                    top,
                    score_prompt,
                )
                for number in range(fields.n)
            ]
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": desk.name,
            "system_fingerprint": desk.engine.model.digest,
        }

    @abstractmethod
    def choice(self, index: int, text: str, work: Work, tokens: list[Scored]) -> dict[str, Any]:
        """A sequence's choice in the whole answer, without what all choices have."""

    @abstractmethod
    def opening(self, index: int, work: Work) -> dict[str, Any] | None:
        """What a streamed choice begins with, before any token; None for nothing."""

    @abstractmethod
    def piece(self, index: int, text: str, tokens: list[Scored]) -> dict[str, Any]:
        """A streamed choice's next piece; the last one has neither text nor tokens."""

    async def whole(self, work: Work) -> dict[str, Any]:
        """The answer in one object."""
        texts = [""] * len(self.asks)
        tokens: list[list[Scored]] = [[] for _ in self.asks]
        results: dict[int, Result] = {}
        async with aclosing(work.chunks()) as chunks:
            async for chunk in chunks:
                texts[chunk.index] += chunk.text
                tokens[chunk.index] += chunk.tokens
                if chunk.result is not None:
                    results[chunk.index] = chunk.result
        choices = [
            {
                **self.choice(index, texts[index], work, tokens[index]),
                "finish_reason": self._reason(index, results[index]),
                **self._ids(tokens[index], self.asks[index]),
            }
            for index in range(len(self.asks))
        ]
        answer = {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": self._usage(results),
        }
        return answer | ({"timings": timings(results[0])} if len(results) == 1 else {})

    async def events(self, work: Work) -> AsyncGenerator[bytes, None]:
        """The answer in pieces."""
        options = self._fields.stream_options
        usage = options is not None and options.include_usage
        results: dict[int, Result] = {}

        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            last = {"usage": None} if usage else {}
            data = {**self._head, "object": self.chunk_kind, "choices": choices, **last, **more}
            return to_json(data)

        opened: set[int] = set()
        async with aclosing(work.chunks()) as chunks:
            async for chunk in chunks:
                index = chunk.index
                if index not in opened:
                    opened.add(index)
                    opening = self.opening(index, work)
                    if opening is not None:
                        yield event([{**opening, "finish_reason": None}])
                if chunk.text or chunk.tokens:
                    piece = self.piece(index, chunk.text, chunk.tokens)
                    yield event([{**piece, "finish_reason": None, **self._ids(chunk.tokens)}])
                if chunk.result is not None:
                    results[index] = chunk.result
                    reason = self._reason(index, chunk.result)
                    choice = {**self.piece(index, "", []), "finish_reason": reason}
                    yield event([choice], timings=timings(chunk.result))
        if usage:
            yield event([], usage=self._usage(results))
        yield DONE

    def _ids(self, tokens: list[Scored], ask: Ask | None = None) -> dict[str, Any]:
        """The ids of tokens, and in a whole answer of the prompt, if they were asked for."""
        if not self._fields.return_token_ids:
            return {}
        prompt = {} if ask is None else {"prompt_token_ids": ask.prompt}
        return {"token_ids": [scored.token for scored in tokens], **prompt}

    def _reason(self, index: int, result: Result) -> str:
        ended = result.stop in ("token", "string") and self.asks[index].count > 0
        return "stop" if ended else "length"

    def _usage(self, results: dict[int, Result]) -> dict[str, Any]:
        """Token counts: each prompt counts once, and the output of every sequence."""
        firsts = range(0, len(self.asks), self._fields.n)
        prompt = sum(len(self.asks[index].prompt) for index in firsts)
        output = sum(min(self.asks[i].count, len(r.tokens)) for i, r in results.items())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {
                "cached_tokens": sum(results[index].cache_n for index in firsts)
            },
        }
