"""Attention: exact, where a row depends on nothing but what it sees, and fast (SPEC 8).

Both work on tiles of query rows, so that memory grows with the number of keys and not with its
square. What a row may see is a set of positions; what it may not see is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from reference import elementary
from reference.arithmetic import (
    BLOCK,
    F32,
    F64,
    NAN,
    AlignedRows,
    Bools,
    add_block_sums,
    added,
    align,
    align_rows,
    all_finite,
    one_nan,
    to_float32,
    weights_of,
)
from reference.extents import Extents, Piece, gathered, whole
from reference.reuse import scratch
from reference.threads import share, thread_count

T = TypeVar("T", bound=np.generic)

EXACT_TILE = 1 << 17
"""Scores of one tile of the exact lane, over all heads."""

EXACT_SHARED = 1 << 15
"""Scores from which on tiles of the exact lane are worth waking threads for."""

FAST_TILE = 1 << 19
"""Scores of one tile of the fast lane, over all heads."""

FAST_SIDE = 512
"""Rows of such a tile at most, of all query heads that share its keys; and keys, or more where rows
are few."""


@dataclass(frozen=True)
class KeyValues:
    """Keys and values as they are stored, in slots; `where` says which slots hold which positions.

    k, v: (Hkv, slots, D), float32 or the narrower type of the cache. finite: (Hkv, slots) bool,
    whether both k and v of a slot are. k_scale, v_scale: (Hkv, slots) float32, where k and v are
    int8 codes (SPEC 11.2).
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
    """Keys aligned in blocks along D, and values in whole rows, in slots (SPEC 2.1, 2.5, 11.1).

    keys: (B, Hkv, slots, 32) float64. values: `digits` is (Hkv, slots, D). Where a position's k or
    v is not finite, that one holds zeros, and `values.finite` (Hkv, slots) is False.
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
    """What makes a score of a dot product, and which keys a row sees (SPEC 8.1, 8.2).

    window: how many keys a row may see, its own included; None for all. sinks: (Hq,) float32.
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
    """Exact attention of T query rows over S keys, the rows being the last T positions (SPEC 8.2).

    q: (T, Hq, D), k and v: (S, Hkv, D) float32, sinks: (Hq,) float32. Returns (T, Hq, D) float32.
    scale: None for 1 / sqrt(D). window, softcap, sinks: None where there is none.
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
    """The same in plain float32 with an online softmax: bounded, not exact (SPEC 8.3).

    Arguments and result are those of `attention_exact`.
    """
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
    """The inverse of `_grouped`, as a view: (Hkv, g, T, D) -> (T, Hq, D)."""
    kv_heads, group, rows, width = out.shape
    return out.reshape(kv_heads * group, rows, width).transpose(1, 0, 2)


def _visible(positions: NDArray[np.int64], keys: NDArray[np.int64], window: int | None) -> Bools:
    """The set of SPEC 8.1 as a table, (R, S)."""
    back = positions[:, None] - keys
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _scaled(products: F32, scores: Scores) -> F32:
    """t = RN32(s * scale), in place (SPEC 8.2)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        products *= scores.scale
    return products


def capped(t: F32, softcap: np.float32 | None) -> F32:
    """u = RN32(c * tanh(RN32(t / c))), or t (SPEC 8.2)."""
    if softcap is None:
        return t
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(softcap * elementary.tanh(t / softcap))


@dataclass(frozen=True)
class Run:
    """Rows of one sequence: the last of its `length` positions, whose slots `where` tells.

    rows: which of a pass's rows they are.
    """

    rows: slice
    where: Extents
    length: int

    def parts(self, count: int) -> list[Run]:
        """The run cut into runs of at most `count` rows."""
        before = self.length - self.rows.stop
        cuts = range(self.rows.start, self.rows.stop, count)
        ends = [min(first + count, self.rows.stop) for first in cuts]
        return [Run(slice(a, b), self.where, before + b) for a, b in zip(cuts, ends, strict=True)]


