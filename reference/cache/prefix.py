"""Prefix reuse: what earlier sequences computed, found again by its tokens (SPEC 11.3).

Pages are looked up by a chain of hashes, and every hit is compared token by token, so that a
collision costs time and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from reference.cache.pages import PagePool
from reference.cache.sequence import KVCache

Ints = NDArray[np.int64]
PageHash = Callable[[bytes, Ints], bytes]


def is_salt(value: object) -> bool:
    """Whether a value is Unicode text, and so has UTF-8 bytes to hash: no lone surrogate."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def root_hash(digest: str, dtype: str, salt: str) -> bytes:
    """h_0, where the chain of a model, a KV type and a user's salt starts (SPEC 11.3)."""
    return hashlib.sha256("\0".join(("bitforbit", digest, dtype, salt)).encode()).digest()


def page_hash(before: bytes, tokens: Ints) -> bytes:
    """h_(i+1), from h_i and the token ids of page i, as little-endian uint32 (SPEC 11.3)."""
    return hashlib.sha256(before + tokens.astype("<u4").tobytes()).digest()


@dataclass(frozen=True)
class Retained:
    """A sequence that is kept: its tokens (n,), its cache, and its chain h_0, h_1, ..."""

    tokens: Ints
    salt: str
    cache: KVCache
    hashes: tuple[bytes, ...]


class PrefixIndex:
    """Sequences kept for prompts to come; the least recently used is given up first (SPEC 11.3).

    They are what the pool reclaims. digest: of the model. hash_page: another function makes
    collisions in tests.
    """

    def __init__(self, pool: PagePool, digest: str, hash_page: PageHash = page_hash) -> None:
        self._pool, self._digest, self._hash_page = pool, digest, hash_page
        self._kept: OrderedDict[int, Retained] = OrderedDict()
        self._by_hash: dict[bytes, set[int]] = {}
        self._count = 0
        pool.reclaim, pool.reclaimable = self.evict, self.reclaimable
        pool.reclaimable_owners = self.owners

    def __len__(self) -> int:
        """How many sequences are kept."""
        return len(self._kept)

    def keep(self, tokens: Sequence[int], salt: str, cache: KVCache) -> None:
        """Take over a cache and the tokens that filled it; a sequence that it extends is given up.

        The latter stays if only it is exact, or can be truncated to its length (SPEC 11.3).
        """
        ids = np.array(tokens[: cache.length], np.int64)
        for number, other in list(self._kept.items()):
            covered = len(other.tokens) <= len(ids) and cache.reaches(len(other.tokens))
            covered &= cache.exact or not other.cache.exact
            if covered and other.salt == salt and common(other.tokens, ids) == len(other.tokens):
                self._drop(number)
        kept = Retained(ids, salt, cache, self._hashes(ids, salt))
        self._kept[self._count] = kept
        for value in kept.hashes:
            self._by_hash.setdefault(value, set()).add(self._count)
        self._count += 1

    def match(
        self, tokens: Sequence[int], salt: str, exact: bool = True
    ) -> tuple[KVCache, Retained | None]:
        """A cache that holds the longest known prefix of a prompt, and the sequence it is from.

        It is empty, and the sequence None, if no prefix is known. At least the prompt's last token
        is left to compute. exact: whether every position must have been computed exactly.
        """
        ids = np.array(tokens[:-1], np.int64)
        size, best, length = self._pool.shape.page_size, None, 0
        hashes, used = self._hashes(ids, salt), {n: when for when, n in enumerate(self._kept)}
        for depth in range(len(hashes) - 1, -1, -1):
            # A sequence that is met at this depth for the first time shares no further whole page.
            if length >= (depth + 1) * size:
                break
            for number in sorted(self._by_hash.get(hashes[depth], ()), key=lambda n: -used[n]):
                kept = self._kept[number]
                if kept.salt != salt or (exact and not kept.cache.exact):
                    continue
                shared = common(kept.tokens, ids)
                if shared > length and kept.cache.reaches(shared):
                    best, length = number, shared
        if best is None:
            return KVCache(self._pool), None
        self._kept.move_to_end(best)
        cache = self._kept[best].cache.fork()
        cache.truncate(length)
        cache.trim()
        return cache, self._kept[best]

    def owners(self, group: int, page: int) -> int:
        """How many kept sequences hold a page of a group."""
        return sum(page in kept.cache.tables[group].pages for kept in self._kept.values())

    def latest(self, salt: str) -> Retained | None:
        """The most recently used sequence under a salt."""
        return next((k for k in reversed(self._kept.values()) if k.salt == salt), None)

    def reclaimable(self) -> int:
        """Bytes of the pages that only kept sequences hold."""
        size = 0
        for g, group in enumerate(self._pool.groups):
            holds = np.zeros_like(group.owners)
            for kept in self._kept.values():
                holds[kept.cache.tables[g].pages] += 1
            size += group.page_bytes * int(((holds > 0) & (holds == group.owners)).sum())
        return size

    def evict(self, size: int) -> None:
        """Give up sequences, the least recently used first, until they have freed `size` bytes."""
        target = self._pool.used_bytes - size
        while self._kept and self._pool.used_bytes > target:
            self._drop(next(iter(self._kept)))

    def _drop(self, number: int) -> None:
        """Give up a sequence and its pages."""
        kept = self._kept.pop(number)
        for value in set(kept.hashes):
            self._by_hash[value].discard(number)
            if not self._by_hash[value]:
                del self._by_hash[value]
        kept.cache.free()

    def _hashes(self, ids: Ints, salt: str) -> tuple[bytes, ...]:
        """The chain's root, and its hash after each whole page of the ids."""
        size = self._pool.shape.page_size
        pages = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
        root = root_hash(self._digest, self._pool.shape.dtype, salt)
        return tuple(accumulate(pages, self._hash_page, initial=root))


def common(a: Ints, b: Ints) -> int:
    """Length of the longest common prefix."""
    shared = min(len(a), len(b))
    differs = np.flatnonzero(a[:shared] != b[:shared])
    return int(differs[0]) if len(differs) else shared
