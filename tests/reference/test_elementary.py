"""Correct rounding of the elementary functions, against mpmath and long double (SPEC 4)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from reference import elementary
from reference.elementary import SLACK, exp, gelu_tanh, sigmoid, silu, softmax, tanh
from reference.errors import PlatformError
from tests.oracle import elementary as oracle
from tests.oracle import nasty
from tests.oracle.arrays import Float32, assert_bits, assert_same, bits
from tests.reference.processes import lines_of
from tools import settle_elementary as tool

ROUNDED = ("exp", "log", "sin", "cos", "tanh")
ACTIVATIONS = ("sigmoid", "silu", "gelu_tanh")
ALL = ROUNDED + ACTIVATIONS
NAN_BITS = 0x7FC00000
INF = np.inf

Bits = NDArray[np.uint32]


def of_bits(*words: int) -> Float32:
    return np.array(words, np.uint32).view(np.float32)


def any_bits(seed: int, count: int) -> Float32:
    words = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64)
    return words.astype(np.uint32).view(np.float32)


def around(centre: int, width: int = 150) -> Float32:
    """The float32 with the bits nearest to those of a centre."""
    return of_bits(*range(max(centre - width, 0), centre + width + 1))


@cache
def table(name: str) -> dict[str, str]:
    text = resources.files("reference").joinpath("hard_cases.json").read_text()
    entries: dict[str, str] = json.loads(text)[name]
    return entries


def hard_inputs(name: str) -> Float32:
    return of_bits(*(int(word, 16) for word in table(name)))


def apply(name: str, x: Float32) -> Float32:
    result: Float32 = getattr(elementary, name)(x)
    return result


def assert_as_oracle(name: str, x: Float32) -> None:
    function: Callable[[float], float] = getattr(oracle, name)
    assert_bits(apply(name, x), [function(float(value)) for value in x], name)


# --- Correct rounding (SPEC 4.1) -----------------------------------------------------------------


@pytest.mark.parametrize("name", ROUNDED)
def test_every_hard_case_is_settled_as_mpmath_does(name: str) -> None:
    x = hard_inputs(name)
    assert len(x) > 50
    assert_as_oracle(name, x)
    settled = of_bits(*(int(word, 16) for word in table(name).values()))
    assert_same(apply(name, x), settled)


def test_the_table_is_canonical() -> None:
    text = resources.files("reference").joinpath("hard_cases.json").read_text()
    tables = json.loads(text)
    assert tuple(tables) == ROUNDED
    for entries in tables.values():
        assert list(entries) == sorted(entries)
        for word in [*entries, *entries.values()]:
            assert word == f"{int(word, 16):08x}"
    for name, flip in (("sin", 1 << 31), ("cos", 0), ("tanh", 1 << 31)):
        entries = {int(a, 16): int(b, 16) for a, b in tables[name].items()}
        assert entries == {a ^ (1 << 31): b ^ flip for a, b in entries.items()}


@pytest.mark.parametrize("name", ROUNDED)
def test_the_table_holds_the_near_inputs_and_no_others(name: str) -> None:
    """`tools/settle_elementary.py --verify`, for some blocks of inputs only."""
    known = np.array([int(word, 16) for word in table(name)])
    rng = np.random.default_rng(4)
    blocks = {int(b) for b in rng.choice(known, 30) // tool.BLOCK}
    blocks |= {int(b) for b in rng.integers(0, 2**32 // tool.BLOCK, 30)}
    for block in sorted(blocks):
        settled = {word: tool.settle(name, word) for word in tool.suspects(name, block).tolist()}
        near = {f"{word:08x}": f"{y:08x}" for word, (y, is_near) in settled.items() if is_near}
        here = {a: b for a, b in table(name).items() if int(a, 16) // tool.BLOCK == block}
        assert near == here


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is no wider")
@pytest.mark.parametrize("name", ROUNDED)
def test_a_million_inputs_as_long_double_rounds_them(name: str) -> None:
    rng = np.random.default_rng(5)
    usual = rng.uniform(-110, 110, 300_000).astype(np.float32)
    small = (rng.standard_normal(300_000) * 2.0 ** rng.integers(-30, 6, 300_000)).astype(np.float32)
    x = np.concatenate([any_bits(6, 1_000_000), usual, small])
    with np.errstate(all="ignore"):
        wide = getattr(np, name)(x.astype(np.longdouble))
        margin = np.longdouble(2) ** -58
        low = (wide * (1 - margin)).astype(np.float32)
        high = (wide * (1 + margin)).astype(np.float32)
    result = apply(name, x)
    sure = low == high
    unsure = x[~sure & ~np.isnan(wide)]
    assert len(unsure) < 20
    assert_as_oracle(name, unsure)
    assert_same(result[sure], low[sure])
    assert (bits(result[np.isnan(wide)]) == NAN_BITS).all()


@pytest.mark.parametrize("name", ALL)
def test_thousands_of_inputs_as_the_oracle(name: str) -> None:
    rng = np.random.default_rng(7)
    x = np.concatenate([any_bits(8, 1500), rng.standard_normal(1000).astype(np.float32) * 5])
    assert_as_oracle(name, x)


@pytest.mark.parametrize("name", ALL)
@given(x=hnp.arrays(np.float32, st.integers(1, 8), elements=st.floats(width=32)))
def test_anything_as_the_oracle(name: str, x: Float32) -> None:
    assert_as_oracle(name, x)


@pytest.mark.parametrize(
    ("name", "centre"),
    [
        ("exp", 0x42B17217),  # the last input before infinity
        ("exp", 0xC2AEAC4F),  # the first subnormal result
        ("exp", 0xC2CFF1B4),  # the last one that is not 0
        ("exp", 0x33000000),  # 2^-25: 1 begins to give way, from above
        ("exp", 0x33800000),  # 2^-24
        ("exp", 0xB2800000),  # -2^-26: and from below
        ("exp", 0xB3000000),  # -2^-25
        ("log", 0x3F800000),  # 1, near which the logarithm vanishes
        ("log", 0x00800000),  # the first normal input
        ("log", 0x00000100),  # subnormal inputs
        ("log", 0x7F7FFF00),
        ("sin", 0x00000100),  # subnormal results
        ("sin", 0x00800000),
        ("sin", 0x39E89768),  # sin(x) ceases to be x
        ("sin", 0x40490FDB),  # pi
        ("sin", 0x7F7FFF00),
        ("cos", 0x39800000),  # 2^-12: 1 begins to give way
        ("cos", 0x3FC90FDB),  # pi / 2
        ("cos", 0x7F7FFF00),
        ("tanh", 0x00000100),
        ("tanh", 0x39B504F3),  # tanh(x) ceases to be x
        ("tanh", 0x41102CB4),  # tanh(x) begins to be 1
        ("tanh", 0xC1102CB4),
        ("sigmoid", 0xC2B17217),  # 1 + exp(-x) overflows
        ("silu", 0xC2B17217),
        ("silu", 0x00000100),
        ("gelu_tanh", 0x00000100),
        ("gelu_tanh", 0xC0A00000),  # 1 + tanh(u) vanishes
    ],
)
def test_the_neighbourhoods_of_thresholds(name: str, centre: int) -> None:
    assert_as_oracle(name, around(centre))


def test_where_the_thresholds_are() -> None:
    overflow = of_bits(0x42B17217, 0x42B17218)
    assert bits(exp(overflow)).tolist() == [0x7F7FFF84, 0x7F800000]
    underflow = of_bits(0xC2CFF1B4, 0xC2CFF1B5)
    assert bits(exp(underflow)).tolist() == [1, 0]
    saturation = of_bits(0x41102CB3, 0x41102CB4)
    assert bits(tanh(saturation)).tolist() == [0x3F7FFFFF, 0x3F800000]


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("exp", [0.0, -0.0, INF, -INF, 3e38, -3e38], [1, 1, INF, 0.0, INF, 0.0]),
        ("log", [0.0, -0.0, INF, -INF, 1, -1e-45], [-INF, -INF, INF, np.nan, 0.0, np.nan]),
        ("sin", [0.0, -0.0, INF, -INF], [0.0, -0.0, np.nan, np.nan]),
        ("cos", [0.0, -0.0, INF, -INF], [1, 1, np.nan, np.nan]),
        ("tanh", [0.0, -0.0, INF, -INF, 50, -3e38], [0.0, -0.0, 1, -1, 1, -1]),
        ("sigmoid", [0.0, -0.0, INF, -INF, -3e38], [0.5, 0.5, 1, 0.0, 0.0]),
        ("silu", [0.0, -0.0, INF, -INF, -3e38], [0.0, -0.0, INF, np.nan, -0.0]),
        ("gelu_tanh", [0.0, -0.0, INF, -INF, -3e38], [0.0, -0.0, INF, np.nan, -0.0]),
    ],
)
def test_special_values(name: str, x: list[float], y: list[float]) -> None:
    special = np.array(x, np.float32)
    assert_bits(apply(name, special), np.array(y, np.float32), name)
    assert_as_oracle(name, special)


@pytest.mark.parametrize("name", ALL)
def test_there_is_one_nan(name: str) -> None:
    x = of_bits(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF)
    assert (bits(apply(name, x)) == NAN_BITS).all()
    for value in x:
        assert bits(apply(name, value)) == NAN_BITS


@pytest.mark.parametrize("name", ["sin", "tanh"])
def test_tiny_and_subnormal_inputs_are_their_own_result(name: str) -> None:
    x = np.concatenate([around(300, 299), around(0x00800000), around(0x20000000)])
    assert_same(apply(name, x), x)
    assert_same(apply(name, -x), -x)


def test_rounding_keeps_exp_and_log_and_tanh_monotone() -> None:
    x = np.sort(any_bits(9, 200_000))
    x = x[~np.isnan(x)]
    for name in ("exp", "log", "tanh"):
        y = apply(name, x[x > 0] if name == "log" else x)
        assert (np.diff(y[np.isfinite(y)]) >= 0).all()


# --- Where float64 is unsure ---------------------------------------------------------------------


class Crooked:
    """A float64 function that is wrong by a given relative error everywhere."""

    def __init__(self, name: str, error: float) -> None:
        self.__name__ = name
        self.error = error

    def __call__(self, x: Any, out: Any) -> None:
        getattr(np, self.__name__)(x, out=out)
        out *= 1 + self.error


@pytest.mark.parametrize("share", [15 / 16, 0.5, -0.5, -15 / 16])
@pytest.mark.parametrize("name", ROUNDED)
def test_errors_of_float64_change_no_bit(name: str, share: float) -> None:
    """Up to 15 ulp, less what the machine's own function takes."""
    x = np.concatenate([hard_inputs(name), any_bits(10, 200_000)])
    crooked: Any = Crooked(name, share * SLACK - np.sign(share) * 2.0**-51)
    assert_same(elementary._correctly_rounded(crooked, x), apply(name, x))


