"""int4, Q4_0 and Q8_0 weights, int8 activations and their exact product (SPEC 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.backends.torch.arithmetic import (
    NAN,
    align,
    cut,
    exponent,
    like,
    power,
    square64,
)

GROUP = 32
MAX_SCALE = 65504.0
MAX_SCALE_SUM = 16384.0


@dataclass(frozen=True)
class Int4:
    """Codes (N, K) float64, small integers, and scales (N, G) float64, each a float16 value."""

    codes: Tensor
    scales: Tensor


def round_float16(x: Tensor) -> Tensor:
    """RN16 of float64 x >= 0, kept as float64; torch's own conversion would round twice (1.1)."""
    quantum = power(torch.clamp(exponent(x) - 11, min=-24))
    return torch.round(x / quantum) * quantum


def _scale(quotient: Tensor, largest: Tensor) -> Tensor:
    """Round a scale to float16, with the two exceptions and the refusal of 5.1."""
    scale = round_float16(quotient)
    if bool((scale > MAX_SCALE).any()):
        raise ValueError("an int4 scale exceeds the range of float16")
    scale = torch.where(scale == 0, 2.0**-24, scale)
    return torch.where(largest == 0, 1.0, scale)


def _codes(w: Tensor, scale: Tensor) -> Tensor:
    """clamp(round_half_away(w / scale), -7, 7), without negative zeros."""
    x = w / scale
    return torch.clamp(torch.sign(x) * torch.floor(x.abs() + 0.5), -7, 7) + 0.0


def _checked(w: Tensor) -> Tensor:
    if not bool(torch.isfinite(w).all()):
        raise ValueError("a weight is not finite")
    return w.double()


def quantize_by_group(w: Tensor) -> Int4:
    """Quantize w (N, K) float32 in groups of 32 (5.1)."""
    groups = cut(_checked(w))
    largest = groups.abs().amax(-1)
    scales = _scale(largest / like(largest, 7.0), largest)
    codes = _codes(groups, scales[..., None]).flatten(1)[:, : w.shape[1]]
    return Int4(codes.contiguous(), scales)


def quantize_by_row(w: Tensor) -> Int4:
    """Quantize w (N, K) float32 with one scale a row, `max-abs` (5.3)."""
    w64 = _checked(w)
    largest = w64.abs().amax(-1, keepdim=True)
    scales = _scale(largest / like(largest, 7.0), largest)
    return Int4(_codes(w64, scales), scales)


def quantize_by_search(w: Tensor) -> Int4:
    """Quantize w (N, K) float32 with the best of 19 scales a row, `search` (5.3)."""
    w64 = _checked(w)
    largest = w64.abs().amax(-1, keepdim=True)
    best = torch.full_like(largest, float("inf"))
    chosen = torch.ones_like(largest)
    for j in range(40, 21, -1):  # the largest f first: a later one must be strictly better
        scale = _scale(largest * (j / 40) / like(largest, 7.0), largest)
        error = (w64 - scale * _codes(w64, scale)).float()
        squared = square64(align(error))[:, None]
        better = squared < best
        best = torch.where(better, squared, best)
        chosen = torch.where(better, scale, chosen)
    return Int4(_codes(w64, chosen), chosen)


def pack(codes: Tensor) -> Tensor:
    """Pack codes (N, K) into bytes (N, ceil(K/2)) uint8, low nibble first (5.2)."""
    stored = codes.to(torch.int64) + 8
    stored = pad(stored, (0, codes.shape[1] % 2), value=8)
    return (stored[:, 0::2] | stored[:, 1::2] << 4).to(torch.uint8)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Unpack bytes (N, ceil(K/2)) uint8 into codes (N, K) float64 (5.2)."""
    stored = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return stored[:, :columns].double() - 8


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (T, K) float64, scale (T,) float32 and finite (T,) of each row (5.4).

    A row that is not finite has zeros for codes and NaN for scale.
    """
    finite = torch.isfinite(x).all(-1)
    x = torch.where(finite[:, None], x, 0)
    s = x.abs().amax(-1, keepdim=True) / like(x, 127.0)
    quotient = x / torch.where(s == 0, 1, s)
    codes = torch.where(s == 0, 0, torch.clamp(torch.round(quotient), -127, 127))
    return codes.double() + 0.0, torch.where(finite, s[:, 0], NAN), finite


def weights_for_linear(w: Int4) -> Int4:
    """Refuse what could round (5.5) and fold group scales into the codes.

    The result has `scales` (N, 1) by row, and (N, 0) where they are folded: `scale * q` is a
    multiple of 2^-24, so one float64 GEMM over all of K is exact in any order (5.6).
    """
    if w.scales.shape[1] == 1:
        return w
    if bool((w.scales.sum(-1) >= MAX_SCALE_SUM).any()):
        raise ValueError("the scales of a row sum to 16384 or more: int4 would depend on order")
    each = w.scales.repeat_interleave(GROUP, dim=-1)[:, : w.codes.shape[1]]
    return Int4(w.codes * each, w.scales[:, :0])


def dequantize(w: Int4, zeros: Tensor | None, group: int) -> Tensor:
    """Weights (N, K) float32 of codes less zero points (N, G), by group or (0) row (5.9)."""
    columns = w.codes.shape[1]

    def of_each(x: Tensor) -> Tensor:
        return x.repeat_interleave(group or columns, dim=-1)[:, :columns]

    codes = w.codes if zeros is None else w.codes - of_each(zeros.double() - 8)
    return (codes * of_each(w.scales)).float()


def unpack_q4_0(blocks: Tensor) -> Int4:
    """Codes and scales of blocks (N, G, 18) uint8: low nibbles before high ones (5.7)."""
    low, high = blocks[..., 2:] & 15, blocks[..., 2:] >> 4
    codes = torch.cat((low, high), -1).flatten(1).double() - 8
    return Int4(codes, _block_scales(blocks))


def unpack_q8_0(blocks: Tensor) -> Int4:
    """Codes and scales of blocks (N, G, 34) uint8 (5.7)."""
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return Int4(codes.double(), _block_scales(blocks))


def _block_scales(blocks: Tensor) -> Tensor:
    """The float16 that each block begins with, low byte first."""
    return blocks[..., :2].contiguous().view(torch.float16)[..., 0].double()


def weights_of_blocks(w: Int4) -> Int4:
    """Fold scales of either sign into the codes, which loses nothing (5.7, 5.8)."""
    return Int4(w.codes * w.scales.repeat_interleave(GROUP, dim=-1), w.scales[:, :0])


def linear_int4(x: Tensor, w: Int4) -> Tensor:
    """Multiply x (T, K) float32 by prepared int4 weights: (T, N) float32 (5.5)."""
    codes, s, finite = quantize_int8(x)
    total = 0.0 + codes @ w.codes.mT
    if w.scales.shape[1] == 1:
        total = total * w.scales[:, 0]
    y = (total * s[:, None].double()).float()
    return torch.where(finite[:, None], y, NAN)
