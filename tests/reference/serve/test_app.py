"""The HTTP door: the engine's bits, two protocols' fields, bounds, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers

from reference.engine import Engine
from reference.errors import RequestError
from reference.model import Model
from reference.sampling import Sampling, sample
from reference.serve import Limits, listen
from reference.serve import app as app_module
from reference.serve.logprobs import Scored, score
from reference.tokenizer import Tokenizer
from tests.reference.serve.servers import Server, alone, running, words
from tests.reference.test_model import tiny

PROMPT = "In the beginning God created"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"temperature": 0}
WARM = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
PATHS = ["/completion", "/v1/completions", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(Engine(tiny())) as server:
        yield server


def encode(text: str) -> list[int]:
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


def body(path: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": PROMPT}
    return {**asked, **GREEDY, **more}


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def wait_for(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


def pages_go(engine: Engine) -> None:
    """Nothing is under way, and what is left in the cache can be given up."""
    wait_for(lambda: not engine.busy)
    engine.prefixes.evict(engine.pool.used_bytes)
    assert engine.pool.used_bytes == 0
    assert len(engine.prefixes) == 0


# /completion


def listed(entry: dict[str, Any]) -> Scored:
    top = tuple((t["id"], t["logprob"]) for t in entry["top_logprobs"])
    return Scored(entry["id"], entry["logprob"], top)


def test_completion_gives_the_engines_bits(server: Server) -> None:
    result, scored = alone(tiny(), encode(PROMPT), 12, top=3)
    answer = server.ask(
        "/completion", prompt=PROMPT, n_predict=12, n_probs=3, return_tokens=True, **GREEDY
    )
    assert answer["tokens"] == result.tokens
    assert answer["content"] == result.text
    assert [listed(entry) for entry in answer["completion_probabilities"]] == scored


def test_logprobs_are_a_float64_log_softmax_of_the_exact_logits(server: Server) -> None:
    answer = server.ask("/completion", prompt=PROMPT, n_predict=1, n_probs=1024, **GREEDY)
    logits = tiny().forward(encode(PROMPT))[-1].astype(np.float64)
    expected = logits - np.logaddexp.reduce(logits)
    (entry,) = answer["completion_probabilities"]
    given = {top["id"]: top["logprob"] for top in entry["top_logprobs"]}
    np.testing.assert_allclose([given[i] for i in range(1024)], expected, rtol=0, atol=1e-12)
    values = [top["logprob"] for top in entry["top_logprobs"]]
    assert values == sorted(values, reverse=True)
    assert entry["id"] == int(logits.argmax())


def test_a_seed_gives_the_engines_draws(server: Server) -> None:
    result, _ = alone(tiny(), encode(PROMPT), 20, sampling=WARM, seed=7)
    fields: dict[str, Any] = {"prompt": PROMPT, "n_predict": 20, "return_tokens": True}
    assert server.ask("/completion", seed=7, **fields)["tokens"] == result.tokens
    drawn = server.ask("/completion", **fields)
    seed = drawn["generation_settings"]["seed"]
    assert server.ask("/completion", seed=seed, **fields)["tokens"] == drawn["tokens"]
    again = [server.ask("/completion", **fields)["tokens"] for _ in range(4)]
    assert any(tokens != drawn["tokens"] for tokens in again), "each draws a seed of its own"


def test_a_prompt_may_be_token_ids(server: Server) -> None:
    ids = server.ask("/completion", prompt=encode(PROMPT), n_predict=5, **GREEDY)
    text = server.ask("/completion", prompt=PROMPT, n_predict=5, **GREEDY)
    assert ids["content"] == text["content"]
    assert ids["prompt"] == text["prompt"] == PROMPT


def test_timings_tell_what_was_reused(server: Server) -> None:
    prompt = "And the evening and the morning were the first day"
    count = len(encode(prompt))
    fields: dict[str, Any] = {"prompt": prompt, "n_predict": 3, **GREEDY}
    first = server.ask("/completion", **fields)
    again = server.ask("/completion", **fields)
    never = server.ask("/completion", cache_prompt=False, **fields)
    kept = [(a["timings"]["cache_n"], a["timings"]["prompt_n"]) for a in (first, again, never)]
    assert kept == [(0, count), (count - 1, 1), (0, count)]
    assert again["tokens_cached"] == count - 1
    assert again["tokens_evaluated"] == count
    assert first["content"] == again["content"] == never["content"]
    times = again["timings"]
    assert times["prompt_per_second"] == pytest.approx(1000 / times["prompt_ms"])
    assert times["predicted_n"] == 3 == again["tokens_predicted"]
    assert times["predicted_per_second"] == pytest.approx(2000 / times["predicted_ms"])


def test_drafted_tokens_are_told() -> None:
    with running(Engine(tiny(), draft="ngram")) as server:
        answer = server.ask("/completion", prompt=PROMPT + " " + PROMPT, n_predict=24, **GREEDY)
    assert answer["content"] == alone(tiny(), encode(PROMPT + " " + PROMPT), 24)[0].text
    assert 0 <= answer["timings"]["draft_n_accepted"] <= answer["timings"]["draft_n"]


@pytest.mark.parametrize(
    ("more", "stop_type", "word"),
    [
        ({"n_predict": 4}, "limit", ""),
        ({"n_predict": 0}, "limit", ""),
        ({"n_predict": 40, "stop": ["zzz", "be"]}, "word", "be"),
    ],
)
def test_why_a_completion_ended(
    server: Server, more: dict[str, Any], stop_type: str, word: str
) -> None:
    answer = server.ask("/completion", prompt=PROMPT, **more, **GREEDY)
    assert (answer["stop_type"], answer["stopping_word"]) == (stop_type, word)
    assert not answer["truncated"]
    whole = alone(tiny(), encode(PROMPT), 40)[0].text
    assert whole.startswith(answer["content"])
    if word:
        assert answer["content"] == whole[: whole.index("be")]
    else:
        assert answer["tokens_predicted"] == more["n_predict"]
        assert bool(answer["content"]) == bool(more["n_predict"])


def test_a_stop_token_and_the_end_of_the_context() -> None:
    model = words()
    with running(Engine(model)) as server:
        for seed in range(8):
            result, _ = alone(
                model, [5, 9], 400, sampling=Sampling(temperature=1), seed=seed, stop_tokens=[2]
            )
            fields: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
            answer = server.ask(
                "/completion", prompt=[5, 9], seed=seed, return_tokens=True, **fields
            )
            assert answer["tokens"] == result.tokens
            assert answer["stop_type"] == {"token": "eos", "context": "limit"}[result.stop]
            assert answer["truncated"] == (result.stop == "context")
        ignoring = server.ask(
            "/completion", prompt=[5, 9], ignore_eos=True, return_tokens=True, **GREEDY
        )
        assert len(ignoring["tokens"]) == model.config.max_positions - 1
        assert ignoring["truncated"]


# /tokenize


def test_a_text_is_tokenized(server: Server) -> None:
    for text in ("", PROMPT, "<|endoftext|>na\u00efve \U0001f600\n"):
        assert server.ask("/tokenize", content=text) == {"tokens": encode(text)}
    assert server.ask("/tokenize", content=PROMPT, parse_special=True, with_pieces=False)


def test_what_a_tokenizer_adds_comes_when_asked_for() -> None:
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        "w31 $A", special_tokens=[("w31", 31)]
    )
    with running(Engine(replace(words(), tokenizer=Tokenizer(library)))) as server:
        told = [
            server.ask("/tokenize", content="w1 w2", **more)["tokens"]
            for more in ({}, {"add_special": False}, {"add_special": True})
        ]
    assert told == [[1, 2], [1, 2], [31, 1, 2]]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "content"),
        ({"content": 3}, "content"),
        ({"content": "a", "add_special": 1}, "add_special"),
        ({"content": "a", "parse_special": False}, "parse_special"),
        ({"content": "a", "with_pieces": True}, "with_pieces"),
        ({"content": "a", "temperature": 0}, "temperature"),
    ],
)
def test_what_tokenize_does_not_take(server: Server, fields: dict[str, Any], named: str) -> None:
    assert named in refusal(server.post("/tokenize", **fields))["message"]


# streams


def merged(path: str, frames: list[Any]) -> dict[str, Any]:
    """The text, the tokens and their logprobs of a stream's pieces."""
    text, tokens, probs = "", list[int](), list[Any]()
    for frame in frames:
        if path == "/completion":
            text, tokens = text + frame["content"], tokens + frame["tokens"]
            probs += frame.get("completion_probabilities", [])
            continue
        for choice in frame["choices"]:
            text += (
                choice["delta"].get("content", "") if "delta" in choice else choice.get("text", "")
            )
            tokens += choice.get("token_ids", [])
            lists = choice["logprobs"] or {}
            if "content" in lists:
                probs += lists["content"]
            elif lists:
                probs += zip(*(lists[name] for name in sorted(lists)), strict=True)
    return {"text": text, "tokens": tokens, "probs": probs}


