"""Models whose logits are a function of the tokens so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import cast

import numpy as np

from reference.model import Model
from reference.tokenizer import Tokenizer
from tests.oracle.arrays import Float32

Row = Callable[[tuple[int, ...]], Float32]


class TableCache:
    """The tokens fed so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class TableModel:
    """Stands for a Model: logits by a function of all tokens so far. `fed` counts its tokens."""

    tokenizer: Tokenizer | None = None

    def __init__(self, row: Row, vocab_size: int, max_positions: int = 10_000) -> None:
        self.row = row
        self.config = SimpleNamespace(vocab_size=vocab_size, max_positions=max_positions)
        self.fed: list[int] = []

    def new_cache(self) -> TableCache:
        return TableCache()

    def forward(self, tokens: Sequence[int], held: TableCache, last_only: bool = False) -> Float32:
        assert len(tokens) > 0
        assert held.length + len(tokens) <= self.config.max_positions
        self.fed.append(len(tokens))
        rows = []
        for token in tokens:
            held.tokens.append(int(token))
            rows.append(self.row(tuple(held.tokens)))
        return np.stack(rows[-1:] if last_only else rows)


def table(
    vocab_size: int, spread: float, name: int, decimals: int = 9, max_positions: int = 10_000
) -> Model:
    """Random logits, that depend on the last two tokens and on the position."""

    @cache
    def row(text: tuple[int, ...]) -> Float32:
        rng = np.random.default_rng([name, len(text), *text[-2:]])
        logits = (rng.standard_normal(vocab_size) * spread).round(decimals)
        return logits.astype(np.float32)

    return cast(Model, TableModel(row, vocab_size, max_positions))
