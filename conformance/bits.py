"""The bits of an array, and an element of it as reports show one (SPEC 16.1, 18)."""

from __future__ import annotations

import numpy as np

from conformance.golden import Array


def raw(x: Array) -> Array:
    """The same bits as unsigned integers, of x's shape, C-contiguous."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def decimal_and_hex(x: Array, flat: int) -> tuple[str, str]:
    """An element, by its place in memory order: `1.0` and `0x3f800000`."""
    element = x.reshape(-1)[flat : flat + 1]
    digits = 2 * x.dtype.itemsize
    return repr(element.item()), f"0x{int(raw(element)[0]):0{digits}x}"


def shown(x: Array, flat: int) -> str:
    """The same in a line: `1.0 (0x3f800000)`."""
    decimal, words = decimal_and_hex(x, flat)
    return f"{decimal} ({words})"