@pytest.mark.parametrize("stop", [[], ["not", " of"], ["zzz"]])
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_the_whole_in_pieces(server: Server, path: str, stop: list[str]) -> None:
    more = {
        "/completion": {"n_predict": 16, "n_probs": 2, "return_tokens": True},
        "/v1/completions": {"max_tokens": 16, "logprobs": 2, "return_token_ids": True},
        "/v1/chat/completions": {
            "max_tokens": 16,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        },
    }[path]
    fields = body(path, stop=stop, **more)
    whole = server.ask(path, **fields)
    frames = events(server.post(path, stream=True, **fields))
    if path == "/completion":
        assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        pieces = merged(path, frames)
        assert pieces["text"] == whole["content"]
        assert pieces["probs"] == whole["completion_probabilities"]
        assert pieces["tokens"] == whole["tokens"]
        assert frames[-1]["stop_type"] == whole["stop_type"]
        assert frames[-1]["tokens_predicted"] == whole["tokens_predicted"]
        return
    assert frames.pop() == "[DONE]"
    choice = whole["choices"][0]
    pieces = merged(path, frames)
    assert pieces == merged(path, [whole]) | {
        "text": choice["message"]["content"] if "message" in choice else choice["text"]
    }
    reasons = [frame["choices"][0]["finish_reason"] for frame in frames]
    assert reasons == [None] * (len(frames) - 1) + [choice["finish_reason"]]
    assert choice["finish_reason"] == ("stop" if "not" in stop else "length")
    assert len({frame["id"] for frame in frames}) == 1


