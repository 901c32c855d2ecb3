"""Attention: exact, whose rows depend on nothing but what they see, and fast (SPEC 8).

Both work on tiles of query rows, so that memory grows with the number of keys and not with its
square. What a row may see is a set of positions; what it may not see is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import elementary
from reference.arithmetic import (
    F32,
    F64,
    NAN,
    AlignedRows,
    Bools,
    align,
    align_rows,
    one_nan,
    to_float32,
    weighted_sum,
)
from reference.extents import Extents, Piece, gathered, whole
from reference.threads import share

EXACT_TILE = 1 << 17
"""Scores of one tile of the exact lane, over all heads."""

FAST_TILE = 1 << 18
"""Scores of one tile of the fast lane, over all heads; FAST_KEYS of them at most along the keys."""

FAST_KEYS = 512


@dataclass(frozen=True)
class KeyValues:
    """Keys and values as they are stored, in slots; `where` tells which slots hold which positions.

    k, v: (Hkv, slots, D) float32, or a narrower type; finite: (Hkv, slots) bool. k_scale, v_scale:
    (Hkv, slots) float32, where k and v are int8 codes.
    """

    k: NDArray[Any]
    v: NDArray[Any]
    finite: Bools
    where: Extents
    k_scale: F32 | None = None
    v_scale: F32 | None = None

    def read(self, low: int, high: int) -> tuple[F32, F32, Bools]:
        """k, v (Hkv, n, D) float32 and finite (Hkv, n) of the positions [low, high)."""
        pieces = self.where.pieces(low, high)
        k, v = (
            widened(gathered(x, pieces, 1), None if s is None else gathered(s, pieces, 1))
            for x, s in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return k, v, gathered(self.finite, pieces, 1)


@dataclass(frozen=True)
class AlignedKeyValues:
    """Keys aligned by blocks of D, values by rows, in slots (SPEC 11.1).

    keys: values (B, Hkv, slots, 32). values: digits (Hkv, slots, D). Where a position's k or v is
    not finite, both hold zeros and `finite` (Hkv, slots) is False.
    """

    keys: F64
    values: AlignedRows
    where: Extents


def widened(x: NDArray[Any], scale: F32 | None) -> F32:
    """Stored keys or values (..., D) as float32; int8 codes times their row's scale (SPEC 11.2)."""
    if scale is None:
        return np.asarray(x, np.float32)
    with np.errstate(under="ignore", over="ignore"):
        return x.astype(np.float32) * scale[..., None]


@dataclass(frozen=True)
class Scores:
    """What turns a dot product into a score, and who sees whom (SPEC 8.1, 8.2).

    window: keys that a row may see, its own included. sinks: (Hq,) float32.
    """

    scale: np.float32
    window: int | None = None
    softcap: np.float32 | None = None
    sinks: F32 | None = None


def default_scale(head_dim: int) -> np.float32:
    """RN32(1 / sqrt(D)) (SPEC 8.2)."""
    return np.float32(1 / np.sqrt(np.float64(head_dim)))


def attention_exact(
    q: F32,
    k: F32,
    v: F32,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: F32 | None = None,
) -> F32:
    """Exact attention of T query rows over S keys, the rows being the last T (SPEC 8.2).

    q: (T, Hq, D), k and v: (S, Hkv, D) float32, sinks: (Hq,) float32. Returns (T, Hq, D) float32.
    """
    return attend_exact(
        q, align_key_values(k, v), len(k), _scores(q, scale, window, softcap, sinks)
    )


def attention_fast(
    q: F32,
    k: F32,
    v: F32,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: F32 | None = None,
) -> F32:
    """The same in plain float32 with an online softmax: bounded, not exact (SPEC 8.3)."""
    k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))
    finite = np.asarray(np.isfinite(k).all(axis=-1) & np.isfinite(v).all(axis=-1))
    kv = KeyValues(k, v, finite, whole(k.shape[1]))
    return attend_fast(q, kv, k.shape[1], _scores(q, scale, window, softcap, sinks))


def _scores(
    q: F32, scale: float | None, window: int | None, softcap: float | None, sinks: F32 | None
) -> Scores:
    return Scores(
        default_scale(q.shape[-1]) if scale is None else np.float32(scale),
        window,
        None if softcap is None else np.float32(softcap),
        sinks,
    )


