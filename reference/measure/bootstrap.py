"""Means over positions of a text, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRETCH = 64
"""Positions of a block of the bootstrap, at most; none spans two windows."""

RESAMPLES = 2000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Interval:
    """A figure, and the middle 95 % of what resamples give."""

    value: float
    low: float
    high: float

    def exp(self) -> Interval:
        """Its exponential."""
        return Interval(*(float(np.exp(x)) for x in (self.value, self.low, self.high)))


class Bootstrap:
    """Means over positions with their intervals, by resampling blocks of them.

    Positions near each other are alike, so blocks of `STRETCH` are drawn, with replacement, and the
    same ones for every figure: differences are paired (Kuensch 1989, without overlap).
    """

    def __init__(self, counts: Sequence[int], seed: int = 0) -> None:
        """Counts: positions of each window, in order."""
        starts, at = list[int](), 0
        for count in counts:
            starts.extend(range(at, at + count, STRETCH))
            at += count
        self._starts = starts
        self._lengths = np.diff([*starts, at]).astype(np.float64)
        draws = np.random.default_rng(seed).multinomial(
            len(starts), np.full(len(starts), 1 / len(starts)), RESAMPLES
        )
        self._draws = draws.astype(np.float64)

    def mean(self, values: NDArray[Any]) -> Interval:
        """The mean of (positions,) values."""
        sums = np.add.reduceat(values.astype(np.float64), self._starts)
        means = (self._draws @ sums) / (self._draws @ self._lengths)
        low, high = np.quantile(means, (0.025, 0.975))
        return Interval(float(sums.sum() / self._lengths.sum()), float(low), float(high))


def interval_fields(name: str, found: Interval | None) -> dict[str, float | None]:
    """An interval as keys of a row, None each where there is none."""
    if found is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
