"""Attention, exact and fast, tiled over query rows (SPEC 2.5, 8).

Inside, heads come first: keys and values are (Hkv, S, D) and queries (Hkv, g, R, D), where
g = Hq // Hkv query heads share one key-value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.backends.torch.arithmetic import (
    BLOCK,
    NAN,
    Aligned,
    align,
    ascending,
    cut,
    exponent,
    like,
    matmul,
    power,
    to_grid,
)
from conformance.backends.torch.elementary import exp, tanh

TILE = 1 << 20
"""Scores held at a time."""


class Cache:
    """Keys and values of the positions so far, raw and aligned (2.5, 11)."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        """Hold k, v (S, Hkv, D) float32."""
        self.k, self.v = k.transpose(0, 1), v.transpose(0, 1)
        self.finite = torch.isfinite(self.k).all(-1) & torch.isfinite(self.v).all(-1)
        self.k = torch.where(self.finite[..., None], self.k, 0)
        self.v = torch.where(self.finite[..., None], self.v, 0)
        self.keys = align(self.k).values
        wide = self.v.double()
        largest = wide.abs().amax(-1)
        e = exponent(largest)
        self.fractions = torch.round(wide * power(24 - e)[..., None]) * 2.0**-24
        self.powers = torch.where(largest == 0, 0, power(e))

    def __len__(self) -> int:
        """Return S."""
        return self.k.shape[1]

    def append(self, other: Cache) -> None:
        """Append the positions of another cache."""
        for name, tensor in vars(self).items():
            setattr(self, name, torch.cat((tensor, getattr(other, name)), 1))

    def first(self, count: int) -> Cache:
        """A cache of the first `count` positions; neither is changed when the other grows."""
        part = copy(self)
        for name, tensor in vars(self).items():
            setattr(part, name, tensor[:, :count])
        return part


@dataclass(frozen=True)
class Options:
    """Scale, window, softcap and sinks (Hq,) of an attention (8.1, 8.2).

    A scale of None is 1/sqrt(D), a window of None infinite.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def scale_of(self, q: Tensor) -> float:
        """Return the scale for q (..., D); it is rounded to float32 where it is used."""
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale


@dataclass(frozen=True)
class Tile:
    """Query rows [start, stop) of a call and keys [low, high) that any of them sees."""

    start: int
    stop: int
    low: int
    high: int
    visible: Tensor
    """(R, high - low) bool (8.1)."""


