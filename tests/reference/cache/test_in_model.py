"""A model's use of its cache: no page, fork or failure shows in a bit (SPEC 10, 11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.cache import KVCache, KVType, PagePool, PageShape
from reference.cache.pages import LayerPages
from reference.errors import CacheError, RequestError
from reference.model import Model, Part
from tests.oracle.arrays import Float32, assert_same
from tests.reference.cache.plain import KV_TYPES, PAGE_SIZES, same, stored, values
from tests.reference.models import (
    LLAMA_SMALL,
    MISTRAL_SMALL,
    QWEN2_SMALL,
    QWEN3_SMALL,
    small,
    tokens_of,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

CONFIGS = {
    "llama": LLAMA_SMALL,
    "mistral": MISTRAL_SMALL,
    "qwen2": QWEN2_SMALL,
    "qwen3": QWEN3_SMALL,
}


def ids(count: int, seed: int | None = None) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed or count).integers(0, 32, count)]


def in_chunks(model: Model, cache: KVCache, tokens: list[int], cuts: list[int]) -> Float32:
    """Logits of all tokens; what left the window is dropped after every chunk."""
    parts = []
    for start, stop in pairwise([0, *cuts, len(tokens)]):
        parts.append(model.forward(tokens[start:stop], cache))
        cache.trim()
    return np.concatenate(parts)


@pytest.mark.parametrize("size", PAGE_SIZES)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_the_same_for_any_page_size(family: str, size: int) -> None:
    model, tokens = small(CONFIGS[family]), ids(90)
    pool = model.new_pool(10_000_000, size)
    other = KVCache(pool)
    expected = model.forward(tokens)
    cache = KVCache(pool)
    found = []
    for start, stop in pairwise([0, 1, 2, 33, 64, 70, 90]):
        found.append(model.forward(tokens[start:stop], cache))
        cache.trim()
        model.forward([start % 32], other)  # so that pages lie apart
    assert_same(np.concatenate(found), expected)


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_narrow_cache_is_a_wide_one_of_rounded_keys_and_values(
    family: str, dtype: KVType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k after rope and v, each rounded by other code than the cache's own."""
    model, tokens = small(CONFIGS[family]), ids(70)
    narrow = in_chunks(model, KVCache(model.new_pool(kv_dtype=dtype)), tokens, [40, 41, 60])
    shape, write = model.new_pool(kv_dtype=dtype).shape, LayerPages.write

    def rounded(self: LayerPages, k: Float32, v: Float32, pieces: Any) -> None:
        kept = stored(shape, k, v)
        write(self, values(kept, "k"), values(kept, "v"), pieces)

    wide = model.forward(tokens)
    monkeypatch.setattr(LayerPages, "write", rounded)
    assert_same(narrow, model.forward(tokens))
    assert (narrow.tobytes() == wide.tobytes()) == (dtype == "float32")


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_aligned_values_are_kept_only_where_they_are_read(arithmetic: Any) -> None:
    model = small(LLAMA_SMALL, arithmetic=arithmetic)
    assert model.new_pool().shape.aligned == (arithmetic == "exact")


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6),
    family=st.sampled_from(["qwen2", "qwen3"]),
    size=st.sampled_from(PAGE_SIZES),
)
@settings(max_examples=15)
def test_truncate_and_go_on_is_starting_over(
    steps: list[tuple[int, int]], family: str, size: int
) -> None:
    model = small(CONFIGS[family])
    cache, held = KVCache(model.new_pool(page_size=size)), list[int]()
    for index, (back, count) in enumerate(steps):
        cache.truncate(max(0, len(held) - back))
        held = held[: cache.length]
        new = ids(count, index + 1)
        y = model.forward(new, cache)
        held += new
        assert cache.length == len(held)
        assert_same(y, model.forward(held)[-count:])


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("size", [1, 16, 64])
def test_forks_do_not_know_each_other(family: str, size: int) -> None:
    """Three of one prompt, together in a pass and then alone."""
    model, prompt = small(CONFIGS[family]), ids(37)
    pool = model.new_pool(page_size=size)
    first = KVCache(pool)
    model.forward(prompt, first)
    first.trim()
    caches = [first, first.fork(), first.fork()]
    texts = [ids(9, seed) for seed in (101, 102, 103)]
    together = model.forward_batch([Part(t[:4], c) for t, c in zip(texts, caches, strict=True)])
    for text, cache, logits in zip(texts, caches, together, strict=True):
        expected = model.forward(prompt + text)[37:]
        assert_same(logits, expected[:4])
        assert_same(model.forward(text[4:], cache), expected[4:])
    for cache in caches:
        cache.free()
    assert pool.used_bytes == 0


# What fails leaves everything as it was.


