"""Aligned arithmetic against the oracle, and its independence of every order (SPEC 2)."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference import arithmetic, threads
from reference.arithmetic import (
    BLOCK,
    align,
    align_rows,
    align_weights,
    all_finite,
    dot,
    dot64,
    matmul,
    sum64,
    weighted_sum,
)
from tests.oracle import aligned as oracle
from tests.oracle import nasty, numbers
from tests.oracle.arrays import Float32, assert_bits, assert_same, bits, f32
from tests.oracle.strategies import lists, paired
from tests.reference.processes import lines_of

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

LARGEST = np.finfo(np.float32).max
TINIEST = np.float32(2.0**-149)
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100)


def same64(actual: Any, expected: Any) -> None:
    """Equal float64 bits, NaN equal to NaN."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert a.shape == b.shape
    known = ~np.isnan(b)
    assert np.array_equal(np.isnan(a), ~known)
    assert a[known].tobytes() == b[known].tobytes()


def flat(x: Float32) -> list[float]:
    """The aligned values of one row, padding checked and cut off."""
    values = align(x).values
    assert values.dtype == np.float64
    assert values.shape == (-(-len(x) // BLOCK), BLOCK)
    assert not values.ravel()[len(x) :].any()
    out: list[float] = values.ravel()[: len(x)].tolist()
    return out


# 2.1 blocks


@given(lists(1, 70))
def test_align_is_the_oracles(x: list[float]) -> None:
    assert flat(f32(x)) == oracle.align(x)


@pytest.mark.parametrize("kind", nasty.KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_align_of_hard_rows(kind: str, length: int) -> None:
    rng = np.random.default_rng(length)
    for _ in range(4):
        x = nasty.row(rng, kind, length)
        assert flat(x) == oracle.align(nasty.tolist(x))


def test_align_rounds_ties_to_even_and_once() -> None:
    unit = 2.0**-23
    x = f32([1.0] + [n * unit / 2 for n in (1, 3, 5, 7, -1, -3)])
    assert flat(x) == [1.0, 0.0, 2 * unit, 2 * unit, 4 * unit, 0.0, -2 * unit]
    # A tie only after a first rounding to some coarser type would go the other way.
    above = f32([1.0, np.nextafter(np.float32(unit / 2), np.float32(1))])
    assert flat(above) == [1.0, unit]


@pytest.mark.parametrize("kind", nasty.KINDS)
def test_align_is_idempotent_and_keeps_the_leading_binade(kind: str) -> None:
    x = nasty.row(np.random.default_rng(3), kind, 96)
    once = f32(flat(x))
    assert flat(once) == once.tolist()
    for start in range(0, 96, 32):
        block, rounded = x[start : start + 32], once[start : start + 32]
        exponent = np.frexp(np.abs(block).max())[1]
        leading = np.frexp(block)[1] == exponent
        assert np.array_equal(block[leading], rounded[leading])


def test_align_depends_on_the_block_alone() -> None:
    rng = np.random.default_rng(4)
    x = nasty.matrix(rng, 6, 96)
    whole = align(x).values
    for b in range(3):
        assert np.array_equal(whole[b], align(x[:, 32 * b : 32 * b + 32]).values[0])
    batched = align(x.reshape(2, 3, 96))
    assert batched.values.shape == (3, 2, 3, 32)
    assert np.array_equal(batched.values, whole.reshape(3, 2, 3, 32))


def test_align_rounds_to_the_grid_of_every_exponent() -> None:
    """Halves, and the two float32 next to each, of every unit that float32 can hold."""
    halves = np.arange(-31, 32, 2)[:31]
    for exponent in range(-148, 129):
        ties = np.ldexp(halves.astype(np.float64), exponent - 25).astype(np.float32)
        largest = np.float32(np.ldexp(1 - 2.0**-24, exponent))
        for near in (ties, *(np.nextafter(ties, np.float32(end)) for end in (-np.inf, np.inf))):
            x = np.append(near, largest)
            assert flat(x) == oracle.align(nasty.tolist(x))


@pytest.mark.parametrize("shape", [(1, 1), (5, 70), (40, 130)])
def test_weights_are_aligned_alike_and_lie_term_by_term(shape: tuple[int, int]) -> None:
    w = nasty.matrix(np.random.default_rng(21), *shape)
    w[0, 0] = np.inf
    found, expected = align_weights(w), align(w)
    assert np.array_equal(found.values, expected.values)
    assert np.array_equal(found.finite, expected.finite)
    assert found.values.swapaxes(1, 2).flags.c_contiguous


def test_align_flags_rows_that_are_not_finite() -> None:
    x = nasty.with_specials(
        np.random.default_rng(5), nasty.matrix(np.random.default_rng(5), 40, 40)
    )
    found = align(x)
    assert np.array_equal(found.finite, np.isfinite(x).all(axis=1))
    assert 0 < found.finite.sum() < 40
    assert np.isfinite(found.values).all()


@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("scale", [1, 1e30, 1e-40])
def test_all_finite_is_isfinite_of_all(bad: float | None, scale: float) -> None:
    """Squares of 1e30 overflow, and those of subnormals vanish: neither is an infinity."""
    x = f32(np.random.default_rng(5).standard_normal((3, 4, 5)) * scale)
    if bad is not None:
        x[1, 2, 3] = bad
    for view in (x, x.swapaxes(0, 1), x[:, 1:3, ::2], x[:0]):
        assert all_finite(view) == np.isfinite(view).all()


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 6, 7, 8, 100, 1001])
@pytest.mark.parametrize("work", [0, 1 << 20, 1 << 30])
@pytest.mark.parametrize("ahead", [0, 1 << 17])
def test_parts_cover_all_once_and_the_first_is_no_shorter(
    workers: int, length: int, work: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "thread_count", lambda: workers)
    parts = arithmetic._parts(length, work, ahead)
    assert [i for part in parts for i in range(length)[part]] == list(range(length))
    assert 1 <= len(parts) <= (workers if work else 1)
    sizes = [part.stop - part.start for part in parts]
    assert sizes[0] == max(sizes)
    if ahead and work == 1 << 20 and workers == 2 and length > 100:
        assert sizes[0] - sizes[1] == pytest.approx(length * ahead / work, abs=2)


@pytest.mark.parametrize("shape", [(0, 3, 5), (3, 0, 5), (300, 0, 5), (3, 5, 0), (300, 5, 0)])
def test_matmul_of_nothing(shape: tuple[int, int, int]) -> None:
    rows, columns, terms = shape
    x, w = np.ones((rows, terms), np.float32), np.ones((columns, terms), np.float32)
    assert_bits(matmul(x, w), np.full((rows, columns), np.float32(terms)))


# 2.2 dot product


@given(paired(0, 70))
def test_dot_is_the_oracles(pair: tuple[list[float], list[float]]) -> None:
    a, b = f32(pair[0]), f32(pair[1])
    same64(dot64(a, b), oracle.dot64(*pair))
    result = dot(a, b)
    assert isinstance(result, np.float32)
    assert_bits(result, oracle.dot(*pair))
    same64(sum64(a), oracle.sum64(pair[0]))


@pytest.mark.parametrize("kind", nasty.KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_matmul_is_the_oracles(kind: str, length: int) -> None:
    rng = np.random.default_rng([length, nasty.KINDS.index(kind)])
    x = np.stack([nasty.row(rng, kind, length) for _ in range(3)])
    w = np.concatenate([nasty.matrix(rng, 2, length), x[:1], np.ones_like(x[:1])])
    expected = oracle.matmul(nasty.tolist(x), nasty.tolist(w))
    assert_bits(matmul(x, w), expected)
    assert_bits([[dot(a, b) for b in w] for a in x], expected)


def test_matmul_takes_aligned_operands() -> None:
    rng = np.random.default_rng(6)
    x, w = nasty.matrix(rng, 9, 70), nasty.matrix(rng, 7, 70)
    expected = matmul(x, w)
    assert_same(matmul(align(x), w), expected)
    assert_same(matmul(x, align(w)), expected)
    assert_same(matmul(align(x), align(w)), expected)
    assert_same(matmul(x, align_weights(w)), expected)
    for few in range(1, 9):
        assert_same(matmul(x[:few], align_weights(w)), expected[:few])
    assert_same(matmul(w, x).T.copy(), expected)


def test_the_identity_is_not_the_identity_on_a_wide_block() -> None:
    assert dot(f32([2.0**30, 1.0]), f32([0.0, 1.0])) == 0


def test_extremes_stay_in_range() -> None:
    full = np.full(32, LARGEST)
    assert float(dot64(full, full)) == 32 * float(LARGEST) ** 2
    assert dot(full, full) == np.inf
    least = np.full(32, TINIEST)
    assert float(dot64(least, least)) == 32 * 2.0**-298
    assert_bits(dot(least, least), 0.0)
    assert float(dot64(least, full)) == 32 * float(LARGEST) * 2.0**-149
    assert_bits(dot(f32([TINIEST]), f32([-1.0])), -(2.0**-149))


def test_overflow_is_decided_after_the_sum() -> None:
    half_unit = np.float32(2.0**103)
    ones = np.ones(64, np.float32)
    x = np.zeros(64, np.float32)
    x[0], x[32] = LARGEST, half_unit
    assert dot(x, ones) == np.inf  # a tie, to the even that lies beyond
    x[32] = np.nextafter(half_unit, np.float32(0))
    assert dot(x, ones) == LARGEST
    x[:3] = LARGEST, LARGEST, -LARGEST
    assert dot(x, ones) == LARGEST


def test_sums_start_at_plus_zero() -> None:
    negative = np.full(40, -0.0, np.float32)
    assert_bits(dot(negative, np.ones(40, np.float32)), 0.0)
    assert_bits(matmul(negative[None], np.ones((3, 40), np.float32)), [[0.0] * 3])
    assert_bits(matmul(negative[None, :1], np.ones((3, 1), np.float32)), [[0.0] * 3])
    same64(sum64(negative), 0.0)
    assert_bits(dot(f32([1, -1]), f32([1, 1])), 0.0)


def test_a_contraction_over_nothing_is_zero() -> None:
    empty = np.zeros((2, 0), np.float32)
    assert_bits(matmul(empty, np.zeros((3, 0), np.float32)), np.zeros((2, 3)))
    assert_bits(dot(empty[0], empty[0]), 0.0)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, np.float32(-np.nan)])
