"""Runs of several arms in turns: what disturbs the machine disturbs all alike.

So a ratio is one of runs within a turn, and its figure the median of such ratios, never a ratio of
pooled times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from reference.errors import RequestError
from reference.measure.machine import Spread

T = TypeVar("T")


def check_repetitions(repetitions: int) -> None:
    """Raise RequestError where nothing would be run."""
    if repetitions < 1:
        raise RequestError(f"repetitions: {repetitions} is out of range; it must be 1 or more")


def in_turns(
    arms: Sequence[Callable[[], T]],
    repetitions: int,
    warm_up: int = 1,
    on_run: Callable[[], object] = lambda: None,
) -> list[list[T]]:
    """What each arm gave in each turn, in the order of the arms; those that warm up are dropped.

    Each arm comes first in its turn: who follows whom must not tell. on_run is called after each.
    """
    turns: list[list[T]] = []
    for turn in range(warm_up + repetitions):
        given: dict[int, T] = {}
        for index in np.roll(np.arange(len(arms)), -turn).tolist():
            given[index] = arms[index]()
            on_run()
        turns.append([given[index] for index in range(len(arms))])
    return turns[warm_up:]


def fields(name: str, spread: Spread | None) -> dict[str, float | None]:
    """A spread as keys of a row, None each where there is none."""
    parts = ("median", "least", "most", "mean", "deviation")
    return {f"{name}_{part}": None if spread is None else getattr(spread, part) for part in parts}
