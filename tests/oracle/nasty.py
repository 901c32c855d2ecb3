"""Hard float32 data: seeded rows by kind."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

KINDS = (
    "normal",
    "spread",
    "subnormal",
    "huge",
    "halves",
    "zero blocks",
    "cancelling",
    "spike",
    "signed zeros",
    "steps",
    "any bits",
)


def row(rng: np.random.Generator, kind: str, length: int) -> Float32:
    """`length` finite float32 values of one kind."""
    x: NDArray[Any]
    if kind == "normal":
        x = rng.standard_normal(length)
    elif kind == "spread":
        x = rng.standard_normal(length) * 2.0 ** rng.integers(-60, 60, length)
    elif kind == "subnormal":
        x = rng.integers(-40, 41, length) * 2.0**-149
    elif kind == "huge":
        x = rng.uniform(-1, 1, length) * float(np.finfo(np.float32).max)
        x[rng.random(length) < 0.3] = float(np.finfo(np.float32).max)
    elif kind == "halves":  # odd multiples of half a unit of the grid that the leading 1.5 sets
        x = (2 * rng.integers(-9, 9, length) + 1) * 2.0**-24
        x[::32] = 1.5
    elif kind == "zero blocks":
        x = rng.standard_normal(length)
        for start in range(0, length, 32):
            if rng.random() < 0.5:
                x[start : start + 32] = 0.0
    elif kind == "cancelling":
        x = rng.standard_normal(length)
        half = length // 2
        x[half : 2 * half] = -x[:half] * (1 + rng.integers(-1, 2, half) * 2.0**-23)
    elif kind == "spike":
        x = rng.standard_normal(length) * 2.0**-20
        if length:
            x[rng.integers(0, length)] = 2.0 ** int(rng.integers(0, 30))
    elif kind == "signed zeros":
        x = rng.choice([0.0, -0.0, 1.0, -1.0], length)
    elif kind == "steps":
        return steps(rng, 1, length).reshape(-1)
    elif kind == "any bits":
        raw = rng.integers(0, 2**32, length, dtype=np.uint64).astype(np.uint32)
        raw = np.where((raw >> 23) & 0xFF == 0xFF, raw & 0x807FFFFF, raw)
        return raw.astype(np.uint32).view(np.float32)
    else:
        raise ValueError(kind)
    return np.clip(x, -3.4028234663852886e38, 3.4028234663852886e38).astype(np.float32)


def matrix(rng: np.random.Generator, rows: int, length: int) -> Float32:
    """Rows of kinds drawn at random."""
    kinds = rng.choice(len(KINDS), rows)
    return np.stack([row(rng, KINDS[int(k)], length) for k in kinds])


def steps(rng: np.random.Generator, rows: int, length: int) -> Float32:
    """Rows that are constant on each block; their sums show in which order blocks are added."""
    heights = [2.0**55, -(2.0**55), 1.0, -3.0, 2.0**-10, 2.0**20]
    blocks = rng.choice(np.array(heights, np.float32), (rows, -(-length // 32)))
    spread: Float32 = np.repeat(blocks, 32, axis=1)[:, :length]
    return spread


def with_specials(rng: np.random.Generator, x: Float32, share: float = 0.3) -> Float32:
    """A copy in which some rows hold one NaN or infinity."""
    out = x.copy()
    for i in range(len(out)):
        if rng.random() < share and out.shape[1]:
            special = rng.choice([np.nan, np.inf, -np.inf])
            out[i, rng.integers(0, out.shape[1])] = special
    return out


def tolist(x: Any) -> Any:
    """Nested Python floats of an array."""
    return np.asarray(x).astype(np.float64).tolist()
