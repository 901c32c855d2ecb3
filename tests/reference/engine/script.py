"""A model that says what it is told, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.engine import Engine
from reference.model import Model, Part
from reference.request import Result
from reference.tokenizer import Tokenizer
from tests.oracle.arrays import Float32
from tests.reference.models import tiny


@dataclass(frozen=True)
class Scripted(Model):
    """Its greedy tokens after a prompt of one token are those of `script`."""

    script: tuple[int, ...] = ()

    def forward_batch(self, parts: Sequence[Part], routed: Any = None) -> list[Float32]:
        rows = []
        for part in parts:
            assert part.cache is not None
            rows.append(np.zeros((len(part.tokens), self.config.vocab_size), np.float32))
            for row in rows[-1]:
                part.cache.extend(1)
                part.cache.commit(1)
                row[self.script[part.cache.length - 1]] = 1
        return rows


def tokenizer() -> Tokenizer:
    found = tiny().tokenizer
    assert found is not None
    return found


def scripted(script: Sequence[int]) -> Scripted:
    base = tiny()
    return Scripted(
        base.config,
        base.weights,
        base.operations,
        base.tokenizer,
        base.eos_tokens,
        script=tuple(script),
    )


def say(script: Sequence[int], **options: Any) -> tuple[Result, list[str]]:
    """The result of a script, and the pieces that were streamed."""
    pieces: list[str] = []
    options = {"stop_tokens": (), **options}
    count = options.pop("count", len(script))
    engine = Engine(scripted(script), cache_bytes=1 << 21)
    result = engine.generate([65], count, on_text=pieces.append, **options)
    assert "".join(pieces) == result.text
    assert all(pieces), "no piece is empty"
    return result, pieces


def spelled(text: str) -> list[int]:
    """One token a byte."""
    names = {tokenizer().token(id_): id_ for id_ in range(tokenizer().vocab_size)}
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in alphabet]
    letter = {byte: chr(byte) for byte in alphabet}
    letter |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [names[letter[byte]] for byte in text.encode()]
