"""Real servers on loopback, each on a port of its own, and what the engine says by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import httpx
import openai
import tokenizers
import uvicorn

from reference.chat import ChatTemplate
from reference.engine import Engine
from reference.model import Model
from reference.request import Result
from reference.sampling import Sampling
from reference.serve import Limits, create_app, listen
from reference.serve.logprobs import Scored, score
from reference.tokenizer import Tokenizer
from tests.oracle.arrays import Float32
from tests.reference.models import QWEN2_SMALL, small

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Server:
    url: str
    engine: Engine

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=fields)

    def ask(self, path: str, **fields: Any) -> Any:
        response = self.post(path, **fields)
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def running(
    engine: Engine,
    template: str | None = TEMPLATE,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
) -> Iterator[Server]:
    chat = None if template is None else ChatTemplate(template, "test", {})
    app = create_app(engine, "tiny", chat, limits, sampling)
    with listen(0) as door:
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: server.run(sockets=[door]))
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{door.getsockname()[1]}", engine)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server hangs"


@cache
def words() -> Model:
    """A small random model of 32 words."""
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return replace(small(QWEN2_SMALL), tokenizer=Tokenizer(library))


def alone(
    model: Model, prompt: Sequence[int], count: int, top: int = 0, **options: Any
) -> tuple[Result, list[Scored]]:
    """What an engine that has nothing else to do gives, and its tokens scored."""
    scored: list[Scored] = []

    def on_token(token: int, logits: Float32) -> None:
        scored.append(score(token, logits, top))

    engine = Engine(model, cache_bytes=1 << 24)
    result = engine.generate(prompt, count, on_token=on_token, **options)
    return result, scored
