"""Sampling against the oracle's integers, and its random numbers (SPEC 13)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import sampling as module
from reference.errors import RequestError
from reference.sampling import (
    Ints,
    Sampling,
    Words,
    candidates,
    penalised,
    philox,
    philox4x32,
    sample,
)
from tests.oracle import nasty
from tests.oracle import sampling as oracle
from tests.oracle.arrays import Float32, assert_bits, f32

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

NOTHING = np.zeros(0, np.int64)

# The known answers that Random123 publishes for Philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


# 13.2


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    assert list(oracle.philox4x32(words(counter), words(key))) == words(expected)
    lanes = [np.full(3, word, np.uint64) for word in words(counter)]
    k0, k1 = words(key)
    found = philox4x32(lanes, (k0, k1))
    assert [lane.tolist() for lane in found] == [[word] * 3 for word in words(expected)]


def test_philox_is_keyed_by_seed_request_and_position() -> None:
    positions = np.array([0, 1, 2, 77, 2**31 - 1, 2**32 - 1])
    for seed in (0, 1, 2**32 - 1, 2**32, 2**63 + 5, 2**64 - 1):
        for request in (0, 1, 2**32 - 1):
            found = philox(seed, request, positions)
            assert found.dtype == np.uint64
            assert found.tolist() == [oracle.philox(seed, request, int(p)) for p in positions]
    assert int(philox(0, 0, np.array([0]))[0]) == 0xE169C58D6627E8D5


def test_draws_do_not_know_each_other() -> None:
    positions = np.arange(100)
    whole = philox(9, 4, positions)
    assert len(set(whole.tolist())) == 100
    order = np.random.default_rng(1).permutation(100)
    assert philox(9, 4, positions[order]).tolist() == whole[order].tolist()
    for p in (0, 50):
        assert philox(9, 4, positions[p : p + 1]).tolist() == [whole[p]]
    assert not set(whole.tolist()) & set(philox(9, 5, positions).tolist())


# 13.1


def as_float32(x: float) -> float:
    return float(np.float32(x))


def compare(
    logits: Float32, options: Sampling, previous: list[int], word: tuple[int, int, int]
) -> int:
    """One draw of the reference, checked against the oracle step by step."""
    values = nasty.tolist(logits)
    penalty, temperature = as_float32(options.repetition_penalty), as_float32(options.temperature)
    seen = np.array(previous, np.int64)
    penalized = oracle.penalize(values, penalty, previous)
    assert_bits(penalised(logits, seen, np.float32(penalty)), penalized)
    if temperature > 0:
        weights = oracle.weights_of(penalized, temperature)
        kept = sorted(oracle.kept_tokens(weights, options.top_k, options.top_p, options.min_p))
        found, found_weights = candidates(f32(penalized), options, np.float32(temperature))
        assert found.tolist() == kept
        assert found_weights.tolist() == [weights[i] for i in kept]
    seed, request, position = word
    expected = oracle.sample(
        values,
        temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        penalty,
        previous,
        oracle.philox(seed, request, position),
    )
    token = sample(logits, options, seen, seed, request, position)
    assert token == expected
    assert isinstance(token, int)
    return token


def option_strategy() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5, 1e-3, 100.0]),
        top_k=st.sampled_from([0, 1, 2, 3, 5, 1000]),
        top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1, 1e-9]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.1, 0.8, 2.0]),
    )


@settings(max_examples=150)
@given(
    logits=st.lists(
        st.one_of(
            st.floats(-20, 20, width=32),
            st.sampled_from([-np.inf, 0.0, -0.0, 1.0, 3.0, 3.0000002, 1e30, -1e30]),
        ),
        min_size=1,
        max_size=14,
    ),
    options=option_strategy(),
    previous=st.lists(st.integers(0, 13), max_size=5),
    word=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 10000)),
)
def test_sampling_is_the_oracles(
    logits: list[float], options: Sampling, previous: list[int], word: tuple[int, int, int]
) -> None:
    if not np.isfinite(logits).any():
        logits = [*logits, 0.5]
    compare(f32(logits), options, [i for i in previous if i < len(logits)], word)


@pytest.mark.parametrize("size", [50, 700])
def test_sampling_from_larger_vocabularies(size: int) -> None:
    rng = np.random.default_rng(size)
    logits = (rng.standard_normal(size) * 3).astype(np.float32)
    logits[rng.integers(0, size, size // 10)] = logits[0]
    for options in (
        Sampling(1.0),
        Sampling(0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1),
        Sampling(1.3, top_p=0.7),
        Sampling(1.0, min_p=0.1),
    ):
        for position in range(3):
            compare(logits, options, [0, 3, 3, 7], (1234567890123, 2, position))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_are_refused(bad: float) -> None:
    with pytest.raises(RequestError):
        sample(f32([0.0, bad, 1.0]), Sampling(), NOTHING)
    with pytest.raises(RequestError):
        sample(f32([0.0, bad, 1.0]), Sampling(1.0), NOTHING)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_allowed_is_refused(temperature: float) -> None:
    with pytest.raises(RequestError):
        sample(f32([-np.inf, -np.inf]), Sampling(temperature), NOTHING)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": np.nan},
        {"temperature": np.inf},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.5},
        {"top_p": np.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 2.0**-150},
        {"repetition_penalty": 2.0**128},
        {"temperature": 2.0**128},
        {"top_p": 0.0},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Sampling(**options)


def test_options_at_the_ends_of_their_range_are_taken() -> None:
    least, largest = 2.0**-149, float(np.finfo(np.float32).max)
    for penalty in (least, largest):
        assert Sampling(repetition_penalty=penalty).repetition_penalty == penalty
    assert Sampling(temperature=largest, top_p=1.0, min_p=1.0).temperature == largest
    assert Sampling(top_p=2.0**-1074, min_p=0.0).min_p == 0


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert sample(f32([1, 3, 3, 2]), Sampling(), NOTHING) == 1
    assert sample(f32([-0.0, 0.0]), Sampling(), NOTHING) == 0
    assert sample(f32([-np.inf, -5, -np.inf]), Sampling(), NOTHING) == 1
    # The penalty comes before, the cuts do not matter.
    options = Sampling(repetition_penalty=2.0, top_k=1, top_p=0.1, min_p=1.0)
    assert sample(f32([4, 3, 3]), options, np.array([0])) == 1


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = f32([-np.inf, 0.0, -np.inf, 0.0])
    options = Sampling(50.0)
    drawn = {sample(logits, options, NOTHING, 0, 0, p) for p in range(60)}
    assert drawn == {1, 3}


def kept(logits: list[float], **options: Any) -> list[int]:
    sampling = Sampling(**{"temperature": 1.0, **options})
    ids, _ = candidates(f32(logits), sampling, np.float32(sampling.temperature))
    found: list[int] = ids.tolist()
    weights = oracle.weights_of(nasty.tolist(f32(logits)), sampling.temperature)
    expected = oracle.kept_tokens(weights, sampling.top_k, sampling.top_p, sampling.min_p)
    assert found == sorted(expected)
    return found


def test_ties_at_a_cut_go_to_the_lower_id() -> None:
    assert kept([1, 1, 1, 1], top_k=2) == [0, 1]
    assert kept([0, 1, 1, 1], top_k=2) == [1, 2]
    assert kept([1, 1, 1, 1], top_p=0.5) == [0, 1]
    assert kept([1, 1, 1, 1], top_p=0.5 + 2.0**-52) == [0, 1, 2]
    assert kept([1, 1, 1, 1], top_p=0.25) == [0]
    assert kept([1, 1, 1, 1], min_p=1.0) == [0, 1, 2, 3]


def test_the_token_that_crosses_top_p_is_kept() -> None:
    logits = [float(np.log(p)) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, top_p=0.39) == [0]
    assert kept(logits, top_p=0.41) == [0, 1]
    assert kept(logits, top_p=0.95) == [0, 1, 2, 3]
    # The float64 next to 0.9 is above it, that next to 0.7 below.
    assert kept([0.0] * 10, top_p=0.9) == list(range(10))
    assert kept([0.0] * 10, top_p=0.7) == list(range(7))
    # top_p is a share of what top_k left, min_p of the largest.
    assert kept(logits, top_k=2, top_p=0.5) == [0]
    assert kept(logits, min_p=0.5) == [0, 1, 2]
    assert kept(logits, min_p=0.51) == [0, 1]


def test_the_first_candidate_always_stays() -> None:
    assert kept([0, 5, 0], top_k=1) == [1]
    assert kept([0, 5, 0], top_p=1e-300) == [1]
    assert kept([0, 5, 0], min_p=1.0) == [1]


def test_equal_weights_are_a_tie_though_logits_differ() -> None:
    # At a temperature this high both weights are 2^40; the lower id goes first.
    assert kept([1.0, 1.0000001], temperature=1e30, top_k=1) == [0]
    # e^-40 weighs nothing, and top_p = 1 is reached without it.
    assert kept([-40.0, 0.0, -41.0], top_k=2) == [1]


def test_temperature_extremes() -> None:
    logits = f32([1.0, 1.0000001, -3e38, 0.0])
    cold = Sampling(1e-30)
    assert {compare(logits, cold, [], (5, 0, p)) for p in range(20)} == {1}
    hot = Sampling(1e38)
    assert {compare(logits, hot, [], (5, 0, p)) for p in range(60)} == {0, 1, 2, 3}
    subnormal = Sampling(2.0**-149)
    assert {compare(logits, subnormal, [], (5, 0, p)) for p in range(20)} == {1}


def test_a_penalty_counts_once_and_by_sign() -> None:
    logits = f32([3.0, -3.0, 0.0, -0.0, 1.0])
    found = penalised(logits, np.array([0, 0, 0, 1, 2, 3, 3]), np.float32(2.0))
    assert_bits(found, [1.5, -6.0, 0.0, -0.0, 1.0])
    assert_bits(logits, [3.0, -3.0, 0.0, -0.0, 1.0])


def test_a_penalty_that_leaves_no_choice_is_named() -> None:
    tiny, logits = Sampling(repetition_penalty=2.0**-140), f32([1.0, 2.0])
    for values, message in (
        (logits, r"^repetition_penalty: 7.*e-43 makes logits .*; give one nearer to 1"),
        (f32([np.nan, 2.0]), "^logits: NaN, .*; check the model's weights"),
    ):
        with pytest.raises(RequestError, match=message):
            sample(values, tiny, np.array([0, 1]))
    assert sample(logits, tiny, np.array([], np.int64)) == 1


def test_every_token_owns_its_share_of_the_random_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order of token id, to the last bit of x: a token is drawn from its first word on."""
    drawn: list[int] = []

    def fixed(seed: int, request: int, positions: Ints, stream: int = 0) -> Words:
        return np.array(drawn[-1:], np.uint64)

    monkeypatch.setattr(module, "philox", fixed)
    for logits in ([0.0, 0.0], [1.0, -3.0, 2.0, 0.0, 1.0], [0.0] * 7, [-20.0, 0.0, -28.0, -2.0]):
        weights = oracle.weights_of(nasty.tolist(f32(logits)), 1.0)
        total, start = sum(weights), 0
        for token, weight in enumerate(weights):
            first, stop = (-(-(edge << 64) // total) for edge in (start, start + weight))
            for word in (first, stop - 1):
                drawn.append(word)
                assert sample(f32(logits), Sampling(1.0), NOTHING) == token
                assert oracle.draw(weights, range(len(weights)), word) == token
            start += weight


def test_frequencies_follow_the_weights() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    logits = np.log(probabilities).astype(np.float32)
    draws = [sample(logits, Sampling(1.0), NOTHING, 11, 0, p) for p in range(4000)]
    counts = np.bincount(draws, minlength=4)
    deviation = np.abs(counts - 4000 * probabilities) / np.sqrt(4000 * probabilities)
    assert (deviation < 4).all()
