"""Sums that do not round and so have no order (SPEC 2), and the orders of float32 (SPEC 3).

A contraction is cut into blocks of 32 terms. Within a block every element is rounded to the 24-bit
grid of the largest, so that the products and their sum are exact in float64. The block sums are
then added one by one, ascending. Everything exact in this engine is built from that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from reference.extents import Piece
from reference.threads import share, thread_count

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]
Real = TypeVar("Real", np.float32, np.float64)
Order = Literal["blas", "sequential", "pairwise", "lanes8", "float64"]

BLOCK = 32
"""Terms of one block (SPEC 2.1)."""

NAN = np.uint32(0x7FC00000).view(np.float32)
"""The only NaN (SPEC 1.3)."""

_TILE, _TALL = 1 << 16, 256
"""Elements and rows of a tile of partial sums: half a MiB, which stays in a core's cache."""

_FEW = 4
"""Rows of x up to which all block sums are kept: for T rows, T/32 of the memory of the weights."""

_SHARED = 1 << 20
"""Elements of work from which on threads share it: waking one takes some 50 to 80 us (README)."""

_AHEAD = 1 << 17
"""Weights that a thread has multiplied with one row by the time another has woken."""


@dataclass(frozen=True)
class Aligned:
    """Rows cut into aligned blocks, ready for any number of dot products (SPEC 2.1).

    values: (B, ..., R, 32) float64, `aligned(x)`, blocks first, with zeros after the last term and
    in blocks that are not finite. finite: (..., R) bool, False where a row holds an infinity or a
    NaN (SPEC 2.6).
    """

    values: F64
    finite: Bools

    @cached_property
    def sound(self) -> bool:
        """Whether all rows are finite."""
        return bool(self.finite.all())


