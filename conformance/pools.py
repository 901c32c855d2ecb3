"""Processes that share out work, and that end with whom they work for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import Any


@contextmanager
def pool(
    workers: int | None, prepare: Callable[..., None], *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """So many processes (None: the cores), each of which calls `prepare(*arguments)` first.

    A terminal sends Ctrl-C to all processes. Left to itself a worker would print where it was and
    go on with the next job. These do not hear it; they are ended where the block that uses them is
    left by an exception, and where the process that they work for ends, whatever they are at.
    """
    count, before = workers or os.cpu_count() or 1, active_children()
    executor = ProcessPoolExecutor(count, get_context("spawn"), _begin, (prepare, arguments))
    try:
        with _deaf():
            for _ in range(count):
                executor.submit(os.getpid)  # a process is started for each, and is deaf for life
        yield executor
    except BaseException:
        for worker in set(active_children()) - set(before):
            worker.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Be ready for jobs, and end with the parent, even one that was killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    prepare(*arguments)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore Ctrl-C, as processes then do that are started meanwhile."""
    if threading.current_thread() is not threading.main_thread():  # only there may one ask for it
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
