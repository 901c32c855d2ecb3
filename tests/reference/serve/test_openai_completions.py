"""`/v1/completions` by OpenAI's client: choices, logprobs, offsets and echoed prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from reference.engine import Engine
from reference.sampling import Sampling
from tests.reference.models import tiny
from tests.reference.serve.asking import PROMPT, encode, events
from tests.reference.serve.servers import Server, alone, running, words


def test_completions_by_the_openai_client(server: Server) -> None:
    result, scored = alone(tiny(), encode(PROMPT), 12, top=2)
    answer = server.openai().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (result.text, "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [entry.logprob for entry in scored]
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == result.text
    assert choice.logprobs.top_logprobs is not None
    for token, top, entry in zip(
        choice.logprobs.tokens, choice.logprobs.top_logprobs, scored, strict=True
    ):
        assert list(top.values()) == [value for _, value in entry.top]
        assert top[token] == entry.logprob
    whole = PROMPT + choice.text
    assert choice.logprobs.text_offset is not None
    for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert whole[offset : offset + len(token)] == token
    assert answer.system_fingerprint == tiny().digest
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(encode(PROMPT))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == len(encode(PROMPT)) + 12
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert answer.model_extra is not None
    assert cached == answer.model_extra["timings"]["cache_n"]


def test_every_choice_is_a_request_of_the_engine(server: Server) -> None:
    prompts = ["And God said", "In the"]
    answer = server.openai().completions.create(
        model="tiny", prompt=prompts, max_tokens=9, n=3, seed=11, temperature=0.7, top_p=0.9
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    sampling = Sampling(temperature=0.7, top_p=0.9)
    expected = [
        alone(tiny(), encode(prompt), 9, sampling=sampling, seed=11, request=request)[0].text
        for prompt in prompts
        for request in range(3)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) > 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(encode(prompt)) for prompt in prompts)


@pytest.mark.parametrize("count", [0, 3])
def test_an_echoed_prompt_is_scored(count: int) -> None:
    """Chunks of 5 tokens, and pages that an earlier request left: the logprobs are all there."""
    ids = encode(PROMPT)
    with running(Engine(tiny(), max_batched_tokens=5)) as server:
        client = server.openai()
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=count, echo=True, logprobs=1, temperature=0
        )
    choice, logits = answer.choices[0], tiny().forward(ids).astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    expected = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    given: list[Any] = list(choice.logprobs.token_logprobs)
    assert given[0] is None
    assert given[1 : len(ids)] == pytest.approx(expected, rel=0, abs=1e-12)
    assert len(given) == len(ids) + count
    result = alone(tiny(), ids, 3)[0]
    assert choice.text == PROMPT + (result.text if count else "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == count
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text


def test_an_echo_is_streamed_first(server: Server) -> None:
    stream = server.openai().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, echo=True, logprobs=0, temperature=0, stream=True
    )
    pieces = [chunk.choices[0] for chunk in stream]
    assert pieces[0].text == PROMPT
    assert pieces[0].logprobs is not None
    assert len(pieces[0].logprobs.tokens or []) == len(encode(PROMPT))
    offsets = [o for piece in pieces if piece.logprobs for o in piece.logprobs.text_offset or []]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(encode(PROMPT)) + 3


def test_a_model_that_is_not_here(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        server.openai().completions.create(model="gpt", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_stand_where_their_offsets_say(echo: bool) -> None:
    """Of a tokenizer whose tokens have a space before them, but where a text begins."""
    prompt, fields = "w1 w2", {"max_tokens": 3, "ignore_eos": True, "logprobs": 2, "echo": echo}
    with running(Engine(words())) as server:
        (choice,) = server.ask("/v1/completions", prompt=prompt, seed=1, **fields)["choices"]
        frames = events(
            server.post("/v1/completions", prompt=prompt, seed=1, stream=True, **fields)
        )
    logprobs, text = choice["logprobs"], choice["text"] if echo else f"{prompt}{choice['text']}"
    spelled = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    assert all(text[offset : offset + len(token)] == token for token, offset in spelled)
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, likeliest in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert likeliest is None or (token in likeliest and len(likeliest) in (2, 3))
        assert likeliest is None or len({name.startswith(" ") for name in likeliest}) == 1
    if echo:
        assert [len(word) for word in text.split(" ")] == [
            2,
            2,
            *(len(w) for w in text.split()[2:]),
        ]
        assert len(text.split()) == 5
    pieces = [frame["choices"][0] for frame in frames if isinstance(frame, dict)]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    offsets = [o for piece in pieces if piece["logprobs"] for o in piece["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]
