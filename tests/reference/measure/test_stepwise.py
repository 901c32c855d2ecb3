"""Attention a step at a time is attention: the same bits, and the same products, held or not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from reference.attention import Scores, attention_exact, attention_fast, default_scale
from reference.measure import stepwise as module
from reference.measure.stepwise import STEPS, drawn, stepwise

CASES: list[dict[str, Any]] = [{}, {"window": 21}, {"softcap": 1.5}]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for lane in (module._Exact, module._Fast):
        monkeypatch.setattr(lane, "size", 4 * 90 * 11)


@pytest.mark.parametrize("case", CASES)
def test_exact_steps_have_the_bits_of_attention(case: dict[str, Any]) -> None:
    q, k, v = drawn(90, 4, 2, 40)
    scores = Scores(default_scale(40), **case)
    expected = attention_exact(q, k, v, **case)
    for held in (False, True):
        out, _ = stepwise(q, k, v, scores, "exact", held)
        assert np.array_equal(out.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("case", CASES)
def test_fast_steps_compute_attention(case: dict[str, Any]) -> None:
    q, k, v = drawn(90, 4, 2, 40)
    expected = attention_fast(q, k, v, **case)
    scores = Scores(default_scale(40), **case)
    for held in (False, True):
        out, _ = stepwise(q, k, v, scores, "fast", held)
        np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", ["exact", "fast"])
@pytest.mark.parametrize("window", [None, 21])
def test_holding_all_scores_changes_no_product(kind: Any, window: int | None) -> None:
    q, k, v = drawn(90, 4, 2, 40)
    scores = Scores(default_scale(40), window)
    counts = [stepwise(q, k, v, scores, kind, held)[1].operations for held in (False, True)]
    assert counts[0] == counts[1]
    visible = sum(min(t + 1, window or 90) for t in range(90))
    tile = 11 + (0 if window is None else 32)  # what is seen by some row of a tile alone
    assert 4 * 4 * 40 * visible <= counts[0] <= 4 * 4 * 40 * (visible + 90 * tile)


def test_every_step_is_timed() -> None:
    ticks = itertools.count()
    q, k, v = drawn(20, 2, 1, 8)
    _, measured = stepwise(q, k, v, Scores(default_scale(8)), "fast", clock=lambda: next(ticks))
    assert measured.seconds == dict.fromkeys(STEPS, 1)
