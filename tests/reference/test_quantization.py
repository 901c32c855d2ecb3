"""int4 and int8 against the oracle's Python integers, and their edges (SPEC 5)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.errors import QuantizationError
from reference.quantization import (
    Int4Matrix,
    check_scales,
    dequantize,
    linear_int4,
    linear_w4a16,
    quantize_int4,
    quantize_int4_row,
    quantize_int8,
    unpack,
)
from tests.oracle import aligned, nasty
from tests.oracle import quantization as oracle
from tests.oracle.arrays import Float32, assert_bits, assert_same, f32
from tests.oracle.strategies import finite32, lists

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

TINIEST = 2.0**-149
LIMIT = 7 * 65504.0
KINDS = [kind for kind in nasty.KINDS if kind not in ("huge", "any bits", "spread")]
WIDTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 95)


def moderate(rng: np.random.Generator, rows: int, width: int) -> Float32:
    """Rows of the kinds whose scales float16 can hold."""
    picked = [nasty.row(rng, KINDS[int(i)], width) for i in rng.integers(0, len(KINDS), rows)]
    return np.clip(np.stack(picked), -1e5, 1e5)


def compare(m: Int4Matrix, w: Float32, group: int) -> None:
    """Every field of a quantized matrix against the oracle, and what follows from them."""
    rows = [oracle.quantize_row(row, group) for row in nasty.tolist(w)]
    check(m, rows, w.shape[1], group)


def check(m: Int4Matrix, rows: list[tuple[list[int], list[float]]], width: int, group: int) -> None:
    codes = [row[0] for row in rows]
    scales = [row[1] for row in rows]
    assert m.packed.dtype == np.uint8
    assert m.scales.dtype == np.float16
    assert m.in_features == width
    assert m.packed.tolist() == [oracle.pack(row) for row in codes]
    assert m.scales.astype(np.float64).tolist() == scales
    assert unpack(m).tolist() == codes
    expected = [oracle.dequantize_row(c, s, group) for c, s in zip(codes, scales, strict=True)]
    assert_bits(dequantize(m), expected)


# 5.1 and 5.2


@pytest.mark.parametrize("width", WIDTHS)
def test_int4_is_the_oracles(width: int) -> None:
    w = moderate(np.random.default_rng(width), 12, width)
    m = quantize_int4(w)
    assert m.group == 32
    assert m.packed.shape == (12, -(-width // 2))
    assert m.scales.shape == (12, -(-width // 32))
    compare(m, w, 32)


@given(lists(1, 40))
def test_int4_on_anything_float16_can_scale(row: list[float]) -> None:
    assume(max(abs(v) for v in row) < LIMIT)
    w = f32([row])
    compare(quantize_int4(w), w, 32)
    compare(quantize_int4_row(w), w, 0)


def test_an_all_zero_group_has_scale_one_and_codes_eight() -> None:
    w = np.zeros((1, 64), np.float32)
    w[0, 5], w[0, 40] = -0.0, 3.5
    m = quantize_int4(w)
    assert m.scales.tolist() == [[1.0, 0.5]]
    assert set(m.packed[0, :16]) == {0x88}
    assert_bits(dequantize(m)[0, :32], np.zeros(32))


@pytest.mark.parametrize(
    ("value", "scale", "code"),
    [
        (TINIEST, 2.0**-24, 0),
        (7 * 2.0**-26, 2.0**-24, 2),  # 1.75 units of the scale below which float16 has none
        (7 * 2.0**-25, 2.0**-24, 4),  # RN16(2^-25) is a tie, to zero; 3.5 goes away from it
        (7 * 2.0**-25 * (1 + 2.0**-23), 2.0**-24, 4),
        (7 * 2.0**-24, 2.0**-24, 7),
        (7 * 1.5 * 2.0**-24, 2.0**-23, 5),  # a tie to even, 5.25
        (7 * 2.0**-14, 2.0**-14, 7),
    ],
)
def test_scales_at_the_bottom_of_float16(value: float, scale: float, code: int) -> None:
    for sign in (1, -1):
        m = quantize_int4(f32([[sign * value]]))
        assert m.scales.tolist() == [[scale]]
        assert unpack(m).tolist() == [[sign * code]]


def test_scales_at_the_top_of_float16() -> None:
    assert quantize_int4(f32([[LIMIT]])).scales.tolist() == [[65504.0]]
    below = np.nextafter(np.float32(7 * 65520), np.float32(0))
    m = quantize_int4(f32([[below, -below]]))
    assert m.scales.tolist() == [[65504.0]]
    assert unpack(m).tolist() == [[7, -7]]


@pytest.mark.parametrize("value", [7 * 65520.0, -7 * 65520.0, 3e38, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 31, 32, 40])
def test_what_has_no_scale_is_refused(value: float, place: int) -> None:
    w = np.ones((3, 41), np.float32)
    w[1, place] = value
    with pytest.raises(QuantizationError):
        quantize_int4(w)
    with pytest.raises(QuantizationError):
        quantize_int4_row(w)
    with pytest.raises(QuantizationError):
        quantize_int4_row(w, search=True)
    with pytest.raises(oracle.RefusedError):
        oracle.quantize_row(w[1].astype(float).tolist())


def test_halves_round_away_from_zero() -> None:
    row = f32([7, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 6.5, -6.5, -0.0])
    half_below = np.nextafter(np.float32(0.5), np.float32(0))
    m = quantize_int4(np.concatenate([row, [half_below, -half_below]])[None])
    assert m.scales.tolist() == [[1.0]]
    assert unpack(m).tolist() == [[7, 1, -1, 2, -2, 3, -3, 7, -7, 0, 0, 0]]


def test_codes_at_every_half_of_every_float16_scale() -> None:
    """(k + 1/2) scale for k = 0..6, exactly and one float32 off, for all 1,024 significands."""
    scale = (1024 + np.arange(1024)) * 2.0**-16
    halves = (np.arange(7) + 0.5) * scale[:, None]
    tie = halves.astype(np.float32)
    assert np.array_equal(tie, halves)
    below, above = np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(9))
    top = (7 * scale[:, None]).astype(np.float32)
    m = quantize_int4(np.concatenate([top, tie, -tie, below, above], axis=1))
    assert np.array_equal(m.scales[:, 0].astype(np.float64), scale)
    k = np.arange(7)
    expected = np.concatenate([[7], k + 1, -k - 1, k, k + 1])
    assert (unpack(m) == expected).all()


def test_a_negative_maximum_is_symmetric() -> None:
    m = quantize_int4(f32([[-14, 13.9, 2]]))
    assert m.scales.tolist() == [[2.0]]
    assert unpack(m).tolist() == [[-7, 7, 1]]


@pytest.mark.parametrize("width", [1, 3, 33, 65])
def test_odd_rows_end_in_a_zero_nibble(width: int) -> None:
    m = quantize_int4(np.full((2, width), -7.0, np.float32))
    assert m.packed.shape == (2, width // 2 + 1)
    assert set(m.packed[:, -1]) == {0x81}
    assert unpack(m).shape == (2, width)


@given(lists(1, 70))
def test_codes_never_hold_minus_eight_and_dequantize_near(row: list[float]) -> None:
    assume(max(abs(v) for v in row) < 1e5)
    m = quantize_int4(f32([row]))
    assert np.abs(unpack(m)).max() <= 7
    scale = np.repeat(m.scales.astype(np.float64)[0], 32)[: len(row)]
    # Half a step, and a step more at the clamp, where float16 may have rounded the scale down.
    assert (np.abs(dequantize(m)[0] - np.array(row)) <= scale * 0.51).all()


# 5.3


@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 70])
def test_rows_are_the_oracles(width: int) -> None:
    w = moderate(np.random.default_rng(width), 10, width)
    m = quantize_int4_row(w)
    assert m.scales.shape == (10, 1)
    compare(m, w, 0)


@pytest.mark.parametrize("width", [1, 5, 40])
def test_searched_rows_are_the_oracles(width: int) -> None:
    rng = np.random.default_rng(width)
    w = np.concatenate([moderate(rng, 5, width), np.zeros((1, width), np.float32)])
    w[0] = rng.standard_t(2, width)
    rows = [oracle.search_row(row) for row in nasty.tolist(w)]
    check(quantize_int4_row(w, search=True), [(c, [s]) for c, s in rows], width, 0)


def test_a_search_takes_the_largest_of_equal_factors() -> None:
    # With scale s, [7s] is exact for f = 1; a row of zeros is equally wrong for every f.
    assert quantize_int4_row(f32([[7.0]]), search=True).scales.tolist() == [[1.0]]
    assert quantize_int4_row(f32([[0.0]]), search=True).scales.tolist() == [[1.0]]
    # In units of 2^-24 the scale is 2 or 1. With 2 the 49 ones are off by 1 each, with 1 the 14
    # is off by 7: 49 either way, and 2 belongs to the larger factors.
    unit = 2.0**-24
    w = np.full((1, 50), unit, np.float32)
    w[0, 0] = 14 * unit
    assert quantize_int4_row(w, search=True).scales.tolist() == [[2 * unit]]
    assert oracle.search_row(nasty.tolist(w[0]))[1] == 2 * unit
    # An error of 2^-22 units is lost on the grid of the 7 and not on that of the ones.
    w[0, 1] = unit * 2.0**-22
    w = np.concatenate([w, [[unit]]], axis=1).astype(np.float32)
    assert quantize_int4_row(w, search=True).scales.tolist() == [[unit]]
    assert oracle.search_row(nasty.tolist(w[0]))[1] == unit


@pytest.mark.parametrize("step", range(22, 41))
def test_a_search_tries_every_factor(step: int) -> None:
    """Rows whose largest weight is 8 m and all others multiples of one factor's scale."""
    middles = (np.arange(2049, 4096, 41) | 1) / 2048  # halfway between two float16
    largest = (8 * middles).astype(np.float32)
    scale = (largest * (step / 40) / 7).astype(np.float16)
    w = (scale[:, None].astype(np.float64) * np.resize([7, 5, -3, 7, -6], 1500)).astype(np.float32)
    found = quantize_int4_row(np.concatenate([largest[:, None], w], axis=1), search=True)
    assert_same(found.scales, scale[:, None])


