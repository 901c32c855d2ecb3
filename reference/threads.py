"""Two hands for whole-array work: tiles go to threads, and BLAS is kept to one thread a tile.

Nothing here touches a bit of any result. A float64 GEMM of 32 terms is too small for BLAS to share
out well, while numpy releases the interpreter in every call, so it pays to share out tiles.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from reference.errors import RequestError

T = TypeVar("T")
Array = NDArray[np.float32]

ROWS = 256
"""Rows of a tile of `by_rows`: their activations stay in a core's cache."""


class _State(threading.local):
    """Whether this thread is at work on a tile."""

    inside = False


_state = _State()


class _Limit:
    """Who holds BLAS to one thread: the limit is the whole process's."""

    lock = threading.Lock()
    holders = 0
    limiter: Any = None


_limit = _Limit()


@cache
def _controller() -> ThreadpoolController:
    """BLAS alone: other libraries' threads, torch's OpenMP among them, are none of our business."""
    return ThreadpoolController().select(user_api="blas")


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """One pool a process: threads do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="bitforbit")


@cache
def thread_count() -> int:
    """How many threads to use: as many as BLAS was told to at first (OPENBLAS_NUM_THREADS, ...)."""
    counts = [library["num_threads"] for library in _controller().info()]
    return max(counts, default=1)


@contextmanager
def single_blas() -> Iterator[None]:
    """Keep BLAS to one thread, so that its own, which spin between calls, leave room for ours.

    The first to ask sets the limit, and the last to leave lifts it.
    """
    with _limit.lock:
        _limit.holders += 1
        if _limit.holders == 1:
            thread_count()  # what BLAS was told before any limit
            _limit.limiter = _controller().limit(limits=1)
    try:
        yield
    finally:
        with _limit.lock:
            _limit.holders -= 1
            if _limit.holders == 0:
                _limit.limiter.restore_original_limits()


@contextmanager
def limited_to(count: int) -> Iterator[None]:
    """Let tiles and BLAS have `count` threads; not to be entered while others compute.

    Raises RequestError where BLAS cannot have so many.
    """
    try:
        with _controller().limit(limits=count):
            thread_count.cache_clear()
            if thread_count() != count:
                raise RequestError(f"threads: {count} were asked for, BLAS has {thread_count()}")
            yield
    finally:
        thread_count.cache_clear()


def share(work: Callable[[T], object], tiles: Sequence[T], worth_it: bool = True) -> None:
    """Call `work` on every tile, on all threads, with BLAS single-threaded meanwhile.

    The tiles must be independent. The calling thread works too: waking one that sleeps takes longer
    than many a tile. Work that is itself a tile is not shared out again, nor is what is not worth
    it. What `work` raises is raised here.
    """
    alone = len(tiles) < 2 or _state.inside or not worth_it
    workers = 1 if alone else min(thread_count(), len(tiles))
    if workers == 1:
        for tile in tiles:
            work(tile)
        return
    left = iter(tiles)

    def drain() -> None:
        _state.inside = True
        try:
            for tile in left:
                work(tile)
        finally:
            _state.inside = False

    with single_blas():
        others = [_pool(os.getpid(), workers - 1).submit(drain) for _ in range(workers - 1)]
        try:
            drain()
        finally:
            for other in others:
                other.result()


def by_rows(work: Callable[..., Sequence[Array]], *arrays: Array) -> tuple[Array, ...]:
    """Results of `work` on arrays of T rows each, computed ROWS rows at a time and put together.

    `work` must treat every row by itself: then this changes nothing but the time it takes.
    """
    length = len(arrays[0])
    if length < 2 * ROWS:
        return tuple(work(*arrays))
    lock = threading.Lock()
    together: list[Array] = []

    def tile(here: slice) -> None:
        results = work(*(array[here] for array in arrays))
        with lock:
            if not together:
                together.extend(np.empty((length, *y.shape[1:]), y.dtype) for y in results)
        for out, y in zip(together, results, strict=True):
            out[here] = y

    share(tile, [slice(first, first + ROWS) for first in range(0, length, ROWS)])
    return tuple(together)
