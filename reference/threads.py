"""Two hands for whole-array work: tiles go to threads, and BLAS is kept to one thread a tile.

Nothing here touches a bit of any result. A float64 GEMM of 32 terms is too small for BLAS to share
out well, while numpy releases the interpreter in every call, so it pays to share out tiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """One pool a process: threads do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="bitforbit")


def thread_count() -> int:
    """How many threads to use: as many as BLAS was told to (OPENBLAS_NUM_THREADS and the like)."""
    counts = [library["num_threads"] for library in _controller().info()]
    return max(counts, default=1)


def share(work: Callable[[T], None], tiles: Sequence[T]) -> None:
    """Call `work` on every tile, on all threads, with BLAS single-threaded meanwhile.

    The tiles must be independent. What `work` raises is raised here.
    """
    workers = thread_count() if len(tiles) > 1 else 1
    if workers == 1:
        for tile in tiles:
            work(tile)
        return
    with _controller().limit(limits=1):
        list(_pool(os.getpid(), workers).map(work, tiles))