def test_a_search_is_never_worse_and_mostly_better() -> None:
    w = np.random.default_rng(3).standard_normal((200, 128)).astype(np.float32)

    def error(m: Int4Matrix) -> Float32:
        loss: Float32 = ((dequantize(m) - w) ** 2).sum(axis=1)
        return loss

    plain, searched = error(quantize_int4_row(w)), error(quantize_int4_row(w, search=True))
    assert (searched <= plain * (1 + 1e-6)).all()
    assert (searched < plain).mean() > 0.8


def test_rows_do_not_know_each_other() -> None:
    w = moderate(np.random.default_rng(4), 20, 70)
    for quantize in (
        quantize_int4,
        quantize_int4_row,
        lambda x: quantize_int4_row(x, search=True),
    ):
        whole, part = quantize(w), quantize(w[[7, 3]])
        assert_same(part.packed, whole.packed[[7, 3]])
        assert_same(part.scales, whole.scales[[7, 3]])


# 5.4


@pytest.mark.parametrize("kind", nasty.KINDS)
@pytest.mark.parametrize("width", [1, 31, 64])
def test_int8_is_the_oracles(kind: str, width: int) -> None:
    rng = np.random.default_rng(width)
    x = np.stack([nasty.row(rng, kind, width) for _ in range(6)])
    codes, scale = quantize_int8(x)
    assert codes.dtype == np.int8
    expected = [oracle.quantize_int8(row) for row in nasty.tolist(x)]
    assert codes.tolist() == [row[0] for row in expected]
    assert_bits(scale, [row[1] for row in expected])


