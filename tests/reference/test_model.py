"""A forward pass: rows that depend on what they see and on nothing else (SPEC 8.3, 10)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference import attention as attention_module
from reference import threads
from reference.attention import attention_exact, attention_fast
from reference.cache import KVCache, KVType, PagePool
from reference.errors import CacheError, RequestError
from reference.model import AttentionKind, Model, Part
from reference.weights import Arithmetic, Mode
from tests.oracle.arrays import Float32, assert_same
from tests.reference.models import (
    LLAMA_SMALL,
    MISTRAL_SMALL,
    MODES,
    QWEN2_SMALL,
    QWEN3_SMALL,
    SMALL,
    small,
    tiny,
    tokens_of,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

COUNT = 60


@cache
def whole(config: str, weights: Mode) -> Float32:
    """Logits of COUNT tokens in one call."""
    return small(config, weights).forward(tokens_of(COUNT, 32))


# the division into calls


def in_chunks(model: Model, tokens: NDArray[np.int64], cuts: list[int]) -> Float32:
    held, edges = model.new_cache(), [0, *sorted(set(cuts)), len(tokens)]
    parts = [model.forward(tokens[a:b], held) for a, b in pairwise(edges)]
    assert held.length == len(tokens)
    return np.concatenate(parts)


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("family", SMALL)
@given(cuts=st.lists(st.integers(1, COUNT - 1), max_size=10))
@settings(max_examples=8)
def test_any_chunks_give_the_same_bits(family: str, weights: Mode, cuts: list[int]) -> None:
    config = SMALL[family]
    y = in_chunks(small(config, weights), tokens_of(COUNT, 32), cuts)
    assert_same(y, whole(config, weights))


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("family", SMALL)
def test_decode_gives_the_bits_of_prefill(family: str, weights: Mode) -> None:
    config = SMALL[family]
    y = in_chunks(small(config, weights), tokens_of(COUNT, 32), list(range(1, COUNT)))
    assert_same(y, whole(config, weights))


@pytest.mark.parametrize("weights", MODES)
def test_chunks_of_the_trained_model(weights: Mode) -> None:
    tokens, model = tokens_of(40, 1024), tiny(weights)
    expected = model.forward(tokens)
    assert_same(in_chunks(model, tokens, [1, 2, 17, 32, 33]), expected)


def test_chunks_across_row_tiles() -> None:
    """Calls above 512 rows are cut up and shared out; smaller ones are not."""
    model, tokens = small(QWEN3_SMALL), tokens_of(800, 32)
    expected = model.forward(tokens)
    assert_same(in_chunks(model, tokens, [255, 256, 767]), expected)
    assert_same(in_chunks(model, tokens, [513, 514]), expected)


# several sequences in one pass (SPEC 10.4)


@dataclass(frozen=True)
class Row:
    """A part of a pass: tokens that are in its cache, tokens to compute, and rows wanted."""

    seed: int
    held: int
    count: int
    last: int | None
    attention: AttentionKind = "exact"

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed).integers(0, 32, self.held + self.count)


@cache
def alone(config: str, weights: Mode, row: Row, kv_dtype: KVType) -> Float32:
    """The logits of a part that nobody shares a pass or a pool with."""
    model = small(config, weights)
    cache = KVCache(model.new_pool(None, 16, kv_dtype))
    if row.held:
        model.forward(row.tokens[: row.held], cache)
    logits = model.forward(row.tokens[row.held :], cache, row.attention)
    return logits[row.count - (row.count if row.last is None else row.last) :]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    count = draw(st.sampled_from([1, 1, 1, 2, 5, 31, 32, 33, 40]))
    last = draw(st.sampled_from([None, 0, 1, count]))
    return Row(draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 16, 37])), count, last)


def in_one_pass(model: Model, parts: list[Row], pool: PagePool) -> list[Float32]:
    caches = [KVCache(pool) for _ in parts]
    for row, held in zip(parts, caches, strict=True):
        if row.held:
            model.forward(row.tokens[: row.held], held)
            held.trim()
    logits = model.forward_batch(
        [
            Part(row.tokens[row.held :], held, row.attention, row.last)
            for row, held in zip(parts, caches, strict=True)
        ]
    )
    assert [held.length for held in caches] == [row.held + row.count for row in parts]
    for held in caches:
        held.free()
    assert pool.used_bytes == 0
    return logits


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("family", SMALL)
@given(
    parts=st.lists(rows(), min_size=1, max_size=7),
    page_size=st.sampled_from([1, 8, 16]),
    kv_dtype=st.sampled_from(get_args(KVType)),
)
@settings(max_examples=5)
def test_a_part_gives_what_it_gives_alone(
    family: str, weights: Mode, parts: list[Row], page_size: int, kv_dtype: KVType
) -> None:
    config = SMALL[family]
    model = small(config, weights)
    logits = in_one_pass(model, parts, model.new_pool(None, page_size, kv_dtype))
    for row, found in zip(parts, logits, strict=True):
        assert_same(found, alone(config, weights, row, kv_dtype))


def test_a_pass_above_the_row_tiles() -> None:
    """More than 512 rows, cut across parts, fast attention among them."""
    model = small(LLAMA_SMALL)
    parts = [
        Row(0, 0, 300, 1),
        Row(1, 37, 1, None),
        Row(2, 0, 250, None, "fast"),
        Row(3, 16, 1, 1),
        Row(4, 16, 33, 0),
    ]
    for row, found in zip(parts, in_one_pass(model, parts, model.new_pool()), strict=True):
        assert_same(found, alone(LLAMA_SMALL, "float32", row, "float32"))


def test_a_pass_reads_each_weight_once() -> None:
    calls: list[int] = []
    model = small(QWEN3_SMALL)

    def counted(layer: Any, x: Float32) -> Float32:
        calls.append(len(x))
        return model.operations.linear(layer, x)

    watched = replace(model, operations=replace(model.operations, linear=counted))
    watched.forward([1, 2, 3])
    single = len(calls)
    calls.clear()
    in_one_pass(watched, [Row(0, 0, 5, 1), Row(1, 0, 1, 1), Row(2, 0, 7, 0)], watched.new_pool())
    assert len(calls) == single
    assert calls == [13] * (single - 1) + [2], "the head sees the rows that are wanted alone"


@pytest.mark.parametrize("failure", ["token", "attention", "room", "in the middle"])
def test_a_pass_that_fails_leaves_all_caches_as_they_were(failure: str) -> None:
    model = small(QWEN2_SMALL)
    bytes_ = model.new_pool(None, 4).bytes_for([9, 9])
    pool = model.new_pool(bytes_, 4)
    caches = [KVCache(pool) for _ in range(3)]
    for length, held in zip((6, 0, 9), caches, strict=True):
        if length:
            model.forward(tokens_of(length, 32), held)
    fork = caches[0].fork()  # a page that is to be copied
    before = pool.used_bytes
    counts = [5, 3, 2]
    parts = [Part(tokens_of(n, 32), c) for n, c in zip(counts, caches, strict=True)]
    used: Model = model
    error: type[Exception]
    if failure == "token":
        parts[2], error = replace(parts[2], tokens=[99]), RequestError
    elif failure == "attention":
        slow: Any = "slow"
        parts[1], error = replace(parts[1], attention=slow), RequestError
    elif failure == "room":
        parts[2], error = replace(parts[2], tokens=tokens_of(30, 32)), CacheError
    else:
        left, error = iter([1]), LookupError  # the first of two layers is written

        def failing(*arguments: Any) -> Float32:
            if next(left, None) is None:
                raise LookupError
            return model.operations.attend(*arguments)

        used = replace(model, operations=replace(model.operations, attend=failing))
    with pytest.raises(error):
        used.forward_batch(parts)
    copied = pool.bytes_for([1, 1])  # the page that the fork shared may have been copied by then
    assert pool.used_bytes - before in (0, copied)
    assert [held.length for held in caches] == [6, 0, 9]
    parts = [Part(tokens_of(n, 32), c) for n, c in zip(counts, caches, strict=True)]
    logits = model.forward_batch(parts)
    for length, count, found in zip((6, 0, 9), counts, logits, strict=True):
        text = np.concatenate([tokens_of(length, 32), tokens_of(count, 32)])
        assert_same(found, model.forward(text)[length:])
    for held in (*caches, fork):
        held.free()
    assert pool.used_bytes == 0


# what a row depends on


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("weights", MODES)
def test_a_row_depends_on_no_later_token(family: str, weights: Mode) -> None:
    config, changed = SMALL[family], tokens_of(COUNT, 32).copy()
    changed[33:] = (changed[33:] + 5) % 32
    y = small(config, weights).forward(changed)
    assert_same(y[:33], whole(config, weights)[:33])
    assert (y[33:] != whole(config, weights)[33:]).any(axis=1).all()


@pytest.mark.parametrize("weights", MODES)
def test_sequences_side_by_side_do_not_touch(weights: Mode) -> None:
    """Two caches of one model, advanced in turns."""
    model = small(QWEN2_SMALL, weights)
    texts = [tokens_of(30, 32), tokens_of(31, 32)]
    caches = [model.new_cache() for _ in texts]
    rows: list[list[Float32]] = [[], []]
    for at in range(0, 30, 3):
        for index, text in enumerate(texts):
            rows[index].append(model.forward(text[at : at + 3], caches[index]))
    for index, text in enumerate(texts):
        assert_same(np.concatenate(rows[index]), model.forward(text[:30]))


def reach(model: Model, count: int) -> int:
    """How far back from the last token a changed token still changes the last logits."""
    tokens = tokens_of(count, 32)
    last = model.forward(tokens, last_only=True)
    for back in range(count - 1, -1, -1):
        changed = tokens.copy()
        changed[-1 - back] = (changed[-1 - back] + 1) % 32
        if (model.forward(changed, last_only=True) != last).any():
            return back
    return -1


def test_windows_reach_as_far_as_their_layers() -> None:
    """Two layers of window W see 2 (W - 1) back, one full layer sees everything."""
    assert small(MISTRAL_SMALL).config.windows == (17, 17)
    assert reach(small(MISTRAL_SMALL), COUNT) == 32
    assert small(QWEN2_SMALL).config.windows == (None, 8)
    assert reach(small(QWEN2_SMALL), COUNT) == COUNT - 1


def test_each_layer_has_its_own_window() -> None:
    """Up to 8 tokens a window of 8 hides nothing; from the ninth on, which layer has it matters."""
    model, tokens = small(QWEN2_SMALL), tokens_of(COUNT, 32)
    both: list[tuple[int | None, int | None]] = [(None, None), (None, 8), (8, None), (8, 8)]
    results = [
        replace(model, config=replace(model.config, windows=windows)).forward(tokens)
        for windows in both
    ]
    for index, y in enumerate(results):
        assert_same(y[:8], results[0][:8])
        for other in results[:index]:
            assert (y[8:] != other[8:]).any(axis=1).all()
    assert_same(results[1], whole(QWEN2_SMALL, "float32"))


def test_a_window_as_long_as_the_text_is_none() -> None:
    model, tokens = small(MISTRAL_SMALL), tokens_of(COUNT, 32)

    def windowed(window: int | None) -> Float32:
        return replace(model, config=replace(model.config, windows=(window,) * 2)).forward(tokens)

    free, close = windowed(None), windowed(COUNT - 1)
    assert_same(windowed(COUNT), free)
    assert_same(close[: COUNT - 1], free[: COUNT - 1])
    assert (close[-1] != free[-1]).any()


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("arithmetic", get_args(Arithmetic))
@pytest.mark.parametrize("count", [1, 2, COUNT])
def test_last_only_is_the_last_row(weights: Mode, arithmetic: Arithmetic, count: int) -> None:
    model, tokens = small(QWEN3_SMALL, weights, arithmetic), tokens_of(count, 32)
    held = model.new_cache()
    last = model.forward(tokens, held, last_only=True)
    assert last.shape == (1, 32)
    assert held.length == count
    if arithmetic == "exact":
        assert_same(last, model.forward(tokens)[-1:])
    else:
        assert np.abs(last - model.forward(tokens)[-1:]).max() < 1e-5


@pytest.mark.parametrize("kind", [list, tuple, np.int64, np.int32, np.uint8, np.uint64])
def test_any_integers_will_do(kind: Any) -> None:
    tokens = tokens_of(COUNT, 32)
    given_ = kind(tokens) if kind in (list, tuple) else tokens.astype(kind)
    assert_same(small(LLAMA_SMALL).forward(given_), whole(LLAMA_SMALL, "float32"))


# the two arithmetics and the two lanes


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("family", SMALL)
def test_float32_is_near(family: str, weights: Mode) -> None:
    """Within float32's noise; where int8 codes are rounded, a code may fall to the other side."""
    plain = small(SMALL[family], weights, "float32").forward(tokens_of(COUNT, 32))
    apart = np.abs(plain - whole(SMALL[family], weights))
    assert plain.dtype == np.float32
    assert 0 < apart.max() < (2e-5 if weights == "float32" else 0.2)
    assert np.median(apart) < (2e-6 if weights == "float32" else 0.02)


