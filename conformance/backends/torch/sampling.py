"""Philox and sampling (SPEC 13)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from conformance.backends.torch.arithmetic import like
from conformance.backends.torch.elementary import exp

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: int, request: int, positions: Tensor, stream: int = 0) -> Tensor:
    """64 random bits for each position: (n,) int64, to be read as unsigned (13.2).

    Philox4x32-10. Products of two 32-bit words wrap in int64; a masked shift gives both halves.
    """
    c0 = positions & MASK
    c1 = torch.full_like(c0, request & MASK)
    c2, c3 = torch.full_like(c0, stream), torch.zeros_like(c0)
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


def law(logits: Tensor, sampler: Sampler, previous: Tensor) -> Tensor:
    """Apply steps 1 to 6 to logits (V,) float32: weights (V,) int64, 0 where not kept (13.1).

    Greedy, the one token has weight 1.
    """
    if bool((torch.isnan(logits) | (logits == torch.inf)).any()):
        raise ValueError("a logit is NaN or +inf")
    if not bool(torch.isfinite(logits).any()):
        raise ValueError("no logit is finite")
    logits = penalize(logits, previous, sampler.repetition_penalty)
    m = logits.max()
    temperature = like(logits, sampler.temperature)
    out = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    if temperature == 0:
        out[torch.nonzero(logits == m)[0]] = 1
        return out
    z = (logits - m) / temperature
    w = torch.round(exp(z).double() * 2.0**40).to(torch.int64)
    ids = torch.sort(w, descending=True, stable=True).indices
    kept = _kept(w[ids], ids, sampler)
    out[kept] = w[kept]
    return out


def draw(weights: Tensor, x: int) -> int:
    """Apply step 7 to weights (V,) int64 with 64 random bits x (13.1)."""
    sums = weights.cumsum(0)
    return int(torch.nonzero(sums > (x * int(sums[-1]) >> 64))[0])


def sample(logits: Tensor, sampler: Sampler, previous: Tensor, x: int) -> int:
    """Choose a token from logits (V,) float32 with 64 random bits x (13.1)."""
    return draw(law(logits, sampler, previous), x)


def verify(
    logits: Tensor,
    draft: Tensor,
    draft_weights: Tensor,
    sampler: Sampler,
    previous: Tensor,
    words: Sequence[Sequence[int]],
) -> list[int]:
    """Judge n drafted tokens by logits (n + 1, V): the tokens of the pass (13.4).

    draft_weights is (n, V) int64. words[stream][i] holds the 64 random bits of row i.
    """
    tokens: list[int] = []
    for i, x in enumerate(draft.tolist()):
        w = law(logits[i], sampler, torch.cat([previous, draft[:i]]))
        q = draft_weights[i]
        w_total, q_total, q_x = int(w.sum()), int(q.sum()), int(q[x])
        if q_x <= 0:
            raise ValueError(f"the draft's law gives its token {x} no weight")
        if words[2][i] * q_x * w_total >= int(w[x]) * q_total << 64:
            return [*tokens, _draw_residual(w.tolist(), q.tolist(), words[3][i])]
        tokens.append(x)
    last = law(logits[len(draft)], sampler, torch.cat([previous, draft]))
    return [*tokens, draw(last, words[0][len(draft)])]


def _draw_residual(w: list[int], q: list[int], x: int) -> int:
    """Apply step 7 to the residual; its weights need more than 64 bits."""
    w_total, q_total = sum(w), sum(q)
    sums = list(accumulate(max(a * q_total - b * w_total, 0) for a, b in zip(w, q, strict=True)))
    return bisect_right(sums, x * sums[-1] >> 64)
