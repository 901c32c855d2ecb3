"""Between numpy arrays and the oracle's lists, and bit-for-bit comparison."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float32 = NDArray[np.float32]
CANONICAL_NAN = 0x7FC00000


def f32(x: ArrayLike) -> Float32:
    """An array of float32, rounded if need be."""
    return np.array(x, np.float32)


def bits(x: ArrayLike) -> NDArray[np.uint32]:
    """The bits of float32 values."""
    return np.asarray(x, dtype=np.float32, order="C").view(np.uint32)


def float32(x: ArrayLike) -> Float32:
    """The oracle's floats as float32: the conversion is exact, and every NaN the canonical one."""
    wide = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    known = ~np.isnan(wide)
    assert np.array_equal(narrow.astype(np.float64)[known], wide[known]), "not a float32"
    narrow[~known] = np.uint32(CANONICAL_NAN).view(np.float32)
    return narrow


def assert_bits(actual: Any, expected: ArrayLike, note: str = "") -> None:
    """The same shape and bits as the oracle's answer, NaN being 0x7fc00000 alone."""
    got = np.asarray(actual)
    want = float32(expected)
    assert got.dtype == np.float32, f"{note} dtype {got.dtype}"
    assert got.shape == want.shape, f"{note} shape {got.shape}, not {want.shape}"
    wrong = np.argwhere(np.atleast_1d(bits(got) != bits(want)))
    if len(wrong):
        index = tuple(int(i) for i in wrong[0]) if got.ndim else ()
        raise AssertionError(
            f"{note} {len(wrong)} of {got.size} differ; at {index}: "
            f"{got[index]!r} {int(bits(got[index])):#010x}, "
            f"expected {want[index]!r} {int(bits(want[index])):#010x}"
        )


def assert_same(actual: Any, expected: Any, note: str = "") -> None:
    """Two arrays of the code under test hold the same bytes."""
    a, b = np.asarray(actual), np.asarray(expected)
    assert a.dtype == b.dtype, note
    assert a.shape == b.shape, note
    assert a.tobytes() == b.tobytes(), f"{note}: {int((a != b).sum())} of {a.size} differ"


def digest(*arrays: Any) -> str:
    """A sha256 over shapes, types and bytes."""
    seen = hashlib.sha256()
    for array in arrays:
        data = np.ascontiguousarray(array)
        seen.update(f"{data.dtype.str}{data.shape}".encode())
        seen.update(data.tobytes())
    return seen.hexdigest()
