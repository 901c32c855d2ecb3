"""Servers that stand in for others: one that does as told, a proxy that alters what it hears."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.conformance.cases.server.judging import Json

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


def one_more(body: Json) -> Json:
    return {**body, "n_predict": body["n_predict"] + (body["n_predict"] < 12)}


def silent(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(5)
