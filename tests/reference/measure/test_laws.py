"""How tokens choose experts: draws, shares, exponents, and real batches."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.errors import RequestError
from reference.experts import Routing
from reference.measure.laws import SLICE, Law, distinct_in, traced, uniform, zipf, zipf_exponent


def test_uniform_hits_are_those_of_all_choices() -> None:
    """Every way in which two or three tokens choose 2 of 5, counted."""
    choices = list(itertools.combinations(range(5), 2))
    for tokens in (1, 2, 3):
        hits = [len(set().union(*each)) for each in itertools.product(choices, repeat=tokens)]
        found = uniform(5, 2).distinct(np.array([tokens]))
        assert found.tolist() == pytest.approx([sum(hits) / len(hits)])


@pytest.mark.parametrize(
    "law", [uniform(16, 4), zipf(16, 4, 0.7), zipf(16, 4, 2.5)], ids=("uniform", "zipf", "steep")
)
def test_draws_follow_the_law(law: Law) -> None:
    rng = np.random.default_rng(0)
    drawn = law.drawn(rng, 40_000)
    assert (drawn.sum(axis=1) == 4).all()
    # a share of 40,000 draws has a standard error of 0.0025 at most
    assert drawn.mean(axis=0) == pytest.approx(law.shares, abs=0.0125)
    for tokens in (2, 7, 3 * SLICE + 5):
        hit = law.hit(rng, 400, tokens)
        expected = law.distinct(np.array([tokens]))[0]
        assert hit.mean() == pytest.approx(expected, abs=5 * max(hit.std(), 0.02) / 20)
        assert hit.max() <= 16


def test_pairs_of_experts_are_not_tied_to_each_other() -> None:
    """Points one apart on a line of fixed order would always choose the same neighbours."""
    drawn = uniform(8, 2).drawn(np.random.default_rng(0), 20_000)
    together = drawn.T.astype(float) @ drawn
    apart = together[~np.eye(8, dtype=bool)] / 20_000
    assert apart.min() > 0.5 / 28


@given(st.integers(2, 200), st.floats(0, 5), st.data())
def test_zipf_shares_are_shares(experts: int, exponent: float, data: Any) -> None:
    chosen = data.draw(st.integers(1, experts))
    shares = zipf(experts, chosen, exponent).shares
    assert shares.sum() == pytest.approx(chosen)
    assert shares.max() <= 1 + 1e-12
    assert (np.diff(shares) <= 1e-12).all()
    free = shares < 1
    weights = np.arange(1, experts + 1)[free] ** -exponent
    assert shares[free] == pytest.approx(
        weights * (shares[free].sum() / max(weights.sum(), 1e-300))
    )


@pytest.mark.parametrize("exponent", [1e3, 1e6])
@pytest.mark.parametrize(("experts", "chosen"), [(4, 1), (4, 3), (4, 4), (64, 8)])
def test_a_steep_zipf_calls_the_first_alone(experts: int, chosen: int, exponent: float) -> None:
    shares = zipf(experts, chosen, exponent).shares
    assert shares == pytest.approx((np.arange(experts) < chosen).astype(float))
    assert shares.max() <= 1


def test_draws_of_many_passes_take_no_more_memory() -> None:
    law, rng = uniform(16, 4), np.random.default_rng(0)
    law.hit(rng, 1, 2)
    tracemalloc.start()
    hit = law.hit(rng, 20_000, 2)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (hit.shape, hit.min(), hit.max()) == ((20_000,), 4, 8)
    assert most < 4 << 20


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0, 2.0])
def test_the_exponent_is_found_again_and_is_the_likeliest(exponent: float) -> None:
    rng, weights = np.random.default_rng(1), np.arange(1, 33) ** -exponent
    shares = weights / weights.sum()
    calls = [rng.permutation(rng.multinomial(200_000, shares)).tolist() for _ in range(3)]
    found = zipf_exponent(calls)
    assert found == pytest.approx(exponent, abs=0.02)

    def likelihood(s: float) -> float:
        ranked = np.sort(np.array(calls), axis=1)[:, ::-1].sum(axis=0)
        p = np.arange(1, 33) ** -s
        return float((ranked * np.log(p / p.sum())).sum())

    for other in (found + 0.01, found - 0.01):
        assert likelihood(other) < likelihood(found)


def test_one_expert_has_no_exponent() -> None:
    with pytest.raises(RequestError, match=r"^routing: one expert has all calls"):
        zipf_exponent([[0, 7, 0]])


def routing(experts: Any) -> Routing:
    chosen = np.array(experts, np.int64)
    return Routing(chosen, np.ones(chosen.shape, np.float32), np.zeros(len(chosen), np.float32))


def test_real_batches_are_counted() -> None:
    rng = random.Random(0)
    chosen = [rng.sample(range(9), 3) for _ in range(23)]
    for tokens in (1, 4, 5, 23):
        count = 23 // tokens
        apart = [[chosen[i * count + b] for i in range(tokens)] for b in range(count)]
        together = [chosen[b * tokens : (b + 1) * tokens] for b in range(count)]
        for way, batches in ((False, apart), (True, together)):
            expected = [len({e for each in batch for e in each}) for batch in batches]
            assert distinct_in(routing(chosen), 9, tokens, way).tolist() == expected
    assert traced(routing(chosen), 9).shares.sum() == pytest.approx(3)
    with pytest.raises(RequestError, match=r"^batch: 24 tokens are wanted, and 23 traced"):
        distinct_in(routing(chosen), 9, 24, True)
