"""`/v1/completions`: text after a prompt."""

from __future__ import annotations

from typing import Any

from reference.serve.desk import Desk, Work
from reference.serve.fields import Completion
from reference.serve.logprobs import LegacyLogprobs, Scored
from reference.serve.openai import Answer, check


class CompletionAnswer(Answer):
    """One request to `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, desk: Desk, fields: Completion, prompts: list[tuple[str, list[int]]]
    ) -> None:
        self._wanted, self._echo = fields.logprobs, fields.echo
        super().__init__(
            desk,
            fields,
            [ids for _, ids in prompts],
            "prompt",
            fields.max_tokens,
            fields.logprobs,
            fields.echo and fields.logprobs is not None,
        )
        self._prompts = [text for text, _ in prompts for _ in range(fields.n)]
        self._begun = set[int]()
        self._logprobs = [
            LegacyLogprobs(desk.tokenizer, 0 if fields.echo else len(text))
            for text in self._prompts
        ]

    @classmethod
    async def make(cls, desk: Desk, fields: Completion) -> CompletionAnswer:
        """Encode the prompts. Raises RequestError or RefusalError."""
        given: Any = fields.prompt
        if isinstance(given, str) or not given or isinstance(given[0], int):
            given = [given]
        check(desk, fields, len(given))
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                prompts.append((prompt, await desk.encode(prompt)))
            else:
                prompts.append((desk.tokenizer.decode(prompt), prompt))
        return cls(desk, fields, prompts)

    def choice(self, index: int, text: str, work: Work, tokens: list[Scored]) -> dict[str, Any]:
        """The text, after the prompt's where it is echoed."""
        if self._echo:
            text = self._prompts[index] + self._gap(index, tokens) + text
            tokens = work.sequences[index].scores + tokens
        return self._choice(index, text, tokens)

    def opening(self, index: int, work: Work) -> dict[str, Any] | None:
        """The prompt, where it is echoed."""
        if not self._echo:
            return None
        return self._choice(index, self._prompts[index], work.sequences[index].scores)

    def piece(self, index: int, text: str, tokens: list[Scored]) -> dict[str, Any]:
        """The next text and its tokens' logprobs."""
        if not (text or tokens):
            return {"index": index, "text": "", "logprobs": None}
        if self._echo and index not in self._begun:
            self._begun.add(index)
            text = self._gap(index, tokens) + text
        return self._choice(index, text, tokens)

    def _gap(self, index: int, tokens: list[Scored]) -> str:
        """The space that some tokens have after a prompt, and not where a text begins."""
        decode, prompt = self.desk.tokenizer.decode, self.asks[index].prompt
        ids = [scored.token for scored in tokens]
        before, alone, joined = decode(prompt), decode(ids), decode([*prompt, *ids])
        gap = len(joined) - len(before) - len(alone)
        return joined[len(before) :][:gap] if gap > 0 and joined.endswith(alone) else ""

    def _choice(self, index: int, text: str, tokens: list[Scored]) -> dict[str, Any]:
        logprobs = None if self._wanted is None else self._logprobs[index].take(tokens)
        return {"index": index, "text": text, "logprobs": logprobs}
