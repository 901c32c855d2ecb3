"""Streams of all endpoints: the whole, in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference.models import tiny
from tests.reference.serve.asking import PATHS, body, events
from tests.reference.serve.servers import Server


def merged(path: str, frames: list[Any]) -> dict[str, Any]:
    """The text, the tokens and their logprobs of a stream's pieces."""
    text, tokens, probs = "", list[int](), list[Any]()
    for frame in frames:
        if path == "/completion":
            text, tokens = text + frame["content"], tokens + frame["tokens"]
            probs += frame.get("completion_probabilities", [])
            continue
        for choice in frame["choices"]:
            text += (
                choice["delta"].get("content", "") if "delta" in choice else choice.get("text", "")
            )
            tokens += choice.get("token_ids", [])
            lists = choice["logprobs"] or {}
            if "content" in lists:
                probs += lists["content"]
            elif lists:
                probs += zip(*(lists[name] for name in sorted(lists)), strict=True)
    return {"text": text, "tokens": tokens, "probs": probs}


@pytest.mark.parametrize("stop", [[], ["not", " of"], ["zzz"]])
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_the_whole_in_pieces(server: Server, path: str, stop: list[str]) -> None:
    more = {
        "/completion": {"n_predict": 16, "n_probs": 2, "return_tokens": True},
        "/v1/completions": {"max_tokens": 16, "logprobs": 2, "return_token_ids": True},
        "/v1/chat/completions": {
            "max_tokens": 16,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        },
    }[path]
    fields = body(path, stop=stop, **more)
    whole = server.ask(path, **fields)
    frames = events(server.post(path, stream=True, **fields))
    if path == "/completion":
        assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        pieces = merged(path, frames)
        assert pieces["text"] == whole["content"]
        assert pieces["probs"] == whole["completion_probabilities"]
        assert pieces["tokens"] == whole["tokens"]
        assert frames[-1]["stop_type"] == whole["stop_type"]
        assert frames[-1]["tokens_predicted"] == whole["tokens_predicted"]
        return
    assert frames.pop() == "[DONE]"
    choice = whole["choices"][0]
    pieces = merged(path, frames)
    assert pieces == merged(path, [whole]) | {
        "text": choice["message"]["content"] if "message" in choice else choice["text"]
    }
    reasons = [frame["choices"][0]["finish_reason"] for frame in frames]
    assert reasons == [None] * (len(frames) - 1) + [choice["finish_reason"]]
    assert choice["finish_reason"] == ("stop" if "not" in stop else "length")
    assert len({frame["id"] for frame in frames}) == 1


def test_text_of_several_tokens_a_character_is_streamed_whole(server: Server) -> None:
    """A prompt that the model is made to repeat cannot be had, so any draws of bytes will do."""
    fields: dict[str, Any] = {"prompt": [240, 128], "n_predict": 60, "temperature": 9, "top_k": 0}
    fields |= {"top_p": 1, "min_p": 0, "return_tokens": True, "seed": 3}
    whole = server.ask("/completion", **fields)
    frames = events(server.post("/completion", stream=True, **fields))
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    assert "".join(frame["content"] for frame in frames) == whole["content"]
    assert whole["content"] == tokenizer.decode(whole["tokens"])
    assert "\ufffd" in whole["content"], "bytes that are no characters were meant to come"
