"""What the tests ask of a server, and how its answers are read."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.reference.models import tiny

PROMPT = "In the beginning God created"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"temperature": 0}
PATHS = ["/completion", "/v1/completions", "/v1/chat/completions"]


def encode(text: str) -> list[int]:
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


def body(path: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": PROMPT}
    return {**asked, **GREEDY, **more}


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error
