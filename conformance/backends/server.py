"""A server as it is, over HTTP: llama-server's `/completion`, or `/v1/completions` (SPEC 17).

Nothing of what a server sends is trusted: each exchange is bounded in time and in bytes, whatever
the server does, and an answer of another form fails its case with a line that says in what.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from conformance.backends.frames import quoted
from conformance.errors import BackendError
from conformance.operations import NotImplementedByBackendError, WrongAnswerError
from reference.measure.server import LLAMA, OPENAI
from reference.tokenizer import Tokenizer

TIMEOUT = 60.0
"""Seconds for one exchange, from the connection to the last byte."""

MAX_ANSWER = 1 << 24
"""Bytes of an answer that are read; the cases ask for some kilobytes."""

GIVEN_UP = 3
"""Exchanges in a row that ran out of time, after which no more are tried."""

TOP = 5
"""Likeliest tokens that are asked for with each token; all servers grant as many."""

Json = dict[str, Any]
T = TypeVar("T")


class ServerError(WrongAnswerError):
    """The server did not answer, or not in the form of its protocol: its case fails."""


@dataclass(frozen=True)
class Scored:
    """A token's id and logprob, and those of the likeliest ones; None for what cannot be told."""

    token: int | None
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """An answer, whole or put together from its pieces. None is what the server did not tell.

    cache_n, prompt_n, predicted_n: tokens reused, computed and generated. prompt_tokens: of the
    prompt. reason: `limit`, `word`, `eos` or `stop`, which is one of the last two.
    """

    text: str
    scored: tuple[Scored, ...]
    ids: tuple[int, ...] | None
    reason: str | None
    cache_n: int | None
    prompt_n: int | None
    predicted_n: int | None
    prompt_tokens: int | None

    @property
    def tokens(self) -> list[int]:
        """The ids of its tokens. Raises NotImplementedByBackendError where it does not tell."""
        if self.ids is not None:
            return list(self.ids)
        found = [s.token for s in self.scored]
        if not found or None in found:
            raise NotImplementedByBackendError("ids of tokens in its answers")
        return [token for token in found if token is not None]


@dataclass(frozen=True)
class Ask:
    """A request. prompt: text or ids. temperature 0 is greedy. top: likeliest tokens to be told."""

    prompt: str | Sequence[int]
    count: int
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top: int = 0
    stream: bool = False
    cache: bool | None = None


class Vocabulary:
    """Ids by the ways in which servers name tokens."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._size = size
        self._bytes = {tokenizer.bytes_of(token): token for token in range(size)}
        self._texts = {tokenizer.shown(token): token for token in range(size)}

    def of_text(self, text: object) -> int | None:
        """The token that is shown so."""
        return self._texts.get(text) if isinstance(text, str) else None

    def of_entry(self, entry: Json) -> int | None:
        """The token of an entry with `id`, `bytes` or `token`."""
        given, raw = entry.get("id"), entry.get("bytes")
        if isinstance(given, int):
            return given if 0 <= given < self._size else None
        if isinstance(raw, list) and all(isinstance(b, int) and 0 <= b < 256 for b in raw):
            return self._bytes.get(bytes(raw))
        return self.of_text(entry.get("token"))


class LlamaApi:
    """llama-server's own endpoint."""

    name, path, done = "llama", LLAMA.path, None

    def body(self, ask: Ask, model: str | None) -> Json:
        """What to send."""
        body: Json = {
            "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
            "n_predict": ask.count,
            "temperature": ask.temperature,
            "return_tokens": True,
            "stream": ask.stream,
        }
        more = {"seed": ask.seed, "cache_prompt": ask.cache}
        body |= {name: value for name, value in more.items() if value is not None}
        body |= {"n_probs": ask.top} if ask.top else {}
        return body | ({"stop": list(ask.stop)} if ask.stop else {})

    def read(self, objects: Sequence[Json], vocabulary: Vocabulary) -> Completion:
        """An answer from its only object, or from its events."""
        last, told = objects[-1], Json()
        if last.get("stop") is not True:
            raise ServerError("its answer ends without an event whose `stop` is true")
        text, ids, scored = "", list[int](), list[Scored]()
        for piece in objects:
            text += _text(piece.get("content"), "content")
            ids += _ids(piece.get("tokens", []), "tokens")
            entries = _list(piece.get("completion_probabilities", []), "completion_probabilities")
            scored += [_scored(_object(e, "probability"), vocabulary) for e in entries]
            told |= LLAMA.told(piece)
        cache_n, prompt_n = told.get("cache_n"), told.get("prompt_n")
        return Completion(
            text,
            tuple(scored),
            tuple(ids) or None,
            _text(last.get("stop_type", ""), "stop_type") or None,
            _count(cache_n, "timings.cache_n"),
            _count(prompt_n, "timings.prompt_n"),
            _count(last.get("tokens_predicted"), "tokens_predicted"),
            _count(last.get("tokens_evaluated"), "tokens_evaluated"),
        )