@given(st.lists(finite32, min_size=1, max_size=8))
def test_int8_on_anything(row: list[float]) -> None:
    codes, scale = quantize_int8(f32([row]))
    expected = oracle.quantize_int8(row)
    assert codes.tolist() == [expected[0]]
    assert_bits(scale, [expected[1]])


@pytest.mark.parametrize("units", [1, 63, 64, 126, 127, 190, 191, 200, 254, 1000, 4000])
def test_int8_with_a_subnormal_scale(units: int) -> None:
    row = [units * TINIEST, -units * TINIEST, TINIEST, 0.0, -0.0]
    codes, scale = quantize_int8(f32([row]))
    expected = oracle.quantize_int8(row)
    assert codes.tolist() == [expected[0]]
    assert_bits(scale, [expected[1]])
    if units <= 63:
        assert not codes.any()
        assert_bits(scale, [0.0])
    if units == 190:  # s is one unit: 190 is clamped
        assert codes[0, :2].tolist() == [127, -127]


def test_int8_quotients_are_rounded_to_float32_first() -> None:
    rng = np.random.default_rng(10)
    largest = rng.uniform(1, 2, 40).astype(np.float32)
    scale = (largest / np.float32(127))[:, None]
    near = (scale * (np.arange(126) + np.float32(0.5))).astype(np.float32)
    x = np.concatenate([largest[:, None], near, np.nextafter(near, np.float32(0))], axis=1)
    codes, _ = quantize_int8(x)
    assert codes.tolist() == [oracle.quantize_int8(row)[0] for row in nasty.tolist(x)]
    unrounded = np.rint(x.astype(np.float64) / scale)
    assert (codes != unrounded).any()


