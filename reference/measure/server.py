"""A server measured from outside: llama-server's `/completion`, or OpenAI's, streamed.

Times are the client's: from the request to the first chunk with a token, and to the last. What was
computed and what came from the server's cache is what the server says, whatever was asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from reference.errors import RequestError
from reference.measure.bench import Clock, Sample, Trial

if TYPE_CHECKING:
    import httpx

Tokens = list[int]
Event = dict[str, Any]


@dataclass
class Prompts:
    """Random prompts of ids below `vocabulary`. Of cold ones, no two begin with the same token.

    Raises RequestError once every token has begun one.
    """

    vocabulary: int
    cold: bool
    rng: np.random.Generator
    starts: Tokens = field(init=False)

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise RequestError(f"vocabulary: {self.vocabulary} is out of range; give 1 or more")
        self.starts = self.rng.permutation(self.vocabulary).tolist()

    def new(self, count: int) -> Tokens:
        """Another prompt of `count` tokens. Raises RequestError."""
        tokens: Tokens = self.rng.integers(0, self.vocabulary, count).tolist()
        if self.cold:
            if not self.starts:
                raise RequestError(
                    f"cold: all {self.vocabulary} tokens have begun a prompt; raise --vocab, or "
                    "run fewer tests"
                )
            tokens[0] = self.starts.pop()
        return tokens


class Llama:
    """llama-server's own endpoint."""

    path = "/completion"

    def body(self, prompt: Tokens, count: int, model: str | None, cold: bool) -> Event:
        """What to ask."""
        wanted = {"n_predict": count, "cache_prompt": not cold}
        return {"prompt": prompt, "temperature": 0, "stream": True, "ignore_eos": True, **wanted}

    def brings(self, event: Event) -> bool:
        """Whether a token, or the text of one, is in an event."""
        return not event.get("stop") and bool(event.get("tokens") or event.get("content"))

    def told(self, event: Event) -> Event:
        """cache_n, prompt_n and predicted_n, as far as an event tells."""
        return _object(event.get("timings"))


class OpenAI:
    """`/v1/completions`. A server that knows no `cache_n` tells it as `cached_tokens`, or not."""

    path = "/v1/completions"

    def body(self, prompt: Tokens, count: int, model: str | None, cold: bool) -> Event:
        """What to ask; `ignore_eos` is an extension that servers of open models have."""
        named = {} if model is None else {"model": model}
        wanted = {"max_tokens": count, "ignore_eos": True, "temperature": 0, **named}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"prompt": prompt, **wanted, **usage}

    def brings(self, event: Event) -> bool:
        """Whether text of a token is in an event."""
        choices = event.get("choices")
        return isinstance(choices, list) and any(_object(c).get("text") for c in choices)

    def told(self, event: Event) -> Event:
        """cache_n, prompt_n and predicted_n, as far as an event tells."""
        usage = _object(event.get("usage"))
        cached = _count(_object(usage.get("prompt_tokens_details")).get("cached_tokens"))
        prompt, told = _count(usage.get("prompt_tokens")), {"cache_n": cached}
        if cached is not None and prompt is not None:
            told["prompt_n"] = prompt - cached
        told["predicted_n"] = _count(usage.get("completion_tokens"))
        return {name: n for name, n in told.items() if n is not None}


LLAMA, OPENAI = Llama(), OpenAI()


