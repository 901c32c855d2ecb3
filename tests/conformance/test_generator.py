"""Inputs that any language can make again (SPEC 15.3)."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.generator import IN_CACHE, integers, normal, seed_of, uniform, words
from tests.oracle.arrays import assert_bits
from tests.oracle.numbers import rn32

MASK = 2**64 - 1


def word(seed: int, i: int) -> int:
    """SPEC 15.3 in Python integers."""
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_published_words_of_splitmix64() -> None:
    """The first words for seed 1234567, as printed with Vigna's splitmix64.c."""
    assert words(1234567, 5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.integers(0, MASK), st.integers(0, 40))
def test_words(seed: int, count: int) -> None:
    assert words(seed, count).tolist() == [word(seed, i) for i in range(count)]
    assert words(seed, count).dtype == np.uint64


def test_long_streams_are_the_same_words_throughout() -> None:
    count = 2 * IN_CACHE + 3
    made = words(7, count)
    for i in (0, IN_CACHE - 1, IN_CACHE, 2 * IN_CACHE - 1, 2 * IN_CACHE, count - 1):
        assert made[i] == word(7, i)


def test_seed_of_a_name() -> None:
    name = "kernel/linear/k33_t5/x"
    digest = hashlib.sha256(name.encode()).digest()
    assert seed_of(name) == sum(byte << (8 * i) for i, byte in enumerate(digest[:8]))
    assert seed_of("a/x") != seed_of("a/w")


@given(st.text(max_size=20))
def test_uniform(name: str) -> None:
    got = uniform(name, 3, 5)
    seed = seed_of(name)
    want = [rn32(Fraction(word(seed, i) >> 40, 1 << 23) - 1) for i in range(15)]
    assert_bits(got, np.reshape(want, (3, 5)))


@given(st.text(max_size=20))
def test_normal(name: str) -> None:
    got = normal(name, 4, 3)
    seed = seed_of(name)
    want = []
    for i in range(12):
        first, second = word(seed, 2 * i), word(seed, 2 * i + 1)
        parts = sum((first >> (16 * j)) & 0xFFFF for j in range(4))
        exact = (parts - 131070 + Fraction(second & 0xFFFFFFFF, 1 << 32)) / (1 << 15)
        want.append(rn32(exact))
    assert_bits(got, np.reshape(want, (4, 3)))


def test_integers() -> None:
    seed = seed_of("tokens")
    assert integers("tokens", 300, 2, 3).tolist() == [
        [word(seed, 3 * row + i) % 300 for i in range(3)] for row in range(2)
    ]
    assert integers("tokens", 7, 100).dtype == np.int64


def test_ranges_and_spread() -> None:
    u, n = uniform("range", 100000), normal("range", 100000)
    assert -1 <= u.min() < -0.9999
    assert 0.9999 < u.max() < 1
    assert abs(float(u.mean())) < 0.01
    assert float(u.std()) == pytest.approx(3**-0.5, rel=0.01)
    assert np.abs(n).max() <= 4
    assert abs(float(n.mean())) < 0.02
    assert float(n.std()) == pytest.approx(1.1547, rel=0.01)


def test_a_stream_does_not_depend_on_its_length_or_shape() -> None:
    long = normal("prefix", 100)
    assert_bits(normal("prefix", 7), long[:7])
    assert_bits(normal("prefix", 5, 4).ravel(), long[:20])
    assert uniform("empty", 0, 3).shape == (0, 3)
    assert normal("scalar").shape == ()