class OpenAIApi:
    """`/v1/completions`, with logprobs in OpenAI's four lists or as llama-server has them."""

    name, path, done = "openai", OPENAI.path, b"[DONE]"

    def body(self, ask: Ask, model: str | None) -> Json:
        """What to send: only what OpenAI's own endpoint knows."""
        body: Json = {
            "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
            "max_tokens": ask.count,
            "temperature": ask.temperature,
        }
        more = {"model": model, "seed": ask.seed, "stop": list(ask.stop) or None}
        body |= {name: value for name, value in more.items() if value is not None}
        body |= {"logprobs": ask.top} if ask.top else {}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return body | (streamed if ask.stream else {})

    def read(self, objects: Sequence[Json], vocabulary: Vocabulary) -> Completion:
        """An answer from its only object, or from its events."""
        text, scored, reason, told, usage = "", list[Scored](), None, Json(), Json()
        for piece in objects:
            for choice in _list(piece.get("choices"), "choices"):
                choice = _object(choice, "choice")
                text += _text(choice.get("text"), "text")
                scored += _logprobs(choice.get("logprobs"), vocabulary)
                reason = choice.get("finish_reason") or reason
            told |= OPENAI.told(piece)
            usage = piece.get("usage") or usage
        if reason is None:
            raise ServerError("its answer ends without a finish_reason")
        given = _object(usage, "usage").get("prompt_tokens")
        return Completion(
            text,
            tuple(scored),
            None,
            {"length": "limit"}.get(_text(reason, "finish_reason"), reason),
            told.get("cache_n"),
            told.get("prompt_n"),
            told.get("predicted_n"),
            _count(given, "usage.prompt_tokens"),
        )


APIS = {api.name: api for api in (LlamaApi(), OpenAIApi())}


# What servers send, part by part.


def _object(x: object, what: str) -> Json:
    if not isinstance(x, dict):
        raise ServerError(f"its {what} is {_brief(x)}, not an object")
    return x


def _list(x: object, what: str) -> list[Any]:
    if not isinstance(x, list):
        raise ServerError(f"its {what} is {_brief(x)}, not a list")
    return x


def _text(x: object, what: str) -> str:
    if not isinstance(x, str):
        raise ServerError(f"its {what} is {_brief(x)}, not a text")
    return x


def _count(x: object, what: str) -> int | None:
    if x is None or (isinstance(x, int) and not isinstance(x, bool) and x >= 0):
        return x
    raise ServerError(f"its {what} is {_brief(x)}, not a count")


def _ids(x: object, what: str) -> list[int]:
    found = _list(x, what)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
        raise ServerError(f"its {what} are {_brief(found)}, not ids")
    return found


def _logprob(x: object) -> float:
    if isinstance(x, int | float) and not isinstance(x, bool) and -math.inf < x < math.inf:
        return float(x)
    raise ServerError(f"its logprob is {_brief(x)}, not a finite number")


def _brief(x: object) -> str:
    return "missing" if x is None else quoted(repr(x)[:80])


def _scored(entry: Json, vocabulary: Vocabulary) -> Scored:
    """An entry of llama-server's, or of OpenAI's chat logprobs."""
    top = _list(entry.get("top_logprobs", []), "top_logprobs")
    likeliest = [_object(other, "logprob") for other in top]
    named = [(vocabulary.of_entry(other), _logprob(other.get("logprob"))) for other in likeliest]
    return Scored(
        vocabulary.of_entry(entry),
        _logprob(entry.get("logprob")),
        tuple((token, logprob) for token, logprob in named if token is not None),
    )


def _logprobs(x: object, vocabulary: Vocabulary) -> list[Scored]:
    """`logprobs` of a choice, in either form."""
    if x is None:
        return []
    about = _object(x, "logprobs")
    if "content" in about:
        entries = _list(about["content"] or [], "logprobs.content")
        return [_scored(_object(entry, "logprob"), vocabulary) for entry in entries]
    names = ("tokens", "token_logprobs", "top_logprobs")
    tokens, logprobs, tops = (_list(about.get(n), f"logprobs.{n}") for n in names)
    if not len(tokens) == len(logprobs) == len(tops):
        raise ServerError("its lists of logprobs are not equally long")
    found = []
    for text, logprob, top in zip(tokens, logprobs, tops, strict=True):
        listed = _object(top or {}, "top_logprobs").items()
        named = [(vocabulary.of_text(name), _logprob(value)) for name, value in listed]
        likeliest = tuple((token, value) for token, value in named if token is not None)
        found.append(Scored(vocabulary.of_text(text), _logprob(logprob), likeliest))
    return found


# The exchange.


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    kind: str
    content: bytes


