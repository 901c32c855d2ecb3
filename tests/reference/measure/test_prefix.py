"""Reuse measured: the counts, and a change that is none where nothing was moved."""

from __future__ import annotations

import numpy as np
import pytest

from reference.errors import RequestError
from reference.measure.perplexity import log_probabilities
from reference.measure.prefix import (
    COLD,
    EDITED,
    INSERTED,
    MOVED,
    NEXT,
    REMOVED,
    Experiment,
    change,
)
from tests.reference.models import QWEN3_SMALL, small, tokens_of


def experiment(**options: int) -> Experiment:
    return Experiment(
        small(QWEN3_SMALL), tokens_of(200, 32).tolist(), **{"held": 120, "new": 20, **options}
    )


def test_counts_are_those_of_the_edits() -> None:
    *_, figures = experiment(edits=2, minimum=16).run()
    assert [len(turns) for turns in figures.turns.values()] == [2] * 4
    for index, at in enumerate((16, 120 - 16 - REMOVED)):
        cold, following, edited, moved = (
            figures.turns[n][index] for n in (COLD, NEXT, EDITED, MOVED)
        )
        assert (cold.prompt_n, cold.cache_n) == (120, 0)
        assert (following.prompt_n, following.cache_n) == (20, 120)
        assert edited.prompt_n + edited.cache_n == 140 - REMOVED + INSERTED
        assert at <= edited.cache_n < at + INSERTED + 2
        assert moved.cache_n > edited.cache_n
        assert figures.changes[index].at == at
        assert figures.changes[index].largest > 0
        assert figures.changes[index].divergence > 0


def test_the_same_logits_have_not_changed() -> None:
    row = np.array([1.0, 3.0, -2.0], np.float32)
    same = change(7, row, row)
    assert (same.at, same.largest, same.divergence, same.same_top) == (7, 0.0, 0.0, True)
    other = change(7, row, np.array([4.0, 3.0, -2.0], np.float32))
    assert (other.largest, other.same_top) == (3.0, False)
    p, q = (np.exp(log_probabilities(x)) for x in (row, np.array([4.0, 3.0, -2.0], np.float32)))
    assert other.divergence == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"held": 0}, {"held": 190}, {"minimum": 60}, {"edits": 0}, {"new": 0}]
)
def test_what_cannot_be_run_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(RequestError):
        experiment(**wrong)
