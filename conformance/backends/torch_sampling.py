"""Philox and sampling (SPEC 13)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from conformance.backends.torch_arithmetic import like
from conformance.backends.torch_elementary import exp

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: int, request: int, positions: Tensor) -> Tensor:
    """64 random bits for each position: (n,) int64, to be read as unsigned (13.2).

    Philox4x32-10. Products of two 32-bit words wrap in int64; a masked shift gives both halves.
    """
    c0 = positions & MASK
    c1 = torch.full_like(c0, request & MASK)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    key = [seed & MASK, seed >> 32 & MASK]
    for _ in range(10):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        high0, high1 = first >> 32 & MASK, second >> 32 & MASK
        c0, c2 = high1 ^ c1 ^ key[0], high0 ^ c3 ^ key[1]
        c1, c3 = second & MASK, first & MASK
        key = [(k + step) & MASK for k, step in zip(key, KEY_STEPS, strict=True)]
    return c0 | c1 << 32


@dataclass(frozen=True)
class Sampler:
    """Parameters of 13.1."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def penalize(logits: Tensor, previous: Tensor, penalty: float) -> Tensor:
    """Apply step 1 to logits (V,), once for every id in previous (n,)."""
    ids = torch.unique(previous)
    chosen, r = logits[ids], like(logits, penalty)
    out = logits.clone()
    out[ids] = torch.where(chosen > 0, chosen / r, chosen * r)
    return out


def _at_least(share: float, weight: int) -> int:
    """Return the smallest integer that is not below share * weight, exactly."""
    return math.ceil(Fraction(share) * weight)


def _kept(w: Tensor, ids: Tensor, sampler: Sampler) -> Tensor:
    """Apply steps 4 to 6 to ranked weights (n,) int64 and their ids (n,): the ids that remain."""
    if sampler.top_k:
        w, ids = w[: sampler.top_k], ids[: sampler.top_k]
    sums = w.cumsum(0)
    reached = sums >= _at_least(sampler.top_p, int(sums[-1]))
    prefix = int(torch.nonzero(reached)[0]) + 1 if bool(reached.any()) else len(w)
    w, ids = w[:prefix], ids[:prefix]
    keep = w >= _at_least(sampler.min_p, int(w[0]))
    keep[0] = True
    return ids[keep]


def sample(logits: Tensor, sampler: Sampler, previous: Tensor, x: int) -> int:
    """Choose a token from logits (V,) float32 with 64 random bits x (13.1)."""
    if bool((torch.isnan(logits) | (logits == torch.inf)).any()):
        raise ValueError("a logit is NaN or +inf")
    if not bool(torch.isfinite(logits).any()):
        raise ValueError("no logit is finite")
    logits = penalize(logits, previous, sampler.repetition_penalty)
    m = logits.max()
    temperature = like(logits, sampler.temperature)
    if temperature == 0:
        return int(torch.nonzero(logits == m)[0])
    z = (logits - m) / temperature
    w = torch.round(exp(z).double() * 2.0**40).to(torch.int64)
    ids = torch.sort(w, descending=True, stable=True).indices
    ids = torch.sort(_kept(w[ids], ids, sampler)).values
    sums = w[ids].cumsum(0)
    return int(ids[torch.nonzero(sums > (x * int(sums[-1]) >> 64))[0]])