def test_int8_of_a_row_that_is_not_finite() -> None:
    codes, scale = quantize_int8(f32([[1.0, 2.0], [np.inf, 1.0], [np.nan, 1.0]]))
    assert codes.tolist() == [[64, 127], [0, 0], [0, 0]]
    assert np.isnan(scale).tolist() == [False, True, True]


def test_int8_halves_go_to_even() -> None:
    codes, scale = quantize_int8(f32([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -0.0]]))
    assert scale.tolist() == [1.0]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, 126, 0]]


# 5.5 and 5.6


def integers(m: Int4Matrix) -> tuple[list[list[int]], list[list[float]]]:
    return unpack(m).tolist(), nasty.tolist(m.scales)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group", [32, 0])
def test_linear_is_the_oracles(width: int, group: int) -> None:
    rng = np.random.default_rng(width)
    m = (quantize_int4 if group else quantize_int4_row)(moderate(rng, 6, width) * np.float32(1e-3))
    kinds = ("normal", "subnormal", "huge", "spike", "any bits", "signed zeros")
    x = np.stack([nasty.row(rng, kind, width) for kind in kinds] + [np.zeros(width, np.float32)])
    codes, scales = integers(m)
    expected = [oracle.linear_row(row, codes, scales, group) for row in nasty.tolist(x)]
    assert_bits(linear_int4(x, m), expected)


def test_linear_rounds_the_sum_once() -> None:
    """Group scales of many sizes, so that the exact sum has more bits than a float32."""
    rng = np.random.default_rng(11)
    sizes = np.repeat(2.0 ** rng.integers(-5, 6, (6, 8)), 32, axis=1)
    m = quantize_int4((rng.standard_normal((6, 256)) * sizes).astype(np.float32))
    x = rng.standard_normal((6, 256)).astype(np.float32)
    codes, scales = integers(m)
    expected = [oracle.linear_row(row, codes, scales, 32) for row in nasty.tolist(x)]
    assert_bits(linear_int4(x, m), expected)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_linear_with_a_row_that_is_not_finite(special: float) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((4, 40)).astype(np.float32)
    m = quantize_int4(rng.standard_normal((3, 40)).astype(np.float32))
    clean = linear_int4(x, m)
    x[2, 39] = special
    clean[2] = np.nan
    assert_bits(linear_int4(x, m), clean)


