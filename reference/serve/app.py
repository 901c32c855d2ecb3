"""The ASGI application: its paths, its bounds, and clients that go away (SPEC 14)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reference.chat import ChatTemplate
from reference.engine import Engine
from reference.errors import RequestError
from reference.loading.strict_json import parse_object
from reference.sampling import Sampling
from reference.serve.completions import CompletionAnswer
from reference.serve.conversation import ChatAnswer
from reference.serve.desk import Ask, Desk, Limits, Work, out_of_time
from reference.serve.fields import (
    NOTHING,
    Chat,
    Completion,
    Fields,
    LlamaCompletion,
    LlamaTokenize,
    defaults,
    parse,
)
from reference.serve.llama import Answer as LlamaAnswer
from reference.serve.llama import tokenized
from reference.serve.metrics import Counted
from reference.serve.refusal import GONE, RefusalError, to_json

HOST = "127.0.0.1"
"""Loopback only, as the server is not made for an open network."""

GRACE = 5.0
"""Seconds from the end of a request's time until its connection is dropped, whatever it does."""


class Answer(Protocol):
    """What an endpoint makes of a request: sequences to ask for, and answers from their results."""

    asks: list[Ask]

    async def whole(self, work: Work) -> dict[str, Any]:
        """The answer in one object."""

    def events(self, work: Work) -> AsyncGenerator[bytes, None]:
        """The answer in pieces, each the data of one server-sent event."""


def create_app(
    engine: Engine,
    name: str,
    template: ChatTemplate | None = None,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
) -> Starlette:
    """The ASGI application of an engine, whose model it calls `name`.

    template: of chat, None for a model without one. limits: None for the defaults. sampling: of
    requests that do not say it; None for each protocol's own. Raises RequestError for a model
    without a tokenizer.
    """
    instead = NOTHING if sampling is None else defaults(sampling)
    desk = Desk(engine, name, template, limits or Limits())
    routes = [*_answering(desk, instead), *_telling(desk)]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await desk.finish()

    known = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Counted, metrics=desk.metrics, paths=known),
            Middleware(TimeLimit, seconds=desk.limits.seconds),
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
        ],
        exception_handlers={
            HTTPException: _http_error,
            RefusalError: _refused,
            RequestError: _bad_request,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
        lifespan=lifespan,
    )


def _answering(desk: Desk, instead: Mapping[str, Any]) -> list[Route]:
    """The paths that generate text. instead: values of fields that a request leaves out."""
    paths: dict[str, tuple[type[Any], Callable[..., Awaitable[Answer]]]] = {
        "/completion": (LlamaCompletion, LlamaAnswer.make),
        "/v1/completions": (Completion, CompletionAnswer.make),
        "/v1/chat/completions": (Chat, ChatAnswer.make),
    }
    return [
        Route(path, _endpoint(desk, kind, make, instead), methods=["POST"])
        for path, (kind, make) in paths.items()
    ]


def _telling(desk: Desk) -> list[Route]:
    """The other paths: of tokens, and of the server itself."""

    async def tokenize(request: Request) -> Response:
        fields = parse(LlamaTokenize, await _body(desk, request))
        return _json(await tokenized(desk, fields))

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(desk.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(request: Request) -> Response:
        model = {"id": desk.name, "object": "model", "created": 0, "owned_by": "bitforbit"}
        return _json({"object": "list", "data": [model]})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
    ]


def _endpoint(
    desk: Desk,
    kind: type[Fields],
    make: Callable[..., Awaitable[Answer]],
    instead: Mapping[str, Any],
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint: it parses a body, makes its answer, and gives that whole or in pieces."""

    async def endpoint(request: Request) -> Response:
        fields: Any = parse(kind, await _body(desk, request), instead)
        if fields.stream:
            answer = await make(desk, fields)
            work = desk.admit(answer.asks)
            return EventStream(work, answer.events(work))

        async def whole() -> Response:
            answer = await make(desk, fields)
            work = desk.admit(answer.asks)
            try:
                return _json(await answer.whole(work))
            finally:
                work.close()

        return await unless_gone(request, whole())

    return endpoint


async def _body(desk: Desk, request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises RefusalError or RequestError."""
    return parse_object(await read(request, desk.limits.body_bytes), "body", RequestError)


async def read(request: Request, most: int) -> bytes:
    """The body of a request. Raises RefusalError as soon as it exceeds `most` bytes."""
    body = bytearray()
    async with aclosing(request.stream()) as parts:
        async for part in parts:
            body += part
            if len(body) > most:
                raise RefusalError(413, f"body: more than {most} bytes; send less", "body")
    return bytes(body)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` gives; it is cancelled if the client goes away."""

    async def gone() -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response(status_code=GONE)

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events; the work behind them is closed when they end, however they end."""

    def __init__(self, work: Work, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(_framed(events), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-store"
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream; Starlette stops if the client goes away."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.close()


async def _framed(events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Events as they are sent. An error is the last event, for the status has been sent already."""
    try:
        async with aclosing(events) as source:
            async for data in source:
                yield b"data: " + data + b"\n\n"
    except RefusalError as refusal:
        yield b"data: " + to_json(refusal.body) + b"\n\n"


class TimeLimit:
    """An application whose requests end after some seconds and GRACE, even if nobody reads."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. At its end an answer that has begun is broken off."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            async with asyncio.timeout(self._seconds + GRACE) as limit:
                await self._app(scope, receive, noting)
        except TimeoutError:
            if not limit.expired():
                raise
            if not begun:
                await out_of_time(self._seconds).response()(scope, receive, send)


def _json(data: Any) -> Response:
    return Response(to_json(data), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path[:80], (error.headers or {}).get("Allow")
    known = ", ".join(route.path for route in request.app.routes)
    # HEAD goes with GET, and their order is that of a set.
    methods = [method for method in (allowed or "").split(", ") if method != "HEAD"]
    remedy = f"use {', '.join(methods)}" if allowed else f"there are {known}"
    response = RefusalError(error.status_code, f"{path}: {error.detail}; {remedy}").response()
    response.headers.update(error.headers or {})
    return response


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return error.response()


async def _bad_request(request: Request, error: Exception) -> Response:
    message = " ".join(str(error).split())
    return RefusalError(400, message, message.partition(":")[0]).response()


async def _failed(request: Request, error: Exception) -> Response:
    """The answer to a fault of ours, which Starlette logs."""
    return RefusalError(500, f"the server failed: {type(error).__name__}").response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


def listen(port: int) -> socket.socket:
    """A listening socket on loopback; port 0 is any that is free. Raises RequestError."""
    try:
        door = socket.create_server((HOST, port))
        # Connections inherit it: without, a chunk waits 40 ms for the client's delayed ACK.
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return door
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else error
        raise RequestError(
            f"--port: cannot listen on {HOST}:{port} ({reason}); choose another"
        ) from None


def serve(app: Starlette, on: socket.socket) -> None:
    """Serve on a socket until SIGINT or SIGTERM; requests on their way have GRACE to end."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(GRACE)
    )
    uvicorn.Server(config).run(sockets=[on])
