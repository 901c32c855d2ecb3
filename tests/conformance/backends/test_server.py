"""Servers judged over HTTP: right ones, subtly wrong ones, and ones that misbehave."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from conformance import cli
from conformance.backends import server as module
from conformance.backends.server import Server
from conformance.cases.server import CASES, Book, judged
from conformance.errors import BackendError
from conformance.paths import model_folder
from conformance.results import Result
from conformance.rules import UNIT
from conformance.selection import Selection
from reference.engine import Engine
from tests.reference.loading import gguf_files
from tests.reference.serve.servers import running

Json = dict[str, Any]
MODEL = "tiny-draft"
CANNOT = {
    "llama": {"server/logits/any:bits"},
    "openai": {"server/logits/any:bits", "server/tokenize/texts:equal"},
}
"""What no server shows, and what a protocol has no endpoint for."""


@pytest.fixture(scope="module")
def book() -> Book:
    return Book.load(MODEL)


@pytest.fixture(scope="module")
def ours(book: Book) -> Iterator[str]:
    """This project's own server."""
    with running(Engine(book.model, exact_prefill=True), None) as server:
        yield server.url


def judge(
    url: str,
    book: Book,
    case: str = "*",
    api: str = "llama",
    precision: str = "float32",
    seconds: float = 60,
) -> dict[str, Result]:
    server = Server(url, api, book.vocabulary, precision, seconds)
    try:
        return {r.id: r for r in judged(server, book, Selection((), (case,)))}
    finally:
        server.close()


