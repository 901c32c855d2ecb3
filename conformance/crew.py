"""Jobs that do not depend on each other, shared out to processes here or to a Dask cluster.

Every worker must give the same answer. Some jobs are therefore done again by another worker, and
two answers that differ stop the run and name both machines.
"""

from __future__ import annotations

import os
import platform
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    wait,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from conformance.errors import CrewError
from conformance.pools import pool
from reference.errors import RequestError
from reference.threads import limited_to, thread_count

SHARE = 10
"""One job in so many is done twice, by two workers."""

POLL = 5.0
"""Seconds between two looks at whether the workers that are waited for are still there."""

Job = TypeVar("Job")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Crew:
    """Workers by name, each doing one job at a time; `alive` tells whether one is still there."""

    workers: Mapping[str, Executor]
    alive: Callable[[str], bool] = lambda name: True


@dataclass(frozen=True)
class Done(Generic[Answer]):
    """An answer, and the machine that it comes from."""

    answer: Answer
    machine: str


@dataclass(frozen=True)
class _Turn(Generic[Job, Answer]):
    """A job, and where it is done a second time, the worker that was first and its answer."""

    job: Job
    first: str | None = None
    done: Done[Answer] | None = None


def share_out(
    crew: Crew, work: Callable[[Job], Answer], jobs: Sequence[Job]
) -> Iterator[tuple[Job, Answer]]:
    """Do all jobs, in whatever order; every tenth, the first among them, twice where two can.

    `work` and `jobs` travel to other processes. A job is yielded when its last answer is there.
    Raises CrewError where two answers differ or a worker dies, and what `work` raises.
    """
    twice = {id(job) for job in jobs[::SHARE]} if len(crew.workers) > 1 else set()
    waiting: deque[_Turn[Job, Answer]] = deque(_Turn(job) for job in jobs)
    running: dict[Future[Done[Answer]], tuple[str, _Turn[Job, Answer]]] = {}
    idle = deque(crew.workers)
    while waiting or running:
        _give_out(crew, work, waiting, idle, running)
        ended, _ = wait(running, timeout=POLL, return_when=FIRST_COMPLETED)
        for future in ended:
            name, turn = running.pop(future)
            idle.append(name)
            done = _result(future, name, turn.job)
            if turn.done is not None:
                _compare(turn.job, turn.done, done)
            elif id(turn.job) in twice:
                waiting.appendleft(_Turn(turn.job, name, done))
                continue
            yield turn.job, done.answer
        for name, turn in running.values():
            if not crew.alive(name):
                raise _lost(name, turn.job)


def _give_out(
    crew: Crew,
    work: Callable[[Job], Answer],
    waiting: deque[_Turn[Job, Answer]],
    idle: deque[str],
    running: dict[Future[Done[Answer]], tuple[str, _Turn[Job, Answer]]],
) -> None:
    """Give every idle worker the next job that it has not done itself."""
    for name in list(idle):
        turn = next((turn for turn in waiting if turn.first != name), None)
        if turn is not None:
            waiting.remove(turn)
            idle.remove(name)
            running[crew.workers[name].submit(_do, work, turn.job)] = name, turn


def _do(work: Callable[[Job], Answer], job: Job) -> Done[Answer]:
    return Done(work(job), machine())


def _result(future: Future[Done[Answer]], name: str, job: object) -> Done[Answer]:
    try:
        return future.result()
    except BrokenExecutor as error:
        raise _lost(name, job) from error


def _lost(name: str, job: object) -> CrewError:
    return CrewError(
        f"{name} died at {job}, perhaps for lack of memory; with fewer workers, run it again"
    )


def _compare(job: object, first: Done[Answer], second: Done[Answer]) -> None:
    if first.answer != second.answer:
        raise CrewError(
            f"{job}: {first.machine} and {second.machine} do not give the same bytes; "
            "run `bitforbit check` on both, and leave out the one that fails"
        )


def machine() -> str:
    """This process for a message: host, process, processor, numpy and its BLAS."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    about = f"{platform.machine()}, numpy {np.__version__}, {blas['name']} {blas['version']}"
    return f"{socket.gethostname()} (process {os.getpid()}, {about})"


@contextmanager
def processes(count: int) -> Iterator[Crew]:
    """A crew of processes on this machine, which share its threads."""
    threads = max(1, (os.cpu_count() or 1) // count)
    with ExitStack() as stack:
        workers = {}
        for number in range(1, count + 1):
            workers[f"worker {number}"] = stack.enter_context(pool(1, _limit, threads))
        yield Crew(workers)


_forever = ExitStack()


def _limit(threads: int) -> None:
    """Keep this process to so many threads, for as long as it lives."""
    _forever.enter_context(limited_to(min(threads, thread_count())))


@contextmanager
def cluster(address: str) -> Iterator[Crew]:
    """A crew of the workers of a Dask scheduler (extra `dask`).

    They must find the model where it lies here. Raises RequestError where no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError as missing:
        raise RequestError("--scheduler: it needs dask; pip install 'bitforbit[dask]'") from missing
    try:
        client = Client(  # type: ignore[no-untyped-call]
            address, timeout=10, set_as_default=False
        )
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"--scheduler: no Dask scheduler at {address} ({reason})") from error
    with client:
        names = list(client.scheduler_info(n_workers=-1)["workers"])
        if not names:
            raise RequestError(
                f"--scheduler: {address} has no workers; run `dask worker {address}`"
            )
        options = {"allow_other_workers": False, "pure": False, "retries": 0}

        def bound(name: str) -> Executor:
            executor: Executor = client.get_executor(  # type: ignore[no-untyped-call]
                workers=[name], **options
            )
            return executor

        yield Crew(
            {name: bound(name) for name in names},
            lambda name: name in client.scheduler_info(n_workers=-1)["workers"],
        )
