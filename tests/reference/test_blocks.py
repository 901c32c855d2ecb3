"""Q4_0 and Q8_0 against the oracle's Python integers and the `gguf` package (SPEC 5.7, 5.8)."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.blocks import (
    BLOCK_BYTES,
    SCALE_LIMITS,
    BlockMatrix,
    BlockType,
    check_blocks,
    dequantize_blocks,
    linear_blocks,
    linear_q4_0,
    linear_q8_0,
    read_blocks,
)
from reference.errors import QuantizationError
from reference.quantization import quantize_int8
from reference.threads import limited_to
from tests.oracle import nasty
from tests.oracle import quantization as oracle
from tests.oracle.arrays import Float32, assert_bits, assert_same, f32
from tests.oracle.strategies import finite32

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

KINDS: tuple[BlockType, ...] = ("Q4_0", "Q8_0")
LINEAR = {"Q4_0": linear_q4_0, "Q8_0": linear_q8_0}
Stored = NDArray[np.uint8]
by_kind = pytest.mark.parametrize("kind", KINDS)


def random_blocks(kind: BlockType, rng: np.random.Generator, rows: int, groups: int) -> Stored:
    """Codes of every value; scales of either sign, over the whole range that a row may have."""
    stored = rng.integers(0, 256, (rows, groups, BLOCK_BYTES[kind]), np.uint8)
    power = rng.integers(-26, 8 if kind == "Q4_0" else 4, (rows, groups))
    scales = np.ldexp(rng.uniform(-1, 1, (rows, groups)), power).astype(np.float16)
    return with_scales(stored, scales)


def with_scales(stored: Stored, scales: Any) -> Stored:
    out = stored.copy()
    out[:, :, :2] = np.asarray(scales, "<f2")[:, :, None].view(np.uint8)
    return out


def expected(x: Float32, stored: Stored, kind: BlockType) -> list[list[float]]:
    return [oracle.linear_blocks(row, stored.tolist(), kind) for row in nasty.tolist(x)]


# 5.7


@by_kind
def test_values_are_those_of_the_gguf_package(kind: BlockType) -> None:
    stored = random_blocks(kind, np.random.default_rng(1), 60, 5)
    known = GGMLQuantizationType[kind]
    theirs = gguf.quants.dequantize(stored.reshape(60, -1), known)
    assert np.array_equal(dequantize_blocks(read_blocks(stored, kind)), theirs)


@by_kind
def test_codes_and_scales_are_the_oracles(kind: BlockType) -> None:
    stored = random_blocks(kind, np.random.default_rng(2), 20, 3)
    m = read_blocks(stored, kind)
    assert m.codes.shape == (20, 96)
    assert m.codes.dtype == np.int8
    assert m.scales.dtype == np.float16
    for n, row in enumerate(stored.tolist()):
        found = [oracle.block(block, kind) for block in row]
        assert m.codes[n].tolist() == [q for codes, _ in found for q in codes]
        assert [float(scale) for _, scale in found] == m.scales[n].astype(np.float64).tolist()


@by_kind
@pytest.mark.parametrize("groups", [1, 2, 3, 9])
def test_linear_is_the_oracles(kind: BlockType, groups: int) -> None:
    rng = np.random.default_rng(groups)
    stored = random_blocks(kind, rng, 7, groups)
    kinds = ("normal", "subnormal", "huge", "spike", "any bits", "signed zeros")
    rows = [nasty.row(rng, name, 32 * groups) for name in kinds]
    x = np.stack([*rows, np.zeros(32 * groups, np.float32)])
    assert_bits(LINEAR[kind](x, stored), expected(x, stored, kind))


@by_kind
@given(
    st.lists(st.integers(0, 0x7BFF), min_size=2, max_size=2),
    st.binary(min_size=64, max_size=64),
    st.lists(finite32, min_size=64, max_size=64),
    st.booleans(),
)
def test_linear_on_anything(
    kind: BlockType, scales: list[int], codes: bytes, row: list[float], negative: bool
) -> None:
    size = BLOCK_BYTES[kind]
    stored = np.frombuffer(codes[: 2 * (size - 2)], np.uint8).reshape(1, 2, size - 2)
    top = 0x6FFF if kind == "Q4_0" else 0x5FFF  # below 8192, and below 512
    bits = np.minimum(np.array([scales], np.uint16), top) | np.uint16(0x8000 * negative)
    blocks = with_scales(np.pad(stored, [(0, 0), (0, 0), (2, 0)]), bits.view(np.float16))
    check_blocks(read_blocks(blocks, kind), "w")
    x = f32([row])
    with np.errstate(over="ignore"):
        assert_bits(LINEAR[kind](x, blocks), expected(x, blocks, kind))


@by_kind
@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-24, -(2.0**-24), -1023 * 2.0**-24, -3.0])
def test_scales_at_the_edges(kind: BlockType, scale: float) -> None:
    rng = np.random.default_rng(3)
    stored = with_scales(random_blocks(kind, rng, 4, 2), np.full((4, 2), scale))
    x = np.concatenate([rng.standard_normal((3, 64)), np.zeros((1, 64))]).astype(np.float32)
    y = LINEAR[kind](x, stored)
    assert_bits(y, expected(x, stored, kind))
    if scale == 0:
        assert_bits(y, np.zeros((4, 4)))


@by_kind
def test_a_sum_that_cancels_is_plus_zero(kind: BlockType) -> None:
    block = random_blocks(kind, np.random.default_rng(4), 5, 1)
    opposite = block.copy()
    opposite[:, :, 1] ^= 0x80
    row = np.random.default_rng(5).standard_normal(32).astype(np.float32)
    x = np.concatenate([row, row])[None]
    assert_bits(LINEAR[kind](x, np.concatenate([block, opposite], axis=1)), np.zeros((1, 5)))


@by_kind
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan(kind: BlockType, special: float) -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    stored = random_blocks(kind, rng, 3, 2)
    clean = LINEAR[kind](x, stored)
    x[2, 63] = special
    clean[2] = np.nan
    assert_bits(LINEAR[kind](x, stored), clean)


# 5.8


def nearly_at_the_limit(kind: BlockType, signs: list[int]) -> Stored:
    """Scales just below the limit in sum, odd in the last bit of the least; the largest codes."""
    whole = SCALE_LIMITS[kind]
    sizes = np.array([whole / 2, whole / 4, whole / 8, whole / 16, 3 * 2.0**-24, 2.0**-24])
    fill = 0x00 if kind == "Q4_0" else 0x80
    stored = np.full((1, 6, BLOCK_BYTES[kind]), fill, np.uint8)
    return with_scales(stored, (sizes * signs)[None])


@by_kind
@pytest.mark.parametrize("signs", [[1] * 6, [-1] * 6, [1, -1, 1, 1, -1, 1]])
def test_sums_are_exact_just_below_the_limit(kind: BlockType, signs: list[int]) -> None:
    stored = nearly_at_the_limit(kind, signs)
    check_blocks(read_blocks(stored, kind), "w")
    x = np.full((2, 192), 127.0, np.float32)
    x[1, 1::2] = -126
    assert_bits(LINEAR[kind](x, stored), expected(x, stored, kind))
    assert oracle.worst_block_units(stored[0].tolist(), kind) < 2**53


@by_kind
def test_the_limit_is_no_larger_than_the_proof_allows(kind: BlockType) -> None:
    """At the limit, in magnitudes, the worst sum is 2^53 units or a little less: 254/256 of it."""
    stored = np.zeros((1, 2, BLOCK_BYTES[kind]), np.uint8)
    stored = with_scales(stored, [[SCALE_LIMITS[kind] / 2, -SCALE_LIMITS[kind] / 2]])
    assert SCALE_LIMITS == {"Q4_0": 2**14, "Q8_0": 2**10}
    worst = oracle.worst_block_units(stored[0].tolist(), kind)
    assert 0.99 * 2**53 < worst < 2**53


@by_kind
def test_scales_at_the_limit_are_refused_by_name(kind: BlockType) -> None:
    half = SCALE_LIMITS[kind] / 2
    below = float(np.nextafter(np.float16(half), np.float16(0)))
    stored = random_blocks(kind, np.random.default_rng(7), 3, 2)
    check_blocks(read_blocks(with_scales(stored, [[1, 1], [half, below], [0, 0]]), kind), "w")
    for pair in ([half, half], [-half, half], [-half, -half], [2 * half, 0]):
        m = read_blocks(with_scales(stored, [[1, 1], pair, [0, 0]]), kind)
        with pytest.raises(QuantizationError, match=r"^some\.matrix: the Q._0 scales of a row sum"):
            check_blocks(m, "some.matrix")


@by_kind
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused_by_name(kind: BlockType, scale: float) -> None:
    stored = with_scales(random_blocks(kind, np.random.default_rng(8), 2, 2), [[1, 1], [1, scale]])
    with pytest.raises(QuantizationError, match=r"^some\.matrix: a Q._0 scale is infinite or NaN"):
        check_blocks(read_blocks(stored, kind), "some.matrix")


@by_kind
def test_any_order_gives_the_same_bits(kind: BlockType) -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((6, 192)).astype(np.float32)
    m = read_blocks(random_blocks(kind, rng, 5, 6), kind)
    assert np.abs(m.scales.astype(np.float64)).sum(axis=1).max() < SCALE_LIMITS[kind]
    whole = linear_blocks(x, m)
    codes, scale = quantize_int8(x)
    terms = codes.astype(np.float64)[:, None, :] * dequantize_blocks(m).astype(np.float64)
    dots = np.einsum(
        "tgk,ngk->tng", *(a.astype(np.int64).reshape(len(a), 6, 32) for a in (codes, m.codes))
    )
    scaled = dots * m.scales.astype(np.float64)
    for _ in range(6):
        order, groups = rng.permutation(192), rng.permutation(6)
        for total in (
            np.cumsum(terms[:, :, order], axis=-1)[:, :, -1],
            np.cumsum(scaled[:, :, groups], axis=-1)[:, :, -1],
            terms[:, :, : order[0]].sum(axis=-1) + terms[:, :, order[0] :].sum(axis=-1),
        ):
            y = (total + 0.0) * scale[:, None].astype(np.float64)
            assert_same(y.astype(np.float32), whole)
        moved = np.concatenate([np.arange(32 * g, 32 * g + 32) for g in groups])
        permuted = BlockMatrix(kind, m.codes[:, moved], m.scales[:, groups])
        assert_same(linear_blocks(x[:, moved], permuted), whole)


@by_kind
def test_rows_do_not_know_each_other(kind: BlockType) -> None:
    rng = np.random.default_rng(10)
    x, stored = rng.standard_normal((200, 96)).astype(np.float32), random_blocks(kind, rng, 40, 3)
    whole = LINEAR[kind](x, stored)
    for t in (0, 99, 199):
        assert_same(LINEAR[kind](x[t : t + 1], stored), whole[t : t + 1])
    assert_same(LINEAR[kind](x[50:90], stored[20:]), whole[50:90, 20:])
    with limited_to(1):
        assert_same(LINEAR[kind](x, stored), whole)