def test_text_of_several_tokens_a_character_is_streamed_whole(server: Server) -> None:
    """A prompt that the model is made to repeat cannot be had, so any draws of bytes will do."""
    fields: dict[str, Any] = {"prompt": [240, 128], "n_predict": 60, "temperature": 9, "top_k": 0}
    fields |= {"top_p": 1, "min_p": 0, "return_tokens": True, "seed": 3}
    whole = server.ask("/completion", **fields)
    frames = events(server.post("/completion", stream=True, **fields))
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    assert "".join(frame["content"] for frame in frames) == whole["content"]
    assert whole["content"] == tokenizer.decode(whole["tokens"])
    assert "\ufffd" in whole["content"], "bytes that are no characters were meant to come"


# OpenAI's client


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


# what is refused


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"nul",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "prompt": "b"}',
        b"\xff\xfe",
        b'{"a":' * 3000,
        b"[" * 100_000,
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_no_json_object_of_known_fields(
    server: Server, path: str, text: bytes
) -> None:
    with server.client() as client:
        error = refusal(client.post(path, content=text))
    assert error["type"] == "invalid_request_error"


WRONG: list[tuple[str, Any]] = [
    ("temperature", "warm"),
    ("temperature", -1),
    ("temperature", True),
    ("top_p", 0),
    ("seed", 1.5),
    ("seed", 2**64),
    ("stop", 3),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stream", 1),
    ("cache_prompt", "yes"),
    ("frequency_penalty", 0.5),
    ("presence_penalty", False),
    ("logit_bias", {"5": 1}),
    ("a_field_that_nobody_knows", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_is_wrong_is_named(server: Server, path: str, name: str, value: Any) -> None:
    error = refusal(server.post(path, **body(path) | {name: value}))
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *[("/completion", "prompt", value) for value in (None, 3, [], [1, "a"], [-1], [1024], "")],
        ("/completion", "n_predict", -2),
        ("/completion", "n_predict", "5"),
        ("/completion", "mirostat", 2),
        ("/completion", "grammar", 'root ::= "a"'),
        ("/completion", "json_schema", {}),
        ("/completion", "samplers", ["top_k"]),
        ("/completion", "post_sampling_probs", True),
        ("/completion", "t_max_predict_ms", 5),
        ("/completion", "lora", [{"id": 0, "scale": 1}]),
        ("/v1/completions", "prompt", [[1], "a"]),
        ("/v1/completions", "prompt", []),
        ("/v1/completions", "max_tokens", -1),
        ("/v1/completions", "logprobs", 21),
        ("/v1/completions", "logprobs", True),
        ("/v1/completions", "n", 0),
        ("/v1/completions", "n", 257),
        ("/v1/completions", "best_of", 2),
        ("/v1/completions", "suffix", "end"),
        ("/v1/completions", "stream_options", {"include_usage": True}),
        ("/v1/chat/completions", "messages", []),
        ("/v1/chat/completions", "messages", "hi"),
        ("/v1/chat/completions", "messages", [{"content": "hi"}]),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": 5}]),
        (
            "/v1/chat/completions",
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ),
        ("/v1/chat/completions", "top_logprobs", 2),
        ("/v1/chat/completions", "tools", [{"type": "function"}]),
        ("/v1/chat/completions", "tool_choice", "auto"),
        ("/v1/chat/completions", "response_format", {"type": "json_object"}),
        ("/v1/chat/completions", "reasoning_effort", "low"),
        ("/v1/chat/completions", "max_tokens", 0),
    ],
)
def test_a_field_of_one_endpoint_that_is_wrong_is_named(
    server: Server, path: str, name: str, value: Any
) -> None:
    error = refusal(server.post(path, **body(path) | {name: value}))
    assert error["param"] == name
    assert name in error["message"]


