"""Runs of several arms take turns, so that what disturbs the machine disturbs all of them alike.

A ratio is therefore one of runs within a turn, and the figure is the median of such ratios, never
the ratio of pooled times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from reference.errors import RequestError
from reference.measure.machine import Spread

T = TypeVar("T")


def check_repetitions(repetitions: int) -> None:
    """Raise RequestError for less than one repetition."""
    if repetitions < 1:
        raise RequestError(f"repetitions: {repetitions} is out of range; it must be 1 or more")


def in_turns(
    arms: Sequence[Callable[[], T]],
    repetitions: int,
    warm_up: int = 1,
    on_run: Callable[[], object] = lambda: None,
) -> list[list[T]]:
    """What each arm gave in each turn, in the order of the arms, without the turns that warm up.

    Arms come first in turn, so that it does not matter which follows which. on_run is called after
    each run.
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
    """A spread as keys of a row; the values are None if there is no spread."""
    parts = ("median", "least", "most", "mean", "deviation")
    return {f"{name}_{part}": None if spread is None else getattr(spread, part) for part in parts}
