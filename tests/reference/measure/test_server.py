"""A server measured from outside: a real one, and ones that misbehave."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reference.engine import Engine
from reference.errors import RequestError
from reference.measure.bench import Bench, Trial
from reference.measure.server import OPENAI, Prompts, Server, about, fingerprint
from tests.reference.serve.servers import running, words

httpx = pytest.importorskip("httpx")


def prompts(cold: bool = False, vocabulary: int = 32) -> Prompts:
    return Prompts(vocabulary, cold, np.random.default_rng(5))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(Engine(words(), cache_bytes=1 << 24)) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_the_same_prompt_again_is_warm(client: Any) -> None:
    (row,) = Bench([Server(client, prompts())], [Trial(40, 0)], 2).rows()
    assert [(s.cache_n, s.prompt_n, s.predicted_n) for s in row.samples] == [(39, 1, 1)] * 2
    assert row.cache == "warm"


def test_cold_prompts_are_computed_whole(client: Any) -> None:
    arm = Server(client, prompts(cold=True))
    rows = list(Bench([arm], [Trial(40, 0), Trial(0, 6), Trial(20, 3)], 2).rows())
    assert [row.cache for row in rows] == ["cold"] * 3
    for row, prompt_n, predicted in zip(rows, (40, 1, 20), (1, 6, 4), strict=True):
        assert {(s.cache_n, s.prompt_n, s.predicted_n) for s in row.samples} == {
            (0, prompt_n, predicted)
        }


def test_depth_is_what_the_cache_holds(client: Any) -> None:
    (row,) = Bench([Server(client, prompts())], [Trial(10, 2, 50)], 3).rows()
    assert {(s.cache_n, s.prompt_n, s.predicted_n) for s in row.samples} == {(50, 10, 3)}
    assert row.cache == "warm"


def test_a_server_says_who_it_is(client: Any) -> None:
    assert about(client) == ("tiny", None)
    assert fingerprint(client, "tiny", [1]) == words().digest


def test_cold_prompts_share_no_first_token() -> None:
    cold = prompts(cold=True, vocabulary=7)
    starts = [cold.new(3)[0] for _ in range(7)]
    assert sorted(starts) == list(range(7))
    with pytest.raises(RequestError, match=r"^cold: all 7 tokens have begun a prompt"):
        cold.new(3)
    with pytest.raises(RequestError, match="vocabulary"):
        prompts(vocabulary=0)


def test_depth_and_cold_contradict(client: Any) -> None:
    with pytest.raises(RequestError, match=r"^pp4 @ d8: a cache that holds tokens is not cold"):
        Bench([Server(client, prompts(cold=True))], [Trial(4, 0, 8)], 1)


def test_openais_endpoint_says_the_same(client: Any) -> None:
    cold = Server(client, prompts(cold=True), "tiny", api=OPENAI)
    warm = Server(client, prompts(), "tiny", api=OPENAI)
    (row,) = Bench([cold], [Trial(20, 3)], 2).rows()
    assert {(s.cache_n, s.prompt_n, s.predicted_n) for s in row.samples} == {(0, 20, 4)}
    assert row.cache == "cold"
    (row,) = Bench([warm], [Trial(40, 0)], 2).rows()
    assert {(s.cache_n, s.prompt_n, s.predicted_n) for s in row.samples} == {(39, 1, 1)}
    (row,) = Bench([warm], [Trial(9, 2, 50)], 2).rows()
    assert {(s.cache_n, s.prompt_n, s.predicted_n) for s in row.samples} == {(50, 9, 3)}


def test_what_openais_usage_does_not_tell_is_unknown() -> None:
    def text(part: str) -> dict[str, Any]:
        return {"choices": [{"text": part}], "usage": None}

    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
    arm = replace(fake(stream(text(""), text("a"), text("b"), usage)), api=OPENAI)
    sample = arm.ask([1] * 9, 3)
    assert (sample.cache_n, sample.prompt_n, sample.predicted_n) == (None, None, 3)
    assert (sample.first, sample.seconds) == (1.0, 2.0)
    odd = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": "x"}}}
    arm = replace(fake(stream(text("a"), {"choices": "odd"}, odd)), api=OPENAI)
    assert arm.ask([1], 1).cache_n is None


# servers of our own making


def piece(token: int) -> dict[str, Any]:
    return {"content": f"w{token}", "tokens": [token], "stop": False}


def stop(**timings: Any) -> dict[str, Any]:
    return {"content": "", "stop": True, "timings": timings}


def stream(*events: Any) -> Callable[[Any], Any]:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return lambda request: httpx.Response(200, text=text, headers=headers)


def fake(answer: Callable[[Any], Any], cold: bool = False) -> Server:
    client = httpx.Client(base_url="http://it", transport=httpx.MockTransport(answer))
    ticks = itertools.count()
    return replace(Server(client, prompts(cold)), clock=lambda: float(next(ticks)))


def test_times_run_from_the_request_to_the_chunks_with_tokens() -> None:
    empty = {"content": "", "tokens": [], "stop": False}
    answer = stream(empty, piece(1), piece(2), piece(3), stop(cache_n=8, prompt_n=2, predicted_n=3))
    sample = fake(answer).ask([0] * 10, 3)
    assert (sample.first, sample.seconds) == (1.0, 3.0)
    assert sample.rate(Trial(10, 2)) == (2 + 2) / 3, "what the cache held was not computed"


def test_warm_is_what_the_server_says_whatever_was_asked() -> None:
    answer = stream(piece(1), stop(cache_n=9, prompt_n=1, predicted_n=1))
    (row,) = Bench([fake(answer, cold=True)], [Trial(10, 0)], 2).rows()
    assert row.cache == "warm"
    (row,) = Bench([fake(stream(piece(1), stop()), cold=True)], [Trial(10, 0)], 2).rows()
    assert row.cache == "unknown"
    assert row.samples[0].rate(Trial(10, 0)) == 10


def test_cold_requests_ask_for_no_cache() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: Any) -> Any:
        bodies.append(json.loads(request.content))
        return stream(piece(1), stop())(request)

    for cold in (True, False):
        fake(answer, cold).ask([1, 2], 1)
    assert [body["cache_prompt"] for body in bodies] == [False, True]
    assert all(body["stream"] and body["n_predict"] == 1 for body in bodies)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda r: httpx.Response(200, json={"content": "w1"}), "application/json, no stream"),
        (stream(stop(predicted_n=5)), "5 tokens came in 0 pieces; it does not stream"),
        (stream(piece(1), stop()), "5 tokens came in 1 pieces; it does not stream"),
        (stream({"error": {"message": "no"}}), "it failed"),
        (stream([1]), "it failed"),
        (lambda r: httpx.Response(503, text="a\nb"), "it answered 503: a b"),
        (
            lambda r: httpx.Response(
                200, text="data: {\n\n", headers={"content-type": "text/event-stream"}
            ),
            "an event is no JSON",
        ),
        (
            lambda r: httpx.Response(
                200,
                text=f"data: {'[' * 100_000}\n\n",
                headers={"content-type": "text/event-stream"},
            ),
            "an event is no JSON .it is nested too deeply",
        ),
    ],
)
def test_a_server_that_does_not_do_as_it_should(answer: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        fake(answer).ask([1], 5)
    assert str(error.value).startswith("http://it")
    assert "\n" not in str(error.value)


def test_counts_that_are_none_are_not_taken() -> None:
    for odd in (10**400, -1, True, "1", 1.5, None):
        answer = stream(piece(1), piece(2), stop(cache_n=odd, prompt_n=odd, predicted_n=odd))
        sample = fake(answer).ask([1] * 9, 3)
        assert (sample.cache_n, sample.prompt_n, sample.predicted_n) == (None, None, 3)


def test_a_server_that_says_it_computed_nothing_has_no_rate() -> None:
    answer = stream(piece(1), stop(cache_n=4, prompt_n=0, predicted_n=1))
    with pytest.raises(RequestError, match=r"^http://it: pp4: it says that it computed nothing"):
        list(Bench([fake(answer)], [Trial(4, 0)], 1).rows())
    assert fake(answer).ask([1] * 4, 1).seconds > 0, "a cache that is filled may be full already"


def test_a_server_that_is_not_there_or_says_odd_things() -> None:
    def gone(request: Any) -> Any:
        raise httpx.ConnectError("Connection refused")

    with pytest.raises(RequestError, match=r"^http://it: Connection refused"):
        fake(gone).ask([1], 1)
    with pytest.raises(RequestError, match=r"^http://it: Connection refused"):
        about(fake(gone).client)
    odd = fake(lambda request: httpx.Response(200, json=["odd"])).client
    assert (about(odd), fingerprint(odd, None, [1])) == ((None, None), None)
    told = {"data": [{"id": "m", "meta": {"n_vocab": 9}}]}
    assert about(fake(lambda request: httpx.Response(200, json=told)).client) == ("m", 9)
    assert about(fake(lambda request: httpx.Response(404)).client) == (None, None)
    deep = fake(lambda request: httpx.Response(200, text="[" * 100_000)).client
    assert (about(deep), fingerprint(deep, None, [1])) == ((None, None), None)
    listed = {"data": [{"id": "m\ud800", "meta": [1]}], "system_fingerprint": "\ud800"}
    odd = fake(lambda request: httpx.Response(200, text=json.dumps(listed))).client
    assert (about(odd), fingerprint(odd, None, [1])) == (("m?", None), "?")
