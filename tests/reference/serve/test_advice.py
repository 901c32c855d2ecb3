"""Requests that say nothing of sampling: as the protocol has it, or as the model's makers do."""

from __future__ import annotations

from typing import Any

import pytest

from reference.engine import Engine
from reference.sampling import Sampling
from tests.reference.models import tiny
from tests.reference.serve.asking import MESSAGES, PATHS, PROMPT, encode
from tests.reference.serve.servers import TEMPLATE, Server, running

ADVICE = Sampling(0.7, 12, 0.9, 0.02, 1.25)
OURS = {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
PROTOCOL = {
    "/completion": Sampling(0.8, 40, 0.95, 0.05),
    "/v1/completions": Sampling(1.0),
    "/v1/chat/completions": Sampling(1.0),
}


@pytest.fixture(scope="module")
def advised() -> Any:
    with running(Engine(tiny()), sampling=ADVICE) as server:
        yield server


def said(server: Server, path: str, **fields: Any) -> str:
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": PROMPT}
    length = {"n_predict" if path == "/completion" else "max_tokens": 24}
    answer = server.ask(path, **asked, **length, seed=5, cache_prompt=False, **fields)
    if path == "/completion":
        return str(answer["content"])
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "chat" in path else choice["text"])


def alone(path: str, sampling: Sampling) -> str:
    prompt = PROMPT
    if "chat" in path:
        prompt = "".join(f"{m['role']}: {m['content']}\n" for m in MESSAGES) + "assistant:"
        assert "assistant:" in TEMPLATE
    return Engine(tiny()).generate(encode(prompt), 24, sampling=sampling, seed=5).text


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_said_is_as_advised(server: Server, advised: Server, path: str) -> None:
    """The same text as the engine's own under that sampling; `null` is not said either."""
    assert said(server, path) == alone(path, PROTOCOL[path])
    wanted = alone(path, ADVICE)
    assert wanted != alone(path, PROTOCOL[path])
    assert said(advised, path) == wanted
    assert said(advised, path, temperature=None, top_k=None) == wanted


@pytest.mark.parametrize("path", PATHS)
def test_what_is_said_comes_first(advised: Server, path: str) -> None:
    penalty = "repeat_penalty" if path == "/completion" else "repetition_penalty"
    assert said(advised, path, temperature=0, **{penalty: 1}) == alone(path, Sampling())
    assert said(advised, path, top_k=3) == alone(path, Sampling(0.7, 3, 0.9, 0.02, 1.25))


def test_the_settings_tell_it(advised: Server) -> None:
    told = advised.ask("/completion", prompt=PROMPT, n_predict=1)["generation_settings"]
    assert {name: told[name] for name in OURS} == OURS
    assert told["repeat_penalty"] == 1.25
