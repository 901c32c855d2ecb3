"""`/completion` and `/tokenize`: llama-server's own endpoints, with its fields."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from reference.request import Result
from reference.sampling import Sampling
from reference.serve.desk import Ask, Chunk, Desk, Work
from reference.serve.fields import LARGEST_TOP, LARGEST_TOPS, LlamaCompletion, LlamaTokenize
from reference.serve.logprobs import Scored, token_json
from reference.serve.refusal import RefusalError, to_json


def timings(result: Result) -> dict[str, float]:
    """llama-server's `timings`, in milliseconds and tokens a second.

    cache_n and prompt_n: prompt tokens reused, and computed. prompt_ms runs from the arrival to the
    first token, waiting included; predicted_ms from there to the last, so its rates are those of
    predicted_n - 1 tokens.
    """
    spent, prompt, predicted = result.timings, result.prompt_n, len(result.tokens)
    prompt_ms, predicted_ms = spent.time_to_first_token * 1000, spent.decode * 1000
    figures = {
        "cache_n": result.cache_n,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt,
        "prompt_per_second": spent.prefill_rate,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(predicted - 1, 1),
        "predicted_per_second": spent.decode_rate,
    }
    if result.draft.drafted:
        figures |= {"draft_n": result.draft.drafted, "draft_n_accepted": result.draft.accepted}
    return figures


def seed_of(given: int) -> int:
    """The engine's seed: drawn at random for -1, which is the default; others modulo 2^64."""
    return secrets.randbits(32) if given == -1 else given % 2**64


async def tokenized(desk: Desk, fields: LlamaTokenize) -> dict[str, list[int]]:
    """The answer to `/tokenize`: ids of a text, in which special tokens may be spelled out.

    The tokens that the tokenizer itself adds to a prompt come only with `add_special`. Raises
    RequestError.
    """
    return {"tokens": await desk.encode(fields.content, fields.add_special)}


class Answer:
    """The answer to one request to `/completion`. Raises RefusalError."""

    def __init__(self, desk: Desk, fields: LlamaCompletion, prompt: list[int]) -> None:
        self._desk, self._fields = desk, fields
        if fields.repeat_penalty != 1 and fields.repeat_last_n != -1:
            raise RefusalError(
                400, "repeat_last_n: only -1, the whole sequence, is supported", "repeat_last_n"
            )
        self._room = desk.room(prompt, "prompt")
        self._count = self._room if fields.n_predict < 0 else min(fields.n_predict, self._room)
        if fields.n_probs > LARGEST_TOP and fields.n_probs * self._count > LARGEST_TOPS:
            raise RefusalError(
                400,
                f"n_probs: {fields.n_probs} likeliest tokens with each of up to {self._count} are "
                f"more than {LARGEST_TOPS}; lower it to {LARGEST_TOP}, or n_predict",
                "n_probs",
            )
        self._stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
        sampling = Sampling(
            fields.temperature, fields.top_k, fields.top_p, fields.min_p, fields.repeat_penalty
        )
        self.asks = [
            Ask(
                prompt,
                self._count,
                sampling,
                seed_of(fields.seed),
                stop=self._stop,
                ignore_eos=fields.ignore_eos,
                cache_prompt=fields.cache_prompt,
                top=fields.n_probs or None,
            )
        ]

    @classmethod
    async def make(cls, desk: Desk, fields: LlamaCompletion) -> Answer:
        """Encode the prompt. Raises RequestError or RefusalError."""
        given = fields.prompt
        return cls(desk, fields, await desk.encode(given) if isinstance(given, str) else given)

    async def whole(self, work: Work) -> dict[str, Any]:
        """The answer in one object."""
        text, tokens, last = "", list[Scored](), None
        async with aclosing(work.chunks()) as chunks:
            async for chunk in chunks:
                text, tokens, last = text + chunk.text, tokens + chunk.tokens, chunk.result
        assert last is not None
        ids = [scored.token for scored in tokens]
        shown = ids if self._fields.return_tokens else []
        return self._final(last, text) | {"content": text, "tokens": shown} | self._probs(tokens)

    async def events(self, work: Work) -> AsyncGenerator[bytes, None]:
        """The answer in pieces; the last one has everything but the text."""
        text, sent = "", 0
        async with aclosing(work.chunks()) as chunks:
            async for chunk in chunks:
                text, sent = text + chunk.text, sent + len(chunk.tokens)
                if chunk.result is None or chunk.tokens:
                    yield to_json(self._piece(chunk, sent))
                if chunk.result is not None:
                    yield to_json(self._final(chunk.result, text))

    def _piece(self, chunk: Chunk, sent: int) -> dict[str, Any]:
        return {
            "index": 0,
            "content": chunk.text,
            "tokens": [scored.token for scored in chunk.tokens],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": sent,
            "tokens_evaluated": len(self.asks[0].prompt),
            **self._probs(chunk.tokens),
        }

    def _probs(self, tokens: list[Scored]) -> dict[str, Any]:
        if not self._fields.n_probs:
            return {}
        entries = [token_json(self._desk.tokenizer, scored) for scored in tokens]
        return {"completion_probabilities": entries}

    def _final(self, result: Result, text: str) -> dict[str, Any]:
        """What the end of an answer tells. tokens_cached: prompt tokens that were reused."""
        prompt, predicted = self.asks[0].prompt, min(self._count, len(result.tokens))
        stop = {"token": "eos", "string": "word"}.get(result.stop, "limit")
        more = not 0 <= self._fields.n_predict <= self._room
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._desk.name,
            "tokens_predicted": predicted,
            "tokens_evaluated": len(prompt),
            "generation_settings": self._settings(),
            "prompt": self._desk.tokenizer.decode(prompt),
            "has_new_line": "\n" in text,
            "truncated": more and result.stop in ("length", "context"),
            "stop_type": stop if self._count else "limit",
            "stopping_word": self._stopping_word(result),
            "tokens_cached": result.cache_n,
            "timings": timings(result),
        }

    def _stopping_word(self, result: Result) -> str:
        """The stop string at which the text was cut."""
        if result.stop != "string" or not self._count:
            return ""
        rest = self._desk.tokenizer.decode(result.tokens)[len(result.text) :]
        return next((word for word in self._stop if rest.startswith(word)), "")

    def _settings(self) -> dict[str, Any]:
        """What the request was computed with, including its seed if that was drawn."""
        fields = self._fields.model_dump(exclude={"prompt", "cache_prompt", "return_tokens"})
        return fields | {
            "n_ctx": self._desk.context,
            "model": self._desk.name,
            "seed": self.asks[0].seed,
            "stop": list(self._stop),
        }
