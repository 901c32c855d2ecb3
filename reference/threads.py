"""Threads for whole-array work: each takes tiles of it, and BLAS keeps to one thread meanwhile.

No result depends on how many threads there are (SPEC 2.2, 8.2): nothing here changes a bit. A
float64 GEMM of 32 terms is too small for BLAS to divide among threads of its own. numpy releases
the interpreter lock in every call, so our threads can work on one tile each at the same time.
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
"""Rows of a tile of `by_rows`: few enough that their activations stay in a core's cache."""

A_CORE = 8
"""Threads of a core at most: no CPU runs more side by side, and others only wait for each other."""


class _State(threading.local):
    """Whether this thread is working on a tile."""

    inside = False


_state = _State()


class _Limit:
    """BLAS's limit of one thread holds for the whole process, so its holders are counted."""

    lock = threading.Lock()
    holders = 0
    limiter: Any = None


_limit = _Limit()


@cache
def _controller() -> ThreadpoolController:
    """Controls the threads of BLAS alone, and not those of other libraries (torch's OpenMP)."""
    return ThreadpoolController().select(user_api="blas")


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """The pool of a process, which its id tells from its parent's: no thread survives a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="bitforbit")


@cache
def thread_count() -> int:
    """How many threads to use: as many as BLAS was set to use (OPENBLAS_NUM_THREADS, ...)."""
    counts = [library["num_threads"] for library in _controller().info()]
    return max(counts, default=1)


@contextmanager
def single_blas() -> Iterator[None]:
    """Limit BLAS to one thread: its own threads spin between calls, and would take cores from ours.

    The first caller sets the limit, and the last to leave lifts it.
    """
    with _limit.lock:
        _limit.holders += 1
        if _limit.holders == 1:
            thread_count()  # is cached from before the limit
            _limit.limiter = _controller().limit(limits=1)
    try:
        yield
    finally:
        with _limit.lock:
            _limit.holders -= 1
            if _limit.holders == 0:
                _limit.limiter.restore_original_limits()


@cache
def cores() -> int:
    """The cores that this process may use."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found or 1


def _demand_threads(count: int) -> None:
    """Raise RequestError where there are too few cores, or the system does not start so many.

    OpenBLAS does not tell that it was refused a thread: it waits for it for ever, in the next
    product or at exit. So they are tried before it is asked: its own, and as many of ours.
    """
    has = thread_count()
    most = max(has, A_CORE * cores())
    if count > most:
        raise RequestError(f"threads: {count} were asked for; give {most} at most, {A_CORE} a core")
    started: list[threading.Thread] = []
    enough = threading.Event()
    try:
        for _ in range(2 * (count - has)):
            thread = threading.Thread(target=enough.wait)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise RequestError(
            f"threads: {count} were asked for, and this system starts no more ({error}); give fewer"
        ) from error
    finally:
        enough.set()
        for thread in started:
            thread.join()


@contextmanager
def limited_to(count: int) -> Iterator[None]:
    """Let tiles and BLAS use `count` threads. No other thread may be computing meanwhile.

    Raises RequestError where the system or BLAS does not have that many.
    """
    _demand_threads(count)
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

    The tiles must be independent of each other. The calling thread works too, because waking
    another often takes longer than a tile. A tile's own work is not shared out again. worth_it:
    False where there is too little work to wake a thread for. What `work` raises is raised here,
    once no tile is being worked on any more.
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
            errors = [other.exception() for other in others]  # all are waited for before any raises
        for error in errors:
            if error is not None:
                raise error


def by_rows(work: Callable[..., Sequence[Array]], *arrays: Array) -> tuple[Array, ...]:
    """Results of `work` on arrays of T rows each, computed ROWS rows at a time on all threads.

    `work` must compute each row from that row alone, so that only the time depends on the tiles.
    Returns the tuple that `work` gives for all rows at once.
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
