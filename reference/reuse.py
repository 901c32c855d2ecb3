"""Memory that is used again: what is fresh comes from the kernel page by page, and zeroed.

Nothing here touches a bit of any result.
"""

from __future__ import annotations

import math
import threading
import weakref
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

LARGE, LARGEST = 1 << 25, 1 << 26
"""Bytes from which on glibc keeps nothing, and up to which `result_memory` does: 32 and 64 MiB."""


class _Memory(threading.local):
    """What this thread keeps: memory for steps on the way, and the last large result's."""

    steps: Array = np.empty(0, np.float32)
    result: Array = np.empty(0, np.float32)
    lent: weakref.ref[Array] | None = None


_memory = _Memory()
_keeping = threading.Event()


@cache
def keep_freed_memory() -> None:
    """Have glibc, and `result_memory`, keep up to 64 MiB of what is freed for the next pass.

    A block that glibc mapped and gets back teaches it to keep twice as much, up to blocks of 32 MiB
    (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD).
    """
    np.empty(LARGE - (1 << 16), np.uint8)
    _keeping.set()


def scratch(shape: tuple[int, ...]) -> Array:
    """float32 memory of this thread, with whatever it held: one array, until the next call."""
    size = math.prod(shape)
    if _memory.steps.size < size:
        _memory.steps = np.empty(size, np.float32)
    return _memory.steps[:size].reshape(shape)


def result_memory(shape: tuple[int, ...]) -> Array:
    """float32 memory for a result, the caller's as long as he holds it, with whatever it held.

    A large one is that of the last, once neither it nor a view of it is held any more: logits of
    512 tokens cost less to compute than to put into fresh memory.
    """
    size = math.prod(shape)
    if not (_keeping.is_set() and LARGE <= 4 * size <= LARGEST):
        return np.empty(shape, np.float32)
    held = _memory.lent is not None and _memory.lent() is not None
    if held or _memory.result.size < size:
        _memory.result = np.empty(size, np.float32)
    # Views of an array that does not own its memory, nor got it from an array, keep that array.
    lent: Array = np.frombuffer(_memory.result.data, np.float32, size)
    _memory.lent = weakref.ref(lent)
    return lent.reshape(shape)