@pytest.mark.parametrize("other", [0.0, -0.0, 1.0, np.inf])
def test_any_non_finite_operand_gives_the_one_nan(special: float, other: float) -> None:
    a, b = np.ones(40, np.float32), np.ones(40, np.float32)
    a[33], b[33] = special, other
    for x, y in ((a, b), (b, a)):
        assert int(bits(dot(x, y))) == 0x7FC00000
        assert np.isnan(dot64(x, y))
    clean = np.ones(40, np.float32)
    product = matmul(np.stack([clean, a]), np.stack([clean, clean]))
    assert_bits(product, [[40.0, 40.0], [np.nan, np.nan]])
    assert np.isnan(sum64(a))


def test_non_finite_rows_leave_the_others_alone() -> None:
    rng = np.random.default_rng(7)
    x, w = nasty.matrix(rng, 30, 70), nasty.matrix(rng, 20, 70)
    marked_x, marked_w = nasty.with_specials(rng, x), nasty.with_specials(rng, w)
    bad = ~align(marked_x).finite[:, None] | ~align(marked_w).finite
    expected = matmul(x, w)
    expected[bad] = np.nan
    assert_bits(matmul(marked_x, marked_w), expected)


# 2.3 no order


def integers(x: Float32) -> tuple[NDArray[np.int64], int]:
    """A_i of one block, by the oracle."""
    values, grid = oracle.align_block([Fraction(float(v)) for v in x])
    return np.array(values, np.int64), grid