@pytest.mark.parametrize("name", ROUNDED)
def test_an_easy_input_that_float64_makes_hard_raises(name: str) -> None:
    x = np.full(100, 1.7, np.float32)
    y = float(apply(name, x)[0])
    boundary = (y + float(np.nextafter(np.float32(y), np.float32(9)))) / 2
    crooked: Any = Crooked(name, boundary / float(getattr(np, name)(float(x[0]))) - 1)
    with pytest.raises(PlatformError, match=f"^{name} of the float32 0x3fd9999a: "):
        elementary._correctly_rounded(crooked, x)


@pytest.mark.parametrize("name", ROUNDED)
def test_an_unsure_input_missing_from_the_table_raises(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementary, "_hard_cases", lambda _: {})
    hard = hard_inputs(name)
    complaints = []
    for x in hard:
        try:
            apply(name, x)
        except PlatformError as error:
            complaints.append(f"{name} of the float32 {int(bits(x)):#010x}: " in str(error))
    assert len(complaints) > len(hard) // 4
    assert all(complaints)
    assert (bits(apply(name, of_bits(0x7FC00000, 0xFFC00001))) == NAN_BITS).all()


CHILD = """
import hashlib, numpy as np
from reference import elementary
from tests.fingerprint import features
from tests.reference.test_elementary import ALL, ROUNDED, any_bits, hard_inputs
x = np.concatenate([any_bits(12, 300_000), *map(hard_inputs, ROUNDED)])
usual = np.random.default_rng(13).standard_normal(100_000).astype(np.float32) * np.float32(9)
x = np.concatenate([x, usual])
print(",".join(features()))
for name in ALL:
    print(name, hashlib.sha256(getattr(elementary, name)(x).tobytes()).hexdigest())
"""

