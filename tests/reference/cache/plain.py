"""A plain cache: whole arrays by position, rounded by other code than the engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference.cache import KVType, PageShape
from reference.quantization import quantize_int8
from tests.oracle.arrays import Float32

Stored = dict[str, NDArray[Any]]

KV_TYPES: tuple[KVType, ...] = ("float32", "float16", "bfloat16", "int8")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BAD = (np.inf, -np.inf, np.nan, 3e38)


def rows(
    rng: np.random.Generator, count: int, heads: int, width: int, bad: float = 0.0
) -> tuple[Float32, Float32]:
    """k and v of `count` positions; a share of the elements is not finite, or huge."""
    shape = (2, count, heads, width)
    both = (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)).astype(np.float32)
    both[:, rng.random(count) < 0.1] = 0
    both[rng.random(shape) < 0.05] = -0.0
    spoilt = rng.random(shape) < bad
    both[spoilt] = rng.choice(np.array(BAD, np.float32), int(spoilt.sum()))
    return both[0], both[1]


def stored(shape: PageShape, k: Float32, v: Float32) -> Stored:
    """What a pool of this shape should hold of k and v, (T, Hkv, D) float32."""
    kept: Stored = {}
    for name, x in (("k", k.swapaxes(0, 1)), ("v", v.swapaxes(0, 1))):
        x = np.ascontiguousarray(x)
        if shape.dtype == "int8":
            codes, scale = quantize_int8(x.reshape(-1, x.shape[-1]))
            kept |= {name: codes.reshape(x.shape), f"{name}_scale": scale.reshape(x.shape[:-1])}
        else:
            kept[name] = x if shape.dtype == "float32" else _by_torch(x, shape.dtype)
    if shape.originals:
        kept |= {"original": np.ascontiguousarray(k.swapaxes(0, 1))}
        kept |= {"shift": np.zeros((1, len(k)), np.int64)}
    return kept


def _by_torch(x: Float32, dtype: str) -> NDArray[Any]:
    narrow = torch.from_numpy(x.copy()).to(TORCH[dtype])
    if dtype == "float16":
        return narrow.numpy()
    import ml_dtypes

    return narrow.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def values(kept: Stored, name: str) -> Float32:
    """k or v as float32, (T, Hkv, D)."""
    x = kept[name].astype(np.float32)
    if f"{name}_scale" in kept:
        with np.errstate(all="ignore"):
            x = x * kept[f"{name}_scale"][..., None]
    return np.ascontiguousarray(x.swapaxes(0, 1))


def same(a: Stored, b: Stored) -> bool:
    """The same arrays, to the bit; every NaN counts as one."""
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.tobytes() == b.tobytes():
        return True
    if a.dtype.kind == "i":
        return False
    wrong = np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))
    raw = f"u{a.dtype.itemsize}"
    return bool((wrong | (np.ascontiguousarray(a).view(raw) == b.view(raw))).all())
