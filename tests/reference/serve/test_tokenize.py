"""`/tokenize`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tokenizers

from reference.engine import Engine
from reference.tokenizer import Tokenizer
from tests.reference.serve.asking import PROMPT, encode, refusal
from tests.reference.serve.servers import Server, running, words


def test_a_text_is_tokenized(server: Server) -> None:
    for text in ("", PROMPT, "<|endoftext|>na\u00efve \U0001f600\n"):
        assert server.ask("/tokenize", content=text) == {"tokens": encode(text)}
    assert server.ask("/tokenize", content=PROMPT, parse_special=True, with_pieces=False)


def test_what_a_tokenizer_adds_comes_when_asked_for() -> None:
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        "w31 $A", special_tokens=[("w31", 31)]
    )
    with running(Engine(replace(words(), tokenizer=Tokenizer(library)))) as server:
        told = [
            server.ask("/tokenize", content="w1 w2", **more)["tokens"]
            for more in ({}, {"add_special": False}, {"add_special": True})
        ]
    assert told == [[1, 2], [1, 2], [31, 1, 2]]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "content"),
        ({"content": 3}, "content"),
        ({"content": "a", "add_special": 1}, "add_special"),
        ({"content": "a", "parse_special": False}, "parse_special"),
        ({"content": "a", "with_pieces": True}, "with_pieces"),
        ({"content": "a", "temperature": 0}, "temperature"),
    ],
)
def test_what_tokenize_does_not_take(server: Server, fields: dict[str, Any], named: str) -> None:
    assert named in refusal(server.post("/tokenize", **fields))["message"]
