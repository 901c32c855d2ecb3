"""Aligned arithmetic in torch (SPEC 1.1, 1.3, 2).

Tensors of float32 come in; aligned values are float64 tensors that hold multiples of a power of
two. Everything here is either exact or rounds once, in an order that the SPEC fixes, so CPU and
CUDA give the same bits.

Two things are avoided on purpose: division by a Python number (CUDA multiplies by its reciprocal)
and `ldexp` (which takes its power of two in float32). Divisors are tensors, see `like`; powers of
two are made from their bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32
NAN = float("nan")


def canonical(x: Tensor) -> Tensor:
    """Replace every NaN of a float32 tensor by the one with bits 0x7fc00000 (1.3)."""
    return torch.where(torch.isnan(x), NAN, x)


def like(x: Tensor, value: float) -> Tensor:
    """Return a 0-d tensor with the dtype and device of x."""
    return torch.full((), value, dtype=x.dtype, device=x.device)


def exponent(x: Tensor) -> Tensor:
    """E with 2^(E-1) <= x < 2^E, int64; 0 where x is zero. x is float64, normal or +0 (2.1)."""
    return torch.where(x > 0, (x.view(torch.int64) >> 52) - 1022, 0)


def power(e: Tensor) -> Tensor:
    """2^e as float64, for int64 e in [-1022, 1023]."""
    return ((e + 1023) << 52).view(torch.float64)


def to_grid(x: Tensor) -> Tensor:
    """Round float64 x to the grid of the largest element along the last dimension (2.1)."""
    e = exponent(x.abs().amax(-1, keepdim=True))
    return torch.round(x * power(24 - e)) * power(e - 24)


def cut(x: Tensor) -> Tensor:
    """Cut (..., K) into (..., B, 32); the last block is filled with zeros."""
    blocks = -(-x.shape[-1] // BLOCK)
    filled = pad(x, (0, blocks * BLOCK - x.shape[-1]))
    return filled.reshape(*x.shape[:-1], blocks, BLOCK)


@dataclass(frozen=True)
class Aligned:
    """Rows ready for dot products: values (..., B, 32) float64, finite (...) bool (2.1, 2.6)."""

    values: Tensor
    finite: Tensor


def align(x: Tensor) -> Aligned:
    """Align (..., K) float32 block by block; a row that is not finite has zeros as values."""
    finite = torch.isfinite(x).all(-1)
    return Aligned(to_grid(cut(torch.where(finite[..., None], x, 0).double())), finite)


def matmul64(x: Tensor, w: Tensor) -> Tensor:
    """dot64 of aligned x (..., T, B, 32) with w (..., N, B, 32): (..., T, N) float64 (2.2).

    One float64 GEMM a block is exact in any order (2.3); the block sums are added ascending.
    """
    rows, columns = x.shape[-3], w.shape[-3]
    total = torch.zeros(*x.shape[:-3], rows, columns, dtype=torch.float64, device=x.device)
    for b in range(x.shape[-2]):
        total += x[..., b, :] @ w[..., b, :].mT
    return total


def matmul(x: Aligned, w: Aligned) -> Tensor:
    """dot(x[t], w[n]) for x (..., T, K) and w (..., N, K): (..., T, N) float32 (2.2, 2.6)."""
    finite = x.finite[..., :, None] & w.finite[..., None, :]
    return torch.where(finite, matmul64(x.values, w.values).float(), NAN)


def ascending(sums: Tensor) -> Tensor:
    """Add block sums (..., B) in float64, ascending, from +0 (2.2)."""
    total = torch.zeros(sums.shape[:-1], dtype=torch.float64, device=sums.device)
    for block in sums.unbind(-1):
        total = total + block
    return total


def square64(x: Aligned) -> Tensor:
    """dot64(x, x) of each row: (...) float64."""
    return ascending((x.values * x.values).sum(-1))


def sum64(p: Tensor) -> Tensor:
    """Aligned sum of finite p (..., K) float32: (...) float64 (2.4)."""
    return ascending(to_grid(cut(p.double())).sum(-1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (..., K) with weight (K,) (6)."""
    rows = align(x)
    ms = square64(rows) / like(rows.values, x.shape[-1])
    r = torch.div(like(ms, 1.0), torch.sqrt(ms + eps)).float()
    y = (x * r[..., None]) * weight
    return canonical(torch.where(rows.finite[..., None], y, NAN))