def test_a_zero_sum_is_plus_zero() -> None:
    m = quantize_int4(f32([[-7.0], [-0.0], [7.0]]))
    for value in (0.0, -0.0, TINIEST):
        assert_bits(linear_int4(f32([[value]]), m), [[0.0, 0.0, 0.0]])
    cancelling = quantize_int4(f32([[7.0, -7.0]]))
    assert_bits(linear_int4(f32([[1.0, 1.0]]), cancelling), [[0.0]])


def test_a_result_beyond_float32_is_infinity() -> None:
    m = quantize_int4(f32([[7.0] * 32, [-7.0] * 32]))
    x = np.full((1, 32), 3e38, np.float32)
    assert_bits(linear_int4(x, m), [[np.inf, -np.inf]])


def near_the_limit() -> tuple[Float32, Int4Matrix]:
    """Scales that sum up to just under 16384, odd in their last bits, and the largest codes."""
    scales = np.array([[8188, 4096, 4094, 5.5, 2.0**-24, 3 * 2.0**-24]], np.float16)
    total = scales.astype(np.float64).sum()
    assert 16383 < total < 16384
    rng = np.random.default_rng(6)
    packed = np.full((1, 96), 0xFF, np.uint8)
    packed[0, 48:] = rng.integers(1, 16, 48) + 16 * rng.integers(1, 16, 48)
    x = np.full((1, 192), 127.0, np.float32)
    x[0, 100:] = rng.integers(-127, 128, 92)
    return x, Int4Matrix(packed, scales, 192, 32)


def test_the_sum_is_exact_just_below_the_limit() -> None:
    x, m = near_the_limit()
    check_scales(m, "w")
    codes, scales = integers(m)
    assert_bits(linear_int4(x, m), [oracle.linear_row(x[0].tolist(), codes, scales, 32)])
    # The worst partial sum is an integer that float64 holds.
    assert oracle.worst_units(scales[0]) < 2**53


@pytest.mark.parametrize(("second", "refused"), [(8192.0, True), (8184.0, False), (8200.0, True)])
def test_the_loader_refuses_scales_from_16384_on(second: float, refused: bool) -> None:
    scales = np.array([[1.0, 1.0], [8192.0, second]], np.float16)
    m = Int4Matrix(np.full((2, 32), 0x88, np.uint8), scales, 64, 32)
    if refused:
        with pytest.raises(QuantizationError, match=r"some\.matrix"):
            check_scales(m, "some.matrix")
    else:
        check_scales(m, "some.matrix")


def test_a_scale_a_row_needs_no_limit() -> None:
    m = quantize_int4_row(np.full((1, 300), LIMIT, np.float32))
    assert m.scales.tolist() == [[65504.0]]
    check_scales(m, "w")
    x = f32([[127.0] * 299 + [1.0]])
    codes, scales = integers(m)
    assert_bits(linear_int4(x, m), [oracle.linear_row(x[0].tolist(), codes, scales, 0)])


def test_any_order_of_accumulation_gives_the_same_bits() -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((9, 200)).astype(np.float32)
    m = quantize_int4(rng.standard_normal((5, 200)).astype(np.float32))
    expected = linear_int4(x, m)
    codes, scale = quantize_int8(x)
    weights = dequantize(m).astype(np.float64)
    terms = codes.astype(np.float64)[:, None, :] * weights  # (T, N, K)
    for _ in range(6):
        order = rng.permutation(200)
        running = np.cumsum(terms[:, :, order], axis=-1)[:, :, -1]
        split = int(rng.integers(1, 199))
        halves = terms[:, :, :split].sum(axis=-1) + terms[:, :, split:].sum(axis=-1)
        for total in (running, halves):
            assert_same((total * scale[:, None].astype(np.float64)).astype(np.float32), expected)
    # Whole columns moved across groups, codes and scales with them: the same terms again.
    groups = [codes.astype(np.int64)[:, g : g + 32] for g in range(0, 200, 32)]
    dots = [
        (group @ unpack(m).astype(np.int64)[:, 32 * g : 32 * g + 32].T)
        * m.scales[:, g].astype(np.float64)
        for g, group in enumerate(groups)
    ]
    for sequence in (range(7), reversed(range(7))):
        total = np.zeros((9, 5))
        for g in sequence:
            total += dots[g]
        assert_same((total * scale[:, None].astype(np.float64)).astype(np.float32), expected)


