"""Models whose logits are a function of the tokens so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np

from reference.cache import KVCache, PagePool, PageShape
from reference.model import Model
from reference.tokenizer import Tokenizer
from tests.oracle.arrays import Float32

Row = Callable[[tuple[int, ...]], Float32]


class TableModel:
    """Stands for a Model: logits by a function of all tokens so far. `fed` counts its tokens.

    Its caches have no layer, and so no page; what they would hold is in `texts`.
    """

    tokenizer: Tokenizer | None = None

    def __init__(self, row: Row, vocab_size: int, max_positions: int = 10_000) -> None:
        self.row = row
        self.config = SimpleNamespace(vocab_size=vocab_size, max_positions=max_positions)
        self.fed: list[int] = []
        self.texts = WeakKeyDictionary[KVCache, list[int]]()

    def new_pool(self, budget: int | None = None, page_size: int = 16) -> PagePool:
        return PagePool(PageShape(1, 1, (), page_size), budget)

    def new_cache(self) -> KVCache:
        return KVCache(self.new_pool())

    def forward(self, tokens: Sequence[int], held: KVCache, last_only: bool = False) -> Float32:
        assert len(tokens) > 0
        assert held.length + len(tokens) <= self.config.max_positions
        self.fed.append(len(tokens))
        text, rows = self.texts.setdefault(held, []), []
        del text[held.length :]
        for token in tokens:
            text.append(int(token))
            rows.append(self.row(tuple(text)))
        held.commit(len(tokens))
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