def test_limits_that_contradict_each_other(server: Server) -> None:
    fields = body(PATHS[2], max_tokens=3, max_completion_tokens=4)
    assert refusal(server.post(PATHS[2], **fields))["param"] == "max_tokens"


def test_a_penalty_of_the_last_tokens_only_is_refused(server: Server) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "n_predict": 2, "repeat_last_n": 64}
    assert server.ask("/completion", repeat_penalty=1.0, **fields)
    error = refusal(server.post("/completion", repeat_penalty=1.1, **fields))
    assert error["param"] == "repeat_last_n"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/completion",
            {
                "mirostat": 0,
                "mirostat_tau": 5.0,
                "logit_bias": [],
                "grammar": "",
                "id_slot": 0,
                "dry_multiplier": 0.0,
                "typical_p": 1.0,
                "n_keep": 0,
                "json_schema": None,
            },
        ),
        (
            "/v1/completions",
            {
                "frequency_penalty": 0.0,
                "presence_penalty": None,
                "best_of": 1,
                "user": "me",
                "suffix": None,
                "logprobs": None,
            },
        ),
        (
            "/v1/chat/completions",
            {
                "tools": None,
                "tool_choice": "none",
                "response_format": {"type": "text"},
                "store": False,
                "logit_bias": {},
                "metadata": {"a": "b"},
            },
        ),
    ],
)
def test_what_changes_nothing_is_accepted(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    limit = {"n_predict": 3} if path == "/completion" else {"max_tokens": 3}
    assert server.ask(path, **body(path, **limit), **fields)


def test_a_model_that_is_not_here(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        server.openai().completions.create(model="gpt", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("path", PATHS[:2])
def test_a_prompt_longer_than_the_context(path: str) -> None:
    with running(Engine(words())) as server:
        limit = {"n_predict": 1} if path == "/completion" else {"max_tokens": 1}
        assert server.ask(path, prompt=[1] * 256, **limit)
        error = refusal(server.post(path, prompt=[1] * 257))
    assert error["code"] == "context_length_exceeded"
    assert "257" in error["message"]
    assert "256" in error["message"]


def test_the_context_is_what_the_cache_has_room_for() -> None:
    model = words()
    engine = Engine(model)
    budget = engine.scheduler.most_bytes(100)
    engine = Engine(model, cache_bytes=budget)
    assert engine.scheduler.most_bytes(100) <= budget
    with running(engine) as server:
        answer = server.ask("/completion", prompt=[5], ignore_eos=True, **GREEDY)
        context = answer["generation_settings"]["n_ctx"]
        assert 100 <= context < 256
        assert engine.scheduler.most_bytes(context) <= budget
        assert engine.scheduler.most_bytes(context + 1) > budget
        assert answer["tokens_predicted"] == context
        refusal(server.post("/completion", prompt=[5] * (context + 1)))


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_all_that_a_small_cache_has_room_for_is_taken(draft: Any) -> None:
    """A draft may take the position of the last token, which else takes none."""
    model = words()
    page = sum(group.page_bytes for group in model.new_pool(1 << 22).groups)
    with running(Engine(model, cache_bytes=3 * page, draft=draft)) as server:
        answer = server.ask("/completion", prompt=[1, 2, 3], n_predict=-1, ignore_eos=True)
        context = answer["generation_settings"]["n_ctx"]
        assert answer["tokens_predicted"] == context - 3 + 1
        assert server.ask("/completion", prompt=[1] * context, n_predict=1)["tokens_predicted"] == 1
        refusal(server.post("/completion", prompt=[1] * (context + 1), n_predict=1), 400)
        assert context == 32 - (draft is not None)


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


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_minus_one_alone_is_a_seed_at_random(path: str) -> None:
    count = "n_predict" if path == "/completion" else "max_tokens"
    with running(Engine(words())) as server:

        def ask(seed: int) -> str:
            of = {"prompt": "w1", "seed": seed, "ignore_eos": True, count: 24}
            answer = server.ask(path, **of)
            text: str = answer["content"] if path == "/completion" else answer["choices"][0]["text"]
            return text

        assert ask(-5) == ask(-5) == ask(2**64 - 5)
        assert len({ask(-1) for _ in range(3)}) > 1


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_penalty_that_leaves_no_choice_is_the_requests_own(path: str) -> None:
    name = "repeat_penalty" if path == "/completion" else "repetition_penalty"
    with running(Engine(words())) as server:
        fields = {"prompt": list(range(32)), name: 1e-40}
        error = refusal(server.post(path, **fields), 400)
        assert error["param"] == "repetition_penalty"
        assert "1e-40 makes logits" in error["message"]
        frames = events(server.post(path, stream=True, **fields))
        assert frames[-1]["error"] == error


def test_no_answer_grows_with_what_it_refuses(server: Server) -> None:
    long = "y" * 100_000
    for path, fields in (
        ("/v1/completions", {"prompt": "w1", "model": long}),
        ("/v1/completions", {"prompt": "w1", long: 1}),
        ("/v1/completions", {"prompt": "w1", "stream": True, "stream_options": {long: 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": long}]}]}),
    ):
        with server.client() as client:
            answer = client.post(path, json=fields)
        assert answer.status_code in (400, 404)
        assert len(answer.text) < 600
    number = "9" * 4300
    with server.client() as client:
        text = f'{{"prompt": ["w1", "w2"], "n": {number}}}'
        assert refusal(client.post("/v1/completions", content=text))["param"] == "n"


def test_no_word_stops_what_chooses_nothing(server: Server) -> None:
    of = {"prompt": [1, 2, 3], "temperature": 0}
    word = server.ask("/completion", n_predict=1, **of)["content"].split()[0]
    for count, stopping in ((0, ""), (1, word)):
        answer = server.ask("/completion", n_predict=count, stop=[word], **of)
        assert answer["stopping_word"] == stopping


def test_sequences_beside_one_that_is_refused_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(words())
    original = Engine.submit

    def picky(self: Engine, prompt: Any, *arguments: Any, **options: Any) -> Any:
        if len(prompt) > 3:
            raise RequestError("prompt: too long; shorten it")
        return original(self, prompt, *arguments, **options)

    monkeypatch.setattr(Engine, "submit", picky)
    with running(engine) as server:
        refusal(server.post("/v1/completions", prompt=[[1, 2, 3], [1] * 20], max_tokens=200))
        pages_go(engine)
        with server.client() as client:
            wait_for(lambda: "bitforbit_sequences 0.0" in client.get("/metrics").text)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body(chunked: bool) -> None:
    with (
        running(Engine(words()), limits=Limits(body_bytes=1000)) as server,
        server.client() as client,
    ):
        text = b" " * 998
        good = client.post("/completion", content=b'{"prompt":"w1","n_predict":1}')
        assert good.status_code == 200
        content: Any = iter([text, b"xxx"]) if chunked else text + b"xxx"
        assert refusal(client.post("/completion", content=content), 413)["param"] == "body"
        assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("method", "path", "status", "remedy"),
    [
        ("GET", "/completion", 405, "use POST"),
        ("POST", "/health", 405, "use GET"),
        ("GET", "/", 404, "there are /completion, /v1/completions"),
    ],
)
def test_other_paths_and_methods(
    server: Server, method: str, path: str, status: int, remedy: str
) -> None:
    with server.client() as client:
        message = refusal(client.request(method, path), status)["message"]
        assert message.partition("; ")[2].startswith(remedy)


def test_another_host_is_refused(server: Server) -> None:
    """A page in a browser may not reach the server by a name that it made point here."""
    with server.client() as client:
        answer = client.get("/health", headers={"Host": "evil.example"})
    assert answer.status_code == 400


# bounds of time and number


def long_request() -> dict[str, Any]:
    return {"prompt": [5], "ignore_eos": True, "stream": True, "cache_prompt": False}


def slowed(engine: Engine, seconds: float) -> Engine:
    engine.on_pass = lambda _: time.sleep(seconds)
    return engine


def test_a_full_queue_refuses_and_empties() -> None:
    engine = slowed(Engine(words()), 0.02)
    with running(engine, limits=Limits(sequences=2)) as server, server.client() as client:
        with client.stream("POST", "/completion", json=long_request()) as stream:
            lines = stream.iter_lines()
            next(lines)
            fields: dict[str, Any] = {"prompt": "w1", "max_tokens": 1}
            assert server.ask("/v1/completions", **fields)
            refused = server.post("/v1/completions", n=2, **fields)
            assert refusal(refused, 503)["code"] == "queue_full"
            assert refused.headers["retry-after"] == "1"
            with pytest.raises(openai.InternalServerError, match="the queue is full"):
                server.openai().completions.create(model="tiny", n=2, prompt="w1")
        wait_for(lambda: not engine.busy)
        assert server.ask("/v1/completions", n=2, **fields)


def test_time_is_up() -> None:
    engine = slowed(Engine(words()), 0.05)
    with running(engine, limits=Limits(seconds=0.4)) as server:
        fields = long_request() | {"stream": False}
        assert refusal(server.post("/completion", **fields), 504)["code"] == "time_limit"
        frames = events(server.post("/completion", **long_request()))
        assert frames[-1]["error"]["code"] == "time_limit"
        assert all(frame["stop"] is False for frame in frames[:-1])
        stream = server.openai().completions.create(
            model="tiny", prompt="w5", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError, match=r"more than 0\.4 seconds"):
            list(stream)
        pages_go(engine)


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "GRACE", 0.1)
    with running(Engine(words()), limits=Limits(seconds=0.2)) as server:
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as door:
            door.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\n")
            door.sendall(b"Content-Length: 50\r\n\r\n{")
            assert door.recv(1000).startswith(b"HTTP/1.1 504")


def test_a_fault_of_the_engine_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(words())
    with running(engine) as server:
        with monkeypatch.context() as patch:

            def fails(*arguments: Any) -> None:
                time.sleep(0.3)  # others arrive meanwhile
                raise MemoryError("no\nroom")

            patch.setattr(Model, "forward_batch", fails)
            error = refusal(server.post("/completion", prompt="w1"), 500)
            assert (error["type"], "MemoryError" in error["message"]) == ("server_error", True)
            frames = events(server.post("/completion", prompt="w1", stream=True))
            assert "MemoryError" in frames[-1]["error"]["message"]
            with ThreadPoolExecutor(8) as threads:
                for answer in threads.map(
                    lambda _: server.post("/completion", prompt="w1"), range(8)
                ):
                    refusal(answer, 500)
        assert server.ask("/completion", prompt="w1", n_predict=2)
        pages_go(engine)
        with server.client() as client:
            assert "bitforbit_sequences 0.0" in client.get("/metrics").text


# clients that go away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_goes_away_frees_its_pages(path: str, stream: bool) -> None:
    engine = slowed(Engine(words()), 0.02)
    with running(engine) as server:
        port = int(server.url.rpartition(":")[2])
        fields = body(path, stream=stream, ignore_eos=True, cache_prompt=False)
        if path == "/v1/completions":
            fields["max_tokens"] = 200
        data = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as door:
            door.sendall(head.encode() + data)
            wait_for(lambda: engine.pool.used_bytes > 0)
        started = time.monotonic()
        wait_for(lambda: engine.pool.used_bytes == 0)
        assert time.monotonic() - started < 2, "200 tokens take 4 seconds at least"
        assert not engine.busy
        with server.client() as client:
            text = client.get("/metrics").text
        assert "bitforbit_sequences_cancelled_total 1.0" in text
        assert "bitforbit_sequences 0.0" in text
        assert "bitforbit_cache_bytes 0.0" in text


def test_two_hundred_requests_of_which_many_go_away() -> None:
    """Nothing leaks, nothing hangs, and no bit of those that stay changes."""
    model, dice = words(), random.Random(1)
    engine = Engine(model, max_batched_tokens=64)
    engine = Engine(model, max_batched_tokens=64, cache_bytes=8 * engine.scheduler.most_bytes(80))
    stems = [[dice.randrange(3, 32) for _ in range(40)] for _ in range(4)]
    asked = []
    for seed in range(200):
        prompt = [*stems[seed % 4][: dice.randrange(1, 40)], seed % 29 + 3]
        asked.append((prompt, dice.randrange(1, 24), seed, dice.random() < 0.4))

    async def one(client: httpx.AsyncClient, index: int) -> list[Scored] | None:
        prompt, count, seed, leaves = asked[index]
        fields: dict[str, Any] = {"prompt": prompt, "seed": seed, "stream": index % 2 == 0}
        fields |= {"ignore_eos": True, "top_p": 1, "min_p": 0, "top_k": 0, "temperature": 1}
        path = PATHS[index // 2 % 2]
        if path == "/completion":
            fields |= {"n_predict": count, "n_probs": 1, "return_tokens": True}
        else:
            fields |= {"max_tokens": count, "logprobs": 0, "return_token_ids": True}
        await asyncio.sleep(dice.random() * 0.5)
        asking = asyncio.ensure_future(client.post(path, json=fields))
        if leaves:
            await asyncio.sleep(dice.random())
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return None
        response = await asking
        assert response.status_code == 200, response.text
        return scores(path, response)

    def scores(path: str, response: httpx.Response) -> list[Scored]:
        streamed = response.headers["content-type"].startswith("text/event-stream")
        frames = events(response) if streamed else [response.json()]
        frames = [frame for frame in frames if frame != "[DONE]"]
        if path == "/completion":
            given = [e for frame in frames for e in frame.get("completion_probabilities", [])]
            return [Scored(entry["id"], entry["logprob"]) for entry in given]
        choices = [frame["choices"][0] for frame in frames]
        ids = [token for choice in choices for token in choice.get("token_ids", [])]
        lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        values = [value for part in lists for value in part["token_logprobs"]]
        return [Scored(*pair) for pair in zip(ids, values, strict=True)]

    async def all_of_them(url: str) -> list[list[Scored] | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            return await asyncio.gather(*(one(client, index) for index in range(len(asked))))

    with running(engine) as server:
        answers = asyncio.run(all_of_them(server.url))
        pages_go(engine)
        with server.client() as client:
            text = client.get("/metrics").text
        assert "bitforbit_sequences 0.0" in text
        assert "bitforbit_sequences_cancelled_total 0.0" not in text
        assert server.ask("/completion", prompt=[5], n_predict=1)
    stayed = [index for index, answer in enumerate(answers) if answer is not None]
    assert 60 < len(stayed) < 180
    for index in stayed:
        assert answers[index] == in_one_pass(*asked[index][:3], answers[index] or [])


def in_one_pass(prompt: list[int], count: int, seed: int, given: list[Scored]) -> list[Scored]:
    """What one forward pass over the prompt and the tokens given says that they should be."""
    tokens = [*prompt, *(entry.token for entry in given)]
    assert len(given) == count
    rows = words().forward(tokens)[len(prompt) - 1 : -1]
    expected = []
    for position, row in enumerate(rows, len(prompt)):
        previous = np.array(tokens[:position], np.int64)
        token = sample(row, Sampling(temperature=1), previous, seed, 0, position)
        expected.append(score(token, row, 0))
    return expected


# the rest


def test_what_a_server_tells_of_itself(server: Server) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert [model.id for model in server.openai().models.list()] == ["tiny"]
        before = client.get("/metrics")
        assert before.headers["content-type"].startswith("text/plain")
        server.ask("/completion", prompt=PROMPT, n_predict=3, cache_prompt=False)
        after = client.get("/metrics").text

    def value(text: str, name: str) -> float:
        (line,) = (line for line in text.splitlines() if line.startswith(name + " "))
        return float(line.split()[-1])

    for name, grown in (
        ("bitforbit_prompt_tokens_total", len(encode(PROMPT))),
        ("bitforbit_generated_tokens_total", 3),
        ('bitforbit_http_requests_total{path="/completion",status="200"}', 1),
    ):
        assert value(after, name) - value(before.text, name) == grown


def test_no_chunk_waits_for_an_acknowledgement() -> None:
    with listen(0) as door, socket.create_connection(door.getsockname()) as client:
        connection, _ = door.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client