@dataclass(frozen=True)
class Server:
    """A server as an arm of a bench. cold: whether prompts share no prefix, else all are the same.

    api: what it is asked by. Raises RequestError where it cannot be reached, refuses, or never
    streams.
    """

    client: httpx.Client
    prompts: Prompts
    name: str | None = None
    digest: str | None = None
    api: Llama | OpenAI = LLAMA
    clock: Clock = perf_counter

    @property
    def labels(self) -> Mapping[str, str | int | None]:
        """What tells it from others; None for what a server does not say."""
        return {
            "model": self.name,
            "digest": self.digest,
            "arithmetic": None,
            "weights": None,
            "attention": None,
            "memory": None,
            "threads": None,
            "server": str(self.client.base_url),
        }

    def of(self, trial: Trial) -> Server:
        """The same for every test. Raises RequestError for a depth of cold prompts."""
        if self.prompts.cold and trial.depth:
            raise RequestError(f"{trial.name}: a cache that holds tokens is not cold; drop --cold")
        return self

    def ready(self, trial: Trial) -> Callable[[], Sample]:
        """Send what the cache is to hold. Runs then have new tokens after it, or the same whole."""
        held = self.prompts.new(trial.depth) if trial.depth else []
        if held:
            self.ask(held, 1)
        fixed = None if self.prompts.cold or held else self.prompts.new(trial.given)

        def run() -> Sample:
            prompt = held + (fixed or self.prompts.new(trial.given))
            sample = self.ask(prompt, trial.decodes + 1)
            if sample.prompt_n == 0 and sample.predicted_n == 1:
                raise RequestError(
                    f"{self.client.base_url}: {trial.name}: it says that it computed nothing, as "
                    "all of the prompt came from its cache; measure with --cold"
                )
            return sample

        return run

    def ask(self, prompt: Tokens, count: int) -> Sample:
        """One request: `count` greedy tokens after a prompt. Raises RequestError."""
        body = self.api.body(prompt, count, self.name, self.prompts.cold)
        started, times, told = self.clock(), list[float](), Event()
        for event in _events(self.client, self.api.path, body):
            if self.api.brings(event):
                times.append(self.clock())
            told |= self.api.told(event)
        if not times or (count > 2 and len(times) < 2):
            raise RequestError(
                f"{self.client.base_url}: {count} tokens came in {len(times)} pieces; it does not "
                "stream, and the time to its first token cannot be told"
            )
        predicted = _count(told.get("predicted_n")) or count
        return Sample(
            times[-1] - started,
            times[0] - started,
            _count(told.get("cache_n")),
            _count(told.get("prompt_n")),
            predicted,
        )


def _object(x: object) -> Event:
    return x if isinstance(x, dict) else {}


def _count(x: object) -> int | None:
    return x if type(x) is int and 0 <= x < 2**53 else None


def _text(x: object) -> str:
    """What a server calls something, fit for a table: a lone surrogate becomes `?`."""
    return str(x).encode(errors="replace").decode()


def _parsed(text: str | bytes) -> Any:
    """JSON that a server sent. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _events(client: httpx.Client, path: str, body: Event) -> Iterator[Event]:
    """The server-sent events of one answer. Raises RequestError."""
    import httpx

    where = client.base_url
    try:
        with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                said = " ".join(response.read().decode("utf-8", "replace").split())[:200]
                raise RequestError(f"{where}: it answered {response.status_code}: {said}")
            kind = response.headers.get("content-type", "none")
            if not kind.startswith("text/event-stream"):
                raise RequestError(f"{where}: its answer is {kind}, no stream of events")
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = _parsed(data)
                if not isinstance(event, dict) or "error" in event:
                    raise RequestError(f"{where}: it failed: {data[:200]}")
                yield event
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RequestError(f"{where}: {error or type(error).__name__}") from error
    except ValueError as error:
        raise RequestError(f"{where}: an event is no JSON ({error})") from error


def about(client: httpx.Client) -> tuple[str | None, int | None]:
    """Name of the server's model and size of its vocabulary, as far as `/v1/models` tells.

    Raises RequestError where nobody answers.
    """
    import httpx

    try:
        models = _parsed(client.get("/v1/models").raise_for_status().content)
        model = models["data"][0]
        name, meta = model["id"], _object(model.get("meta"))
    except httpx.HTTPStatusError:
        return None, None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RequestError(
            f"{str(client.base_url) or '--server'}: {error or type(error).__name__}; "
            "start a server there, or give another address"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError):
        return None, None
    return _text(name), _count(meta.get("n_vocab"))


def fingerprint(client: httpx.Client, model: str | None, prompt: Tokens) -> str | None:
    """What `/v1/completions` says of the server's state; None where it says nothing."""
    import httpx

    body = {"prompt": prompt, "max_tokens": 1, **({} if model is None else {"model": model})}
    try:
        answer = client.post("/v1/completions", json=body).raise_for_status()
        told = _parsed(answer.content)["system_fingerprint"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None
    return None if told is None else _text(told)