def outcomes(results: Mapping[str, Result]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for case, result in results.items():
        found.setdefault(result.outcome, set()).add(case)
    return found


# Right ones.


@pytest.mark.parametrize("api", ["llama", "openai"])
def test_our_own_server_passes(ours: str, book: Book, api: str) -> None:
    found = outcomes(judge(ours, book, api=api))
    cannot = CANNOT[api]
    assert found == {"pass": {case.id for case in CASES} - cannot, "not implemented": cannot}


def test_its_logprobs_are_the_exact_ones(ours: str, book: Book) -> None:
    found = judge(ours, book, "*:noise")
    assert len(found) == 3
    assert all(r.worst is not None and r.worst < 1e-3 for r in found.values())


def test_what_cannot_be_shown_is_said(ours: str, book: Book) -> None:
    found = judge(ours, book, "server/[lt]o*/*")
    assert found["server/logits/any:bits"].message.startswith("the backend has no logits to show")


def test_what_has_no_tokenize_is_not_failed(ours: str, book: Book) -> None:
    through = Proxy(ours)

    def without(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/tokenize":
            reply(handler, b"{}", status=404)
        else:
            through(handler)

    with listening(without) as url:
        (found,) = judge(url, book, "server/tokenize/*").values()
    assert (found.outcome, found.message) == ("not implemented", "the backend has no /tokenize")


@pytest.mark.parametrize("tokens", [[], [1, 2], None, "abc", [1.5]])
def test_wrong_ids_of_a_text_fail(ours: str, book: Book, tokens: object) -> None:
    def wrong(sent: Json, told: Json) -> Json:
        return {"tokens": tokens} if sent.get("content") else told

    with listening(Proxy(ours, answer=wrong)) as url:
        (found,) = judge(url, book, "server/tokenize/*").values()
    assert found.outcome == "fail"


# Subtly wrong ones: a proxy that alters what goes through.

Request = Callable[[Json], Json]
Answer = Callable[[Json, Json], Json]


class Proxy:
    """Passes requests on to a server; `request` and `answer` alter bodies, `lines` a stream."""

    def __init__(
        self,
        url: str,
        request: Request = lambda body: body,
        answer: Answer = lambda body, told: told,
        lines: Callable[[list[bytes]], list[bytes]] = lambda lines: lines,
    ) -> None:
        self.url, self.request, self.answer, self.lines = url, request, answer, lines

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        size = int(handler.headers.get("Content-Length") or 0)
        sent = json.loads(handler.rfile.read(size)) if size else {}
        if size:
            given = httpx.post(self.url + handler.path, json=self.request(dict(sent)), timeout=60)
        else:
            given = httpx.get(self.url + handler.path)
        kind, content = given.headers["content-type"], given.content
        if kind == "application/json" and handler.path != "/v1/models":
            content = json.dumps(self.answer(sent, given.json())).encode()
        elif kind.startswith("text/event-stream"):
            content = b"\n\n".join(self.lines(content.split(b"\n\n")))
        reply(handler, content, kind, given.status_code)


def reply(
    handler: BaseHTTPRequestHandler,
    content: bytes,
    kind: str = "application/json",
    status: int = 200,
    **headers: str,
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(content)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def listening(act: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that does so with every request; a client that goes away is no error."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                act(self)
            except OSError:
                self.close_connection = True

        do_GET = do_POST  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def other_token(body: Json, told: Json) -> Json:
    told["tokens"][3:4] = [999]
    return told


def shifted_logprob(body: Json, told: Json) -> Json:
    for entry in told.get("completion_probabilities", [])[4:5]:
        entry["top_logprobs"][1]["logprob"] += 0.002
    return told


def without_the_second(body: Json, told: Json) -> Json:
    for entry in told.get("completion_probabilities", []):
        del entry["top_logprobs"][1]
    return told


def wrong_count(body: Json, told: Json) -> Json:
    told["timings"]["cache_n"] += 1
    return told


def other_text(body: Json, told: Json) -> Json:
    return {**told, "content": told["content"].replace(" ", "  ", 1)}


def one_more(body: Json) -> Json:
    return {**body, "n_predict": body["n_predict"] + (body["n_predict"] < 12)}


def stop_after_one_more(body: Json, told: Json) -> Json:
    return {**told, "content": told["content"] + body["stop"][0]} if "stop" in body else told


def no_prompt_of_its_own(body: Json) -> Json:
    """A second turn that continues the first one's last token again: a stale position."""
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) > 40:
        return {**body, "prompt": [*prompt[:-12], *prompt[-13:-1]]}
    return body


def without_second_event(lines: list[bytes]) -> list[bytes]:
    return lines[:1] + lines[2:]


SEEDS = iter(range(10**6, 10**7))


@pytest.mark.parametrize(
    ("tricks", "failing"),
    [
        ({"answer": other_token}, {"greedy/*", "reuse/*:tokens", "company/*"}),
        ({"answer": shifted_logprob}, {"logprobs/*", "reuse/*:noise"}),
        ({"answer": without_the_second}, {"logprobs/*", "reuse/*:noise"}),
        ({"answer": wrong_count}, {"reuse/count"}),
        ({"answer": other_text}, {"greedy/*", "stream/whole"}),
        ({"request": one_more}, {"length/limit"}),
        ({"answer": stop_after_one_more}, {"stop/within"}),
        ({"request": lambda body: {**body, "stop": []}}, {"stop/within"}),
        ({"request": lambda body: {**body, "seed": next(SEEDS)}}, {"seed/same"}),
        ({"request": lambda body: {**body, "seed": 7}}, {"seed/others"}),
        ({"request": lambda body: {**body, "temperature": 0}}, {"seed/others"}),
        ({"request": no_prompt_of_its_own}, {"reuse/*:tokens", "reuse/*:noise"}),
        ({"lines": without_second_event}, {"stream/whole"}),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_subtle_fault_is_seen(
    ours: str, book: Book, tricks: dict[str, Any], failing: set[str]
) -> None:
    with listening(Proxy(ours, **tricks)) as url:
        for part in failing:
            found = judge(url, book, f"server/{part}")
            assert found
            assert {r.outcome for r in found.values()} == {"fail"}, part


def test_a_prompt_that_is_trimmed_is_counted(ours: str, book: Book) -> None:
    def trimmed(body: Json) -> Json:
        prompt = body["prompt"]
        return {**body, "prompt": prompt.strip() if isinstance(prompt, str) else prompt}

    with listening(Proxy(ours, trimmed)) as url:
        found = judge(url, book, "server/prompt/*")
    (result,) = found.values()
    assert result.outcome == "fail"
    assert "prompt tokens of '  two" in result.message


def test_a_model_that_is_slightly_another_fails(book: Book) -> None:
    """Its epsilon is 1e-5 instead of 1e-6."""
    config = replace(book.model.config, rms_norm_eps=1e-5)
    with running(Engine(replace(book.model, config=config)), None) as server:
        found = judge(server.url, book, "server/logprobs/*")
    assert {r.outcome for r in found.values()} == {"fail"}


def test_the_declared_precision_sets_the_bound(ours: str, book: Book) -> None:
    with listening(Proxy(ours, answer=shifted_logprob)) as url:
        for precision in UNIT:
            found = judge(url, book, "server/logprobs/short*", precision=precision)
            coarse = UNIT[precision] >= 2.0**-11
            assert {r.outcome for r in found.values()} == {"pass" if coarse else "fail"}


def test_ids_are_found_by_text_and_by_bytes(ours: str, book: Book) -> None:
    def nameless(body: Json, told: Json) -> Json:
        for entry in told.get("completion_probabilities", []):
            for one in (entry, *entry["top_logprobs"]):
                del one["id"]
        return {**told, "tokens": []}

    def textless(body: Json, told: Json) -> Json:
        for entry in nameless(body, told).get("completion_probabilities", []):
            for one in (entry, *entry["top_logprobs"]):
                del one["bytes"]
        return told | {"tokens": []}

    def neither(body: Json, told: Json) -> Json:
        return {k: v for k, v in told.items() if k not in ("tokens", "completion_probabilities")}

    for trick, expected in (
        (nameless, "pass"),
        (textless, "pass"),
        (neither, "not implemented"),
    ):
        with listening(Proxy(ours, answer=trick)) as url:
            found = judge(url, book, "server/[gl][ro][eg][ep]*/short*")
        assert {r.outcome for r in found.values()} == {expected}, trick
        assert len(found) == 2


# Ones that misbehave.

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


def silent(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(5)


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


# The command.


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--server", "http://127.0.0.1:9"), "--server: http://127.0.0.1:9: "),
        (("--server", "nowhere"), "'nowhere' is no address"),
        (("--server", "ftp://127.0.0.1/"), "is no address"),
        (("--server", "http://[::1"), "is no address"),
        (("--server", "http://127.0.0.1:99999"), "a port is less than 65536"),
        (("--server", "http://x", "--process", "y"), "goes with it"),
        (("numpy", "--server", "http://x"), "goes with it"),
        (("--server", "http://x", "--level", "kernel"), "--level: a server has"),
        (("--server", "http://x", "--case", "kernel/*"), "--case: no case of servers"),
        (("--server", "http://x", "--model", "random-llama"), "has no tokenizer"),
        (("--server", "http://x", "--model", "nowhere"), "nowhere"),
        (("numpy", "--api", "llama"), "they are for --server"),
        (("--precision", "float16"), "they are for --server"),
    ],
)
def test_what_cannot_run(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], part: str
) -> None:
    assert cli.main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert part in err
    assert err.count("\n") == 1


def test_nobody_answers(book: Book) -> None:
    with listening(silent) as url, pytest.raises(BackendError, match="no whole answer within"):
        Server(url, "llama", book.vocabulary, "float32", 1)


def test_the_command(ours: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    options = ("--server", ours, "--model", MODEL, "--case", "server/[sl]e*")
    assert cli.main(["check", *options, "--json", str(target)]) == 0
    told = json.loads(target.read_text())
    assert told["summary"]["passed"] == len(told["cases"]) == 3
    with listening(Proxy(ours, one_more)) as url:
        assert cli.main(["check", "--server", url, *options[2:]]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "FAIL server/length/limit:equal" in out
    assert f"bitforbit check --server {url} --api llama --model {MODEL}" in out


def test_an_interrupt_keeps_the_report(
    ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> object:
        raise KeyboardInterrupt

    target = tmp_path / "report.json"
    monkeypatch.setattr(Server, "tokenize", interrupted)
    options = ("--server", ours, "--model", MODEL, "--case", "server/[lt]o*")
    assert cli.main(["check", *options, "--json", str(target)]) == 2
    told = json.loads(target.read_text())
    assert told["interrupted"] is True
    assert [case["id"] for case in told["cases"]] == ["server/logits/any:bits"]


# A real one.


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a GGUF file of float32."""
    folder = model_folder(MODEL)
    raw = json.loads((folder / "config.json").read_text())
    tensors = {n: t.astype(np.float32) for n, t in load_file(folder / "model.safetensors").items()}
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    out = gguf_files.writer(raw, path)
    gguf_files.add_byte_level(out, folder / "tokenizer.json", "gpt-2")
    out.add_eos_token_id(raw["eos_token_id"])
    out.add_add_bos_token(False)
    gguf_files.finish(out, gguf_files.converted(raw, tensors), gguf.GGMLQuantizationType.F32)
    return path


def llama_cpp(file: Path, exact_cache: bool) -> Any:
    """llama.cpp's own server in this process; by default its cache holds float16."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.port, params.verbosity = str(file), 2048, 0, -1
    params.cpuparams.n_threads = 1
    if exact_cache:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = off
    return xllamacpp.Server(params)


@pytest.mark.parametrize("api", ["llama", "openai"])
def test_llama_cpp_in_float32_passes(file: Path, book: Book, api: str) -> None:
    server = llama_cpp(file, exact_cache=True)
    found = judge(server.listening_address, book, api=api)
    cannot = CANNOT[api]
    assert outcomes(found) == {
        "pass": {case.id for case in CASES} - cannot,
        "not implemented": cannot,
    }
    worst = max(r.worst or 0.0 for r in found.values() if r.rule == "noise")
    assert 0 < worst < 1


def test_llama_cpp_with_its_cache_of_float16(file: Path, book: Book) -> None:
    """It fails as float32, by the logprobs alone, and passes as the float16 that it is."""
    server = llama_cpp(file, exact_cache=False)
    as_float32 = outcomes(judge(server.listening_address, book))
    assert as_float32["fail"] == {case.id for case in CASES if case.rule == "noise"}
    as_float16 = judge(server.listening_address, book, precision="float16")
    assert "fail" not in outcomes(as_float16)
