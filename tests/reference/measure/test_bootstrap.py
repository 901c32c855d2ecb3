"""Intervals against statistics."""

from __future__ import annotations

import numpy as np
import pytest

from reference.measure.bootstrap import RESAMPLES, STRETCH, Bootstrap


def test_intervals_of_independent_positions_are_those_of_the_normal_law() -> None:
    values = np.random.default_rng(0).exponential(size=20_000)
    found = Bootstrap([1000] * 20).mean(values)
    error = values.std() / np.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.12)


def test_positions_that_are_alike_widen_the_interval() -> None:
    """Runs of 32 equal values tell as much as one each: the error grows by the root of 32."""
    rng = np.random.default_rng(0)
    values = np.repeat(rng.standard_normal(640), 32)
    found = Bootstrap([len(values)]).mean(values)
    error = values.std() / np.sqrt(640)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_blocks_stay_in_their_windows_and_are_weighted_by_their_length() -> None:
    """Two windows of 65: blocks of 64, 1, 64, 1; a mean of ones is 1 in every resample."""
    bootstrap = Bootstrap([STRETCH + 1] * 2)
    found = bootstrap.mean(np.ones(2 * STRETCH + 2))
    assert (found.value, found.low, found.high) == (1, 1, 1)
    assert bootstrap._draws.shape == (RESAMPLES, 4)
    assert (bootstrap._draws.sum(axis=1) == 4).all()
    values = np.arange(2.0 * STRETCH + 2)
    assert bootstrap.mean(values).value == values.mean()


def test_differences_are_paired() -> None:
    noise = 100 * np.random.default_rng(0).standard_normal(1000)
    bootstrap = Bootstrap([1000])
    apart = bootstrap.mean(noise + 0.5).low - bootstrap.mean(noise).low
    assert apart == pytest.approx(0.5)