def attend_exact(q: F32, kv: AlignedKeyValues, length: int, scores: Scores) -> F32:
    """`attention_exact` of rows q (T, Hq, D) on prepared keys (SPEC 8.2).

    The rows are the last T of the first `length` positions.
    """
    out = np.empty_like(q)
    attend_exact_runs(q, kv, [Run(slice(0, len(q)), kv.where, length)], scores, out)
    return out


def attend_exact_runs(
    q: F32, kv: AlignedKeyValues, runs: Sequence[Run], scores: Scores, out: F32
) -> None:
    """The same for the rows of several sequences, into `out` (SPEC 8.2, 10.4).

    q, out: (T, Hq, D) float32. Other rows than those of the runs are left alone.
    """
    kv_heads = kv.values.scale.shape[0]

    def tile(part: list[Run]) -> None:
        rows: slice | NDArray[np.int64] = part[0].rows
        if len(part) > 1:
            rows = np.concatenate([np.arange(r.rows.start, r.rows.stop) for r in part])
        out[rows] = _ungrouped(_exact_tile(_grouped(q[rows], kv_heads), kv, part, scores))

    share(tile, _tiles(runs, q.shape[1]))


def _tiles(runs: Sequence[Run], heads: int) -> list[list[Run]]:
    """Cut long runs into parts, and join those of similar length, to tiles of at most EXACT_TILE.

    A single row may have more scores than that. If there are fewer for each thread, every thread
    still gets a tile, as far as there are runs; if waking threads is not worth it, one gets all.
    """
    parts = [
        part
        for run in runs
        for part in run.parts(max(1, EXACT_TILE // (heads * max(1, run.length))))
    ]
    parts.sort(key=lambda run: -run.length)
    total = sum((run.rows.stop - run.rows.start) * run.length for run in parts)
    threads = thread_count() if total * heads >= EXACT_SHARED else 1
    limit = max(1, min(EXACT_TILE // heads, -(-total // threads)))
    tiles: list[list[Run]] = []
    filled = limit
    for part in parts:
        size = (part.rows.stop - part.rows.start) * part.length
        if filled + size > limit:
            tiles.append([])
            filled = 0
        tiles[-1].append(part)
        filled += size
    return tiles


def _exact_tile(q: F32, kv: AlignedKeyValues, runs: Sequence[Run], scores: Scores) -> F32:
    """Rows q (Hkv, g, R, D) of the runs, one behind the other -> (Hkv, g, R, D)."""
    kv_heads, group, _, width = q.shape
    queries, tile = align(q), _Tile.of(runs, scores.window)
    if tile.visible.shape[1] == 0:  # no row of the tile sees anything
        return np.zeros_like(q)
    scale, finite = tile.gathered(kv.values.scale), tile.gathered(kv.values.finite)
    t = _scaled(to_float32(_products(queries.values, width, kv.keys, tile)), scores)
    invalid = (~(np.isfinite(t) & finite) & tile.visible).any(axis=-1) | ~queries.finite
    if invalid.any():
        t = np.where(invalid[..., None], np.float32(0), t)

    sinks, no_sink = _sinks(scores, kv_heads, group)
    u = np.where(tile.visible, capped(t, scores.softcap), np.float32(-np.inf))
    m = np.maximum(u.max(axis=-1, initial=-np.inf), sinks)
    m = np.where(m == -np.inf, np.float32(0), m)
    with np.errstate(over="ignore"):
        weights, den = weights_of(elementary.exp(u - m[..., None]), scale)
        if scores.sinks is not None:
            den += elementary.exp(sinks - m)
    sums = np.zeros((weights.shape[-2], *q.shape))
    for here, pieces in tile.runs:
        part = weights[:, :, here].reshape(kv_heads, -1, *weights.shape[-2:])
        into = sums[:, :, :, here].reshape(len(sums), kv_heads, -1, width)
        add_block_sums(into, part, kv.values.digits, pieces)
        sums[:, :, :, here] = into.reshape(len(sums), kv_heads, group, -1, width)
    with np.errstate(invalid="ignore"):
        out = to_float32(added(sums) / den[..., None])
    out[invalid | no_sink] = NAN
    out[:, :, ~tile.visible.any(axis=-1)] = 0
    return out


def _products(q: F64, width: int, keys: F64, tile: _Tile) -> F64:
    """q (B, Hkv, g, R, 32) with what it sees of the keys: (Hkv, g, R, S), zeros elsewhere."""
    _, kv_heads, group, rows, _ = q.shape
    products = np.zeros((kv_heads, group, rows, tile.visible.shape[1]))
    for here, pieces in tile.runs:
        for block, terms in enumerate(_terms(width)):
            left = q[block, :, :, here].reshape(kv_heads, -1, BLOCK)[..., :terms]
            for seen, there in pieces:
                part = np.matmul(left, keys[block, :, there, :terms].swapaxes(1, 2))
                products[:, :, here, seen] += part.reshape(kv_heads, group, -1, part.shape[-1])
    return products


def _terms(width: int) -> list[int]:
    """Terms of each block of `width`: the last may have fewer than 32, and zeros after them."""
    return [min(BLOCK, width - first) for first in range(0, width, BLOCK)]


@dataclass(frozen=True)
class _Tile:
    """What the rows of a tile see. Column j of a run is its position `base + j`.

    base: the start of the block of 32 that holds the first position that the run sees. visible:
    (R, S) bool. runs: of each run, its rows and the pieces of what they see.
    """

    visible: Bools
    runs: list[tuple[slice, list[Piece]]]

    @classmethod
    def of(cls, runs: Sequence[Run], window: int | None) -> _Tile:
        """The tile of runs, one behind the other."""
        spans, found, row = [], [], 0
        for run in runs:
            count = run.rows.stop - run.rows.start
            positions = np.arange(run.length - count, run.length)
            low, high = _seen(positions, window)
            base, end = low - low % BLOCK, high + -high % BLOCK
            spans.append(_visible(positions, np.arange(base, end), window))
            found.append((slice(row, row + count), run.where.pieces(low, high, base)))
            row += count
        if len(runs) == 1:
            return cls(spans[0], found)
        visible = np.zeros((row, max(span.shape[1] for span in spans)), np.bool_)
        for (here, _), span in zip(found, spans, strict=True):
            visible[here, : span.shape[1]] = span
        return cls(visible, found)

    def gathered(self, x: NDArray[T]) -> NDArray[T]:
        """What x (Hkv, slots) holds for the columns: (Hkv, 1, R, S), R = 1 if there is one run."""
        rows = 1 if len(self.runs) == 1 else len(self.visible)
        out = np.zeros((len(x), 1, rows, self.visible.shape[1]), x.dtype)
        for here, pieces in self.runs:
            for seen, there in pieces:
                out[:, 0, here if rows > 1 else slice(None), seen] = x[:, None, there]
        return out


def _seen(positions: NDArray[np.int64], window: int | None) -> tuple[int, int]:
    """The range of positions that some of the rows, which are ascending, may see."""
    first, last = int(positions[0]), int(positions[-1])
    low = 0 if window is None else max(0, first - window + 1)
    return low, max(low, last + 1)


def _sinks(scores: Scores, kv_heads: int, group: int) -> tuple[F32, Bools]:
    """The sink of each head, (Hkv, g, 1), -inf where there is none, and which are NaN or +inf."""
    if scores.sinks is None:
        return np.full((kv_heads, group, 1), -np.inf, np.float32), np.zeros((1, 1, 1), np.bool_)
    sinks = scores.sinks.reshape(kv_heads, group, 1)
    wrong = np.asarray(np.isnan(sinks) | (sinks == np.inf))
    return np.where(wrong, np.float32(-np.inf), sinks), wrong


def _all_see(positions: NDArray[np.int64], first: int, last: int) -> int:
    """How many of the keys [first, last) lie before all rows, which are ascending."""
    return min(max(int(positions[0]) + 1 - first, 0), last - first)


def attend_fast(q: F32, kv: KeyValues, length: int, scores: Scores) -> F32:
    """`attention_fast` of rows q (T, Hq, D) on stored keys (SPEC 8.3).

    The rows are the last T of the first `length` positions.
    """
    out = np.empty_like(q)
    rows, before = len(q), length - len(q)
    most = FAST_TILE // (q.shape[1] * min(FAST_SIDE, max(1, length)))
    group = q.shape[1] // len(kv.k)
    tiles = max(1, -(-rows // max(1, min(most, FAST_SIDE // group))))
    step = max(1, -(-rows // tiles))

    def tile(first: int) -> None:
        here = slice(first, min(first + step, rows))
        positions = np.arange(before + here.start, before + here.stop)
        out[here] = _ungrouped(_fast_tile(_grouped(q[here], len(kv.k)), kv, positions, scores))

    share(tile, range(0, rows, step)[::-1])  # the last rows see most, and so come first
    return out


@np.errstate(all="ignore")
def _fast_tile(q: F32, kv: KeyValues, positions: NDArray[np.int64], scores: Scores) -> F32:
    """Rows q (Hkv, g, R, D) at `positions` over the keys that they see -> (Hkv, g, R, D).

    An online softmax (Milakov and Gimelshein, arXiv:1805.02867): m is the largest score so far,
    total and acc are the sums of exp(u - m) and of exp(u - m) v, rescaled whenever m grows.
    """
    kv_heads, group, rows, width = q.shape
    scaled = (q * scores.scale).reshape(kv_heads, group * rows, width)
    sinks, no_sink = _sinks(scores, kv_heads, group)
    m = np.full(q.shape[:-1], sinks)
    total, acc = np.isfinite(m).astype(np.float32), np.zeros(q.shape, np.float32)
    invalid = np.full(q.shape[:-1], no_sink)
    if not all_finite(scaled):
        invalid |= ~np.isfinite(q).all(axis=-1)
    low, high = _seen(positions, scores.window)
    step = max(FAST_SIDE, FAST_TILE // (kv_heads * group * rows))
    for first in range(low, high, step):
        k, v, finite = kv.read(first, min(first + step, high))
        sound = bool(finite.all())
        if not sound:
            k, v = (np.where(finite[..., None], x, np.float32(0)) for x in (k, v))
        u, broken = _fast_scores(scaled, k, None if sound else finite, positions, first, scores)
        if broken is not None:
            invalid |= broken
        higher = np.maximum(m, u.max(axis=-1))
        safe = np.where(np.isfinite(higher), higher, np.float32(0))
        u -= safe[..., None]
        p = np.exp(u, out=u)
        rescale = np.exp(m - safe)
        total = total * rescale + p @ np.ones(p.shape[-1], np.float32)
        acc *= rescale[..., None]
        acc += np.matmul(p.reshape(kv_heads, group * rows, -1), v).reshape(q.shape)
        m = higher
    out = np.divide(acc, total[..., None], out=acc)
    if invalid.any():
        out[invalid] = NAN
    if positions[0] < 0 or scores.window == 0:  # some rows see nothing
        out[:, :, (positions < 0) | (scores.window == 0)] = 0
    return one_nan(out)


def _fast_scores(
    scaled: F32,
    k: F32,
    finite: Bools | None,
    positions: NDArray[np.int64],
    first: int,
    scores: Scores,
) -> tuple[F32, Bools | None]:
    """Scores of rows (Hkv, g R, D), scaled before, with the keys (Hkv, n, D) from `first` on.

    finite: (Hkv, n), of the keys and their values; None where all are. Returns u (Hkv, g, R, n),
    -inf where a row does not see a key, and the rows that see something not finite, (Hkv, g, R),
    or None where there is none.
    """
    heads, count, rows = len(k), k.shape[1], len(positions)
    t = np.matmul(scaled, k.swapaxes(1, 2), out=scratch((heads, scaled.shape[1], count)))
    t = t.reshape(heads, -1, rows, count)
    edge = _all_see(positions, first, first + count) if scores.window is None else 0
    visible = _visible(positions, np.arange(first + edge, first + count), scores.window)
    broken = None
    if finite is not None or not all_finite(t):
        wrong = ~np.isfinite(t) if finite is None else ~(np.isfinite(t) & finite[:, None, None])
        t[wrong] = 0
        wrong[..., edge:] &= visible
        broken = np.asarray(wrong.any(axis=-1))
    u = t if scores.softcap is None else scores.softcap * np.tanh(t / scores.softcap)
    if edge < count:
        np.copyto(u[..., edge:], np.float32(-np.inf), where=~visible)
    return u, broken