VECTORS = (
    "AVX512_SKX AVX512_SPR AVX512_ICL AVX512_CNL AVX512_CLX AVX512F AVX512CD X86_V4 AVX2 FMA3 "
    "X86_V3 NEON_FP16 NEON_VFPV4 ASIMDHP ASIMDDP ASIMDFHM SVE VX VXE VXE2"
)


def in_a_process(**environment: str) -> tuple[str, list[str]]:
    """Features of the machine that numpy uses, and a digest of each function's results."""
    features, *digests = lines_of("-c", CHILD, **environment)
    return features, digests


def test_vector_instructions_change_no_bit() -> None:
    features, digests = in_a_process()
    fewer, same = in_a_process(NPY_DISABLE_CPU_FEATURES=VECTORS)
    assert fewer == ""
    assert digests == same
    assert len(digests) == len(ALL)
    if not features:
        pytest.skip("numpy uses no optional features here")


# --- Arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_any_shape(name: str) -> None:
    x = np.random.default_rng(14).standard_normal((6, 4, 5)).astype(np.float32)
    before = x.copy()
    y = apply(name, x)
    assert y.shape == x.shape
    assert_same(apply(name, x[::2, :, ::-1]), np.ascontiguousarray(y[::2, :, ::-1]))
    assert_same(apply(name, x.T), np.ascontiguousarray(y.T))
    assert apply(name, x[:0]).shape == (0, 4, 5)
    for scalar in (x[1, 2, 3], np.asarray(x[1, 2, 3])):
        assert_same(apply(name, scalar), y[1, 2, 3])
        assert np.asarray(apply(name, scalar)).shape == ()
    assert_same(x, before)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("count", [elementary._CHUNK - 1, 2 * elementary._CHUNK + 3])