def to_float32(x: F64) -> F32:
    """RN32 of x, (...) float64 -> float32; overflow gives infinity, NaN the one NaN (SPEC 1.3)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return one_nan(x.astype(np.float32))


def one_nan(x: F32) -> F32:
    """Replace every NaN of x, in place, by the one with bits 0x7fc00000 (SPEC 1.3)."""
    nan = np.isnan(x)
    if nan.any():
        x[nan] = NAN
    return x


def all_finite(x: F32) -> bool:
    """Whether x (...) holds no infinity and no NaN.

    If the sum of its squares is finite, so is every element; only if not are they looked at.
    """
    flat = x.ravel(order="K")
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(flat @ flat) or np.isfinite(x).all())


def largest(x: F32) -> F32:
    """max|x| over the last axis, (..., K) -> (...), infinity or NaN where an element is not finite.

    The bits of non-negative floats are ordered as the floats are, with NaN above infinity.
    """
    bits = np.bitwise_and(x.view(np.int32), np.int32(0x7FFFFFFF))
    peak: F32 = bits.max(axis=-1, initial=np.int32(0)).view(np.float32)
    return peak


def power_above(x: F32 | F64) -> NDArray[np.int32]:
    """E with 2^(E-1) <= x < 2^E for x > 0, subnormals included; 0 for x = 0 (SPEC 2.1)."""
    return np.frexp(x)[1]


def _on_grid(x: F32 | F64, peak: F32 | F64, out: F64 | None = None) -> F64:
    """Round x (..., 32) to the grid of blocks whose largest elements are `peak` (...) (SPEC 2.1).

    Near 1.5 * 2^(E+28) float64 numbers are 2^(E-24) apart, as the grid's are, and 1.5 * 2^(E+28)
    is an even multiple of that. So adding it rounds once, as `rint` does, and subtracting it again
    is exact.
    """
    shift = np.ldexp(1.5, power_above(peak) + 28)[..., None]
    rounded = np.add(x, shift, out=out)
    rounded -= shift
    return rounded


def _blocks(x: NDArray[Real]) -> NDArray[Real]:
    """Cut the last axis into blocks, (..., K) -> (..., B, 32), and fill the last with zeros."""
    width = x.shape[-1]
    if width % BLOCK:
        filled = np.zeros((*x.shape[:-1], width + -width % BLOCK), x.dtype)
        filled[..., :width] = x
        x = filled
    return np.ascontiguousarray(x).reshape(*x.shape[:-1], -(-width // BLOCK), BLOCK)


def align(x: F32) -> Aligned:
    """Align every block of every row of x, (..., K) float32 (SPEC 2.1, 2.6)."""
    blocks = _blocks(x)
    values = np.empty((blocks.shape[-2], *blocks.shape[:-2], BLOCK))
    finite = np.empty(blocks.shape[:-1], np.bool_)
    in_place = values.transpose(*range(1, values.ndim - 1), 0, -1)
    parts = _parts(len(blocks), blocks.size) if blocks.ndim > 2 else [slice(None)]
    share(lambda here: _align(blocks[here], in_place[here], finite[here]), parts)
    return Aligned(values, np.asarray(finite.all(axis=-1)))


def align_weights(w: F32) -> Aligned:
    """`align` of w (N, K) float32, laid out for many calls of `matmul` (SPEC 2.1).

    The values are those of `align`; in memory they lie as (B, 32, N). A product with a single row
    then reads them from start to end, which is twice as fast as row by row from main memory.
    """
    aligned = align(w)
    return Aligned(
        np.ascontiguousarray(aligned.values.swapaxes(1, 2)).swapaxes(1, 2), aligned.finite
    )


def _parts(length: int, work: int, ahead: int = 0) -> list[slice]:
    """Cut `length` into one slice a thread, or leave it whole where there is little work.

    work: elements in all. ahead: how many more of them the first slice has than the others.
    """
    count = thread_count() if work >= _SHARED else 1
    more = ahead * length // max(1, work) if count > 1 else 0
    step = max(1, -(-(length - more) // count))
    starts = [0, *range(step + more, length, step)]
    return [slice(a, b) for a, b in itertools.pairwise([*starts, length])]


def _align(blocks: F32, values: F64, finite: Bools) -> None:
    """Align blocks (..., 32) into `values`; those that are not `finite` (...) become zeros."""
    peak = largest(blocks)
    np.isfinite(peak, out=finite)
    if not finite.all():
        blocks = np.where(finite[..., None], blocks, np.float32(0))
        peak = np.where(finite, peak, np.float32(0))
    _on_grid(blocks, peak, values)


def added(sums: F64) -> F64:
    """Add block sums one by one, ascending, from +0.0, (B, ...) -> (...) float64 (SPEC 2.2).

    These are the only additions of the exact lane that round.
    """
    total = np.zeros(sums.shape[1:])
    for block_sum in sums:
        total += block_sum
    return total


def dot64(a: F32, b: F32) -> F64:
    """Dot products of rows before rounding, (..., K), (..., K) float32 -> (...) float64 (SPEC 2.2).

    NaN where a row of either operand is not finite.
    """
    x = align(a)
    y = x if b is a else align(b)
    finite = x.finite & y.finite
    return np.where(finite, added(np.vecdot(x.values, y.values)), np.nan)


def dot(a: F32, b: F32) -> np.float32:
    """The dot product of two vectors (K,) float32 (SPEC 2.2)."""
    return np.float32(to_float32(dot64(a, b)[None])[0])


def sum64(p: F32) -> F64:
    """The aligned sum over the last axis, (..., K) float32 -> (...) float64 (SPEC 2.4).

    NaN where a row is not finite.
    """
    x = align(p)
    return np.where(x.finite, added(x.values.sum(axis=-1)), np.nan)


def matmul(x: F32 | Aligned, w: F32 | Aligned) -> F32:
    """Dot products of every row of x with every row of w: (T, K), (N, K) -> (T, N) (SPEC 2.2).

    x and w are float32, or aligned before, as weights are that serve many calls. Neither tiles nor
    threads change a bit of the result, float32.
    """
    x, w = (v if isinstance(v, Aligned) else align(v) for v in (x, w))
    out = np.empty((x.values.shape[1], w.values.shape[1]), np.float32)
    if len(out) <= _FEW:
        _multiply_few(x.values, w.values, out)
    else:
        tiles = _tiles(out.shape, w.values.size)
        share(lambda tile: _multiply(x.values, w.values, out, *tile), tiles)
    if not (x.sound and w.sound):
        out[~(x.finite[:, None] & w.finite[None, :])] = NAN
    return out


def _tiles(shape: tuple[int, int], work: int) -> list[tuple[slice, slice]]:
    """Rows and columns of tiles of `shape`: at most _TILE elements each, at least one a thread."""
    columns = _parts(shape[1], work)
    tall = max(1, min(shape[0], _TALL))
    wide = max(1, min(_TILE // tall, columns[0].stop))
    corners = itertools.product(range(0, shape[1], wide), range(0, shape[0], tall))
    return [(slice(r, r + tall), slice(c, c + wide)) for c, r in corners]


def _multiply(x: F64, w: F64, out: F32, rows: slice, columns: slice) -> None:
    """One tile of `matmul`: GEMMs of one block each, their results added ascending (SPEC 2.2)."""
    total = np.zeros(out[rows, columns].shape)
    block_sum = np.empty_like(total)
    for left, right in zip(x[:, rows], w[:, columns], strict=True):
        total += np.matmul(left, right.T, out=block_sum)
    _round(total, out[rows, columns])


def _multiply_few(x: F64, w: F64, out: F32) -> None:
    """`matmul` of a few rows: all the block sums first, then their addition, ascending (SPEC 2.2).

    Adding in tiles, as above, would be many short calls, for which threads wait for each other at
    the interpreter lock.
    """
    sums = np.empty((len(x), *out.shape))
    share(
        lambda columns: np.matmul(x, w[:, columns].swapaxes(1, 2), out=sums[..., columns]),
        _parts(out.shape[1], w.size, _AHEAD),
    )
    _round(added(sums), out)


def _round(total: F64, out: F32) -> None:
    """RN32 of finite sums into `out`; overflow gives infinity (SPEC 1.3)."""
    with np.errstate(over="ignore", under="ignore"):
        out[...] = total


@dataclass(frozen=True)
class AlignedRows:
    """Rows aligned over their whole width, to be summed with weights (SPEC 2.5).

    digits: (..., S, D) float64, V_j * 2^-24, in (-1, 1); zeros for a row that is not finite.
    scale: (..., S) float64, 2^(e_j), and 0 for an all-zero row or one that is not finite.
    finite: (..., S) bool.
    """

    digits: F64
    scale: F64
    finite: Bools


def align_rows(v: F32) -> AlignedRows:
    """Align each row of v, (..., S, D) float32, on the grid of its largest element (SPEC 2.5)."""
    peak = largest(np.ascontiguousarray(v))
    finite = np.isfinite(peak)
    if not finite.all():
        v = np.where(finite[..., None], v, np.float32(0))
        peak = np.where(finite, peak, np.float32(0))
    exponent = power_above(peak)
    digits = np.rint(np.ldexp(v.astype(np.float64), 24 - exponent[..., None]))
    return AlignedRows(
        np.ldexp(digits, -24), np.where(peak > 0, np.ldexp(1.0, exponent), 0.0), finite
    )


def weighted_sum(p: F32, rows: AlignedRows) -> tuple[F64, F64]:
    """Sums of rows (..., S, D) with weights p >= 0, (..., R, S) float32 (SPEC 2.5).

    Returns num (..., R, D) and den (..., R), float64. A position that is not in the set has p = 0.
    The first position must be a multiple of 32, so that blocks are those of the whole sequence.
    """
    weights, den = weights_of(p, rows.scale[..., None, :])
    sums = np.zeros((weights.shape[-2], *p.shape[:-1], rows.digits.shape[-1]))
    add_block_sums(sums, weights, rows.digits, [(slice(0, p.shape[-1]),) * 2])
    return added(sums), den


def weights_of(p: F32, scale: F64) -> tuple[F64, F64]:
    """The aligned weights of rows, and den, from p and scale, (..., S) both (SPEC 2.5).

    Returns W, scaled back, (..., B, 32) and den (...), float64. The products p * scale, and p for
    den, are each rounded to the grid of the largest in their block.
    """
    blocks, scales = (_blocks(x) for x in (p.astype(np.float64), scale))
    totals = _on_common_grid(blocks).sum(axis=-1)
    totals = totals.transpose(-1, *range(totals.ndim - 1))
    return _on_common_grid(blocks * scales), added(totals)


def add_block_sums(sums: F64, weights: F64, digits: F64, pieces: Sequence[Piece]) -> None:
    """Add what the rows in some pieces contribute to block sums, to `sums` (B, ..., R, D), exactly.

    weights: (..., R, B, 32). digits: (..., slots, D). A block may be cut between several pieces,
    for a sum that is exact has no order (SPEC 2.3, 2.5).
    """
    for here, there in pieces:
        for start, stop in _cuts(here.start, here.stop):
            block, inside = divmod(start, BLOCK)
            count = -(-(stop - start) // BLOCK)
            width = (stop - start) // count
            rows = digits[..., there.start + start - here.start :, :][..., : stop - start, :]
            rows = rows.reshape(*rows.shape[:-2], count, width, rows.shape[-1])
            part = weights[..., block : block + count, inside : inside + width]
            heads = range(part.ndim - 3)
            sums[block : block + count] += np.matmul(
                part.transpose(-2, *heads, -3, -1), rows.transpose(-3, *heads, -2, -1)
            )


def _cuts(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into the end of a block, whole blocks, and the start of a block."""
    head, tail = min(stop, -(-start // BLOCK) * BLOCK), max(start, stop // BLOCK * BLOCK)
    return [(a, b) for a, b in ((start, head), (head, tail), (max(head, tail), stop)) if a < b]


def _on_common_grid(w: F64) -> F64:
    """Round w >= 0, (..., 32) float64, to the 24-bit grid of the largest of each block (SPEC 2.5).

    The bits of non-negative floats are ordered as the floats are, and compared faster.
    """
    return _on_grid(w, w.view(np.int64).max(axis=-1).view(np.float64))


def matmul_float32(x: F32, w: F32, order: Order, fma: bool = False) -> F32:
    """x (T, K) times w (N, K) in float32, in a named order -> (T, N) float32 (SPEC 3).

    These are the orders of common kernels, for the lane that is bounded and not exact.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if order == "blas":
            return one_nan(x @ w.T)
        if order == "float64":
            return to_float32(sequential(x.astype(np.float64), w.astype(np.float64)))
        if order == "pairwise":
            return one_nan(_pairwise(x, w, fma))
        if order == "lanes8":
            lanes = [sequential(x[:, i::8], w[:, i::8], fma) for i in range(8)]
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
            return one_nan(lanes[0])
        return one_nan(sequential(x, w, fma))


def sequential(x: NDArray[Any], w: NDArray[Any], fma: bool = False) -> NDArray[Any]:
    """Sum in one accumulator, of the operands' type: (T, K), (N, K) -> (T, N) (SPEC 3)."""
    total = np.zeros((len(x), len(w)), x.dtype)
    for k in range(x.shape[1]):
        total = multiply_add(x[:, k, None], w[None, :, k], total, fma)
    return total


def _pairwise(x: F32, w: F32, fma: bool) -> F32:
    """Halve the terms until one is left (two, with FMA), and add the sums of the halves."""
    terms = x.shape[1]
    if terms == 0:
        return np.zeros((len(x), len(w)), np.float32)
    if terms == 1 or (fma and terms == 2):
        first = x[:, 0, None] * w[None, :, 0]
        return first if terms == 1 else multiply_add(x[:, 1, None], w[None, :, 1], first, True)
    half = -(-terms // 2)
    return _pairwise(x[:, :half], w[:, :half], fma) + _pairwise(x[:, half:], w[:, half:], fma)


def multiply_add(a: F32, b: F32, c: F32, fma: bool) -> F32:
    """a * b + c in float32, rounded twice, or once with `fma` (SPEC 3).

    The product is exact in float64. Its sum with c is rounded to odd there (Boldo and Melquiond,
    IEEE Trans. Comput. 57, 2008), so that rounding once more, to float32, is rounding once.
    """
    if not fma:
        return a * b + c
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c
    shifted = total - product
    error = (product - (total - shifted)) + (c - shifted)
    even = (total.view(np.int64) & 1) == 0
    fix = (error != 0) & even & np.isfinite(total) & np.isfinite(error)
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(fix, np.nextafter(total, towards), total).astype(np.float32)
