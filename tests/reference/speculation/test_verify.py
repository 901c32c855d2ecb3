"""One pass of verification against the oracle's fractions (SPEC 13.2, 13.4)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.errors import RequestError
from reference.sampling import Law, law_of, philox, sample
from reference.speculation import Proposal, Tally, acceptance, point_mass, residual, verify
from tests.oracle import sampling as oracle
from tests.oracle.arrays import f32
from tests.reference.speculation.laws import OPTIONS, shares_of
from tests.reference.speculation.loop import GREEDY, ids

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def test_streams_are_words_of_their_own() -> None:
    positions = np.array([0, 1, 77, 2**32 - 1])
    seen: set[int] = set()
    for stream in range(4):
        words = philox(2**63 + 5, 9, positions, stream).tolist()
        assert words == [oracle.philox(2**63 + 5, 9, int(p), stream) for p in positions]
        seen |= set(words)
    assert len(seen) == 16
    assert philox(3, 4, positions, stream=0).tolist() == philox(3, 4, positions).tolist()


@given(data=st.data())
@settings(max_examples=200)
def test_a_pass_is_the_oracles(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    n = data.draw(st.integers(0, 4))
    logit: st.SearchStrategy[float] = st.one_of(
        st.floats(-4, 4, width=32), st.sampled_from([0.0, 1.0, -60.0])
    )
    row = st.lists(logit, min_size=size, max_size=size)
    rows: list[list[float]] = [data.draw(row) for _ in range(n + 1)]
    options = data.draw(st.sampled_from(OPTIONS))
    weight = st.sampled_from([0, 1, 2, 3, 2**40, 2**40 - 1, 2**20 + 1])
    laws, tokens = [], []
    for _ in range(n):
        weights = data.draw(
            st.lists(weight, min_size=size, max_size=size).filter(lambda x: sum(x) > 0)
        )
        kept = [i for i in range(size) if weights[i]]
        laws.append(Law(ids(kept), ids([weights[i] for i in kept])))
        tokens.append(data.draw(st.sampled_from(kept)))
    previous = data.draw(st.lists(st.integers(0, size - 1), max_size=4))
    key = data.draw(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9)))
    position = data.draw(st.integers(0, 2**20))

    def random(row: int, stream: int) -> Fraction:
        return Fraction(oracle.philox(*key, position + row, stream), 2**64)

    expected = oracle.verify(
        rows,
        tokens,
        [shares_of(law) for law in laws],
        float(np.float32(options.temperature)),
        (options.top_k, options.top_p, options.min_p),
        float(np.float32(options.repetition_penalty)),
        previous,
        random,
    )
    proposal = Proposal(tokens, laws)
    verdict = verify(f32(rows), proposal, options, ids(previous), *key, position)
    assert verdict.tokens == expected
    assert verdict.accepted == len(expected) - 1
    assert all(type(token) is int for token in verdict.tokens)


@given(
    w=st.lists(st.integers(0, 2**40), min_size=1, max_size=6).filter(lambda x: sum(x) > 0),
    q=st.lists(st.integers(0, 2**40), min_size=6, max_size=6),
)
def test_acceptance_and_residual_are_exact(w: list[int], q: list[int]) -> None:
    target = Law(np.arange(len(w)), ids(w))
    kept = [i for i in range(6) if q[i]]
    if not kept:
        return
    drafted = Law(ids(kept), ids([q[i] for i in kept]))
    t, d = shares_of(target), shares_of(drafted)
    rejected = Fraction(0)
    for token in kept:
        share, of = acceptance(target, drafted, token)
        assert min(Fraction(share, of), Fraction(1)) == oracle.acceptance(t, d, token)
        rejected += d[token] * (1 - oracle.acceptance(t, d, token))
    left = residual(target, drafted)
    assert left.ids.tolist() == target.ids.tolist()
    assert all(type(weight) is int for weight in left.weights)
    assert sum(left.weights) == rejected * sum(w) * sum(q)
    if rejected:
        assert shares_of(left) == oracle.residual(t, d)


def test_a_residual_survives_where_floats_cancel() -> None:
    """One unit in 2^40 more than the draft, on 2^17 tokens: the residual is exactly it."""
    count = 2**17
    weights = np.full(count, 2**40)
    drafted = weights.copy()
    drafted[[3, 70_000]] -= 1
    left = residual(Law(np.arange(count), weights), Law(np.arange(count), drafted))
    assert np.flatnonzero(left.weights).tolist() == [3, 70_000]
    total = 2**57
    assert left.weights[3] == 2**40 * (total - 2) - (2**40 - 1) * total > 2**56


def test_bad_logits_are_refused() -> None:
    logits = f32([[0.0, 1.0], [np.nan, 0.0]])
    with pytest.raises(RequestError, match="NaN"):
        verify(logits, Proposal([1], [point_mass(1)]), GREEDY, ids([]))


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = f32([[1, 3, 3], [0, 0, 0]])
    lowest = Proposal([1], [point_mass(1)])
    assert verify(logits, lowest, GREEDY, ids([])).tokens == [1, 0]
    other = Proposal([2], [point_mass(2)])
    assert verify(logits, other, GREEDY, ids([])).tokens == [1]


def test_figures() -> None:
    tally = Tally()
    assert (tally.acceptance_rate, tally.tokens_per_pass) == (0.0, 0.0)
    logits = f32([[0, 9], [9, 0], [0, 9]])
    for tokens in ([1, 0], [1, 1], [], [0, 0]):
        proposal = Proposal(tokens, [point_mass(token) for token in tokens])
        tally.add(proposal, verify(logits, proposal, GREEDY, ids([])))
    assert (tally.passes, tally.drafted, tally.accepted) == (4, 6, 3)
    assert (tally.acceptance_rate, tally.tokens_per_pass) == (0.5, 1.75)


def test_law_of_is_what_sample_draws_from() -> None:
    logits = f32([0.5, -1, 2, 0])
    for options in OPTIONS:
        law = law_of(logits, options, ids([2]))
        drawn = {sample(logits, options, ids([2]), 4, 0, p) for p in range(200)}
        assert drawn == set(law.ids[law.weights > 0].tolist())