def tiles(rows: int, cache: Cache, heads: int, window: int | None) -> Iterator[Tile]:
    """Cut the rows so that scores of all heads stay within TILE, whatever S is."""
    size = len(cache)
    step = max(1, TILE // max(1, heads * size))
    device = cache.k.device
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        t = torch.arange(size - rows + start, size - rows + stop, device=device)[:, None]
        high = max(0, size - rows + stop)
        low = 0 if window is None else max(0, size - rows + start - window + 1)
        low = min(low // BLOCK * BLOCK, high)
        j = torch.arange(low, high, device=device)
        visible = j <= t if window is None else (j <= t) & (j > t - window)
        yield Tile(start, stop, low, high, visible)


def _scaled(scores: Tensor, scale: float, options: Options) -> tuple[Tensor, Tensor]:
    """Return t_j and u_j of scores (..., S) (8.2), with the float32 tanh of 4.1."""
    t = scores * like(scores, scale)
    if options.softcap is None:
        return t, t
    c = like(t, options.softcap)
    return t, c * tanh(t / c)


def _sink(options: Options, groups: tuple[int, int], device: torch.device) -> Tensor:
    """Sinks as (Hkv, g, 1, 1); -inf where there is none."""
    if options.sinks is None:
        return torch.full((*groups, 1, 1), -torch.inf, device=device)
    return options.sinks.view(*groups, 1, 1)


def _weights(u: Tensor, tile: Tile, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return u - m where visible and -inf elsewhere, and sink - m, both RN32 (8.2)."""
    u = torch.where(tile.visible, u, -torch.inf)
    m = torch.maximum(u.amax(-1, keepdim=True), sink)
    m = torch.where(torch.isfinite(m), m, 0)  # nothing visible, or a row that is NaN anyway
    return u - m, sink - m


def _bad(q: Tensor, t: Tensor, cache: Cache, tile: Tile, sink: Tensor) -> Tensor:
    """Rows (Hkv, g, R) that are NaN by the non-finite rules of 8.2."""
    keys = ~cache.finite[:, None, None, tile.low : tile.high]
    bad = ((keys | ~torch.isfinite(t)) & tile.visible).any(-1)
    bad |= ~torch.isfinite(q).all(-1)
    return bad | ((sink == torch.inf) | torch.isnan(sink))[..., 0]


def weighted_sum(p: Tensor, cache: Cache, tile: Tile) -> tuple[Tensor, Tensor]:
    """Sum rows of v with weights p (Hkv, g, R, keys) float32 (2.5).

    Returns num (Hkv, g, R, D) and den (Hkv, g, R), float64.

    Invisible positions have p = 0, and so neither a grid nor a share. `tile.low` is a multiple of
    32, so the blocks are those of absolute positions.
    """
    heads, g, rows, _ = p.shape
    p64 = p.double()
    w = to_grid(cut(p64 * cache.powers[:, None, None, tile.low : tile.high]))
    w = w.flatten(1, 2)
    v = cache.fractions[:, tile.low : tile.high]
    num = torch.zeros(heads, g * rows, v.shape[-1], dtype=torch.float64, device=p.device)
    for b in range(w.shape[-2]):
        values = v[:, b * BLOCK : (b + 1) * BLOCK]
        num += w[:, :, b, : values.shape[1]] @ values
    den = ascending(to_grid(cut(p64)).sum(-1))
    return num.view(heads, g, rows, -1), den


def _exact_tile(q: Tensor, cache: Cache, tile: Tile, options: Options) -> Tensor:
    """Exact attention of one tile: q and result (Hkv, g, R, D) (8.2)."""
    heads, g, rows, _ = q.shape
    x = align(q.flatten(1, 2))
    k = cache.keys[:, tile.low : tile.high]
    everything = torch.ones(k.shape[:2], dtype=torch.bool, device=q.device)
    scores = matmul(x, Aligned(k, everything)).view(heads, g, rows, -1)
    t, u = _scaled(scores, options.scale_of(q), options)
    sink = _sink(options, (heads, g), q.device)
    bad = _bad(q, t, cache, tile, sink)
    shifted, sink_shifted = _weights(torch.where(bad[..., None], 0, u), tile, sink)
    num, den = weighted_sum(exp(shifted), cache, tile)
    den = den + exp(sink_shifted)[..., 0].double()
    return _finish(num, den, bad, tile)


def _finish(num: Tensor, den: Tensor, bad: Tensor, tile: Tile) -> Tensor:
    """Divide: RN32(num / den), +0 where nothing is visible, NaN where the rules say so (8.2)."""
    den = torch.where(den == 0, 1, den)
    out = torch.where(bad[..., None], NAN, (num / den[..., None]).float())
    return torch.where(tile.visible.any(-1)[:, None], out, 0)


def _fast_tile(q: Tensor, cache: Cache, tile: Tile, options: Options) -> Tensor:
    """Float32 attention of one tile: q and result (Hkv, g, R, D) (8.3)."""
    k = cache.k[:, None, tile.low : tile.high]
    t = (q @ k.mT) * options.scale_of(q)
    u = t if options.softcap is None else options.softcap * torch.tanh(t / options.softcap)
    sink = _sink(options, (q.shape[0], q.shape[1]), q.device)
    bad = _bad(q, t, cache, tile, sink)
    shifted, sink_shifted = _weights(torch.where(bad[..., None], 0, u), tile, sink)
    p = torch.exp(shifted)
    den = p.sum(-1) + torch.exp(sink_shifted)[..., 0]
    return _finish(p @ cache.v[:, None, tile.low : tile.high], den, bad, tile)


def attention(q: Tensor, cache: Cache, options: Options, mode: str) -> Tensor:
    """Attention of the last T positions, q (T, Hq, D) float32, over a cache: (T, Hq, D) (8)."""
    if mode not in ("exact", "fast"):
        raise ValueError(f"attention mode {mode!r} is neither exact nor fast")
    compute = _exact_tile if mode == "exact" else _fast_tile
    rows, heads, d = q.shape
    grouped = q.transpose(0, 1).reshape(cache.k.shape[0], -1, rows, d)
    out = torch.zeros_like(grouped)
    for tile in tiles(rows, cache, heads, options.window):
        if tile.high > tile.low:
            part = grouped[:, :, tile.start : tile.stop]
            out[:, :, tile.start : tile.stop] = compute(part, cache, tile, options)
    return out.reshape(heads, rows, d).transpose(0, 1).contiguous()
