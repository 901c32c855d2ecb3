"""The torch backend and the reference on the same inputs, hard ones among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")

from conformance.backends.reference import ReferenceBackend
from conformance.backends.torch import TorchBackend
from conformance.backends.torch.float32 import TorchFloat32Backend

Array = NDArray[Any]
FIXTURES = Path(__file__).parents[4] / "fixtures"
TORCH, REFERENCE, FLOAT32 = TorchBackend(), ReferenceBackend(), TorchFloat32Backend()
MODES = ("float32", "int4", "int4-row")
TOKENS = np.random.default_rng(17).integers(0, 1000, 80)
MAX = float(np.finfo(np.float32).max)
SPECIALS = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2**-149, -(2**-149), 1, MAX, -MAX])


def nasty(rng: np.random.Generator, *shape: int, specials: float = 0.0) -> Array:
    """Float32 values of all sizes, row by row of another kind; a share of them special."""
    x = rng.standard_normal(shape)
    kind = rng.integers(0, 7, (*shape[:-1], 1))
    x = np.where(kind == 1, x * 2.0 ** rng.integers(-40, 40, shape), x)
    x = np.where(kind == 2, rng.integers(-40, 41, shape) * 2.0**-149, x)
    x = np.where(kind == 3, np.clip(x, -1, 1) * MAX, x)
    x = np.where(kind == 4, rng.integers(-2, 3, shape) * 0.5, x)
    x = np.where(kind == 5, (2 * rng.integers(-9, 9, shape) + 1) * 2.0**-24, x)
    x[..., ::32] = np.where(kind[..., 0, None] == 5, 1.5, x[..., ::32])
    for start in range(0, shape[-1], 32):
        zero = rng.random(shape[:-1]) < 0.15
        x[..., start : start + 32][zero] *= 0.0  # signs stay
    x = np.where(rng.random(shape) < specials, rng.choice(SPECIALS, shape), x)
    return x.astype(np.float32)


def bits(x: Array) -> Array:
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def same(ours: Any, theirs: Any, about: object = "") -> None:
    """Equal in shape, dtype and bits; a tuple item by item."""
    ours, theirs = (a if isinstance(a, tuple) else (a,) for a in (ours, theirs))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), about
        differs = bits(a) != bits(np.ascontiguousarray(b))
        first = np.argwhere(differs)[:1]
        assert not differs.any(), f"{about}: {differs.sum()} differ, first at {first}"


def both(operation: str, **arguments: Any) -> None:
    ours = getattr(TORCH, operation)(**arguments)
    theirs = getattr(REFERENCE, operation)(**arguments)
    shown = {k: v.shape if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    same(ours, theirs, (operation, shown))


def weights(rng: np.random.Generator, n: int, k: int) -> Array:
    """Quantizable rows of all sizes, with ties of the rounding and zero groups among them."""
    w = rng.standard_normal((n, k)) * 2.0 ** rng.integers(-45, 12, (n, 1))
    w[0], w[1] = 0.0, rng.integers(-14, 15, k) * 0.5
    w[2] = rng.integers(-30, 31, k) * 2.0**-149
    w[3, :] = rng.choice([7 * 2.0**-25, 10 * 2.0**-24, -0.0], k)
    w[4:, ::32][rng.random(w[4:, ::32].shape) < 0.3] *= -0.0
    return w.astype(np.float32)


def packed(prompts: list[list[int]]) -> dict[str, Any]:
    return {
        "tokens": np.array([t for p in prompts for t in p], np.int64),
        "lengths": np.array([len(p) for p in prompts], np.int64),
    }
