"""Greedy decoding with an engine of its own, and without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference.engine import Engine
from reference.model import Model
from reference.request import Result
from reference.sampling import Sampling

WARM = Sampling(temperature=1.0)
PROMPT = [5, 1, 30, 2]


_CHOSEN: dict[tuple[int, tuple[int, ...]], tuple[int, Model]] = {}
"""What follows a text in a model, found once; the model is kept too, so that its id stays its."""


def argmax_chain(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        text = (id(model), tuple(tokens))
        if text not in _CHOSEN:
            _CHOSEN[text] = (int(model.forward(tokens)[-1].argmax()), model)
        tokens.append(_CHOSEN[text][0])
    return tokens[len(prompt) :]


def generate(model: Model, prompt: str | Sequence[int], count: int, **options: Any) -> Result:
    return Engine(model).generate(prompt, count, **{"stop_tokens": (), **options})
