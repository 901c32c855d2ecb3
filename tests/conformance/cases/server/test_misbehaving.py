"""Servers that hang, drip, close or answer garbage: a verdict on that case alone."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from conformance.backends import server as module
from conformance.backends.server import Server
from conformance.cases.server import CASES, Book
from conformance.errors import BackendError
from tests.conformance.cases.server.judging import Json, judge
from tests.conformance.cases.server.stand_ins import Proxy, listening, reply, silent

WHOLE: Json = {
    "content": " and",
    "tokens": [268],
    "stop": True,
    "stop_type": "limit",
    "tokens_predicted": 1,
    "tokens_evaluated": 16,
    "timings": {"cache_n": 0, "prompt_n": 16},
    "completion_probabilities": [
        {"id": 268, "logprob": -1.0, "top_logprobs": [{"id": 268, "logprob": -1.0}]}
    ],
}


def saying(
    content: bytes | Json, kind: str = "application/json", status: int = 200, **headers: str
) -> Callable[..., None]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda handler: reply(handler, text, kind, status, **headers)


def drip(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then, each within any limit on a single read."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def drip_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: ")
    for _ in range(100):
        handler.wfile.write(b"a")
        handler.wfile.flush()
        time.sleep(0.05)


def closes_early(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"content": "')
    handler.close_connection = True


def closes_at_once(handler: BaseHTTPRequestHandler) -> None:
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()
    handler.close_connection = True


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * (1 << 20))


def garbage(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"\x00\xff this is no HTTP\r\n\r\n")
    handler.close_connection = True


def without(name: str) -> Json:
    return {k: v for k, v in WHOLE.items() if k != name}


MISBEHAVIOUR: dict[str, tuple[Callable[..., None], str]] = {
    "silent": (silent, "no whole answer within 1 s; nothing had come"),
    "drip": (drip, "no whole answer within 1 s; status 200 and"),
    "drip_headers": (drip_headers, "no whole answer within 1 s"),
    "closes_early": (closes_early, "RemoteProtocolError"),
    "closes_at_once": (closes_at_once, "Error"),
    "endless": (endless, "longer than 65536 bytes"),
    "garbage": (garbage, "RemoteProtocolError"),
    "error_500": (saying(b"oh\x1b[31m no\xff", "text/plain", 500), "it answered 500: 'oh"),
    "redirect": (saying(b"", "text/plain", 302, Location="http://example.org/"), "answered 302"),
    "html": (saying(b"<html>hi</html>", "text/html"), "its answer is 'text/html'"),
    "empty": (saying(b""), "its answer is no JSON"),
    "no_json": (saying(b'{"content": "a'), "its answer is no JSON"),
    "deep": (saying(b"[" * 50_000), "its answer is no JSON"),
    "list": (saying(b"[]"), "its answer is '[]', not an object"),
    "long_number": (saying(b'{"a": ' + b"9" * 5000 + b"}"), "its answer is no JSON"),
    "not_utf8": (saying(b'{"content": "\xff"}'), "its answer is no JSON"),
    "compressed": (
        saying(b"\x1f\x8b\x08", "application/json", 200, Content_Encoding="gzip"),
        "encoded as 'gzip', unasked",
    ),
    "no_content": (saying(without("content")), "its content is missing, not a text"),
    "no_stop": (saying(without("stop")), "ends without an event whose `stop` is true"),
    "text_is_a_number": (saying({**WHOLE, "content": 7}), "its content is '7', not a text"),
    "ids_are_text": (saying({**WHOLE, "tokens": ["a"]}), "not ids"),
    "ids_too_large": (saying({**WHOLE, "tokens": [10**30]}), "are not all of the vocabulary"),
    "id_of_no_token": (saying({**WHOLE, "tokens": [-1]}), "are not all of the vocabulary"),
    "negative_count": (
        saying({**WHOLE, "tokens_predicted": -1}),
        "its tokens_predicted is '-1', not a count",
    ),
    "nan": (
        saying(json.dumps(WHOLE).replace("-1.0", "NaN").encode()),
        "its logprob is 'nan', not a finite number",
    ),
    "logprob_is_text": (
        saying({**WHOLE, "completion_probabilities": [{"id": 1, "logprob": "-1"}]}),
        "not a finite number",
    ),
    "entry_is_a_list": (saying({**WHOLE, "completion_probabilities": [[]]}), "not an object"),
    "entries_are_an_object": (saying({**WHOLE, "completion_probabilities": {}}), "not a list"),
    "surrogates": (saying({**WHOLE, "stop": "\ud800"}), "ends without an event"),
    "no_token_at_all": (
        saying({**WHOLE, "completion_probabilities": []} | {"tokens": []}),
        "the backend has no ids of tokens",
    ),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_is_a_verdict_on_that_case(
    book: Book, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The server is well until it is asked for a completion, and the run goes on."""
    act, part = MISBEHAVIOUR[name]
    monkeypatch.setattr(module, "MAX_ANSWER", 1 << 16)

    def well_at_first(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/v1/models":
            return reply(handler, b"{}")
        handler.rfile.read(int(handler.headers["Content-Length"]))
        return act(handler)

    seconds = 1 if "within" in part else 60
    with listening(well_at_first) as url:
        found = judge(url, book, "server/[gl][ro][eg][ip]*", seconds=seconds)
        (first,) = judge(url, book, "server/greedy/ids*", seconds=seconds).values()
    assert first.outcome == ("not implemented" if part.startswith("the backend") else "fail")
    assert part in first.message
    assert first.message.isprintable()
    assert len(first.message) < 600
    assert {r.outcome for r in found.values()} <= {"fail", "not implemented"}


STREAMS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "its stream has no event"),
    "no_json": (b"data: {nope}\n\n", "its event is no JSON"),
    "no_end": (b'data: {"content": "a"}\n\n', "ends without an event whose `stop` is true"),
    "error": (b'data: {"error": {"message": "boom"}}\n\n', "its stream ends with an error"),
    "list": (b"data: []\n\n", "its event is '[]', not an object"),
    "binary": (b"data: \xff\xfe\n\n", "its event is no JSON"),
    "half": (b'data: {"content": "a", "stop": tr', "its event is no JSON"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_malformed_stream(ours: str, book: Book, name: str) -> None:
    content, part = STREAMS[name]
    with listening(Proxy(ours, lines=lambda lines: [content])) as url:
        (result,) = judge(url, book, "server/stream/*").values()
    assert result.outcome == "fail"
    assert part in result.message


def test_a_stream_that_is_none(ours: str, book: Book) -> None:
    with listening(Proxy(ours, lambda body: {**body, "stream": False})) as url:
        (result,) = judge(url, book, "server/stream/*").values()
    assert "its answer is 'application/json', not text/event-stream" in result.message


@pytest.mark.parametrize(
    ("bend", "part"),
    [
        (lambda lines: [line for line in lines if b"[DONE]" not in line], "without [DONE]"),
        (
            lambda lines: [line.replace(b'"length"', b"null") for line in lines],
            "without a finish_reason",
        ),
        (lambda lines: [b"data: 7", *lines], "its event is '7', not an object"),
    ],
)
def test_a_malformed_stream_of_openai(
    ours: str, book: Book, bend: Callable[..., Any], part: str
) -> None:
    with listening(Proxy(ours, lines=bend)) as url:
        (result,) = judge(url, book, "server/stream/*", "openai").values()
    assert result.outcome == "fail"
    assert part in result.message


def test_lists_of_logprobs_that_do_not_match(ours: str, book: Book) -> None:
    def shorter(body: Json, told: Json) -> Json:
        for choice in told["choices"]:
            if choice.get("logprobs"):
                choice["logprobs"]["tokens"].pop()
        return told

    with listening(Proxy(ours, answer=shorter)) as url:
        (result,) = judge(url, book, "server/logprobs/short*", "openai").values()
    assert result.message == "its lists of logprobs are not equally long"


def test_a_server_that_hangs_is_given_up(book: Book) -> None:
    """Three exchanges run out of time, and the others are not tried."""
    asked = []

    def well_at_first(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/v1/models":
            return reply(handler, b"{}")
        asked.append(handler.path)
        return silent(handler)

    with listening(well_at_first) as url:
        found = judge(url, book, seconds=1)
    assert len(asked) == 3
    failed = [r for r in found.values() if r.outcome == "fail"]
    assert len(failed) == len(CASES) - 1
    assert failed[-1].message == "it ran out of time 3 times in a row and is given up"


def test_nobody_answers(book: Book) -> None:
    with listening(silent) as url, pytest.raises(BackendError, match="no whole answer within"):
        Server(url, "llama", book.vocabulary, "float32", 1)
