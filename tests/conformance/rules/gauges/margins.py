"""Inputs of computations, and the share of its bound that an answer uses (SPEC 16.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from conformance.rules import judge
from conformance.rules.gauges import Gauge

F32 = NDArray[Any]
Record = Callable[[str, object], None]
Dot = Callable[[F32, F32], F32]

U = 2.0**-24


def normal(seed: int, *shape: int, spread: float = 1.0) -> F32:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def heavy(seed: int, *shape: int) -> F32:
    """Values over 24 binades, a third of them exact zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 4, shape)
    return np.where(rng.random(shape) < 1 / 3, 0, x).astype(np.float32)


def margin(exact: F32, gauge: Gauge, answer: F32, u: float = U) -> float:
    """The largest share of its bound that an answer uses."""
    golden = Golden(
        "a/b/c", "16", "b", {}, {}, {"y": exact}, (), gauge.terms, gauge.models, gauge.distance
    )
    verdict = judge("gauge", golden, {"y": answer}, u)
    assert verdict.worst is not None, verdict.message
    return verdict.worst


class Worst:
    """The largest margin, and where."""

    def __init__(self) -> None:
        self.value, self.at, self.count = 0.0, "", 0

    def add(self, value: float, at: str) -> None:
        self.count += 1
        if value > self.value:
            self.value, self.at = value, at

    def settle(self, record: Record, least: float, computations: int) -> None:
        """Record it: none exceeded its bound, and some came near enough to show that it is one."""
        record("worst", f"{self.value:.3f} at {self.at}, of {self.count}")
        assert self.count >= computations
        assert least <= self.value <= 1, (self.value, self.at)


def golden(name: str) -> Golden:
    return next(read_all(data_folder("goldens"), {name}))


def fault(name: str, answer: Callable[..., F32], **changed: Any) -> float:
    """The margin of a wrong answer to a golden's question."""
    asked = golden(name)
    y = answer(**{**asked.parameters, **asked.inputs, **changed})
    verdict = judge("gauge", asked, {"y": y}, U)
    assert verdict.worst is not None, verdict.message
    return verdict.worst