@pytest.mark.parametrize("kind", nasty.KINDS)
def test_a_block_sum_is_the_same_in_int64_float64_and_fma_in_any_order(kind: str) -> None:
    rng = np.random.default_rng(8)
    a, b = nasty.row(rng, kind, 32), nasty.row(rng, kind, 32)
    (left, left_grid), (right, right_grid) = integers(a), integers(b)
    exact = int(sum(int(x) * int(y) for x, y in zip(left, right, strict=True)))
    unit = numbers.power(left_grid + right_grid)
    assert Fraction(float(dot64(a, b))) == exact * unit
    for _ in range(6):
        order = rng.permutation(32)
        products = left[order] * right[order]
        assert int(np.cumsum(products)[-1]) == exact
        assert int(np.cumsum(products.astype(np.float64))[-1]) == exact
        fused = 0.0
        for x, y in zip(left[order], right[order], strict=True):
            fused = numbers.fma(float(x), float(y), fused, numbers.BINARY64)
        assert fused == exact
        split = int(rng.integers(1, 31))
        assert float(products[:split].sum()) + float(products[split:].sum()) == exact
        assert_same(dot64(a[order], b[order]), dot64(a, b))


def test_the_bound_of_a_block_sum_is_attained_and_safe() -> None:
    worst = np.full(32, 2.0**24 - 1, np.float32)
    exact = 32 * (2**24 - 1) ** 2
    assert 2**53 - 2**31 < exact < 2**53 - 2**29
    assert int(dot64(worst, worst)) == exact
    assert int(dot64(worst, -worst)) == -exact
    assert float(exact) == exact
    # One term more would not fit: 32 is the largest power of two that does.
    assert 64 * (2**24 - 1) ** 2 > 2**53


