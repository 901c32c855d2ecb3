"""Sequences on one pool, with any history: plain arrays hold the same (SPEC 11.1, 11.2)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from reference.attention import Scores, align_key_values, attend_exact, attend_fast, default_scale
from reference.cache import KVCache, KVType, LayerView, PagePool, PageShape
from reference.errors import CacheError
from tests.oracle.arrays import assert_same
from tests.reference.cache.plain import KV_TYPES, PAGE_SIZES, Stored, rows, same, stored, values

HEADS = 2
FATES = st.sampled_from(["", "trim", "trim", "fail"])
WINDOWS = ((None,), (None, 5), (3, 3), (5, None, 40), (1, 17))


@dataclass
class Held:
    """A cache, and what it should hold of every position since its start."""

    cache: KVCache
    kept: Stored

    @property
    def length(self) -> int:
        return int(self.kept["k"].shape[1])

    def cut(self, length: int) -> None:
        self.kept = {name: array[:, :length] for name, array in self.kept.items()}


def first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


class Sequences(RuleBasedStateMachine):
    """Some sequences in use and some kept until their room is needed, on one small pool."""

    operations: ClassVar[Counter[str]] = Counter()

    @initialize(
        size=st.sampled_from(PAGE_SIZES[:4]) | st.sampled_from(PAGE_SIZES),
        dtype=st.sampled_from(KV_TYPES),
        windows=st.sampled_from(WINDOWS),
        width=st.sampled_from([3, 33]),
        aligned=st.booleans() | st.just(True),
        originals=st.booleans(),
        pages=st.integers(6, 40),
        bad=st.sampled_from([0.0, 0.0, 0.01]),
        seed=st.integers(0, 2**32 - 1),
    )
    def begin(
        self,
        size: int,
        dtype: KVType,
        windows: tuple[int | None, ...],
        width: int,
        aligned: bool,
        originals: bool,
        pages: int,
        bad: float,
        seed: int,
    ) -> None:
        self.shape = PageShape(HEADS, width, windows, size, dtype, aligned, originals)
        pages = min(pages, 4 + 256 // size)
        self.pool = PagePool(self.shape, pages * len(windows) * self.shape.layer_bytes())
        self.poisoned: dict[int, NDArray[np.bool_]] = {}
        self.pool.reclaim = self.evict
        self.rng, self.bad = np.random.default_rng(seed), bad
        self.used: list[Held] = []
        self.kept: list[Held] = []
        self.new()

    def evict(self, missing: int) -> None:
        target = self.pool.used_bytes - missing
        while self.kept and self.pool.used_bytes > target:
            self.kept.pop(0).cache.free()
            self.operations["evict"] += 1

    def one(self, which: int) -> Held:
        return self.used[which % len(self.used)]

    @precondition(lambda self: len(self.used) < 2)
    @rule()
    def new(self) -> None:
        self.operations["new"] += 1
        nothing = np.zeros((0, HEADS, self.shape.head_dim), np.float32)
        self.used.append(Held(KVCache(self.pool), stored(self.shape, nothing, nothing)))

    @precondition(lambda self: len(self.used) < 4)
    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        self.operations["fork"] += 1
        held = self.one(which)
        self.used.append(Held(held.cache.fork(), dict(held.kept)))

    @rule(which=st.integers(0, 3), count=st.integers(0, 9) | st.integers(10, 70), then=FATES)
    def append(self, which: int, count: int, then: str) -> None:
        """A pass; one that fails after it wrote what it wrote leaves everything as it was."""
        self.operations["append"] += 1
        held = self.one(which)
        k, v = rows(self.rng, count, HEADS, self.shape.head_dim, self.bad)
        before = self.state()
        try:
            views = held.cache.extend(count)
        except CacheError:
            self.operations["exhausted"] += 1
            assert self.state() == before
            wanted, budget = self.pool.bytes_for(self.wanted(held, count)), self.pool.budget or 0
            assert self.pool.used_bytes + wanted > budget
            assert wanted > budget or not self.kept
            return
        for view in views:
            view.write(k, v)
        self.poisoned = {}
        if then == "fail":
            self.operations["failed"] += 1
            held.cache.truncate(held.cache.length)
            return
        held.cache.commit(count)
        new = stored(self.shape, k, v)
        held.kept = {n: np.concatenate([a, new[n]], axis=1) for n, a in held.kept.items()}
        self.attention(held, views, min(count, 3))
        if then == "trim":
            self.trim(which)

    def wanted(self, held: Held, count: int) -> list[int]:
        """Pages that so many positions need, counted from the definition."""
        size, wanted = self.shape.page_size, []
        for g, table in enumerate(held.cache.tables):
            there = set(range(table.start // size, table.start // size + len(table.pages)))
            stop = math.ceil((held.length + count) / size)
            new = len(set(range(table.start // size, stop)) - there)
            copied = count > 0 and held.length % size > 0 and self.owners(g)[table.pages[-1]] > 1
            wanted.append(new + copied)
        return wanted

    @rule(which=st.integers(0, 3), back=st.integers(0, 9) | st.integers(0, 400))
    def truncate(self, which: int, back: int) -> None:
        self.operations["truncate"] += 1
        held = self.one(which)
        length = max(0, held.length - back)
        starts = [table.start for table in held.cache.tables]
        seen = [first_seen(length, group.window) for group in self.pool.groups]
        lost = length > 0 and any(s > f for s, f in zip(starts, seen, strict=True))
        before = self.state()
        if lost:
            self.operations["lost"] += 1
            with pytest.raises(CacheError, match="whose window was dropped"):
                held.cache.truncate(length)
            assert self.state() == before
            return
        held.cache.truncate(length)
        held.cut(length)

    @rule(which=st.integers(0, 3))
    def trim(self, which: int) -> None:
        self.operations["trim"] += 1
        held = self.one(which)
        held.cache.trim()
        for table, group in zip(held.cache.tables, self.pool.groups, strict=True):
            seen = first_seen(held.length, group.window)
            assert table.start == seen // self.shape.page_size * self.shape.page_size
            self.operations["dropped"] += table.start > 0

    @precondition(lambda self: len(self.used) > 1)
    @rule(which=st.integers(0, 3), keep=st.booleans())
    def finish(self, which: int, keep: bool) -> None:
        self.operations["finish"] += 1
        held = self.used.pop(which % len(self.used))
        if keep:
            self.kept.append(held)
        else:
            held.cache.free()
            assert held.cache.length == 0

    # What always holds.

    def owners(self, g: int) -> Counter[int]:
        """How many sequences hold each page, counted from their tables."""
        return Counter(p for held in self.used + self.kept for p in held.cache.tables[g].pages)

    def state(self) -> list[Any]:
        """All that can be seen of the sequences in use."""
        return [
            (held.cache.length, [(table.start, list(table.pages)) for table in held.cache.tables])
            for held in self.used
        ]

    @invariant()
    def pages_are_owned_by_who_lists_them(self) -> None:
        used, budget = 0, self.pool.budget or 0
        for g, group in enumerate(self.pool.groups):
            owners = self.owners(g)
            counts = [owners[page] for page in range(len(group.owners))]
            assert group.owners.tolist() == counts
            arrays = [layer._arrays.values() for layer in group.pages.values()]
            whole = sum(array.nbytes for layer in arrays for array in layer)
            used += len(owners) * whole // max(1, len(counts))
        assert self.pool.used_bytes == used
        assert used <= budget

    @invariant()
    def tables_hold_what_they_should(self) -> None:
        size = self.shape.page_size
        for held in self.used + self.kept:
            assert held.cache.length == held.length
            for table in held.cache.tables:
                assert len(set(table.pages)) == len(table.pages)
                count = math.ceil(held.length / size) - table.start // size
                assert len(table.pages) == max(0, count)

    @invariant()
    def contents_survive_poison_wherever_nothing_is_held(self) -> None:
        self.poison()
        for held in self.used + self.kept:
            for view in held.cache.views():
                kept = {name: array[:, view.start :] for name, array in held.kept.items()}
                assert same(view.stored(view.start, held.length), kept)

    def poison(self) -> None:
        """Fill every slot that no sequence holds a position in."""
        size = self.shape.page_size
        for g, group in enumerate(self.pool.groups):
            slots = np.ones((len(group.owners), size), np.bool_)
            for held in self.used + self.kept:
                pages = held.cache.tables[g].pages
                slots[pages[:-1]] = False
                slots[pages[-1:], : (held.length - 1) % size + 1] = False
            free = slots.reshape(-1)
            fresh = free & ~self.poisoned.get(g, np.False_)
            self.poisoned[g] = free
            edges = np.flatnonzero(np.diff(fresh, prepend=False, append=False)).reshape(-1, 2)
            for layer in group.pages.values():
                for start, stop in edges.tolist():
                    layer.poison(slice(start, stop))

    @rule(which=st.integers(0, 3), count=st.integers(1, 3))
    def look(self, which: int, count: int) -> None:
        """Attention of the last rows, poison or not."""
        self.operations["look"] += 1
        held = self.one(which)
        count = min(count, held.length)
        if count and held.cache.reaches(held.length - count):
            self.operations["looked"] += 1
            before = self.attention(held, held.cache.views(), count)
            self.poison()
            for a, b in zip(before, self.attention(held, held.cache.views(), count), strict=True):
                assert_same(a, b)

    def attention(self, held: Held, views: list[LayerView], count: int) -> list[Any]:
        """Exact attention of the last rows is that over plain arrays; the results of both lanes."""
        shape = (count, 2 * HEADS, self.shape.head_dim)
        q = np.random.default_rng(held.length).standard_normal(shape).astype(np.float32)
        k, v = (values(held.kept, name) for name in ("k", "v"))
        found = []
        for view, window in zip(views, self.shape.windows, strict=True):
            scores = Scores(default_scale(self.shape.head_dim), window)
            found.append(attend_fast(q, view.plain(), held.length, scores))
            if self.shape.aligned:
                found.append(attend_exact(q, view.aligned(), held.length, scores))
                plain = attend_exact(q, align_key_values(k, v), held.length, scores)
                assert_same(found[-1], plain)
        return found

    def teardown(self) -> None:
        for held in getattr(self, "used", []) + getattr(self, "kept", []):
            held.cache.free()
        if hasattr(self, "pool"):
            assert self.pool.used_bytes == 0
            assert all((group.owners == 0).all() for group in self.pool.groups)


def test_any_history_of_several_sequences() -> None:
    """No page is lost or owned twice, and contents are those of plain arrays, throughout."""
    Sequences.operations = Counter()
    steps = settings(
        max_examples=240,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Sequences, settings=steps)
    done = Sequences.operations
    names = ("new", "fork", "append", "truncate", "trim", "finish", "look")
    assert sum(done[name] for name in names) >= 10_000
    for name in (*names, "looked", "dropped", "evict", "exhausted", "failed", "lost"):
        assert done[name] > 0, name


def sequence(pool: PagePool, count: int, seed: int = 0) -> KVCache:
    cache, shape = KVCache(pool), pool.shape
    for view in cache.extend(count):
        view.write(*rows(np.random.default_rng(seed), count, shape.kv_heads, shape.head_dim))
    cache.commit(count)
    return cache


def test_a_full_page_is_shared_and_a_partly_filled_one_is_copied_by_who_writes() -> None:
    pool = PagePool(PageShape(1, 4, (None,), 4))
    one = sequence(pool, 6)
    two = one.fork()
    assert pool.used_bytes == 2 * pool.groups[0].page_bytes
    two.extend(1)
    two.commit(1)
    assert one.tables[0].pages[0] == two.tables[0].pages[0]
    assert one.tables[0].pages[1] != two.tables[0].pages[1]
    assert pool.used_bytes == 3 * pool.groups[0].page_bytes
    before = list(one.tables[0].pages)
    one.extend(1)  # nobody else holds its last page any more
    assert one.tables[0].pages == before
    assert one.needed(2) == [0]
    assert one.needed(3) == [1]


def test_a_page_that_stops_being_shared_while_room_is_made() -> None:
    """Whoever shared it was given up for room: no page too many is kept."""
    shape = PageShape(1, 4, (None,), 4)
    pool = PagePool(shape, 4 * shape.layer_bytes())
    one = sequence(pool, 6)
    two = one.fork()
    three = sequence(pool, 8)

    def reclaim(missing: int) -> None:
        three.free()
        two.free()

    pool.reclaim = reclaim
    held = one.views()[0].stored(0, 6)
    one.extend(1)
    one.commit(1)
    assert len(one.tables[0].pages) == 2
    assert pool.used_bytes == 2 * shape.layer_bytes()
    assert same(one.views()[0].stored(0, 6), held)


def test_a_sequence_alone_lies_side_by_side() -> None:
    """What is fed one token at a time, in turns with others, is in few extents."""
    shape = PageShape(1, 4, (None,), 4)
    pool = PagePool(shape, 400 * shape.layer_bytes())
    caches = [KVCache(pool) for _ in range(4)]
    for _ in range(160):
        for cache in caches:
            cache.extend(1)
            cache.commit(1)
    for cache in caches:
        assert len(cache.views()[0].where.slot) <= 4


def test_memory_is_written_no_farther_than_needed() -> None:
    """Pages far behind those in use are not handed out, for they take time to come."""
    shape = PageShape(1, 4, (None,), 4)
    pool = PagePool(shape, 1000 * shape.layer_bytes())
    caches = [KVCache(pool) for _ in range(5)]
    for cache in caches:
        cache.extend(40)
        cache.commit(40)
    assert max(page for cache in caches for page in cache.tables[0].pages) < 4 * 50


def test_going_back_to_nothing_always_works() -> None:
    pool = PagePool(PageShape(1, 4, (None, 5), 4))
    cache = sequence(pool, 30)
    cache.trim()
    assert not cache.reaches(10)
    cache.truncate(0)
    assert (cache.length, pool.used_bytes) == (0, 0)
    assert cache.reaches(0)
    assert [len(view.pages.stored([])["k"]) for view in cache.views()] == [1, 1]


def test_truncate_never_lengthens() -> None:
    pool = PagePool(PageShape(1, 4, (None,), 4))
    cache = sequence(pool, 7)
    cache.truncate(9)
    assert cache.length == 7
    cache.truncate(3)
    assert cache.length == 3
    assert pool.used_bytes == pool.groups[0].page_bytes


def test_what_a_cache_holds_of_its_windows() -> None:
    pool = PagePool(PageShape(1, 4, (None, 5), 4))
    cache = sequence(pool, 30)
    assert cache.holds(0, 30)
    assert not cache.holds(0, 31)
    cache.trim()
    assert [table.start for table in cache.tables] == [0, 24]
    assert cache.holds(24, 30)
    assert not cache.holds(23, 30)
    assert cache.reaches(28)
    assert not cache.reaches(27)


@pytest.mark.parametrize("size", PAGE_SIZES)
@pytest.mark.parametrize("options", [{}, {"window": 37, "softcap": np.float32(4.0)}])
def test_attention_over_scattered_pages(
    size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages in any order, above, at and below the size of a block."""
    rng, length = np.random.default_rng(size), 150
    pool = PagePool(PageShape(HEADS, 40, (options.get("window"),), size))
    count = -(-length // size)
    pool.groups[0].grow(2 * count + 3)
    order = rng.permutation(2 * count + 3).tolist()
    monkeypatch.setattr(pool.groups[0], "find", lambda wanted, after: order[:wanted])
    cache = KVCache(pool)
    k, v = rows(rng, length, HEADS, 40)
    views = cache.extend(length)
    pool.groups[0].pages[0].poison(slice(0, None))
    views[0].write(k, v)
    assert size > 64 or len(views[0].where.slot) > 1
    q = rng.standard_normal((20, 4, 40)).astype(np.float32)
    scores = Scores(default_scale(40), **options)
    plain = attend_exact(q, align_key_values(k, v), length, scores)
    assert_same(attend_exact(q, views[0].aligned(), length, scores), plain)
    cache.commit(length)
    cache.trim()
    if cache.reaches(length - 1):
        last = attend_exact(q[-1:], cache.views()[0].aligned(), length, scores)
        assert_same(last, plain[-1:])


def test_a_negative_length_is_refused() -> None:
    pool = PagePool(PageShape(1, 4, (None,), 4))
    one = sequence(pool, 6)
    with pytest.raises(CacheError, match="cannot go back to -1 positions; keep 0 or more"):
        one.truncate(-1)
    assert (one.length, len(one.tables[0].pages)) == (6, 2)
