"""Attention: exact, whose rows depend on nothing but what they see, and fast (SPEC 8).

Both work on tiles of query rows, so that memory grows with the number of keys and not with its
square. What a row may see is a set of positions; what it may not see is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference import elementary
from reference.arithmetic import (
    BLOCK,
    F32,
    NAN,
    Aligned,
    AlignedRows,
    Bools,
    align,
    align_rows,
    one_nan,
    to_float32,
    weighted_sum,
)
from reference.threads import share

EXACT_TILE = 1 << 17
"""Scores of one tile of the exact lane, over all heads."""

FAST_TILE = 1 << 18
"""Scores of one tile of the fast lane, over all heads; FAST_KEYS of them at most along the keys."""

FAST_KEYS = 512


@dataclass(frozen=True)
class KeyValues:
    """Keys and values as they came: k, v (Hkv, S, D) float32, finite (Hkv, S) bool."""

    k: F32
    v: F32
    finite: Bools


@dataclass(frozen=True)
class AlignedKeyValues:
    """Keys aligned by blocks of D, values by rows; S is a multiple of 32, zeros after the last.

    keys: values (B, Hkv, S, 32). values: digits (Hkv, S, D). Both hold zeros where not finite.
    """

    keys: Aligned
    values: AlignedRows


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
    return attend_fast(q, KeyValues(k, v, finite), _scores(q, scale, window, softcap, sinks))


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
    missing = -len(k) % BLOCK
    k, v = (np.pad(x, [(0, missing), (0, 0), (0, 0)]).swapaxes(0, 1) for x in (k, v))
    return AlignedKeyValues(align(k), align_rows(v))


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
        low = 0 if scores.window is None else max(0, positions[0] - scores.window + 1)
        seen = slice(low - low % BLOCK, max(low, -(-(positions[-1] + 1) // BLOCK) * BLOCK))
        out[:, :, here] = _exact_tile(grouped[:, :, here], kv, positions, seen, scores)

    share(tile, range(0, rows, step))
    return _ungrouped(out)


def _exact_tile(
    q: F32, kv: AlignedKeyValues, positions: NDArray[np.int64], seen: slice, scores: Scores
) -> F32:
    """Rows q (Hkv, g, R, D) at `positions` over the keys `seen` -> (Hkv, g, R, D)."""
    kv_heads, group, rows, width = q.shape
    queries = align(q.reshape(kv_heads, group * rows, width))
    visible = _visible(positions, np.arange(seen.start, seen.stop), scores.window)
    finite = kv.keys.finite[:, seen] & kv.values.finite[:, seen]
    t = _exact_scores(queries, kv.keys, seen, scores).reshape(kv_heads, group, rows, -1)
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
    part = AlignedRows(kv.values.digits[:, seen], kv.values.scale[:, seen], finite)
    num, den = weighted_sum(p.reshape(kv_heads, group * rows, -1), part)
    with np.errstate(invalid="ignore"):
        total = den.reshape(m.shape) + sink_share
        out = to_float32(num.reshape(q.shape) / total[..., None])
    out[invalid | no_sink] = NAN
    out[:, :, ~visible.any(axis=-1)] = 0
    return out


def _exact_scores(queries: Aligned, keys: Aligned, seen: slice, scores: Scores) -> F32:
    """RN32(dot(q, k) * scale) of rows (Hkv, R) over the keys `seen` -> (Hkv, R, S) (SPEC 8.2)."""
    heads, rows = queries.finite.shape
    products = np.zeros((heads, rows, seen.stop - seen.start))
    for left, right in zip(queries.values, keys.values[:, :, seen], strict=True):
        products += np.matmul(left, right.swapaxes(1, 2))
    return _scaled(to_float32(products), scores)


def _sinks(scores: Scores, kv_heads: int, group: int) -> tuple[F32, Bools]:
    """The sink of each head, (Hkv, g, 1), -inf where there is none, and which are no numbers."""
    if scores.sinks is None:
        return np.full((kv_heads, group, 1), -np.inf, np.float32), np.zeros((1, 1, 1), np.bool_)
    sinks = scores.sinks.reshape(kv_heads, group, 1)
    wrong = np.asarray(np.isnan(sinks) | (sinks == np.inf))
    return np.where(wrong, np.float32(-np.inf), sinks), wrong


def attend_fast(q: F32, kv: KeyValues, scores: Scores) -> F32:
    """`attention_fast` on keys (Hkv, S, D) (SPEC 8.3)."""
    grouped = _grouped(q, len(kv.k))
    out = np.empty_like(grouped)
    rows, before = len(q), kv.k.shape[1] - len(q)
    step = max(1, FAST_TILE // (q.shape[1] * min(FAST_KEYS, kv.k.shape[1])))
    if not kv.finite.all():
        clean = kv.finite[..., None]
        kv = KeyValues(
            np.where(clean, kv.k, np.float32(0)), np.where(clean, kv.v, np.float32(0)), kv.finite
        )

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
    low = 0 if scores.window is None else max(0, positions[0] - scores.window + 1)
    for first in range(low, positions[-1] + 1, FAST_KEYS):
        here = slice(first, min(first + FAST_KEYS, positions[-1] + 1))
        with np.errstate(all="ignore"):
            t = np.matmul(scaled, kv.k[:, here].swapaxes(1, 2)).reshape(*shape, -1)
            visible = _visible(positions, np.arange(here.start, here.stop), scores.window)
            if not (kv.finite[:, here].all() and np.isfinite(t).all()):
                broken = ~(np.isfinite(t) & kv.finite[:, None, None, here])
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
            products = np.matmul(p.reshape(kv_heads, group * rows, -1), kv.v[:, here])
            acc = acc * rescale[..., None] + products.reshape(q.shape)
            m = higher
    with np.errstate(all="ignore"):
        out = acc / total[..., None]
    out[invalid] = NAN
    out[:, :, (positions < 0) | (scores.window == 0)] = 0
    return one_nan(out)
