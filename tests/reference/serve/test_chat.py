"""`/v1/chat/completions` by OpenAI's client: messages and the template that renders them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
import tokenizers

from reference.engine import Engine
from reference.tokenizer import Tokenizer
from tests.reference.models import tiny
from tests.reference.serve.asking import GREEDY, MESSAGES, encode
from tests.reference.serve.servers import Server, alone, running, words


def test_chat_by_the_openai_client(server: Server) -> None:
    text = "system: Be brief.\nuser: Hi\nassistant:"
    result, scored = alone(tiny(), encode(text), 10, top=2)
    client = server.openai()
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=10,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    )
    (choice,) = answer.choices
    assert choice.message.content == result.text
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert [entry.logprob for entry in content] == [entry.logprob for entry in scored]
    assert [[t.logprob for t in entry.top_logprobs] for entry in content] == [
        [value for _, value in entry.top] for entry in scored
    ]
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == result.text
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=10,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == result.text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_parts_of_text_are_joined(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    fields: dict[str, Any] = {"max_tokens": 4, "return_token_ids": True, **GREEDY}
    joined = server.ask(
        "/v1/chat/completions", messages=[{"role": "user", "content": parts}], **fields
    )
    plain = server.ask(
        "/v1/chat/completions", messages=[{"role": "user", "content": "a\nb"}], **fields
    )
    assert joined["choices"] == plain["choices"]
    assert joined["choices"][0]["prompt_token_ids"] == encode("user: a\nb\nassistant:")


def test_a_template_writes_special_tokens_itself() -> None:
    """A text prompt gets what the tokenizer adds, a rendered one only what its template wrote."""
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="w1 $A", special_tokens=[("w1", 1)]
    )
    model = replace(words(), tokenizer=Tokenizer(library))
    more: dict[str, Any] = {"max_tokens": 1, "return_token_ids": True}
    with running(Engine(model), template="w1 {{ messages[0].content }}") as server:
        text = server.ask("/v1/completions", prompt="w5 w6", **more)
        messages = [{"role": "user", "content": "w5 w6"}]
        chat = server.ask("/v1/chat/completions", messages=messages, **more)
    for answer in (text, chat):
        assert answer["choices"][0]["prompt_token_ids"] == [1, 5, 6]


def test_arguments_of_the_template(server: Server) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2, "return_token_ids": True}
    more = {"chat_template_kwargs": {"add_generation_prompt": False}}
    answer = server.ask("/v1/chat/completions", **fields, **more)
    prompt = answer["choices"][0]["prompt_token_ids"]
    assert prompt == encode("system: Be brief.\nuser: Hi\n")
    refused = server.post("/v1/chat/completions", **fields, chat_template_kwargs={"messages": []})
    assert refused.status_code == 400


def test_without_a_template_chat_names_the_option() -> None:
    with running(Engine(words()), template=None) as server:
        with pytest.raises(openai.BadRequestError, match="--chat-template FILE"):
            server.openai().chat.completions.create(model="tiny", messages=MESSAGES)
        assert server.ask("/v1/completions", prompt="w1", max_tokens=1)["choices"]


def test_a_template_that_refuses() -> None:
    source = "{{ raise_exception('roles must\n alternate') }}"
    with (
        running(Engine(words()), template=source) as refusing,
        pytest.raises(openai.BadRequestError, match="roles must alternate") as error,
    ):
        refusing.openai().chat.completions.create(model="tiny", messages=MESSAGES)
    assert error.value.param == "messages"