def test_any_permutation_within_blocks_leaves_every_bit() -> None:
    rng = np.random.default_rng(9)
    x, w = nasty.matrix(rng, 50, 100), nasty.matrix(rng, 40, 100)
    expected = matmul(x, w)
    for _ in range(8):
        order = np.concatenate(
            [start + rng.permutation(min(32, 100 - start)) for start in range(0, 100, 32)]
        )
        assert_same(matmul(x[:, order], w[:, order]), expected)


def test_block_sums_are_added_ascending() -> None:
    x = np.zeros(96, np.float32)
    x[0], x[32], x[64] = 1.0, 1.0, 2.0**53
    ones = np.ones(96, np.float32)
    assert float(dot64(x, ones)) == 2.0**53 + 2
    assert float(dot64(x[::-1].copy(), ones)) == 2.0**53
    assert float(sum64(x)) == 2.0**53 + 2
    # Sums that float64 drops one by one, but not together, decide a tie of float32.
    y = np.zeros((1, 192), np.float32)
    y[0, ::32] = 1.0, 2.0**-54, 2.0**-54, 2.0**-54, 2.0**-54, 2.0**-24
    every = np.ones((1, 192), np.float32)
    assert_bits(matmul(y, every), [[1.0]])
    assert_bits(matmul(y[:, ::-1].copy(), every), [[1.0 + 2.0**-23]])


def sensitive(
    rng: np.random.Generator, rows: int, columns: int, length: int
) -> tuple[Float32, Float32]:
    """Hard rows, and rows whose products change with the order of block sums."""
    half, few = rows // 2, columns // 3
    x = np.concatenate([nasty.matrix(rng, rows - half, length), nasty.steps(rng, half, length)])
    w = np.concatenate([nasty.matrix(rng, columns - few, length), np.ones((few, length))])
    return x, w.astype(np.float32)


