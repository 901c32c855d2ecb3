"""The cache operations of SPEC 17 that need no model, on the reference's own pages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from conformance.golden import Array
from conformance.operations import APPEND, FORK, TRUNCATE
from reference.arithmetic import F32
from reference.attention import (
    AlignedKeyValues,
    KeyValues,
    Scores,
    align_key_values,
    attend_exact,
    attend_fast,
)
from reference.cache import KVCache, KVType, PagePool, PageShape
from reference.cache.prefix import PrefixIndex, page_hash, root_hash
from reference.extents import of_pages

Ints = NDArray[np.int64]


def paged_attention(
    q: F32,
    k_pages: F32,
    v_pages: F32,
    block_table: Ints,
    length: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    mode: str,
) -> F32:
    """Attention of T rows, the last of `length` positions, over pages (P, page_size, Hkv, D)."""
    size, width = k_pages.shape[1], k_pages.shape[2:]
    where = of_pages(block_table.tolist(), 0, size)
    k, v = (x.reshape(-1, *width) for x in (k_pages, v_pages))
    cap = None if softcap is None else np.float32(softcap)
    scores = Scores(np.float32(scale), window, cap)
    if mode == "exact":
        aligned = align_key_values(k, v)
        return attend_exact(
            q, AlignedKeyValues(aligned.keys, aligned.values, where), length, scores
        )
    k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))
    finite = np.asarray(np.isfinite(k).all(axis=-1) & np.isfinite(v).all(axis=-1))
    return attend_fast(q, KeyValues(k, v, finite, where), length, scores)


def _shape(dtype: KVType, kv_heads: int, head_dim: int, page_size: int) -> PageShape:
    return PageShape(kv_heads, head_dim, (None,), page_size, dtype, aligned=False)


def store_kv(x: F32, dtype: KVType) -> F32:
    """What a cache of a type gives back of x (T, Hkv, D)."""
    cache = KVCache(PagePool(_shape(dtype, x.shape[1], x.shape[2], 16)))
    (layer,) = cache.extend(len(x))
    layer.write(x, x)
    k, _, _ = layer.plain().read(0, len(x))
    return np.ascontiguousarray(k.swapaxes(0, 1))


def page_hashes(tokens: Ints, page_size: int, digest: str, dtype: str, salt: str) -> Array:
    """The chain of hashes, its root first, (n + 1, 32) uint8."""
    chain = [root_hash(digest, dtype, salt)]
    for start in range(0, len(tokens) - page_size + 1, page_size):
        chain.append(page_hash(chain[-1], tokens[start : start + page_size]))
    return np.frombuffer(b"".join(chain), np.uint8).reshape(-1, 32).copy()


def paging(script: Ints, page_size: int) -> Ints:
    """Pages in use, pages that are shared, and pages copied so far, after each line (n, 3)."""
    pool = PagePool(_shape("float32", 1, 1, page_size))
    owners, sequences = pool.groups[0], dict[int, KVCache]()
    counts, copied = [], 0
    for operation, name, amount in script.tolist():
        cache = sequences.setdefault(name, KVCache(pool))
        if operation == APPEND:
            before = list(cache.tables[0].pages)
            cache.extend(amount)
            cache.commit(amount)
            copied += before != cache.tables[0].pages[: len(before)]
        elif operation == FORK:
            sequences[amount] = cache.fork()
        elif operation == TRUNCATE:
            cache.truncate(amount)
        else:
            sequences.pop(name).free()
        held = owners.owners
        counts.append((int((held > 0).sum()), int((held > 1).sum()), copied))
    return np.array(counts, np.int64)


def prefix_reuse(tokens: Ints, lengths: Ints, page_size: int, pages: int) -> Ints:
    """How many tokens of each prompt come from the cache, one after the other (R,)."""
    shape = _shape("float32", 1, 1, page_size)
    pool = PagePool(shape, pages * shape.layer_bytes())
    index = PrefixIndex(pool, "")
    reused = []
    for prompt in split(tokens, lengths):
        cache, _ = index.match(prompt.tolist(), "")
        reused.append(cache.length)
        cache.extend(len(prompt) - cache.length)
        cache.commit(len(prompt) - cache.length)
        index.keep(prompt.tolist(), "", cache)
    return np.array(reused)


def split(tokens: Ints, lengths: Ints) -> Iterator[Ints]:
    """Prompts that were put one behind the other."""
    return iter(np.split(tokens, np.cumsum(lengths)[:-1]))