class InjectedError(Exception):
    pass


def failing_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which fails at its call number `calls`."""
    left = [calls]

    def wrapped(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise InjectedError
        return function(*arguments)

    return wrapped


def broken(model: Model, operation: str, calls: int) -> Model:
    failing = failing_after(calls, getattr(model.operations, operation))
    changed = replace(model.operations, **dict[str, Any]({operation: failing}))
    return replace(model, operations=changed)


def continues_as_if_nothing_was(model: Model, cache: KVCache, held: list[int]) -> None:
    assert cache.length == len(held)
    new = ids(37)
    expected = model.forward(held + new)
    for start, stop in ((0, 5), (5, 6), (6, 37)):
        found = model.forward(new[start:stop], cache)
        assert_same(found, expected[len(held) + start : len(held) + stop])


def filled(model: Model, pool: PagePool, count: int) -> tuple[KVCache, list[int]]:
    cache, held = KVCache(pool), ids(count)
    if held:
        model.forward(held, cache)
    return cache, held


@pytest.mark.parametrize("bad", [[3, 32], [-1], [], [0.5], [[1, 2]], [1] * 257])
@pytest.mark.parametrize("count", [0, 40])
def test_a_refused_call_leaves_the_cache(bad: Any, count: int) -> None:
    model = small(QWEN2_SMALL)
    cache, held = filled(model, model.new_pool(), count)
    used = cache.pool.used_bytes
    with pytest.raises(RequestError):
        model.forward(bad, cache)
    assert cache.pool.used_bytes == used
    continues_as_if_nothing_was(model, cache, held)


@pytest.mark.parametrize("operation", ["rms_norm", "linear", "attend", "add"])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 20, 40])
def test_a_failed_pass_leaves_the_cache(operation: str, calls: int, count: int) -> None:
    """Whatever breaks, in the first layer or the second, before or after keys were written."""
    model = small(QWEN2_SMALL)
    cache, held = filled(model, model.new_pool(), count)
    used, tables = cache.pool.used_bytes, [list(table.pages) for table in cache.tables]
    calls = min(calls, 1) if operation == "attend" else calls
    with pytest.raises(InjectedError):
        broken(model, operation, calls).forward([1] * 70, cache)
    assert cache.pool.used_bytes == used
    assert [table.pages for table in cache.tables] == tables
    continues_as_if_nothing_was(model, cache, held)


def test_a_pass_that_fails_on_a_thread_leaves_the_cache() -> None:
    model = small(QWEN3_SMALL)
    cache, held = filled(model, model.new_pool(), 20)
    with pytest.raises(InjectedError):
        broken(model, "linear", 4).forward(tokens_of(700, 32), cache)
    continues_as_if_nothing_was(model, cache, held)


@pytest.mark.parametrize("calls", [0, 4, 7])
def test_a_failed_pass_leaves_all_its_caches(calls: int) -> None:
    """Forks among them: what was copied so that it could be written holds the same."""
    model = small(MISTRAL_SMALL)
    pool = model.new_pool()
    one, held = filled(model, pool, 20)
    two, (three, other) = one.fork(), filled(model, pool, 33)
    parts = [Part([1] * 9, one), Part([2], two), Part([3] * 40, three)]
    with pytest.raises(InjectedError):
        broken(model, "linear", calls).forward_batch(parts)
    for cache, tokens in ((one, held), (two, held), (three, other)):
        continues_as_if_nothing_was(model, cache, tokens)


@pytest.mark.parametrize("count", [0, 20, 40])
@pytest.mark.parametrize("shared", [False, True])
def test_an_exhausted_pool_leaves_everything(count: int, shared: bool) -> None:
    """Nothing was taken, copied or written; a pass that fits goes on, to the bit."""
    model = small(MISTRAL_SMALL)
    page = model.new_pool().groups[0].page_bytes
    pool = model.new_pool(6 * page)
    cache, held = filled(model, pool, count)
    other = cache.fork() if shared else KVCache(pool)
    used, tables = pool.used_bytes, [list(table.pages) for table in cache.tables]
    before = [view.stored(0, count) for view in cache.views()]
    with pytest.raises(CacheError, match="raise cache_bytes"):
        model.forward([1] * 110, cache)
    assert (pool.used_bytes, cache.length) == (used, count)
    assert [table.pages for table in cache.tables] == tables
    for view, kept in zip(cache.views(), before, strict=True):
        assert same(view.stored(0, count), kept)
    other.free()
    continues_as_if_nothing_was(model, cache, held)


def test_a_batch_for_which_there_is_no_room_leaves_all_its_caches() -> None:
    model = small(MISTRAL_SMALL)
    pool = model.new_pool(11 * model.new_pool().groups[0].page_bytes)
    one, held = filled(model, pool, 20)
    two, other = filled(model, pool, 33)
    used = pool.used_bytes
    with pytest.raises(CacheError, match="raise cache_bytes"):
        model.forward_batch([Part([1] * 30, one), Part([2] * 90, two)])
    assert pool.used_bytes == used
    continues_as_if_nothing_was(model, one, held)
    continues_as_if_nothing_was(model, two, other)


def test_pages_that_do_not_exist_are_refused() -> None:
    model = small(LLAMA_SMALL)
    for options in ({"page_size": 12}, {"kv_dtype": "fp8"}, {"budget": -5}):
        with pytest.raises(RequestError):
            model.new_pool(**dict[str, Any](options))
    assert model.new_pool().shape == PageShape(2, 12, (None, None))


# What no sequence holds is never read.


def poison(pool: PagePool, caches: list[KVCache]) -> None:
    """Fill every slot in which none of the sequences holds a position."""
    size = pool.shape.page_size
    for g, group in enumerate(pool.groups):
        slots = np.ones((len(group.owners), size), np.bool_)
        for cache in caches:
            pages = cache.tables[g].pages
            slots[pages[:-1]] = False
            slots[pages[-1:], : (cache.length - 1) % size + 1] = False
        for slot in np.flatnonzero(slots.reshape(-1)).tolist():
            for layer in group.pages.values():
                layer.poison(slice(slot, slot + 1))


@pytest.mark.parametrize("attention", ["exact", "fast"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("size", [1, 8, 64])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_poison_in_unused_slots_changes_no_bit(
    family: str, size: int, dtype: KVType, attention: Any
) -> None:
    """Passes of three sequences, two of them forks; what is free was used before."""
    model = small(CONFIGS[family])
    found = []
    for poisoned in (False, True):
        pool = model.new_pool(4_000_000, size, dtype)
        gone, held = filled(model, pool, 50)[0], filled(model, pool, 30)[0]
        gone.free()
        caches = [held, held.fork(), KVCache(pool)]
        for index, counts in enumerate(([1, 5, 40], [3, 1, 1], [1, 40, 2], [1, 1, 1])):
            for cache in caches:
                cache.trim()
            if poisoned:
                poison(pool, caches)
            parts = [
                Part(ids(n, index + 7), cache, attention)
                for n, cache in zip(counts, caches, strict=True)
            ]
            found.append(np.concatenate(model.forward_batch(parts)))
    half = len(found) // 2
    for clean, other in zip(found[:half], found[half:], strict=True):
        assert np.isfinite(clean).all()
        assert_same(other, clean)


def test_the_same_cache_twice_in_a_batch_is_refused() -> None:
    model = small(MISTRAL_SMALL)
    cache, held = filled(model, model.new_pool(), 20)
    with pytest.raises(RequestError, match="fork it"):
        model.forward_batch([Part([1, 2], cache), Part([3], cache)])
    continues_as_if_nothing_was(model, cache, held)


def test_what_can_never_fit_evicts_nothing() -> None:
    model = small(MISTRAL_SMALL)
    pool = model.new_pool(4 * model.new_pool().groups[0].page_bytes)
    asked: list[int] = []
    pool.reclaim = asked.append
    assert pool.budget is not None
    assert not pool.make_room(pool.budget + 1)
    assert asked == []
    assert pool.make_room(pool.budget)


@pytest.mark.parametrize("last", [-1, 3])
def test_rows_that_a_part_does_not_have_are_refused(last: int) -> None:
    model = small(MISTRAL_SMALL)
    cache, held = filled(model, model.new_pool(), 20)
    with pytest.raises(RequestError, match="last"):
        model.forward_batch([Part([1, 2], cache, last=last)])
    with pytest.raises(RequestError, match="nothing to compute"):
        model.forward_batch([])
    continues_as_if_nothing_was(model, cache, held)


def test_a_cache_of_another_model_is_refused() -> None:
    """Whatever differs: windows, heads, or whether aligned values are kept."""
    model = small(QWEN2_SMALL)
    plain = small(QWEN2_SMALL, arithmetic="float32")
    for other in (small(MISTRAL_SMALL), small(LLAMA_SMALL), plain):
        for one, two in ((model, other), (other, model)):
            cache = two.new_cache()
            with pytest.raises(RequestError, match=r"^cache: its pages are of another model's"):
                one.forward([1, 2, 3], cache)
            assert (cache.length, cache.pool.used_bytes) == (0, 0)
    for pool in (model.new_pool(page_size=4), model.new_pool(None, 16, "int8", originals=True)):
        assert model.forward([1, 2, 3], KVCache(pool)).shape == (3, 32)
