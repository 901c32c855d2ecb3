"""Pages and prefixes in steps, over the composed backend (SPEC 11)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from conformance.backends.composed import ComposedBackend
from conformance.backends.paging import split
from conformance.backends.reference import Ints
from conformance.golden import Array
from conformance.operations import APPEND, FORK, TRUNCATE
from reference.arithmetic import F32
from reference.cache import KVCache, PagePool, PageShape
from reference.cache.prefix import PrefixIndex

_TYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@dataclass
class Held:
    """A sequence's pages, and how many positions it has on them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass
class Book:
    """Who holds each page, (page) -> tables; pages handed out, and copied, so far."""

    owners: Counter[int] = field(default_factory=Counter)
    given: int = 0
    copied: int = 0

    def take(self, count: int) -> list[int]:
        """So many pages that nobody holds."""
        pages = list(range(self.given, self.given + count))
        self.given += count
        self.owners.update(pages)
        return pages


class CacheBackend(ComposedBackend):
    """`paged_attention`, `store_kv`, `paging`, `page_hashes` and `prefix_reuse` in steps."""

    # ------------------------------------------------------------------ reading pages (SPEC 11.1)

    def paged_attention(
        self,
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
        """Positions are gathered from their pages, and attended to."""
        k, v = (self.gathered(x, block_table, length, window) for x in (k_pages, v_pages))
        return self.attention(q=q, k=k, v=v, mode=mode, scale=scale, window=window, softcap=softcap)

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """The positions of a sequence, (length, Hkv, D)."""
        positions = np.arange(length)
        size = pages.shape[1]
        return pages[self.page_of(positions, table, size), self.slot_of(positions, size)]

    def page_of(self, positions: Ints, table: Ints, size: int) -> Ints:
        """The page where each position lies."""
        return np.asarray(table)[positions // size]

    def slot_of(self, positions: Ints, size: int) -> Ints:
        """Where in its page each position lies."""
        return positions % size

    # ------------------------------------------------------------------ types (SPEC 11.2)

    def store_kv(self, x: F32, dtype: str) -> F32:
        """What a cache of a type gives back of x (T, Hkv, D)."""
        with np.errstate(all="ignore"):
            return self.kept_int8(x) if dtype == "int8" else self.narrowed(x, dtype)

    def narrowed(self, x: F32, dtype: str) -> F32:
        """Rounded to a floating type."""
        return x.astype(_TYPES[dtype]).astype(np.float32)

    def kept_int8(self, x: F32) -> F32:
        """Codes times the scale of their token and head."""
        codes, scale = self.quantize_int8(x.reshape(-1, x.shape[-1]))
        y: F32 = codes.astype(np.float32) * scale[:, None]
        return y.reshape(x.shape)

    # ------------------------------------------------------------------ block tables (SPEC 11.1)

    def paging(self, script: Ints, page_size: int) -> Ints:
        """Pages in use, pages that are shared, and pages copied so far, after each line (n, 3)."""
        book, tables, counts = Book(), dict[int, Held](), []
        for operation, name, amount in script.tolist():
            table = tables.setdefault(name, Held())
            if operation == APPEND:
                self.append(book, table, amount, page_size)
            elif operation == FORK:
                tables[amount] = self.fork(book, table)
            elif operation == TRUNCATE:
                self.truncate(book, table, amount, page_size)
            else:
                self.release(book, tables.pop(name).pages)
            held = list(book.owners.values())
            counts.append((sum(n > 0 for n in held), sum(n > 1 for n in held), book.copied))
        return np.array(counts, np.int64)

    def append(self, book: Book, table: Held, count: int, size: int) -> None:
        """Make room for `count` more positions."""
        if count and self.must_copy(book, table, size):
            self.release(book, [table.pages[-1]])
            table.pages[-1:] = book.take(1)
            book.copied += 1
        table.pages += book.take(self.missing(table, count, size))
        table.length += count

    def must_copy(self, book: Book, table: Held, size: int) -> bool:
        """Whether the page that is written next is partly filled and another's too."""
        return table.length % size > 0 and book.owners[table.pages[-1]] > 1

    def missing(self, table: Held, count: int, size: int) -> int:
        """Pages that `count` more positions need."""
        return max(0, -(-(table.length + count) // size) - len(table.pages))

    def fork(self, book: Book, table: Held) -> Held:
        """A second table on the same pages."""
        book.owners.update(table.pages)
        return Held(list(table.pages), table.length)

    def truncate(self, book: Book, table: Held, length: int, size: int) -> None:
        """Drop the pages whose first position is `length` or later."""
        length = min(table.length, length)
        keep = self.kept_pages(length, size)
        dropped, table.pages = table.pages[keep:], table.pages[:keep]
        table.length = length
        self.release(book, dropped)

    def kept_pages(self, length: int, size: int) -> int:
        """Pages of the first `length` positions."""
        return -(-length // size)

    def release(self, book: Book, pages: Sequence[int]) -> None:
        """One owner less for each page."""
        book.owners.subtract(pages)

    # ------------------------------------------------------------------ prefixes (SPEC 11.3)

    def page_hashes(
        self, tokens: Ints, page_size: int, digest: str, dtype: str, salt: str
    ) -> Array:
        """The chain of hashes, its root first, (n + 1, 32) uint8."""
        chain = [self.root(digest, dtype, salt)]
        for page in self.hashed_pages(tokens, page_size):
            chain.append(self.link(chain, page))
        return np.frombuffer(b"".join(chain), np.uint8).reshape(-1, 32).copy()

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """h_0."""
        return hashlib.sha256("\0".join(("bitforbit", digest, dtype, salt)).encode()).digest()

    def hashed_pages(self, tokens: Ints, size: int) -> list[Ints]:
        """The tokens of each whole page."""
        return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]

    def link(self, chain: Sequence[bytes], page: Ints) -> bytes:
        """The hash after one more page."""
        return hashlib.sha256(chain[-1] + self.token_bytes(page)).digest()

    def token_bytes(self, page: Ints) -> bytes:
        """What is hashed of a page."""
        return page.astype("<u4").tobytes()

    def prefix_reuse(self, tokens: Ints, lengths: Ints, page_size: int, pages: int) -> Ints:
        """How many tokens of each prompt come from the cache, one after the other (R,)."""
        shape = PageShape(1, 1, (None,), page_size, aligned=False)
        index = self.index(PagePool(shape, pages * shape.layer_bytes()))
        reused = []
        for prompt in split(tokens, lengths):
            cache, _ = index.match(self.looked_up(prompt).tolist(), "")
            cache.truncate(self.usable(cache.length, len(prompt), page_size))
            reused.append(self.reported(cache.length, len(prompt), page_size))
            cache.extend(len(prompt) - cache.length)
            cache.commit(len(prompt) - cache.length)
            self.retain(index, prompt, cache)
        return np.array(reused)

    def index(self, pool: PagePool) -> PrefixIndex:
        """What keeps sequences and finds them."""
        return PrefixIndex(pool, "")

    def looked_up(self, prompt: Ints) -> Ints:
        """The prompt of which a prefix is looked for; its last token is not."""
        return prompt

    def usable(self, found: int, length: int, size: int) -> int:
        """How many of the positions found are used."""
        return found

    def reported(self, used: int, length: int, size: int) -> int:
        """How many tokens are said to be reused."""
        return used

    def retain(self, index: PrefixIndex, prompt: Ints, cache: KVCache) -> None:
        """Keep a sequence for the prompts to come."""
        index.keep(prompt.tolist(), "", cache)
