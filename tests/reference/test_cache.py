"""The cache: whatever its history, it holds what a plain array would (SPEC 11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.arithmetic import BLOCK
from reference.attention import Scores, align_key_values, attend_exact, attend_fast, default_scale
from reference.cache import KVCache, LayerCache
from reference.errors import RequestError
from reference.model import Model
from tests.oracle.arrays import Float32, assert_same
from tests.reference.test_model import QWEN2_SMALL, QWEN3_SMALL, small, tokens_of

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

HEADS, WIDTH = 2, 40
BAD = (np.inf, -np.inf, np.nan)


def rows(seed: int, count: int, bad: int = 0) -> tuple[Float32, Float32]:
    """k and v of `count` positions, some elements of either not finite."""
    rng = np.random.default_rng(seed)
    shape = (2, count, HEADS, WIDTH)
    both = (rng.standard_normal(shape) * 2.0 ** rng.integers(-40, 40, shape)).astype(np.float32)
    both[:, rng.random(count) < 0.1] = 0
    for _ in range(bad if count else 0):
        both[tuple(rng.integers(0, shape))] = BAD[int(rng.integers(3))]
    return both[0], both[1]


@dataclass(frozen=True)
class Step:
    """Truncate to `keep` of what is there, write `count` rows, ask for alignment or not."""

    keep: float
    count: int
    bad: int
    ask: bool


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([1.0, 1.0, 1.0, 0.97, 0.5, 0.0]) | st.floats(0, 1),
        st.integers(0, 5) | st.integers(0, 80) | st.sampled_from([31, 32, 33, 256, 257]),
        st.sampled_from([0, 0, 1, 4]),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def check(cache: LayerCache, k: Float32, v: Float32) -> None:
    """The first positions are those of k and v, as they came and aligned."""
    length = len(k)
    plain = cache.plain(length)
    assert_same(plain.k, k.swapaxes(0, 1))
    assert_same(plain.v, v.swapaxes(0, 1))
    assert_same(plain.finite, (np.isfinite(k).all(-1) & np.isfinite(v).all(-1)).T)


def check_aligned(cache: LayerCache, k: Float32, v: Float32) -> None:
    length, actual, fresh = len(k), cache.aligned(len(k)), align_key_values(k, v)
    assert actual.keys.values.shape == fresh.keys.values.shape
    assert actual.values.digits.shape == fresh.values.digits.shape
    assert actual.keys.values.shape[2] % BLOCK == 0
    assert_same(actual.keys.values[:, :, :length], fresh.keys.values[:, :, :length])
    assert_same(actual.keys.finite[:, :length], fresh.keys.finite[:, :length])
    assert_same(actual.values.digits[:, :length], fresh.values.digits[:, :length])
    assert_same(actual.values.scale[:, :length], fresh.values.scale[:, :length])
    assert_same(actual.values.finite[:, :length], fresh.values.finite[:, :length])


@given(steps=STEPS, seed=st.integers(0, 2**32 - 1))
def test_any_history_is_that_of_a_plain_array(steps: list[Step], seed: int) -> None:
    cache = LayerCache(HEADS, WIDTH)
    k = np.zeros((0, HEADS, WIDTH), np.float32)
    v = k.copy()
    for index, step in enumerate(steps):
        start = int(step.keep * len(k))
        new_k, new_v = rows(seed + index, step.count, step.bad)
        cache.write(new_k, new_v, start)
        k, v = np.concatenate([k[:start], new_k]), np.concatenate([v[:start], new_v])
        check(cache, k, v)
        if step.ask:
            check_aligned(cache, k, v)
    check_aligned(cache, k, v)
    if len(k):
        check_attention(cache, k, v, seed)


def check_attention(cache: LayerCache, k: Float32, v: Float32, seed: int) -> None:
    """What lies beyond the last position, left there by an earlier write, changes nothing."""
    count = min(3, len(k))
    q = np.random.default_rng(seed).standard_normal((count, HEADS, WIDTH)).astype(np.float32)
    scores = Scores(default_scale(WIDTH))
    fresh = attend_exact(q, align_key_values(k, v), len(k), scores)
    assert_same(attend_exact(q, cache.aligned(len(k)), len(k), scores), fresh)


@given(steps=STEPS, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_writes_in_the_middle_keep_what_follows(steps: list[Step], seed: int) -> None:
    """An overwrite that ends before the last position leaves the later ones as they were."""
    k, v = rows(seed, 90, 2)
    k, v = k.copy(), v.copy()
    cache = LayerCache(HEADS, WIDTH)
    cache.write(k, v, 0)
    cache.aligned(90)
    for index, step in enumerate(steps):
        start = min(89, int(step.keep * 90))
        new_k, new_v = rows(seed + index, min(step.count, 90 - start), step.bad)
        cache.write(new_k, new_v, start)
        k[start : start + len(new_k)], v[start : start + len(new_v)] = new_k, new_v
        check(cache, k, v)
        if step.ask:
            check_aligned(cache, k, v)
    check_aligned(cache, k, v)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("which", [0, 1])
def test_a_bad_row_may_be_overwritten(bad: float, which: int) -> None:
    cache, pair = LayerCache(HEADS, WIDTH), rows(1, 40)
    broken = [x.copy() for x in pair]
    broken[which][10, 1, 3] = bad
    cache.write(broken[0], broken[1], 0)
    assert not cache.plain(40).finite[1, 10]
    check_aligned(cache, broken[0], broken[1])
    cache.write(pair[0][10:11], pair[1][10:11], 10)
    assert cache.plain(40).finite.all()
    check_aligned(cache, *pair)


def test_stale_rows_beyond_the_end_change_nothing() -> None:
    cache, (k, v) = LayerCache(HEADS, WIDTH), rows(2, 64)
    broken_k, broken_v = k.copy(), v.copy()
    broken_k[40:], broken_v[41:] = np.inf, np.nan
    cache.write(broken_k, broken_v, 0)
    cache.aligned(64)
    check_attention(cache, k[:40], v[:40], 3)
    scores, q = Scores(default_scale(WIDTH)), rows(4, 3)[0]
    kept = LayerCache(HEADS, WIDTH)
    kept.write(k[:40], v[:40], 0)
    fast = attend_fast(q, cache.plain(40), scores)
    assert_same(fast, attend_fast(q, kept.plain(40), scores))


def test_room_grows_by_doubling() -> None:
    """Appending one at a time copies each position only a few times over."""
    cache, sizes = LayerCache(1, 4), set()
    one = np.ones((1, 1, 4), np.float32)
    for position in range(1500):
        cache.write(one, one, position)
        sizes.add(cache._k.shape[1])
    assert len(sizes) <= 4
    assert all(size % BLOCK == 0 for size in sizes)
    assert cache.plain(1500).k.shape == (1, 1500, 4)


def test_each_position_is_aligned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    original = LayerCache._align

    def spy(self: LayerCache, here: slice) -> None:
        seen.append((here.start, here.stop))
        original(self, here)

    monkeypatch.setattr(LayerCache, "_align", spy)
    cache, (k, v) = LayerCache(HEADS, WIDTH), rows(5, 300)
    for start, stop in ((0, 100), (100, 101), (101, 300)):
        cache.write(k[start:stop], v[start:stop], start)
        cache.aligned(stop)
        cache.aligned(stop)
    assert seen == [(0, 100), (100, 101), (101, 300)]
    check_aligned(cache, k, v)


def test_truncate_never_lengthens() -> None:
    cache = KVCache(2, HEADS, WIDTH)
    cache.length = 7
    cache.truncate(9)
    assert cache.length == 7
    cache.truncate(3)
    assert cache.length == 3
    cache.truncate(0)
    assert cache.length == 0


# a model's use of it


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6),
    family=st.sampled_from(["qwen2", "qwen3"]),
)
@settings(max_examples=15)
def test_truncate_and_go_on_is_starting_over(steps: list[tuple[int, int]], family: str) -> None:
    model = small(QWEN2_SMALL if family == "qwen2" else QWEN3_SMALL)
    cache, held = model.new_cache(), list[int]()
    for index, (back, count) in enumerate(steps):
        cache.truncate(max(0, len(held) - back))
        held = held[: cache.length]
        new = [int(t) for t in np.random.default_rng(index).integers(0, 32, count)]
        y = model.forward(new, cache)
        held += new
        assert cache.length == len(held)
        assert_same(y, model.forward(held)[-count:])


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


def continues_as_if_nothing_was(model: Model, cache: KVCache, held: list[int]) -> None:
    assert cache.length == len(held)
    new = [int(t) for t in tokens_of(37, model.config.vocab_size)]
    expected = model.forward(held + new)
    assert_same(model.forward(new[:5], cache), expected[len(held) : len(held) + 5])
    assert_same(model.forward(new[5:6], cache), expected[len(held) + 5 : len(held) + 6])
    assert_same(model.forward(new[6:], cache), expected[len(held) + 6 :])


@pytest.mark.parametrize("bad", [[3, 32], [-1], [], [0.5], [[1, 2]], [1] * 257])
@pytest.mark.parametrize("count", [0, 40])
def test_a_refused_call_leaves_the_cache(bad: Any, count: int) -> None:
    model = small(QWEN2_SMALL)
    cache, held = model.new_cache(), [int(t) for t in tokens_of(count, 32)]
    if held:
        model.forward(held, cache)
    with pytest.raises(RequestError):
        model.forward(bad, cache)
    continues_as_if_nothing_was(model, cache, held)


@pytest.mark.parametrize("operation", ["rms_norm", "linear", "attend", "add"])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 20, 40])
def test_a_failed_pass_leaves_the_cache(operation: str, calls: int, count: int) -> None:
    """Whatever breaks, in the first layer or the second, before or after keys were written."""
    model = small(QWEN2_SMALL)
    cache, held = model.new_cache(), [int(t) for t in tokens_of(count, 32)]
    if held:
        model.forward(held, cache)
    calls = min(calls, 1) if operation == "attend" else calls
    broken = failing_after(calls, getattr(model.operations, operation))
    changed = replace(
        model, operations=replace(model.operations, **dict[str, Any]({operation: broken}))
    )
    with pytest.raises(InjectedError):
        changed.forward([1] * 70, cache)
    continues_as_if_nothing_was(model, cache, held)


def test_a_pass_that_fails_on_a_thread_leaves_the_cache() -> None:
    model = small(QWEN3_SMALL)
    cache, held = model.new_cache(), [int(t) for t in tokens_of(20, 32)]
    model.forward(held, cache)
    broken = failing_after(4, model.operations.linear)
    changed = replace(model, operations=replace(model.operations, linear=broken))
    with pytest.raises(InjectedError):
        changed.forward(tokens_of(700, 32), cache)
    continues_as_if_nothing_was(model, cache, held)
