"""Threads and processes compute the same bits; ratios are paired, and a broken worker is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from functools import cache
from typing import Any

import numpy as np
import pytest

from reference.errors import RequestError
from reference.measure import speedup as module
from reference.measure.machine import this_machine
from reference.measure.source import Dimensions, Source
from reference.measure.speedup import Done, Speedup, by_processes, by_threads, workers
from reference.model import Model

SOURCE = Source(
    Dimensions(layers=1, hidden=32, heads=2, kv=1, head_dim=16, ffn=32, vocab=32, context=600)
)
PROMPTS = np.random.default_rng(0).integers(0, 32, (5, 530)).tolist()


@cache
def model() -> Model:
    return SOURCE.load()


def test_bits_do_not_depend_on_workers() -> None:
    expected = by_threads(model(), PROMPTS, "exact", 1).digests
    assert len(set(expected)) == len(PROMPTS)  # another prompt has other bits
    assert by_threads(model(), PROMPTS, "exact", 2).digests == expected
    with workers(SOURCE, 2) as pool:
        for count in (1, 2):
            assert by_processes(pool, PROMPTS, "exact", count).digests == expected
        assert by_processes(pool, PROMPTS, "fast", 2).digests != expected


def test_prompts_are_shared_out_and_put_together_again() -> None:
    given: list[Any] = []

    class Here(Executor):
        def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Any:
            given.append(arguments[0])
            future: Future[list[str]] = Future()
            future.set_result([str(prompt) for prompt in arguments[0]])
            return future

    for count in (1, 2, 3, 7):
        given.clear()
        prompts = [[n] for n in range(5)]
        done = by_processes(Here(), prompts, "fast", count)
        assert done.digests == tuple(str(prompt) for prompt in prompts)
        assert len(given) == min(count, 5)
        assert max(map(len, given)) - min(map(len, given)) <= 1


def figures(monkeypatch: pytest.MonkeyPatch, times: Iterator[float], bits: str) -> list[Any]:
    def threads(model: Any, prompts: Any, kind: Any, count: int) -> Done:
        return Done(next(times), ("x",) if count == 1 else (bits,))

    monkeypatch.setattr(module, "by_threads", threads)
    return list(
        Speedup(SOURCE, model(), PROMPTS, [1, 2], ["threads"], "fast", 2, 0).rows(this_machine())
    )


def test_ratios_are_paired_and_nothing_is_done_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # one, two, one again; then, each arm being first in turn: two, one again, one
    rows = figures(monkeypatch, iter([4.0, 2.0, 4.0, 3.0, 8.0, 12.0]), "x")
    assert [(row["count"], row["role"]) for row in rows] == [
        (1, "first"),
        (2, ""),
        (1, "do nothing"),
    ]
    assert rows[0]["speedup_median"] is None
    assert (rows[1]["speedup_least"], rows[1]["speedup_most"]) == (2.0, 4.0)
    assert (rows[2]["speedup_least"], rows[2]["speedup_most"]) == (1.0, 1.5)
    assert rows[0]["rate_most"] == 5 * 530 / 4
    assert all(row["same_bits"] for row in rows)
    assert json.loads(json.dumps(rows)) == rows


def test_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = figures(monkeypatch, iter([1.0] * 6), "y")
    assert [row["same_bits"] for row in rows] == [True, False, True]
    assert rows[0]["logits_sha256"] == rows[2]["logits_sha256"] != rows[1]["logits_sha256"]


def test_a_process_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.by_processes

    def killed(pool: Any, *rest: Any) -> Done:
        pool.submit(int).result()
        os.kill(next(iter(pool._processes)), signal.SIGKILL)
        return real(pool, *rest)

    monkeypatch.setattr(module, "by_processes", killed)
    speedup = Speedup(SOURCE, model(), PROMPTS, [1], ["processes"], "fast", 1, 0)
    with pytest.raises(RequestError, match=r"^workers: a process ended before it was done"):
        list(speedup.rows(this_machine()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counts": [0]}, "^workers: 0 of them"),
        ({"counts": []}, "^workers: 0 of them"),
        ({"counts": [6]}, "^workers: 6 processes have 5 prompts"),
        ({"counts": [4096], "kinds": ["threads"]}, "^threads: 4096 were asked for"),
        ({"repetitions": 0}, "^repetitions: 0 is out of range"),
        ({"prompts": [[1] * 601]}, "^lengths: 601 positions are needed"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], message: str) -> None:
    plain = {"source": SOURCE, "model": model(), "prompts": PROMPTS, "counts": [1]}
    with pytest.raises(RequestError, match=message):
        Speedup(**{**plain, **options})
