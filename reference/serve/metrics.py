"""Metrics of a server, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reference.engine import Engine
from reference.request import Result
from reference.serve.refusal import GONE


class Metrics:
    """Counters and gauges of one server. inside: sequences in the engine."""

    def __init__(self, engine: Engine, inside: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"bitforbit_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"bitforbit_{name}", text, registry=self.registry).set_function(value)

        self.requests = counter("http_requests", "HTTP requests answered", ("path", "status"))
        self.cancelled = counter("sequences_cancelled", "Sequences given up before their end")
        self.prompt = counter("prompt_tokens", "Prompt tokens computed")
        self.reused = counter("prompt_tokens_reused", "Prompt tokens reused from earlier requests")
        self.generated = counter("generated_tokens", "Tokens generated")
        self.first_token = Histogram(
            "bitforbit_time_to_first_token_seconds",
            "From a sequence's arrival to its first token, waiting included",
            registry=self.registry,
        )
        gauge("sequences", "Sequences in the engine, waiting or running", inside)
        gauge("sequences_waiting", "Sequences without pages", lambda: len(engine.scheduler.waiting))
        gauge("cache_bytes", "Bytes of pages in use", lambda: engine.pool.used_bytes)
        gauge("prefixes", "Sequences kept for reuse", lambda: len(engine.prefixes))

    def ended(self, result: Result, count: int) -> None:
        """Count a sequence that has ended, of which at most `count` tokens were wanted."""
        self.prompt.inc(result.prompt_n)
        self.reused.inc(result.cache_n)
        self.generated.inc(min(count, len(result.tokens)))
        self.first_token.observe(result.timings.time_to_first_token)

    def text(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        return generate_latest(self.registry)


class Counted:
    """An application whose answers are counted by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note the status of its answer."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status)).inc()