class Server:
    """A server that is judged. numerics: what its owner declares of it (SPEC 17)."""

    def __init__(
        self, url: str, api: str, vocabulary: Vocabulary, precision: str, seconds: float = TIMEOUT
    ) -> None:
        """Look who is there. Raises BackendError where nobody answers.

        url: with or without the `/v1` that OpenAI's clients want at its end.
        """
        self.numerics = {"accumulator": precision}
        self.api, self._vocabulary, self._seconds = APIS[api], vocabulary, seconds
        self._late = 0
        try:
            self._client = httpx.AsyncClient(
                base_url=url.rstrip("/").removesuffix("/v1"), timeout=None
            )
            address = self._client.base_url
            if address.scheme not in ("http", "https") or not address.host:
                raise ValueError("it begins with http:// or https:// and names a host")
            if (address.port or 0) >= 1 << 16:
                raise ValueError("a port is less than 65536")
        except (httpx.InvalidURL, ValueError) as error:
            raise BackendError(f"--server: {quoted(url)} is no address ({error})") from error
        self._runner = asyncio.Runner()
        try:
            self.model = self._named(self._run(self._exchange("GET", "/v1/models", None)))
        except ServerError as error:
            self.close()
            raise BackendError(f"--server: {url}: {error}") from error

    @staticmethod
    def _named(reply: Reply) -> str | None:
        """The first model of `/v1/models`; None where it tells none."""
        try:
            name = json.loads(reply.content)["data"][0]["id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        return name if isinstance(name, str) else None

    def complete(self, *asks: Ask) -> list[Completion]:
        """The answers to requests that are made at once. Raises ServerError."""

        async def together() -> list[Reply]:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._exchange("POST", self.api.path, self.api.body(ask, self.model))
                    )
                    for ask in asks
                ]
            return [task.result() for task in tasks]

        try:
            replies = self._run(together())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [self._read(ask, reply) for ask, reply in zip(asks, replies, strict=True)]

    def one(self, ask: Ask) -> Completion:
        """The answer to one request."""
        return self.complete(ask)[0]

    def tokenize(self, text: str) -> list[int]:
        """What `/tokenize` makes of a text. Raises NotImplementedByBackendError without one."""
        if self.api.name != "llama":
            raise NotImplementedByBackendError("/tokenize in OpenAI's protocol")
        reply = self._run(self._exchange("POST", "/tokenize", {"content": text}))
        if reply.status in (404, 405, 501):
            raise NotImplementedByBackendError("/tokenize")
        return _ids(_parsed(reply).get("tokens"), "tokens")

    def _read(self, ask: Ask, reply: Reply) -> Completion:
        events = _events(reply, self.api.done) if ask.stream else [_parsed(reply)]
        return self.api.read(events, self._vocabulary)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._late >= GIVEN_UP:
            work.close()
            raise ServerError(f"it ran out of time {GIVEN_UP} times in a row and is given up")
        return self._runner.run(work)

    async def _exchange(self, method: str, path: str, body: Json | None) -> Reply:
        """One request and its answer, in time and at most MAX_ANSWER bytes. Raises ServerError."""
        content, status = bytearray(), None
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream(
                    method, path, json=body, headers={"Accept-Encoding": "identity"}
                ) as response,
            ):
                status = response.status_code
                encoding = response.headers.get("content-encoding", "identity")
                if encoding != "identity":
                    raise ServerError(f"its answer is encoded as {quoted(encoding)}, unasked")
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > MAX_ANSWER:
                        raise ServerError(f"its answer is longer than {MAX_ANSWER} bytes")
        except TimeoutError:
            self._late += 1
            came = "nothing" if status is None else f"status {status} and {len(content)} bytes"
            raise ServerError(
                f"{path}: no whole answer within {self._seconds:g} s; {came} had come"
            ) from None
        except httpx.HTTPError as error:
            said = quoted(str(error)) if str(error) else ""
            raise ServerError(f"{path}: {type(error).__name__} {said}".rstrip()) from error
        self._late = 0
        return Reply(status, response.headers.get("content-type", "none"), bytes(content))

    def close(self) -> None:
        """Drop the connection."""
        self._runner.run(self._client.aclose())
        self._runner.close()


def _demand(reply: Reply, kind: str) -> None:
    """Raise ServerError unless the answer is a success of a content type."""
    start = quoted(reply.content[:200].decode(errors="replace"))
    if reply.status != 200:
        raise ServerError(f"it answered {reply.status}: {start}")
    if not reply.kind.startswith(kind):
        raise ServerError(f"its answer is {quoted(reply.kind)}, not {kind}; it begins with {start}")


def _json(text: bytes, what: str) -> Json:
    try:
        return _object(json.loads(text), what)
    except (ValueError, RecursionError) as error:
        start = quoted(text[:80].decode(errors="replace"))
        raise ServerError(f"its {what} is no JSON ({quoted(str(error))}): {start}") from error


def _parsed(reply: Reply) -> Json:
    """The object of a whole answer."""
    _demand(reply, "application/json")
    return _json(reply.content, "answer")


def _events(reply: Reply, done: bytes | None) -> list[Json]:
    """The objects of a stream of events."""
    _demand(reply, "text/event-stream")
    lines = [line for line in reply.content.splitlines() if line.startswith(b"data:")]
    data = [line.removeprefix(b"data:").strip() for line in lines]
    if done is not None:
        if done not in data:
            raise ServerError(f"its stream ends without {done.decode()}")
        data = data[: data.index(done)]
    events = [_json(text, "event") for text in data if text != b"[DONE]"]
    for event in events:
        if "error" in event:
            raise ServerError(f"its stream ends with an error: {_brief(event['error'])}")
    if not events:
        raise ServerError("its stream has no event")
    return events