def test_results_do_not_depend_on_neighbours(name: str, count: int) -> None:
    x = np.random.default_rng(15).standard_normal(count).astype(np.float32) * np.float32(20)
    if name in ROUNDED:
        x[::777] = np.resize(hard_inputs(name), len(x[::777]))
    x[[5, -1]] = np.nan, np.inf
    y = apply(name, x)
    for some in (slice(0, 100), slice(elementary._CHUNK - 50, None), slice(3, None, 1000)):
        assert_same(apply(name, x[some]), y[some])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_only_float32_is_taken(name: str, dtype: type) -> None:
    with pytest.raises(TypeError, match=r"takes float32, not (float64|float16|int32)"):
        apply(name, np.ones(3, dtype))


@pytest.mark.parametrize("name", ALL)
def test_nothing_warns(name: str) -> None:
    special = np.array([0, INF, np.nan, 3e38], np.float32)
    x = np.concatenate([any_bits(16, 100_000), around(0x42B17217), around(0, 3), special, -special])
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        apply(name, x)
        for value in x[-320:]:
            apply(name, value)


# --- Activations and softmax (SPEC 4.2, 4.3) -----------------------------------------------------


def test_activations_are_their_steps() -> None:
    """The formulas of SPEC 4.2, one float32 operation a line."""
    one, half = np.float32(1), np.float32(0.5)
    x = np.random.default_rng(17).standard_normal(50_000).astype(np.float32) * np.float32(6)
    e = exp(-x)
    s = one + e
    s = one / s
    assert_same(sigmoid(x), s)
    assert_same(silu(x), x * s)
    u = x * x
    u = u * x
    u = of_bits(0x3D372713) * u
    u = x + u
    u = of_bits(0x3F4C422A) * u
    t = one + tanh(u)
    h = half * x
    assert_same(gelu_tanh(x), h * t)


@pytest.mark.parametrize("kind", nasty.KINDS)
@pytest.mark.parametrize("length", [1, 2, 33, 100])
def test_softmax_as_the_oracle(kind: str, length: int) -> None:
    rng = np.random.default_rng(18)
    for scale in (1, 20):
        with np.errstate(over="ignore"):
            x = nasty.row(rng, kind, length) * np.float32(scale)
        x[np.isinf(x)] = -INF
        x[rng.random(length) < 0.2] = -INF
        assert_bits(softmax(x), oracle.softmax(x.tolist()))


def test_softmax_rows_are_on_their_own() -> None:
    x = np.random.default_rng(19).standard_normal((5, 3, 40)).astype(np.float32)
    x[0, 0, 3], x[1, 1, 0], x[2, 2, :], x[3, 0, 7] = np.nan, INF, -INF, -INF
    y = softmax(x)
    for index in np.ndindex(5, 3):
        assert_bits(y[index], oracle.softmax(x[index].tolist()), str(index))
    assert (bits(y[[0, 1, 2], [0, 1, 2]]) == NAN_BITS).all()
    assert y[3, 0, 7] == 0
    assert all(a <= b for a, b in pairwise(np.sort(y[4, 0])))
