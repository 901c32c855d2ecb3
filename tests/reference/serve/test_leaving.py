"""Clients that go away, and requests whose neighbours or passes fail: nothing leaks."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from reference.engine import Engine
from reference.errors import RequestError
from reference.model import Model
from reference.sampling import Sampling, sample
from reference.serve.logprobs import Scored, score
from tests.reference.serve.asking import PATHS, body, events, refusal
from tests.reference.serve.servers import running, words
from tests.reference.serve.waiting import pages_go, slowed, wait_for


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
