"""What is computed on, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.rules.gauges import Gauge
from tools.error_models.machine import F32, F64, Machine, Rng

KINDS = ("normal", "heavy", "outliers", "cancelling", "one sign", "subnormal")


def kinds(rng: Rng) -> tuple[str, str]:
    """A kind of data, and another one, as often the same; both subnormal never."""
    first, second = (str(k) for k in rng.choice(KINDS, 2))
    return first, "normal" if first == "subnormal" else second


def data(rng: Rng, kind: str, machine: Machine, *shape: int) -> F32:
    """Numbers of a kind; within the range of float16 where the machine has no more."""
    x = rng.standard_normal(shape)
    narrow = min(machine.operands.least, machine.sums.least) != -126 and (
        "float16" in (machine.operands.name, machine.sums.name)
    )
    if kind == "heavy":
        x *= 2.0 ** rng.integers(-20, 4, shape)
    elif kind == "outliers":
        x[..., rng.integers(0, shape[-1], max(1, shape[-1] // 20))] *= 8 if narrow else 1000
    elif kind == "cancelling":
        half = shape[-1] // 2
        x[..., half : 2 * half] = -x[..., :half] * (1 + 2.0**-12 * rng.standard_normal())
    elif kind == "one sign":
        x = np.abs(x)
    elif kind == "subnormal":
        x *= 2.0 ** rng.integers(-18 if narrow else -130, -10 if narrow else -100)
    if narrow:
        x = np.clip(x, -16, 16)
    return x.astype(np.float32)


def length(rng: Rng, most: int) -> int:
    """From 1 to `most`, each octave as likely as another."""
    return int(2 ** rng.uniform(0, math.log2(most + 0.99)))


@dataclass(frozen=True)
class Computed:
    """What was asked, the exact answer with its gauge, and the machine's.

    beside: outputs of the exact lane that a machine is given: the choice of experts.
    """

    operation: str
    inputs: dict[str, Any]
    parameters: dict[str, Any]
    exact: F32
    gauge: Gauge
    answer: F64
    beside: dict[str, Any] = field(default_factory=dict)
