"""Inputs that any language can make again in five lines (SPEC 15.3)."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32

Words = NDArray[np.uint64]

IN_CACHE = 1 << 15
"""Words that are made at a time: so many stay in a core's cache from step to step."""


def seed_of(name: str) -> int:
    """The seed of a tensor from `<golden id>/<tensor name>` (SPEC 15.3)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def words(seed: int, count: int) -> Words:
    """The first `count` words of a stream, (count,) uint64: splitmix64 (SPEC 15.3)."""
    z = np.arange(1, count + 1, dtype=np.uint64)
    for first in range(0, count, IN_CACHE):
        _mix(np.uint64(seed), z[first : first + IN_CACHE])
    return z


def _mix(seed: np.uint64, z: Words) -> None:
    """Put words in the place of their indices, which begin at 1."""
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += seed
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)


def uniform(name: str, *shape: int) -> F32:
    """Uniform in [-1, 1), float32 of the given shape (SPEC 15.3)."""
    high = (words(seed_of(name), math.prod(shape)) >> np.uint64(40)).astype(np.float64)
    return (high * 2.0**-23 - 1).astype(np.float32).reshape(shape)


def normal(name: str, *shape: int) -> F32:
    """Nearly normal with standard deviation 1.15, float32 of the given shape (SPEC 15.3)."""
    pairs = words(seed_of(name), 2 * math.prod(shape)).reshape(-1, 2)
    parts = sum((pairs[:, 0] >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
    fraction = (pairs[:, 1] & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    value = (np.asarray(parts).astype(np.float64) - 131070 + fraction) * 2.0**-15
    return value.astype(np.float32).reshape(shape)


def integers(name: str, below: int, *shape: int) -> NDArray[np.int64]:
    """Integers in 0..below-1, int64 of the given shape: word modulo `below`."""
    return (
        (words(seed_of(name), math.prod(shape)) % np.uint64(below)).astype(np.int64).reshape(shape)
    )
