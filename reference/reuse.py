"""Large arrays that are used again, because the kernel zeroes fresh memory page by page.

No result depends on it: nothing here changes a bit.
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
"""Sizes in bytes: glibc keeps no freed block of 32 MiB or more (mallopt(3), M_MMAP_THRESHOLD), and
`result_memory` keeps those up to 64 MiB."""


class _Memory(threading.local):
    """What this thread keeps: scratch memory, and the memory of the last large result."""

    steps: Array = np.empty(0, np.float32)
    result: Array = np.empty(0, np.float32)
    lent: weakref.ref[Array] | None = None


_memory = _Memory()
_keeping = threading.Event()


@cache
def keep_freed_memory() -> None:
    """Make glibc and `result_memory` keep up to 64 MiB of freed memory for the next pass.

    When a block that glibc had mapped is freed, it raises its thresholds: blocks up to that size
    are kept from then on, and twice as much in all (mallopt(3), M_MMAP_THRESHOLD and
    M_TRIM_THRESHOLD). So one block of nearly 32 MiB is allocated, and freed at once.
    """
    np.empty(LARGE - (1 << 16), np.uint8)
    _keeping.set()


def scratch(shape: tuple[int, ...]) -> Array:
    """An uninitialized float32 array of this thread, valid until the thread's next call."""
    size = math.prod(shape)
    if _memory.steps.size < size:
        _memory.steps = np.empty(size, np.float32)
    return _memory.steps[:size].reshape(shape)


def result_memory(shape: tuple[int, ...]) -> Array:
    """An uninitialized float32 array for a result, which stays the caller's while it is held.

    A large one reuses the memory of the last, if neither that nor a view of it is held any more.
    (Computing the logits of 512 tokens takes less time than writing them to fresh memory.)
    """
    size = math.prod(shape)
    if not (_keeping.is_set() and LARGE <= 4 * size <= LARGEST):
        return np.empty(shape, np.float32)
    held = _memory.lent is not None and _memory.lent() is not None
    if held or _memory.result.size < size:
        _memory.result = np.empty(size, np.float32)
    # A view keeps the array alive that owns its memory. This one owns none, but has it from a
    # buffer, and so its own views keep it alive itself: it is gone once all of them are.
    lent: Array = np.frombuffer(_memory.result.data, np.float32, size)
    _memory.lent = weakref.ref(lent)
    return lent.reshape(shape)