def align_key_values(k: F32, v: F32) -> AlignedKeyValues:
    """Prepare k and v, (S, Hkv, D) float32, for any number of query rows (SPEC 2.1, 2.5)."""
    keys, values = align(k.swapaxes(0, 1)), align_rows(v.swapaxes(0, 1))
    both = AlignedRows(values.digits, values.scale, keys.finite & values.finite)
    return AlignedKeyValues(keys.values, both, whole(len(k)))


def _grouped(q: F32, kv_heads: int) -> F32:
    """(T, Hq, D) -> (Hkv, Hq/Hkv, T, D): the query heads that share a key head, together."""
    rows, heads, width = q.shape
    return np.ascontiguousarray(q.transpose(1, 0, 2)).reshape(
        kv_heads, heads // kv_heads, rows, width
    )


def _ungrouped(out: F32) -> F32:
    kv_heads, group, rows, width = out.shape
    return np.ascontiguousarray(out.reshape(kv_heads * group, rows, width).transpose(1, 0, 2))


def _visible(positions: NDArray[np.int64], keys: NDArray[np.int64], window: int | None) -> Bools:
    """The set of SPEC 8.1 as a table, (R, S)."""
    back = positions[:, None] - keys
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _scaled(products: F32, scores: Scores) -> F32:
    """t = RN32(s * scale), in place (SPEC 8.2)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        products *= scores.scale
    return products


def _capped(t: F32, softcap: np.float32 | None) -> F32:
    """u = RN32(c * tanh(RN32(t / c))), or t (SPEC 8.2)."""
    return t if softcap is None else softcap * elementary.tanh(t / softcap)


def attend_exact(q: F32, kv: AlignedKeyValues, length: int, scores: Scores) -> F32:
    """`attention_exact` on prepared keys, the first `length` of which count (SPEC 8.2)."""
    kv_heads = kv.values.scale.shape[0]
    grouped = _grouped(q, kv_heads)
    out = np.empty_like(grouped)
    rows, before = len(q), length - len(q)
    step = max(1, EXACT_TILE // (q.shape[1] * length))

    def tile(first: int) -> None:
        here = slice(first, min(first + step, rows))
        positions = np.arange(before + here.start, before + here.stop)
        out[:, :, here] = _exact_tile(grouped[:, :, here], kv, positions, scores)

    share(tile, range(0, rows, step))
    return _ungrouped(out)


def _exact_tile(q: F32, kv: AlignedKeyValues, positions: NDArray[np.int64], scores: Scores) -> F32:
    """Rows q (Hkv, g, R, D) at `positions` -> (Hkv, g, R, D)."""
    kv_heads, group, rows, width = q.shape
    low, high = _seen(positions, scores.window)
    pieces = kv.where.pieces(low, high)
    queries = align(q.reshape(kv_heads, group * rows, width))
    visible = _visible(positions, np.arange(low, high), scores.window)
    finite = gathered(kv.values.finite, pieces, 1)
    t = _exact_scores(queries.values, kv.keys, high - low, pieces, scores)
    t = t.reshape(kv_heads, group, rows, -1)
    invalid = ~queries.finite.reshape(kv_heads, group, rows)
    invalid |= (~(np.isfinite(t) & finite[:, None, None]) & visible).any(axis=-1)
    if invalid.any():
        t = np.where(invalid[..., None], np.float32(0), t)

    sinks, no_sink = _sinks(scores, kv_heads, group)
    u = np.where(visible, _capped(t, scores.softcap), np.float32(-np.inf))
    m = np.maximum(u.max(axis=-1, initial=-np.inf), sinks)
    m = np.where(m == -np.inf, np.float32(0), m)
    with np.errstate(over="ignore"):
        p, sink_share = elementary.exp(u - m[..., None]), elementary.exp(sinks - m)
    num, den = weighted_sum(p.reshape(kv_heads, group * rows, -1), kv.values, low, pieces)
    with np.errstate(invalid="ignore"):
        total = den.reshape(m.shape) + sink_share
        out = to_float32(num.reshape(q.shape) / total[..., None])
    out[invalid | no_sink] = NAN
    out[:, :, ~visible.any(axis=-1)] = 0
    return out


def _seen(positions: NDArray[np.int64], window: int | None) -> tuple[int, int]:
    """The range of positions that some of the rows, which are ascending, may see."""
    first, last = int(positions[0]), int(positions[-1])
    low = 0 if window is None else max(0, first - window + 1)
    return low, max(low, last + 1)


def _exact_scores(
    queries: F64, keys: F64, count: int, pieces: Sequence[Piece], scores: Scores
) -> F32:
    """RN32(dot(q, k) * scale) of rows (B, Hkv, R, 32) over the pieces -> (Hkv, R, S) (SPEC 8.2)."""
    products = np.zeros((*queries.shape[1:3], count))
    for here, there in pieces:
        for left, right in zip(queries, keys[:, :, there], strict=True):
            products[..., here] += np.matmul(left, right.swapaxes(1, 2))
    return _scaled(to_float32(products), scores)


def _sinks(scores: Scores, kv_heads: int, group: int) -> tuple[F32, Bools]:
    """The sink of each head, (Hkv, g, 1), -inf where there is none, and which are no numbers."""
    if scores.sinks is None:
        return np.full((kv_heads, group, 1), -np.inf, np.float32), np.zeros((1, 1, 1), np.bool_)
    sinks = scores.sinks.reshape(kv_heads, group, 1)
    wrong = np.asarray(np.isnan(sinks) | (sinks == np.inf))
    return np.where(wrong, np.float32(-np.inf), sinks), wrong


def attend_fast(q: F32, kv: KeyValues, length: int, scores: Scores) -> F32:
    """`attention_fast` on stored keys, the first `length` of which count (SPEC 8.3)."""
    grouped = _grouped(q, len(kv.k))
    out = np.empty_like(grouped)
    rows, before = len(q), length - len(q)
    step = max(1, FAST_TILE // (q.shape[1] * min(FAST_KEYS, length)))

    def tile(first: int) -> None:
        here = slice(first, min(first + step, rows))
        positions = np.arange(before + here.start, before + here.stop)
        out[:, :, here] = _fast_tile(grouped[:, :, here], kv, positions, scores)

    share(tile, range(0, rows, step))
    return _ungrouped(out)


def _fast_tile(q: F32, kv: KeyValues, positions: NDArray[np.int64], scores: Scores) -> F32:
    """Rows q (Hkv, g, R, D) at `positions` over all keys they see, FAST_KEYS at a time."""
    kv_heads, group, rows, width = q.shape
    shape = (kv_heads, group, rows)
    scaled = _scaled(q.reshape(kv_heads, group * rows, width).copy(), scores)
    sinks, no_sink = _sinks(scores, kv_heads, group)
    m = np.broadcast_to(sinks, shape).copy()
    total, acc = np.isfinite(m).astype(np.float32), np.zeros(q.shape, np.float32)
    invalid = ~np.isfinite(q).all(axis=-1) | no_sink
    low, high = _seen(positions, scores.window)
    for first in range(low, high, FAST_KEYS):
        last = min(first + FAST_KEYS, high)
        k, v, finite = kv.read(first, last)
        if not finite.all():
            k, v = (np.where(finite[..., None], x, np.float32(0)) for x in (k, v))
        with np.errstate(all="ignore"):
            t = np.matmul(scaled, k.swapaxes(1, 2)).reshape(*shape, -1)
            visible = _visible(positions, np.arange(first, last), scores.window)
            if not (finite.all() and np.isfinite(t).all()):
                broken = ~(np.isfinite(t) & finite[:, None, None])
                invalid |= (broken & visible).any(axis=-1)
            u = t if scores.softcap is None else scores.softcap * np.tanh(t / scores.softcap)
            if not visible.all():
                u = np.where(visible, u, np.float32(-np.inf))
            higher = np.maximum(m, u.max(axis=-1))
            safe = np.where(np.isfinite(higher), higher, np.float32(0))
            u -= safe[..., None]
            p = np.exp(u, out=u)
            rescale = np.exp(m - safe)
            total = total * rescale + p.sum(axis=-1)
            products = np.matmul(p.reshape(kv_heads, group * rows, -1), v)
            acc = acc * rescale[..., None] + products.reshape(q.shape)
            m = higher
    with np.errstate(all="ignore"):
        out = acc / total[..., None]
    out[invalid] = NAN
    out[:, :, (positions < 0) | (scores.window == 0)] = 0
    return one_nan(out)
