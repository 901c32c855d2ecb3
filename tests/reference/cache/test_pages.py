"""What a page holds, what it costs, and how pages are handed out (SPEC 11.1, 11.2)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.attention import Scores, align_key_values, attend_exact, default_scale
from reference.cache import KVCache, KVType, PagePool, PageShape
from reference.cache.pages import LayerPages
from reference.errors import CacheError, RequestError
from tests.oracle.arrays import Float32, assert_same
from tests.reference.cache.plain import KV_TYPES, PAGE_SIZES, rows, same, stored, values

HEADS, WIDTH = 2, 40


def shapes(dtype: KVType, size: int = 4) -> list[PageShape]:
    both = (False, True)
    return [PageShape(HEADS, WIDTH, (None,), size, dtype, a, o) for a in both for o in both]


@pytest.mark.parametrize("size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", KV_TYPES)
def test_a_page_costs_the_bytes_of_its_arrays(dtype: KVType, size: int) -> None:
    for shape in shapes(dtype, size):
        pages = LayerPages(shape, size)
        assert shape.layer_bytes() == sum(array.nbytes for array in pages._arrays.values())


def test_bytes_by_hand() -> None:
    """2 heads, 40 wide, 1 position: k and v, finite; 64 keys and 40 digits and a scale aligned."""
    wide = 2 * (2 * 40 * 4 + 1)
    assert PageShape(2, 40, (None,), 1, "float32", aligned=False).layer_bytes() == wide
    assert PageShape(2, 40, (None,), 1, "bfloat16", aligned=False).layer_bytes() == wide - 320
    assert PageShape(2, 40, (None,), 1, "int8", aligned=False).layer_bytes() == wide - 480 + 16
    assert PageShape(2, 40, (None,), 1).layer_bytes() == wide + 2 * 8 * (64 + 40 + 1)
    moved = PageShape(2, 40, (None,), 1, aligned=False, originals=True).layer_bytes()
    assert moved == wide + 2 * 4 * 40 + 8


def test_layers_of_one_window_share_pages() -> None:
    pool = PagePool(PageShape(HEADS, WIDTH, (None, 5, None, 5, 7), 4))
    assert [group.layers for group in pool.groups] == [(0, 2), (1, 3), (4,)]
    assert [group.window for group in pool.groups] == [None, 5, 7]
    one = pool.shape.layer_bytes()
    assert [group.page_bytes for group in pool.groups] == [2 * one, 2 * one, one]
    assert pool.bytes_for([1, 0, 3]) == 5 * one


# What is written.


@pytest.mark.parametrize("dtype", KV_TYPES)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), bad=st.sampled_from([0.0, 0.02]))
def test_values_are_rounded_to_the_pools_type(
    dtype: KVType, count: int, seed: int, bad: float
) -> None:
    k, v = rows(np.random.default_rng(seed), count, HEADS, WIDTH, bad)
    for shape in shapes(dtype):
        pages = LayerPages(shape, 64)
        there = [(slice(0, count), slice(7, 7 + count))]
        pages.write(k, v, there)
        assert same(pages.stored(there), stored(shape, k, v))


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("bad", [0.0, 0.02])
def test_the_contract_holds_on_the_rounded_values(dtype: KVType, bad: float) -> None:
    rng, length = np.random.default_rng(3), 70
    k, v = rows(rng, length, HEADS, WIDTH, bad)
    pool = PagePool(PageShape(HEADS, WIDTH, (None,), 8, dtype))
    view = KVCache(pool).extend(length)[0]
    view.write(k, v)
    kept = stored(pool.shape, k, v)
    k, v = values(kept, "k"), values(kept, "v")
    q = rng.standard_normal((5, 4, WIDTH)).astype(np.float32)
    plain = attend_exact(q, align_key_values(k, v), length, Scores(default_scale(WIDTH)))
    found = attend_exact(q, view.aligned(), length, Scores(default_scale(WIDTH)))
    assert_same(found, plain)
    assert np.isnan(found).any() == (bad > 0)
    read = view.plain().read(3, 60)
    finite = np.isfinite(np.concatenate([k, v], axis=-1)).all(-1)
    assert np.array_equal(read[0], k[3:60].swapaxes(0, 1), equal_nan=True)
    assert np.array_equal(read[1], v[3:60].swapaxes(0, 1), equal_nan=True)
    assert np.array_equal(read[2], finite[3:60].T)


def test_a_value_beyond_float16_is_infinite_and_spoils_its_row() -> None:
    k = np.ones((2, 1, 4), np.float32)
    k[1, 0, 2] = 65520
    pool = PagePool(PageShape(1, 4, (None,), 4, "float16"))
    view = KVCache(pool).extend(2)[0]
    view.write(k, np.ones_like(k))
    found = attend_exact(k, view.aligned(), 2, Scores(default_scale(4)))
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_put_takes_what_stored_gives(dtype: KVType) -> None:
    for shape in shapes(dtype):
        one, two = LayerPages(shape, 32), LayerPages(shape, 32)
        one.write(*rows(np.random.default_rng(1), 20, HEADS, WIDTH, 0.01), [(slice(0, 20),) * 2])
        taken = one.stored([(slice(0, 20),) * 2])
        two.put(taken, [(slice(0, 9), slice(11, 20)), (slice(9, 20), slice(0, 11))])
        moved = two.stored([(slice(0, 9), slice(11, 20)), (slice(9, 20), slice(0, 11))])
        assert same(moved, taken)
        for name, array in one._arrays.items():
            again = np.concatenate([two._arrays[name][:, 11:20], two._arrays[name][:, :11]], 1)
            assert again.tobytes() == array[:, :20].tobytes(), name


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_poison_and_copies_reach_every_array(dtype: KVType) -> None:
    for shape in shapes(dtype):
        pages = LayerPages(shape, 8)
        pages.poison(slice(2, 4))
        for name, array in pages._arrays.items():
            assert (array[:, 2:4] != array[:, :2]).all(), name
            assert not array[:, [0, 1, 4, 5, 6, 7]].any(), name
        pages.copy(slice(2, 4), slice(6, 8))
        for array in pages._arrays.values():
            assert array[:, 6:8].tobytes() == array[:, 2:4].tobytes()


# How pages are handed out.


@given(
    held=st.lists(st.booleans(), min_size=1, max_size=30),
    count=st.integers(0, 12),
    after=st.none() | st.integers(0, 29),
)
def test_pages_that_are_found_are_free(held: list[bool], count: int, after: int | None) -> None:
    pool = PagePool(PageShape(1, 4, (None,), 4))
    group = pool.groups[0]
    group.grow(len(held))
    group.owners[:] = held
    count = min(count, held.count(False))
    after = None if after is None else min(after, len(held) - 1)
    found = group.find(count, after)
    assert len(set(found)) == count
    assert not any(held[page] for page in found)
    free = "".join("x" if h else "." for h in held)
    if after is None and "." * count in free and count:
        assert found == list(range(found[0], found[0] + count))
    if after is not None and free[after + 1 : after + 1 + count] == "." * count:
        assert found == list(range(after + 1, after + 1 + count))


def test_an_unlimited_pool_copies_each_page_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grown, grow = list[int](), LayerPages.grown

    def noted(self: LayerPages, slots: int) -> dict[str, Any]:
        grown.append(slots)
        return grow(self, slots)

    monkeypatch.setattr(LayerPages, "grown", noted)
    pool = PagePool(PageShape(1, 4, (None,), 4))
    cache = KVCache(pool)
    for _ in range(1500):
        cache.extend(1)
        cache.commit(1)
    assert len(grown) <= 10
    assert grown[-1] >= 1500


def test_pages_are_used_again() -> None:
    shape = PageShape(1, 4, (None,), 4)
    pool = PagePool(shape, 3 * shape.layer_bytes())
    for _ in range(5):
        cache = KVCache(pool)
        cache.extend(12)
        cache.commit(12)
        assert pool.used_bytes == pool.budget
        cache.free()
        assert pool.used_bytes == 0


def test_groups_share_one_budget() -> None:
    shape = PageShape(1, 4, (None, 5), 4)
    pool = PagePool(shape, 7 * shape.layer_bytes())
    cache = KVCache(pool)
    cache.extend(12)
    cache.commit(12)
    with pytest.raises(CacheError, match="raise cache_bytes"):
        cache.extend(1)
    cache.trim()
    cache.extend(1)
    assert pool.used_bytes == 6 * shape.layer_bytes()
    assert pool.most_positions == 3 * 4  # the seventh page is in no pair
    assert PagePool(shape).most_positions == math.inf


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"page_size": 0}, "page_size: 0 is not a power of two from 1 to 256"),
        ({"page_size": 3}, "page_size: 3 is not"),
        ({"page_size": 512}, "page_size: 512 is not"),
        ({"page_size": -1}, "page_size: -1 is not"),
        ({"dtype": "int4"}, "kv_dtype: 'int4' is none of float32, float16, bfloat16, int8"),
    ],
)
def test_a_shape_that_does_not_exist_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        PageShape(1, 4, (None,), **changes)


def test_budgets_that_cannot_be() -> None:
    shape = PageShape(1, 4, (None, 5), 4)
    with pytest.raises(RequestError, match="cache_bytes: -1 is out of range"):
        PagePool(shape, -1)
    for budget in (2**61, 2**80):
        with pytest.raises(CacheError, match="more than this machine can give; lower cache_bytes"):
            PagePool(shape, budget)
    pool = PagePool(shape, 0)
    with pytest.raises(CacheError, match="of the 0 of the whole cache 0 are in use"):
        KVCache(pool).extend(1)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_machine_that_has_no_more_memory(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Whichever layer cannot grow, nothing is taken or lost, and smaller requests go on."""
    pool = PagePool(PageShape(1, 4, (None, 5, None), 4))
    one = KVCache(pool)
    for view in one.extend(8):
        view.write(ones(8), 2 * ones(8))
    one.commit(8)
    held = [view.stored(0, 8) for view in one.views()]
    before = [group.owners.tolist() for group in pool.groups]
    used, grow, left = pool.used_bytes, LayerPages.grown, [calls]

    def failing(self: LayerPages, slots: int) -> dict[str, Any]:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return grow(self, slots)

    monkeypatch.setattr(LayerPages, "grown", failing)
    with pytest.raises(CacheError, match="more than this machine can give"):
        one.extend(5000)
    monkeypatch.undo()
    assert pool.used_bytes == used
    for view, kept in zip(one.views(), held, strict=True):
        assert same(view.stored(0, 8), kept)
    for group, owners in zip(pool.groups, before, strict=True):
        assert group.owners[: len(owners)].tolist() == owners
        assert not group.owners[len(owners) :].any()
    one.extend(5000)
    one.free()
    assert pool.used_bytes == 0


def ones(count: int) -> Float32:
    return np.ones((count, 1, 4), np.float32)


def test_growth_keeps_what_is_there() -> None:
    pool = PagePool(PageShape(1, 4, (None,), 4))
    cache = KVCache(pool)
    view = cache.extend(3)[0]
    view.write(ones(3), 2 * ones(3))
    cache.commit(3)
    before = view.stored(0, 3)
    other = KVCache(pool)
    other.extend(1000)
    view.write(ones(3), 2 * ones(3))  # a view that was made before still writes to its pages
    assert same(cache.views()[0].stored(0, 3), before)
