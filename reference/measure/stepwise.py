"""Attention a step at a time: scores, softmax, weighted values (SPEC 8), each one timed by itself.

The engine's own attention is one function a lane, whose steps cannot be told apart from outside.
This computes the same for a tile of rows in three steps, the exact lane to the same bits. With
`held` every step is done for all rows before the next begins, so that the scores of all rows lie
in memory at once: attention as it is written in a formula. The products are the same ones, and
counted as they are made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import elementary
from reference.arithmetic import BLOCK, F32, Aligned, align, matmul, to_float32, weighted_sum
from reference.attention import (
    EXACT_TILE,
    FAST_TILE,
    AlignedKeyValues,
    KeyValues,
    Scores,
    align_key_values,
    capped,
)
from reference.extents import whole
from reference.model import AttentionKind
from reference.threads import share

STEPS = ("qk", "softmax", "av")


@dataclass
class Measured:
    """seconds: of each step, over all threads. operations: of products, an addition being one."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    operations: int = 0
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, step: str, seconds: float, operations: int) -> None:
        """Count a step of a tile."""
        with self.lock:
            self.seconds[step] += seconds
            self.operations += operations


@dataclass(frozen=True)
class Tile:
    """Rows of T, and the keys among which all are that they see: whole blocks of 32 from `first`.

    visible: (R, S) bool.
    """

    rows: slice
    keys: slice
    visible: NDArray[np.bool_]

    @property
    def products(self) -> int:
        """Pairs of a row and a key."""
        return self.visible.size


def tiles(rows: int, heads: int, scores: Scores, size: int) -> list[Tile]:
    """Tiles of about `size` scores over all heads; row t is at position t."""
    step, found = max(1, size // (heads * rows)), []
    for first in range(0, rows, step):
        here = slice(first, min(first + step, rows))
        low = 0 if scores.window is None else max(0, first - scores.window + 1)
        keys = slice(low - low % BLOCK, here.stop)
        back = np.arange(here.start, here.stop)[:, None] - np.arange(keys.start, keys.stop)
        visible = back >= 0 if scores.window is None else (back >= 0) & (back < scores.window)
        found.append(Tile(here, keys, np.asarray(visible)))
    return found


class _Lane:
    """Steps of a tile for finite q (T, Hq, D) and k, v (T, Hkv, D), float32, without sinks."""

    def __init__(self, q: F32, k: F32, v: F32, scores: Scores) -> None:
        self.q, self.k, self.v, self.scores = q, k, v, scores
        self.heads = [(h, h // (q.shape[1] // k.shape[1])) for h in range(q.shape[1])]

    def masked(self, t: F32, tile: Tile) -> F32:
        """Scores (Hq, R, S) with minus infinity where a row sees nothing."""
        return np.where(tile.visible, t, np.float32(-np.inf))


class _Exact(_Lane):
    """SPEC 8.2, to the bit."""

    size = EXACT_TILE

    def __init__(self, q: F32, k: F32, v: F32, scores: Scores) -> None:
        super().__init__(q, k, v, scores)
        self.queries = align(q.swapaxes(0, 1))
        self.prepared = align_key_values(k, v)

    def qk(self, tile: Tile) -> F32:
        q, k = self.queries, self.prepared
        finite = k.values.finite
        return np.stack(
            [
                matmul(
                    Aligned(q.values[:, h, tile.rows], q.finite[h, tile.rows]),
                    Aligned(k.keys[:, g, tile.keys], finite[g, tile.keys]),
                )
                for h, g in self.heads
            ]
        )

    def softmax(self, s: F32, tile: Tile) -> F32:
        u = self.masked(capped(s * self.scores.scale, self.scores.softcap), tile)
        return elementary.exp(u - u.max(axis=-1, keepdims=True))

    def av(self, p: F32, tile: Tile) -> F32:
        v, out = self.prepared.values, []
        for h, g in self.heads:
            rows = type(v)(v.digits[g, tile.keys], v.scale[g, tile.keys], v.finite[g, tile.keys])
            num, den = weighted_sum(p[h], rows)
            out.append(to_float32(num / den[:, None]))
        return np.stack(out)


class _Fast(_Lane):
    """SPEC 8.3, with the softmax of whole rows in place of one that goes along."""

    size = FAST_TILE

    def qk(self, tile: Tile) -> F32:
        q, k = self.q[tile.rows] * self.scores.scale, self.k[tile.keys]
        return np.stack([q[:, h] @ k[:, g].T for h, g in self.heads])

    def softmax(self, s: F32, tile: Tile) -> F32:
        cap = self.scores.softcap
        u = self.masked(s if cap is None else cap * np.tanh(s / cap), tile)
        u -= u.max(axis=-1, keepdims=True)
        return np.exp(u, out=u)

    def av(self, p: F32, tile: Tile) -> F32:
        v = self.v[tile.keys]
        out = np.stack([p[h] @ v[:, g] for h, g in self.heads])
        return np.asarray(out / p.sum(axis=-1, keepdims=True))


def stepwise(
    q: F32,
    k: F32,
    v: F32,
    scores: Scores,
    kind: AttentionKind,
    held: bool = False,
    clock: Callable[[], float] = perf_counter,
) -> tuple[F32, Measured]:
    """Attention of T rows over as many keys, (T, Hq, D) float32, and what its steps took.

    q: (T, Hq, D), k, v: (T, Hkv, D) float32, all finite. Sinks are left out.
    """
    lane = (_Exact if kind == "exact" else _Fast)(q, k, v, scores)
    out, measured = np.empty_like(q), Measured()
    parts = tiles(len(q), q.shape[1], scores, lane.size)
    kept: dict[int, F32] = {}

    def step(name: str, index: int) -> None:
        tile, of_tile = parts[index], 2 * parts[index].products * q.shape[1] * q.shape[2]
        given = () if name == "qk" else (kept.pop(index),)
        started = clock()
        kept[index] = getattr(lane, name)(*given, tile)
        measured.add(name, clock() - started, 0 if name == "softmax" else of_tile)
        if name == "av":
            out[tile.rows] = kept.pop(index).swapaxes(0, 1)

    def steps(index: int) -> None:
        for name in STEPS:
            step(name, index)

    if held:
        for name in STEPS:
            share(partial(step, name), range(len(parts)))
    else:
        share(steps, range(len(parts)))
    return out, measured


def drawn(rows: int, heads: int, kv_heads: int, width: int, seed: int = 0) -> tuple[F32, F32, F32]:
    """Random q (T, Hq, D) and k, v (T, Hkv, D) float32: time does not depend on values."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((rows, heads, width), np.float32),
        rng.standard_normal((rows, kv_heads, width), np.float32),
        rng.standard_normal((rows, kv_heads, width), np.float32),
    )


def prepared(k: F32, v: F32, kind: AttentionKind) -> AlignedKeyValues | KeyValues:
    """k, v (S, Hkv, D) as the engine's attention of that kind reads them from its cache."""
    if kind == "exact":
        return align_key_values(k, v)
    k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))
    return KeyValues(k, v, np.ones(k.shape[:2], np.bool_), whole(k.shape[1]))