def test_permuted_columns_of_a_row_quantized_matrix_leave_every_bit() -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((9, 100)).astype(np.float32)
    w = rng.standard_normal((5, 100)).astype(np.float32)
    expected = linear_int4(x, quantize_int4_row(w))
    order = rng.permutation(100)
    assert_same(linear_int4(x[:, order], quantize_int4_row(w[:, order])), expected)
    grouped = linear_int4(x, quantize_int4(w))
    inside = np.concatenate([s + rng.permutation(min(32, 100 - s)) for s in range(0, 100, 32)])
    assert_same(linear_int4(x[:, inside], quantize_int4(w[:, inside])), grouped)


def test_linear_rows_do_not_know_each_other() -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((200, 130)).astype(np.float32)
    w = rng.standard_normal((60, 130)).astype(np.float32)
    whole = linear_int4(x, quantize_int4(w))
    for t in (0, 99, 199):
        assert_same(linear_int4(x[t : t + 1], quantize_int4(w)), whole[t : t + 1])
    assert_same(linear_int4(x[50:90], quantize_int4(w[20:])), whole[50:90, 20:])


# Weight-only int4 (SPEC 5.9).


def weight_only(seed: int, width: int, group: int) -> tuple[Int4Matrix, NDArray[np.uint8]]:
    """A matrix (6, width) of all codes, of scales over float16's whole range, and zero points."""
    rng = np.random.default_rng(seed)
    groups = -(-width // group)
    bits = rng.integers(0, 0x7C00, (6, groups)) + 0x8000 * rng.integers(0, 2, (6, groups))
    packed = rng.integers(0, 256, (6, -(-width // 2)), np.uint8)
    scales = bits.astype(np.uint16).view(np.float16)
    return Int4Matrix(packed, scales, width, group), rng.integers(0, 16, (6, groups), np.uint8)


@pytest.mark.parametrize(("width", "group"), [(1, 32), (33, 32), (130, 64), (256, 128), (65, 65)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_weight_is_scale_times_code_less_zero_point(
    width: int, group: int, symmetric: bool
) -> None:
    """In rational arithmetic, code by code: nothing rounds."""
    for seed in range(20):
        m, zeros = weight_only(seed, width, group)
        weights = dequantize(m, None if symmetric else zeros)
        assert weights.dtype == np.float32
        for n in range(6):
            for k in range(width):
                code = int(m.packed[n, k // 2]) >> 4 * (k % 2) & 15
                zero = 8 if symmetric else int(zeros[n, k // group])
                exact = Fraction(float(m.scales[n, k // group])) * (code - zero)
                assert Fraction(float(weights[n, k])) == exact
        assert not np.signbit(weights[weights == 0]).any()


def test_weight_only_is_the_aligned_product_with_those_weights() -> None:
    rng = np.random.default_rng(8)
    for width, group in ((33, 32), (130, 64)):
        m, zeros = weight_only(width, width, group)
        x = rng.standard_normal((3, width)).astype(np.float32)
        x[1] = np.ldexp(x[1], rng.integers(-30, 30, width))
        for z in (None, zeros):
            expected = aligned.matmul(nasty.tolist(x), nasty.tolist(dequantize(m, z)))
            assert_bits(linear_w4a16(x, m, z), expected)


def test_weight_only_rows_that_are_not_finite_are_nan() -> None:
    m, zeros = weight_only(1, 64, 32)
    x = np.ones((4, 64), np.float32)
    x[1, 3], x[2, 63] = np.nan, np.inf
    y = linear_w4a16(x, m, zeros)
    assert np.isnan(y).all(axis=1).tolist() == [False, True, True, False]
    assert np.isfinite(y[[0, 3]]).all()
