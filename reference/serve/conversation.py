"""`/v1/chat/completions`: what an assistant says, by the model's chat template."""

from __future__ import annotations

import asyncio
from typing import Any

from reference.config import show
from reference.serve.desk import Desk, Work
from reference.serve.fields import Chat, Message
from reference.serve.logprobs import Scored, token_json
from reference.serve.openai import Answer, check
from reference.serve.refusal import RefusalError

RESERVED = {"messages", "tools", "documents"}


class ChatAnswer(Answer):
    """One request to `/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, desk: Desk, fields: Chat, prompt: list[int]) -> None:
        self._wanted = fields.logprobs
        most = fields.max_completion_tokens or fields.max_tokens
        super().__init__(
            desk, fields, [prompt], "messages", most, fields.top_logprobs if self._wanted else None
        )

    @classmethod
    async def make(cls, desk: Desk, fields: Chat) -> ChatAnswer:
        """Render the messages and encode them. Raises RequestError or RefusalError."""
        check(desk, fields)
        if desk.template is None:
            raise RefusalError(
                400,
                "messages: the model has no chat template; start the server with "
                "--chat-template FILE",
                "messages",
                "no_chat_template",
            )
        if fields.top_logprobs and not fields.logprobs:
            raise RefusalError(400, "top_logprobs: only with logprobs", "top_logprobs")
        limits = {fields.max_tokens, fields.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RefusalError(
                400, "max_tokens: it contradicts max_completion_tokens", "max_tokens"
            )
        reserved = sorted(RESERVED & fields.chat_template_kwargs.keys())
        if reserved:
            raise RefusalError(
                400, f"chat_template_kwargs: {reserved[0]} is set by the server", reserved[0]
            )
        messages = [_plain(message) for message in fields.messages]
        text = await asyncio.to_thread(desk.template.render, messages, fields.chat_template_kwargs)
        return cls(desk, fields, await desk.encode(text, add_special_tokens=False))

    def choice(self, index: int, text: str, work: Work, tokens: list[Scored]) -> dict[str, Any]:
        """The message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens)}

    def opening(self, index: int, work: Work) -> dict[str, Any] | None:
        """Who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(self, index: int, text: str, tokens: list[Scored]) -> dict[str, Any]:
        """The next text; nothing at the end."""
        if not (text or tokens):
            return {"index": index, "delta": {}, "logprobs": None}
        return {"index": index, "delta": {"content": text}, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: list[Scored]) -> dict[str, Any] | None:
        if not self._wanted:
            return None
        entries = [token_json(self.desk.tokenizer, scored) for scored in tokens]
        return {"content": entries, "refusal": None}


def _plain(message: Message) -> dict[str, Any]:
    """A message for the template; parts of text are joined by line ends, other parts refused."""
    data = message.model_dump()
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text":
                raise RefusalError(
                    400,
                    f"messages: content of type {show(part.type)} is not supported; only text is",
                    "messages",
                )
        data["content"] = "\n".join(part.text for part in message.content)
    return data
