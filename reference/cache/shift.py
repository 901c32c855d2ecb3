"""Chunks that an edit moved: found again by their tokens, moved by rotating their keys (SPEC 11.5).

This is an approximation by nature: v, and k above the first layer, depend on all that came before,
which the edit has changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.cache.pages import narrowed
from reference.cache.sequence import KVCache
from reference.errors import CacheError, RequestError
from reference.rotary import RopeParameters, rope_constants, rotate, turn

Tokens = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class Chunk:
    """`length` tokens that are the same from `old_start` and from `new_start` on."""

    old_start: int
    new_start: int
    length: int


def matched_chunks(old: Tokens, new: Tokens, start: int, minimum: int) -> list[Chunk]:
    """Chunks of `new` that `old` holds too, both from `start` on, in the order of both (SPEC 11.5).

    old, new: token ids. From left to right, each chunk is the earliest in `old` that follows the
    one before and has at least `minimum` tokens; it extends as far as the tokens agree. The last
    token of `new` is in none.
    """
    before, after = (np.asarray(tokens).tolist() for tokens in (old, new))
    del after[-1:]
    # By hashes, because the tuples themselves would take much memory.
    places = defaultdict[int, list[int]](list)
    for place in range(start, len(before) - minimum + 1):
        places[hash(tuple(before[place : place + minimum]))].append(place)
    chunks, here, there = list[Chunk](), start, start
    while here + minimum <= len(after):
        wanted = after[here : here + minimum]
        found = places.get(hash(tuple(wanted)), [])
        for place in found[bisect_left(found, there) :]:
            if before[place : place + minimum] == wanted:
                length = minimum + _common(before, after, place + minimum, here + minimum)
                chunks.append(Chunk(place, here, length))
                here, there = here + length, place + length
                break
        else:
            here += 1
    return chunks


def _common(a: list[int], b: list[int], i: int, j: int) -> int:
    """How many tokens of a from i on and of b from j on agree."""
    length = 0
    while i + length < len(a) and j + length < len(b) and a[i + length] == b[j + length]:
        length += 1
    return length


def move(source: KVCache, start: int, stop: int, target: KVCache, rope: RopeParameters) -> None:
    """Append the positions [start, stop) of one sequence to another (SPEC 11.5).

    Both are in one pool, which keeps originals. Raises RequestError for a rope whose constants
    depend on the position, and CacheError where the source no longer holds the positions or the
    pool has no room; nothing has changed then.
    """
    if rope.by_position:
        raise RequestError(
            f"cache_reuse: keys of {rope.kind} rope cannot be moved; leave cache_reuse at 0"
        )
    if source.pool is not target.pool or not source.pool.shape.originals:
        raise CacheError("cache: chunks move within one pool that keeps originals; make it so")
    if not source.holds(start, stop):
        raise CacheError(
            f"cache: positions {start} to {stop} are not all held any more; compute them again"
        )
    count, by = stop - start, target.length - start
    views = target.extend(count)
    try:
        for old, new in zip(source.views(), views, strict=True):
            rows = old.stored(start, stop)
            rows["shift"] += by
            k = shifted(rows["original"], rows["shift"][0], rope)
            new.put(rows | narrowed("k", k, target.pool.shape.dtype))
    except BaseException:
        target.truncate(target.length)
        raise
    target.commit(count, exact=False)


def shifted(k: F32, shift: NDArray[np.int64], rope: RopeParameters) -> F32:
    """Original keys k (Hkv, T, D) float32, each rotated by its shift, (T,) int64 (SPEC 11.5).

    Returns (Hkv, T, D) float32. The factor of yarn on cos and sin is in k already.
    """
    angle = shift.astype(np.float32)[:, None] * rope_constants(rope)[0]
    cos, sin = turn(angle, np.float32(1))
    turned = rotate(k.swapaxes(0, 1), cos, sin, rope.interleaved).swapaxes(0, 1)
    return np.where((shift == 0)[:, None], k, turned)
