"""Prefill with more workers: threads inside one process, or processes that share out the prompts.

Threads share out the tiles of one prompt after another. Processes have one thread each, and each
computes whole prompts, every n-th one. All arms compute the same prompts, in turns; the first, one
thread in this process, runs a second time, which shows what of a ratio is noise. The logits of
every prompt must have the same bits in all arms.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import Any, Literal

import numpy as np

from reference.errors import RequestError
from reference.measure.machine import Machine, Spread
from reference.measure.profile import check_lengths
from reference.measure.source import Source
from reference.measure.turns import check_repetitions, fields, in_turns
from reference.model import AttentionKind, Model
from reference.threads import limited_to

Kind = Literal["threads", "processes"]
KINDS: tuple[Kind, ...] = ("threads", "processes")

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Done:
    """All prompts once. digests: sha256 of each one's logits, in hex."""

    seconds: float
    digests: tuple[str, ...]


def computed(model: Model, prompts: Prompts, kind: AttentionKind) -> list[str]:
    """Prefill of each prompt on an empty cache: sha256 of the logits of its last token."""
    rows = (model.forward(prompt, None, kind, last_only=True) for prompt in prompts)
    return [hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest() for row in rows]


def by_threads(model: Model, prompts: Prompts, kind: AttentionKind, count: int) -> Done:
    """One prompt after another, in this process."""
    with limited_to(count):
        started = perf_counter()
        digests = computed(model, prompts, kind)
        return Done(perf_counter() - started, tuple(digests))


_own: list[Model] = []
"""The model of a worker process."""


def _start(source: Source) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it will end it
    _own.append(source.load())


def _work(prompts: Prompts, kind: AttentionKind) -> list[str]:
    with limited_to(1):
        return computed(_own[0], prompts, kind)


def by_processes(pool: Executor, prompts: Prompts, kind: AttentionKind, count: int) -> Done:
    """Shared out to `count` processes of a pool that has as many or more."""
    started = perf_counter()
    shares = [prompts[first::count] for first in range(count)]
    parts = [pool.submit(_work, share, kind) for share in shares if share]
    digests = [""] * len(prompts)
    for first, part in enumerate(parts):
        digests[first::count] = part.result()
    return Done(perf_counter() - started, tuple(digests))


def workers(source: Source, count: int) -> AbstractContextManager[ProcessPoolExecutor]:
    """Processes, each with the model. Their own threads and locks are not this process's."""
    return ProcessPoolExecutor(count, get_context("spawn"), _start, (source,))


@dataclass(frozen=True)
class Speedup:
    """Prompts, all of one length, by how many workers. counts: of each kind.

    Raises RequestError for what cannot be run.
    """

    source: Source
    model: Model
    prompts: Prompts
    counts: Sequence[int]
    kinds: Sequence[Kind] = KINDS
    attention: AttentionKind = "fast"
    repetitions: int = 3
    warm_up: int = 1

    def __post_init__(self) -> None:
        check_repetitions(self.repetitions)
        check_lengths([len(prompt) for prompt in self.prompts], self.model)
        if not self.counts or min(self.counts) < 1:
            raise RequestError("workers: 0 of them compute nothing; give 1 or more")
        if "processes" in self.kinds and max(self.counts) > len(self.prompts):
            raise RequestError(
                f"workers: {max(self.counts)} processes have {len(self.prompts)} prompts to share; "
                "give as many prompts at least"
            )
        if "threads" in self.kinds:
            for count in self.counts:
                with limited_to(count):
                    pass

    @property
    def arms(self) -> list[tuple[Kind, int]]:
        """Kind and count of each; the first, one thread, is the last one too."""
        one: tuple[Kind, int] = ("threads", 1)
        others = [(kind, n) for kind in self.kinds for n in self.counts if (kind, n) != one]
        return [one, *others, one]

    @property
    def runs(self) -> int:
        """Runs in all."""
        return (self.repetitions + self.warm_up) * len(self.arms)

    def rows(
        self, machine: Machine, on_run: Callable[[], object] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """A row for each arm. Raises RequestError where a process ends."""
        arms, turns = self.arms, self._turns(on_run)
        for index, (kind, count) in enumerate(arms):
            mine = [turn[index] for turn in turns]
            ratios = [turn[0].seconds / turn[index].seconds for turn in turns]
            tokens = sum(map(len, self.prompts))
            yield {
                **asdict(machine),
                "digest": self.model.digest,
                "attention": self.attention,
                "workers": kind,
                "count": count,
                "threads": count if kind == "threads" else 1,
                "role": {0: "first", len(arms) - 1: "do nothing"}.get(index, ""),
                "prompts": len(self.prompts),
                "cache_n": 0,
                "prompt_n": len(self.prompts[0]),
                "repetitions": len(mine),
                **fields("seconds", Spread.of([done.seconds for done in mine])),
                **fields("rate", Spread.of([tokens / done.seconds for done in mine])),
                **fields("speedup", Spread.of(ratios) if index else None),
                "logits_sha256": hashlib.sha256("".join(mine[0].digests).encode()).hexdigest(),
                "same_bits": all(done.digests == turns[0][0].digests for done in mine),
            }

    def _turns(self, on_run: Callable[[], object]) -> list[list[Done]]:
        """What each arm gave in each turn. Raises RequestError where a process ends."""
        with ExitStack() as stack:
            runs: list[Callable[[], Done]] = []
            most = max((n for kind, n in self.arms if kind == "processes"), default=0)
            pool = stack.enter_context(workers(self.source, most)) if most else None
            for kind, count in self.arms:
                if kind == "threads":
                    run = partial(by_threads, self.model)
                else:
                    assert pool is not None
                    run = partial(by_processes, pool)
                runs.append(partial(run, self.prompts, self.attention, count))
            try:
                return in_turns(runs, self.repetitions, self.warm_up, on_run)
            except BrokenProcessPool as error:
                raise RequestError(
                    "workers: a process ended before it was done; is there memory for so many?"
                ) from error