def test_fast_attention_is_near_and_not_the_same() -> None:
    model, tokens = tiny(), tokens_of(520, 1024)
    exact, fast = (model.forward(tokens, attention=kind) for kind in ("exact", "fast"))
    apart = np.abs(exact - fast).max()
    assert 0 < apart < 1e-4


@pytest.mark.parametrize("count", [1, 40])
def test_float32_arithmetic_has_one_attention(count: int) -> None:
    model, tokens = small(LLAMA_SMALL, "float32", "float32"), tokens_of(count, 32)
    assert_same(model.forward(tokens), model.forward(tokens, attention="fast"))


# requests that cannot be computed


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "at least one token"),
        (np.zeros(0, np.int64), "at least one token"),
        (3, "flat list"),
        ([[1, 2]], "flat list"),
        (np.zeros((2, 2), np.int64), "flat list"),
        ([1.0, 2.0], "integers"),
        ([True, False], "integers"),
        (["1"], "integers"),
        ([None], "integers"),
        ([2**70], "integers"),
        ([0, 32], "id 32 is outside"),
        ([31, -1], "id -1 is outside"),
        (np.array([2**63], np.uint64), "id 9223372036854775808 is outside"),
        ([0] * 257, "257 positions exceed.*256"),
    ],
)
def test_bad_tokens_are_a_request_error(tokens: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^tokens: .*{message}") as error:
        small(QWEN2_SMALL).forward(tokens)
    assert "\n" not in str(error.value)


def test_the_context_may_be_filled_to_the_last_position() -> None:
    model = small(QWEN2_SMALL)
    held = model.new_cache()
    model.forward([1] * 255, held)
    with pytest.raises(RequestError, match="257 positions exceed"):
        model.forward([1, 1], held)
    model.forward([1], held)
    assert held.length == 256
    with pytest.raises(RequestError, match="257 positions exceed"):
        model.forward([1], held)


# memory (SPEC 8.2, 8.3)


MEMORY: dict[str, tuple[Callable[..., Float32], int, int, int]] = {
    "exact": (attention_exact, 8, attention_module.EXACT_TILE, 64),
    "fast": (attention_fast, 4, attention_module.FAST_TILE, 20),
}
"""By lane: bytes of an element of its keys and values, scores of a tile, and bytes of a score.

The last was measured: 63.2 and 19.6 at a tile's peak, over all arrays alive then (float64 products,
weights and their grids; float32 scores and exponentials; positions and masks).
"""


def peak(lane: str, length: int) -> int:
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((length, 1, 64)).astype(np.float32) for _ in range(3))
    tracemalloc.start()
    try:
        MEMORY[lane][0](q, k, v)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("lane", MEMORY)
def test_memory_of_attention_is_linear(
    lane: str, workers: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Keys and values as the lane keeps them, and one tile a thread."""
    monkeypatch.setattr(threads, "thread_count", lambda: workers)
    _, element, scores, score = MEMORY[lane]
    peak(lane, 64)
    peaks = {length: peak(lane, length) for length in (2048, 4096)}
    for length, bytes_ in peaks.items():
        kept = 2 * length * 64 * element
        record_property(f"peak_{length}", bytes_)
        assert bytes_ < 1.5 * (kept + workers * scores * score), length
    assert peaks[4096] < 2.6 * peaks[2048]