@pytest.mark.parametrize(("rows", "columns", "length"), [(1, 1, 32), (70, 50, 100), (300, 90, 257)])
def test_subsets_of_rows_and_columns(rows: int, columns: int, length: int) -> None:
    rng = np.random.default_rng(10)
    x, w = sensitive(rng, rows, columns, length)
    expected = matmul(x, w)
    for _ in range(5):
        some = rng.permutation(rows)[: rng.integers(1, rows + 1)]
        few = rng.permutation(columns)[: rng.integers(1, columns + 1)]
        assert_same(matmul(x[some], w[few]), expected[np.ix_(some, few)])
    for t in rng.integers(0, rows, 5):
        assert_same(matmul(x[t : t + 1], w), expected[t : t + 1])
    size = max(1, rows // 3)
    chunks = [matmul(x[start : start + size], w) for start in range(0, rows, size)]
    assert_same(np.concatenate(chunks), expected)
    assert_same(dot64(x, x), np.array([dot64(row, row) for row in x]))


def test_operands_need_not_be_contiguous() -> None:
    rng = np.random.default_rng(11)
    x, w = nasty.matrix(rng, 20, 70), nasty.matrix(rng, 15, 70)
    expected = matmul(x, w)
    assert_same(matmul(np.asfortranarray(x), np.asfortranarray(w)), expected)
    wide = np.repeat(x, 2, axis=1)
    assert_same(matmul(wide[:, ::2], w), expected)
    assert_same(matmul(x[::-1], w)[::-1].copy(), expected)


SIZES = ("_TILE", "_TALL", "_FEW", "_SHARED")


@pytest.mark.parametrize("size", [1, 37, 1000, 1 << 22])
def test_tiles_leave_every_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(12)
    x, w = sensitive(rng, 40, 30, 130)
    expected = matmul(x, w)
    for name in SIZES:
        monkeypatch.setattr(arithmetic, name, size, raising=False)
    assert_same(matmul(x, w), expected)


def test_threads_leave_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(13)
    x, w = sensitive(rng, 300, 200, 200)
    results = []
    for count in (1, 2):
        for place in (arithmetic, threads):
            monkeypatch.setattr(place, "thread_count", lambda count=count: count)
        with threadpoolctl.threadpool_limits(count, user_api="blas"):
            results.append(matmul(x, w))
    assert_same(results[0], results[1])


def fingerprint(**environment: str) -> dict[str, Any]:
    """What a process of its own computes under these variables."""
    report: dict[str, Any] = json.loads(lines_of("-m", "tests.fingerprint", **environment)[-1])
    return report


@cache
def plain() -> dict[str, Any]:
    return fingerprint()


@pytest.mark.parametrize(
    "core", ["Prescott", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX"]
)
def test_blas_kernels_leave_every_bit(core: str) -> None:
    report = fingerprint(OPENBLAS_CORETYPE=core)
    if report["architecture"] == plain()["architecture"]:
        pytest.skip(f"OpenBLAS does not switch from {plain()['architecture']} to {core}")
    assert report["digests"] == plain()["digests"]


@pytest.mark.parametrize("count", [1, 2])
def test_blas_threads_leave_every_bit(count: int) -> None:
    report = fingerprint(OPENBLAS_NUM_THREADS=str(count))
    if count not in report["threads"]:
        pytest.skip(f"this BLAS does not take {count} threads from the environment")
    assert report["digests"] == plain()["digests"]


def test_instruction_sets_of_numpy_leave_every_bit() -> None:
    if not plain()["features"]:
        pytest.skip("numpy dispatches to nothing beyond its baseline here")
    dropped = " ".join(plain()["features"])
    report = fingerprint(NPY_DISABLE_CPU_FEATURES=dropped, OPENBLAS_CORETYPE="Nehalem")
    if report["features"] == plain()["features"]:
        pytest.skip("numpy did not drop an instruction set")
    assert report["digests"] == plain()["digests"]


# 2.5 weighted sum of rows


def weighted(p: Float32, v: Float32) -> tuple[Any, Any]:
    """The oracle on rows of weights p (R, S), a zero weight being outside the set."""
    nums, dens = [], []
    for row in nasty.tolist(p):
        members = {j: value for j, value in enumerate(row) if value != 0}
        if members:
            vectors = nasty.tolist(v)
            num, den = oracle.weighted_sum(members, {j: vectors[j] for j in members})
        else:
            num, den = [0.0] * v.shape[1], 0.0
        nums.append(num)
        dens.append(den)
    return nums, dens


def weights(rng: np.random.Generator, rows: int, length: int) -> Float32:
    p = np.exp(rng.uniform(-110, 0, (rows, length))).astype(np.float32)
    p[rng.random(p.shape) < 0.3] = 0
    p[rng.random(p.shape) < 0.1] = 1
    p[rng.random(p.shape) < 0.1] = TINIEST
    return p


@pytest.mark.parametrize("length", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("width", [1, 5, 33])
def test_weighted_sum_is_the_oracles(length: int, width: int) -> None:
    rng = np.random.default_rng([length, width])
    p, v = weights(rng, 4, length), nasty.matrix(rng, length, width)
    v[rng.random(length) < 0.2] = 0
    p[0] = 0
    num, den = weighted_sum(p, align_rows(v))
    want_num, want_den = weighted(p, v)
    same64(num, want_num)
    same64(den, want_den)


def test_weighted_sum_over_the_whole_range() -> None:
    top, bottom = float(LARGEST), float(TINIEST)
    v = f32([[top, -top], [bottom, 0.0], [0.0, 0.0], [1.0, -bottom], [-0.0, bottom]])
    p = np.zeros((3, 5), np.float32)
    p[0] = bottom, 1, 1, bottom, 0.5
    p[1, [1, 2, 4]] = bottom, 1, bottom
    p[2, 2] = 1
    num, den = weighted_sum(p, align_rows(v))
    want_num, want_den = weighted(p, v)
    same64(num, want_num)
    same64(den, want_den)


@given(st.data())
def test_weighted_sum_of_anything(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    v = f32(data.draw(lists(rows * width, rows * width))).reshape(rows, width)
    share = st.floats(0, 1, width=32)
    p = f32([data.draw(st.lists(share, min_size=rows, max_size=rows))])
    num, den = weighted_sum(p, align_rows(v))
    want_num, want_den = weighted(p, v)
    same64(num, want_num)
    same64(den, want_den)


def test_weighted_sum_has_blocks_at_absolute_positions() -> None:
    rng = np.random.default_rng(14)
    p, v = weights(rng, 5, 100), nasty.matrix(rng, 100, 9)
    p[:, :64] = 0
    whole = weighted_sum(p, align_rows(v))
    tail = weighted_sum(p[:, 64:], align_rows(v[64:]))
    assert_same(whole[0], tail[0])
    assert_same(whole[1], tail[1])


def test_weighted_sum_in_batches_by_rows_and_in_any_order_within_blocks() -> None:
    rng = np.random.default_rng(15)
    p = np.stack([weights(rng, 5, 70) for _ in range(6)]).reshape(2, 3, 5, 70)
    v = nasty.matrix(rng, 6 * 70, 9).reshape(2, 3, 70, 9)
    num, den = weighted_sum(p, align_rows(v))
    assert num.shape == (2, 3, 5, 9)
    assert den.shape == (2, 3, 5)
    order = np.concatenate([s + rng.permutation(min(32, 70 - s)) for s in (0, 32, 64)])
    for i in range(2):
        for j in range(3):
            one = weighted_sum(p[i, j, 2:3], align_rows(v[i, j]))
            assert_same(one[0], num[i, j, 2:3])
            assert_same(one[1], den[i, j, 2:3])
            mixed = weighted_sum(p[i, j][:, order], align_rows(v[i, j][order]))
            assert_same(mixed[0], num[i, j])
            assert_same(mixed[1], den[i, j])
