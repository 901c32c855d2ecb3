"""Users who decode together: rates are drawn from the trace, and predicted by the ceiling."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from reference.engine import Engine
from reference.errors import RequestError
from reference.measure import batching as module
from reference.measure.batching import FIRST, Batching, Run, flat_from, together
from reference.measure.ceiling import EXACT, Hardware, turning_batch
from reference.measure.machine import this_machine
from reference.trace import Trace
from tests.reference.models import LLAMA_SMALL, QWEN2_SMALL, small

HARDWARE = Hardware("it", 1e9, {"float64": 3e9}, "given")


def test_only_passes_in_which_all_decode_count(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Trace] = []

    class Kept(Trace):
        def __init__(self) -> None:
            super().__init__()
            traces.append(self)

    monkeypatch.setattr(module, "Trace", Kept)
    run = together(small(LLAMA_SMALL), 3, 5, 4)
    (trace,) = traces
    first, *others = trace.passes
    assert [share[1:] for share in first.shares] == [("prefill", 5)] * 3
    for done in others:
        assert [share[1:] for share in done.shares] == [("decode", 1)] * 3
    assert len(others) == FIRST + 4
    seconds = [done.ended - done.started for done in others[FIRST:]]
    assert run == Run(3, tuple(seconds))
    assert run.single == pytest.approx(4 / sum(seconds))
    assert run.total == pytest.approx(3 * run.single)


def test_rows_compare_batches_with_the_first_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = iter([1, 1, 1, 4, 4, 2])  # the second turn begins with the second arm
    monkeypatch.setattr(
        module, "together", lambda model, n, depth, output: Run(n, (float(next(slow)),))
    )
    model = small(LLAMA_SMALL)
    counted: list[int] = []
    batching = Batching(model, [1, 4], 1, 8, 4, 2, 0)
    rows = list(batching.rows(this_machine(), HARDWARE, lambda: counted.append(1)))
    assert len(counted) == batching.runs == 6
    assert json.loads(json.dumps(rows)) == rows
    told = [(row["batch"], row["role"]) for row in rows]
    assert told == [(1, "first"), (4, ""), (1, "do nothing")]
    assert rows[0]["gain_median"] is None
    assert (rows[1]["gain_least"], rows[1]["gain_most"]) == (2.0, 4.0)
    assert (rows[2]["gain_least"], rows[2]["gain_most"]) == (0.5, 1.0)
    assert (rows[1]["total_most"], rows[1]["single_most"]) == (4.0, 1.0)
    predicted = turning_batch(model.config, EXACT, HARDWARE, 8 + FIRST + 2)
    for row in rows:
        assert row["flat_predicted"] == predicted
        assert (row["test"], row["prompt_n"], row["cache_n"]) == ("tg4 @ d8", 8, 0)
        assert row["ceiling_total"] > 0


def test_flat_is_where_the_total_no_longer_grows() -> None:
    assert flat_from([1, 2, 4, 8], [10, 20, 38, 40]) == 4
    assert flat_from([1, 2, 4, 8], [10, 20, 30, 40]) is None
    assert flat_from([1, 2], [10, 10]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": [0, 1]}, "^batch: 0 is out of range"),
        ({"batches": []}, "^batch: 0 is out of range"),
        ({"depth": 0}, "^depth: 0 is out of range"),
        ({"output": 0}, "^output: 0 is out of range"),
        ({"depth": 250}, "^depth: 267 positions are needed, .* has 256"),
        ({"repetitions": 0}, "^repetitions: 0 is out of range"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], message: str) -> None:
    plain = {"model": small(QWEN2_SMALL), "batches": [1], "threads": 1}
    with pytest.raises(RequestError, match=message):
        Batching(**{**plain, **options})


def test_a_cache_that_is_too_small_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    small_engine = partial(Engine, cache_bytes=200_000)
    monkeypatch.setattr(module, "Engine", small_engine)
    with pytest.raises(RequestError, match=r"^batch: the engine's cache has no room for 9 users"):
        together(small(LLAMA_SMALL), 9, 30, 4)
