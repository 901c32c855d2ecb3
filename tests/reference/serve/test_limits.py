"""Bounds: the context, room in the cache, bytes of a body, requests at a time, seconds."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import openai
import pytest

from reference.engine import Engine
from reference.errors import RequestError
from reference.serve import Limits
from reference.serve import app as app_module
from tests.reference.models import LLAMA_SMALL, MISTRAL_SMALL, small
from tests.reference.serve.asking import GREEDY, PATHS, events, refusal
from tests.reference.serve.servers import running, words
from tests.reference.serve.waiting import long_request, pages_go, slowed, wait_for


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


@pytest.mark.parametrize("target", ["llama", "windowed"])
@pytest.mark.parametrize("positions", [48, 100, 230])
def test_a_draft_models_share_limits_the_context_too(target: str, positions: int) -> None:
    """A target with windows has few pages, whatever the length; its draft model's grow with it."""
    drafter, config = words(), {"llama": LLAMA_SMALL, "windowed": MISTRAL_SMALL}[target]
    model = replace(small(config), tokenizer=drafter.tokenizer)
    both = sum(one.new_pool().position_bytes for one in (model, drafter))
    engine = Engine(model, draft=drafter, cache_bytes=positions * both, max_batched_tokens=16)
    with running(engine) as server:
        answer = server.ask("/completion", prompt=[1, 2, 3], n_predict=-1, ignore_eos=True)
        context = answer["generation_settings"]["n_ctx"]
        assert 16 <= context < positions
        assert answer["tokens_predicted"] == context - 3 + 1
        assert server.ask("/completion", prompt=[1] * context, n_predict=1)["tokens_predicted"] == 1
        error = refusal(server.post("/completion", prompt=[1] * (context + 1), n_predict=1), 400)
        assert error["code"] == "context_length_exceeded"
        assert f"{context + 1} tokens are more than the context of {context}" in error["message"]
    with pytest.raises(RequestError, match=f"^cache: {context + 2} positions"):
        engine.submit([1] * (context + 1), 1)


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
