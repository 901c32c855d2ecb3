"""A sequence's block tables: append, truncate, fork, and drop what left the window (SPEC 11.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.attention import AlignedKeyValues, KeyValues
from reference.cache.pages import LayerPages, PagePool
from reference.errors import CacheError
from reference.extents import Extents, Piece, of_pages


@dataclass
class Table:
    """The pages of one group, in order; they hold the positions from `start` on."""

    start: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LayerView:
    """One layer of a sequence during a forward pass, and where its positions are stored.

    start: the first position that is held. length: of the sequence, with the pass's positions.
    """

    pages: LayerPages
    where: Extents
    start: int
    length: int

    def write(self, k: F32, v: F32) -> None:
        """Store k and v, (T, Hkv, D) float32, of the last T positions: the pass's tokens."""
        self.pages.write(k, v, self.writes(slice(0, len(k))))

    def writes(self, rows: slice) -> list[Piece]:
        """Where rows of a pass, which are this sequence's last positions, are to be stored."""
        first = self.length - (rows.stop - rows.start)
        return self.where.pieces(first, self.length, first - rows.start)

    def put(self, stored: Mapping[str, NDArray[Any]]) -> None:
        """Store what `stored` gave of T positions as the last T positions."""
        rows = stored["k"].shape[1]
        self.pages.put(stored, self.where.pieces(self.length - rows, self.length))

    def stored(self, start: int, stop: int) -> dict[str, NDArray[Any]]:
        """Copies of everything stored of the positions [start, stop), (heads, T, ...) each."""
        return self.pages.stored(self.where.pieces(start, stop))

    def plain(self) -> KeyValues:
        """Keys and values as they are stored, where fast attention reads them."""
        return self.pages.plain(self.where)

    def aligned(self) -> AlignedKeyValues:
        """Keys and values aligned, where exact attention reads them."""
        return self.pages.aligned(self.where)


