"""Fields that are refused, each by its name, and those that change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from reference.engine import Engine
from tests.reference.serve.asking import PATHS, PROMPT, body, events, refusal
from tests.reference.serve.servers import Server, running, words


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
