"""int4 weights by group and by row, and int8 or float activations (SPEC 5).

A float16 scale is a multiple of 2^-24, so the scaled sums of a whole row are integers in units of
that, and small enough for float64 to hold: group scales do not prevent sums without an order
(SPEC 5.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32, F64, NAN, dot64, largest, matmul, one_nan, to_float32
from reference.errors import QuantizationError

GROUP = 32
"""Weights that share a scale (SPEC 5.1)."""

SCALE_LIMIT = 16384.0
"""The sum of one row's scales must be below this (SPEC 5.5)."""


@dataclass(frozen=True)
class Int4Matrix:
    """A quantized weight matrix (N, K) (SPEC 5.2).

    packed: (N, ceil(K/2)) uint8, two codes q + 8 in each byte, even k in the low nibble.
    scales: (N, G) float16. group: how many weights share one; K where a row has a single one.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float16]
    in_features: int
    group: int


def quantize_int4(w: F32, group: int = GROUP) -> Int4Matrix:
    """Quantize w (N, K) float32, each group of consecutive k with a scale of its own (SPEC 5.1).

    Raises QuantizationError on a weight that is not finite and on a scale beyond float16.
    """
    peak = np.stack([largest(np.ascontiguousarray(part)) for part in _groups(w, group)], axis=1)
    scales = _scales(peak.astype(np.float64) / 7, peak > 0)
    return Int4Matrix(
        _pack(_codes(w, _spread(scales, w.shape[1], group))), scales, w.shape[1], group
    )


def quantize_int4_row(w: F32, search: bool = False) -> Int4Matrix:
    """Quantize w (N, K) float32, one scale a row: from max|w|, or the best of a search (SPEC 5.3).

    Raises QuantizationError as `quantize_int4` does.
    """
    width = w.shape[1]
    if not search:
        return quantize_int4(w, group=width)
    peak = largest(w)[:, None].astype(np.float64)
    best, least = np.zeros((len(w), 1), np.float16), np.full(len(w), np.inf)
    for step in range(40, 21, -1):
        scales = _scales(peak * (step / 40) / 7, peak > 0)
        error = to_float32(w - scales.astype(np.float64) * _codes(w, scales))
        squares = dot64(error, error)
        better = squares < least
        best[better], least[better] = scales[better], squares[better]
    return Int4Matrix(_pack(_codes(w, best)), best, width, width)


def _groups(w: F32, group: int) -> list[F32]:
    """Views of w (N, K), one for each group of k, the last of them perhaps narrower."""
    return [w[:, first : first + group] for first in range(0, w.shape[1], group)]


def _scales(ideal: F64, used: NDArray[np.bool_]) -> NDArray[np.float16]:
    """RN16 of the ideal scales, with the two exceptions and the refusals of SPEC 5.1."""
    if not np.isfinite(ideal).all():
        raise QuantizationError(
            "int4: a weight is infinite or NaN; such a matrix cannot be quantized"
        )
    with np.errstate(over="ignore", under="ignore"):
        scales = ideal.astype(np.float16)
    if np.isinf(scales).any():
        raise QuantizationError(
            f"int4: a group needs the scale {ideal.max():g}, beyond float16's 65504; "
            "scale the weights down"
        )
    scales[used & (scales == 0)] = np.float16(2.0**-24)
    scales[~used] = np.float16(1)
    return scales


def _spread(scales: NDArray[Any], width: int, group: int) -> F64:
    """The scale, or zero point, of every weight, (N, G) -> (N, K)."""
    return np.repeat(scales.astype(np.float64), group, axis=1)[:, :width]


def _codes(w: F32, scales: NDArray[np.floating]) -> F64:
    """clamp(round_half_away(w / scale), -7, 7) (SPEC 5.1)."""
    ratio: F64 = w / scales.astype(np.float64)
    return np.copysign(np.minimum(np.floor(np.abs(ratio) + 0.5), 7), ratio)


def _pack(codes: F64) -> NDArray[np.uint8]:
    """Pack codes q (N, K) in -8..7 as bytes, (N, ceil(K/2)) (SPEC 5.2)."""
    nibbles = (codes + 8).astype(np.uint8)
    if nibbles.shape[1] % 2:
        nibbles = np.pad(nibbles, [(0, 0), (0, 1)], constant_values=8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)


def unpack(m: Int4Matrix) -> NDArray[np.int8]:
    """The codes q of a matrix, (N, K) int8 in -8..7 (SPEC 5.2)."""
    nibbles = np.stack([m.packed & 15, m.packed >> 4], axis=-1).reshape(len(m.packed), -1)
    return nibbles[:, : m.in_features].astype(np.int8) - np.int8(8)


def dequantize(m: Int4Matrix, zeros: NDArray[np.uint8] | None = None) -> F32:
    """The weights, `scale * q` or `scale * (c - z)`, (N, K) float32, exact (SPEC 5.1, 5.9).

    zeros: the zero point z of each group, (N, G) uint8 in 0..15; None is 8 for all.
    """
    codes = unpack(m).astype(np.float64)
    if zeros is not None:
        codes += 8 - _spread(zeros, m.in_features, m.group)
    return to_float32(codes * _spread(m.scales, m.in_features, m.group) + 0.0)


def check_scales(m: Int4Matrix, name: str) -> None:
    """Raise QuantizationError where a row's scales sum up to 16,384 or more (SPEC 5.5).

    A matrix with one scale a row needs no check (SPEC 5.6). name: of the tensor, for the message.
    """
    if m.group >= m.in_features:
        return
    worst = m.scales.astype(np.float64).sum(axis=1).max(initial=0)
    if worst >= SCALE_LIMIT:
        raise QuantizationError(
            f"{name}: the int4 scales of a row sum up to {worst:g}, and sums are exact only below "
            f"{SCALE_LIMIT:g}; scale the weights down"
        )


def quantize_int8(x: F32) -> tuple[NDArray[np.int8], F32]:
    """Codes (T, K) int8 and a scale for each row, (T,) float32, of x (T, K) float32 (SPEC 5.4).

    A row that is not finite gets the scale NaN, and zeros as codes.
    """
    peak = largest(np.ascontiguousarray(x))
    finite = np.isfinite(peak)
    scale = np.where(finite, peak / np.float32(127), NAN)
    usable = finite & (scale > 0)
    divisor = np.where(usable, scale, np.float32(1))[:, None]
    codes = np.rint(np.where(usable[:, None], x, np.float32(0)) / divisor)
    return np.clip(codes, -127, 127).astype(np.int8), scale


def linear_int4(x: F32, m: Int4Matrix) -> F32:
    """Multiply x (T, K) float32, as int8, by a quantized matrix (N, K) -> (T, N) (SPEC 5.5)."""
    return linear_dequantized(x, dequantize(m).astype(np.float64))


def linear_w4a16(x: F32, m: Int4Matrix, zeros: NDArray[np.uint8] | None = None) -> F32:
    """Multiply x (T, K), float32 as it is, by a quantized matrix (N, K) -> (T, N) (SPEC 5.9).

    zeros: as in `dequantize`.
    """
    return matmul(x, dequantize(m, zeros))


def linear_dequantized(x: F32, weights: F64) -> F32:
    """`linear_int4` on dequantized weights (N, K) float64: no sum rounds in the GEMM (SPEC 5.6)."""
    codes, scale = quantize_int8(x)
    exact = codes.astype(np.float64) @ weights.T + 0.0
    with np.errstate(invalid="ignore"):
        return one_nan(to_float32(exact * scale[:, None].astype(np.float64)))