class KVCache:
    """The keys and values of a sequence's positions so far: block tables into a pool (SPEC 11.1).

    length: how many positions there are. exact: whether all were computed exactly, none by fast
    attention and none moved. starts: the first position that each group holds, 0 by default. A
    forward pass extends the cache, writes every layer, and then commits; until then `length` is
    what it was.
    """

    def __init__(self, pool: PagePool, starts: Sequence[int] | None = None) -> None:
        self.pool = pool
        self.length, self.exact = 0, True
        self.tables = [Table(start) for start in starts or [0] * len(pool.groups)]
        self._group = {i: g for g, group in enumerate(pool.groups) for i in group.layers}

    @property
    def bytes(self) -> int:
        """Bytes of its pages, including those that it shares."""
        return self.pool.bytes_for([len(table.pages) for table in self.tables])

    def needed(self, count: int) -> list[int]:
        """Pages of each group that `count` more positions take, including one for a copy."""
        stop, size = self._pages(self.length + count), self.pool.shape.page_size
        return [
            max(0, stop - table.start // size - len(table.pages)) + self._copied(g, count)
            for g, table in enumerate(self.tables)
        ]

    def extend(self, count: int) -> list[LayerView]:
        """Make room for `count` more positions; returns a view of each layer to write and read.

        A last page that is partly filled and shared is copied first. Raises CacheError where the
        pool has no room; the cache is then as it was.
        """
        missing = self.needed(count)
        if not any(missing):
            return self.views(count)
        # First, because it may end the sharing of the page that would be copied.
        self.pool.make_room(self.pool.bytes_for(missing), self._spared())
        wanted = [
            (pages, table.pages[-1] if table.pages else None)
            for pages, table in zip(self.needed(count), self.tables, strict=True)
        ]
        for g, (table, pages) in enumerate(zip(self.tables, self.pool.take(wanted), strict=True)):
            if self._copied(g, count):
                self._copy_last(g, pages.pop(0))
            table.pages += pages
        return self.views(count)

    def views(self, count: int = 0) -> list[LayerView]:
        """A view of each layer, with `count` positions that are not committed yet."""
        stop, size = self.length + count, self.pool.shape.page_size
        where = [of_pages(table.pages, table.start // size, size) for table in self.tables]
        return [
            LayerView(self.pool.groups[g].pages[i], where[g], self.tables[g].start, stop)
            for i, g in sorted(self._group.items())
        ]

    def commit(self, count: int, exact: bool = True) -> None:
        """Add `count` positions that were written. exact: whether they were computed exactly."""
        self.length += count
        self.exact &= exact

    def _pages(self, length: int) -> int:
        """Pages of the positions [0, length)."""
        return -(-length // self.pool.shape.page_size)

    def _copied(self, group: int, count: int) -> bool:
        """Whether the first of `count` more positions goes to a page that is shared."""
        return count > 0 and self._shared(group)

    def _shared(self, group: int) -> bool:
        """Whether the last page of a group is partly filled and shared."""
        table = self.tables[group]
        partly = self.length % self.pool.shape.page_size > 0 and len(table.pages) > 0
        return partly and bool(self.pool.groups[group].owners[table.pages[-1]] > 1)

    def _spared(self) -> int:
        """Bytes of copies that are unnecessary once the pool has reclaimed all that it can."""
        return sum(
            group.page_bytes
            for g, (group, table) in enumerate(zip(self.pool.groups, self.tables, strict=True))
            if self._shared(g)
            and group.owners[table.pages[-1]]
            == 1 + self.pool.reclaimable_owners(g, table.pages[-1])
        )

    def _copy_last(self, group: int, target: int) -> None:
        """Replace the last page of a group by a copy of it."""
        table = self.tables[group]
        source = table.pages[-1]
        self.pool.groups[group].copy(source, target)
        self.pool.release(group, [source])
        table.pages[-1] = target

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on.

        Raises CacheError where the next position's window holds what `trim` dropped, or for a
        negative length; nothing has changed then.
        """
        if length < 0:
            raise CacheError(f"cache: cannot go back to {length} positions; keep 0 or more")
        length = min(self.length, length)
        if length == 0:
            self.free()
        elif not self.reaches(length):
            raise CacheError(
                f"cache: cannot go back to {length} positions, whose window was dropped; "
                "compute them again in a new cache"
            )
        self.length, size = length, self.pool.shape.page_size
        for g, table in enumerate(self.tables):
            keep = max(0, self._pages(length) - table.start // size)
            dropped, table.pages = table.pages[keep:], table.pages[:keep]
            self.pool.release(g, dropped)

    def reaches(self, length: int) -> bool:
        """Whether everything that position `length` sees is still held (SPEC 8.1)."""
        return all(
            table.start <= first_seen(length, group.window)
            for table, group in zip(self.tables, self.pool.groups, strict=True)
        )

    def holds(self, start: int, stop: int) -> bool:
        """Whether every layer still holds all positions [start, stop)."""
        first = max((table.start for table in self.tables), default=0)
        return first <= start <= stop <= self.length

    def trim(self) -> None:
        """Drop whole pages that the next position, and so every later one, does not see."""
        size = self.pool.shape.page_size
        for g, (table, group) in enumerate(zip(self.tables, self.pool.groups, strict=True)):
            first = first_seen(self.length, group.window) // size
            dropped = first - table.start // size
            if dropped > 0:
                self.pool.release(g, table.pages[:dropped])
                del table.pages[:dropped]
                table.start = first * size

    def fork(self) -> KVCache:
        """A second sequence with the same positions, on the same pages."""
        other = KVCache(self.pool)
        other.length, other.exact = self.length, self.exact
        for g, table in enumerate(self.tables):
            self.pool.groups[g].hold(table.pages)
            other.tables[g] = Table(table.start, list(table.pages))
        return other

    def free(self) -> None:
        """Give up all pages."""
        for g, table in enumerate(self.tables):
            self.pool.release(g, table.pages)
            self.tables[g] = Table()
        self.length, self.exact = 0, True


def first_seen(position: int, window: int | None) -> int:
    """The first position that `position` sees (SPEC 8.1)."""
    return 0 if window is None else max(0, position - window + 1)
