"""Moved chunks: which are found, and to which bits their keys are rotated (SPEC 11.5)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.cache import KVCache, KVType, PagePool, PageShape
from reference.cache.pages import LayerPages
from reference.cache.shift import Chunk, matched_chunks, move, shifted
from reference.errors import CacheError, RequestError
from reference.rotary import RopeParameters, cos_sin, rope_constants, rotate
from tests.oracle.arrays import Float32, assert_same, f32
from tests.reference.cache.plain import KV_TYPES, rows, same
from tests.reference.models import LLAMA_SMALL, QWEN2_SMALL, small, tokens_of

HEADS, WIDTH = 2, 12
ROPE = RopeParameters("default", 10000.0, 12)
KINDS = {
    "default": ROPE,
    "partial": RopeParameters("default", 500.0, 8),
    "interleaved": RopeParameters("default", 10000.0, 12, interleaved=True),
    "linear": RopeParameters("linear", 10000.0, 12, 3.0),
    "llama3": RopeParameters("llama3", 10000.0, 12, 8.0, 64, 1.0, 4.0),
    "yarn": RopeParameters("yarn", 10000.0, 12, 4.0, 64),
}


# Which chunks.


def chunks_by_hand(old: list[int], new: list[int], start: int, minimum: int) -> list[Chunk]:
    """The definition, every place tried."""
    found, here, there = list[Chunk](), start, start
    while here < len(new) - 1:
        for place in range(there, len(old)):
            length = 0
            while (
                place + length < len(old)
                and here + length < len(new) - 1
                and old[place + length] == new[here + length]
            ):
                length += 1
            if length >= minimum:
                found.append(Chunk(place, here, length))
                here, there = here + length, place + length
                break
        else:
            here += 1
    return found


TOKENS = st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 40), max_size=40)


@given(old=TOKENS, new=TOKENS, start=st.integers(0, 10), minimum=st.integers(1, 5))
@settings(max_examples=300)
def test_chunks_are_those_of_the_definition(
    old: list[int], new: list[int], start: int, minimum: int
) -> None:
    found = matched_chunks(old, new, start, minimum)
    assert found == chunks_by_hand(old, new, start, minimum)
    for chunk in found:
        a = old[chunk.old_start : chunk.old_start + chunk.length]
        assert a == new[chunk.new_start : chunk.new_start + chunk.length]


@given(old=TOKENS, edit=TOKENS, data=st.data())
def test_what_follows_an_edit_is_found(
    old: list[int], edit: list[int], data: st.DataObject
) -> None:
    """Tokens that occur once each are found again wherever an edit has moved them."""
    old = [100 + i for i in range(len(old))]
    at = data.draw(st.integers(0, len(old)))
    cut = data.draw(st.integers(at, len(old)))
    new = [*old[:at], *edit, *old[cut:], 7]
    rest = len(old) - cut
    found = matched_chunks(np.array(old), np.array(new), at, 2)
    assert found == ([Chunk(cut, at + len(edit), rest)] if rest >= 2 else [])


def test_the_last_token_is_never_part_of_a_chunk() -> None:
    assert matched_chunks([1, 2, 3, 4], [9, 1, 2, 3, 4], 0, 2) == [Chunk(0, 1, 3)]
    assert matched_chunks([1, 2], [9, 1, 2], 0, 2) == []
    assert matched_chunks([], [], 0, 2) == matched_chunks([1], [1], 0, 1) == []


# To which bits.


def filled(pool: PagePool, count: int, seed: int = 1, bad: float = 0.0) -> KVCache:
    cache = KVCache(pool)
    shape = pool.shape
    for view in cache.extend(count):
        view.write(*rows(np.random.default_rng(seed), count, shape.kv_heads, shape.head_dim, bad))
    cache.commit(count)
    return cache


def new_pool(dtype: KVType = "float32", windows: tuple[int | None, ...] = (None,)) -> PagePool:
    return PagePool(PageShape(HEADS, WIDTH, windows, 4, dtype, originals=True))


def without_shift(stored: dict[str, Float32]) -> dict[str, Float32]:
    return {name: array for name, array in stored.items() if name != "shift"}


@pytest.mark.parametrize("dtype", KV_TYPES)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    places=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    bad=st.sampled_from([0.0, 0.02]),
)
@settings(max_examples=25)
def test_moving_again_and_again_is_moving_once(
    dtype: KVType, kind: str, places: list[int], bad: float
) -> None:
    pool, count = new_pool(dtype), 9
    source = filled(pool, 30, 1, bad)
    at, start = source, 11
    for place in places:
        target = filled(pool, place, 2) if place else KVCache(pool)
        move(at, start, start + count, target, KINDS[kind])
        at, start = target, place
    once = filled(pool, places[-1], 3) if places[-1] else KVCache(pool)
    move(source, 11, 20, once, KINDS[kind])
    a, b = at.views()[0].stored(start, start + count), once.views()[0].stored(start, start + count)
    assert same(a, b)
    assert (a["shift"] == start - 11).all()
    before = source.views()[0].stored(11, 20)
    assert same({"v": a["v"], "o": a["original"]}, {"v": before["v"], "o": before["original"]})
    if start == 11:
        assert same(a, before)


@pytest.mark.parametrize("kind", KINDS)
def test_shift_zero_is_the_original_itself(kind: str) -> None:
    """Signed zeros and infinities, which a rotation by no angle would change, included."""
    k = rows(np.random.default_rng(1), 50, HEADS, WIDTH, 0.05)[0].swapaxes(0, 1)
    k[:, 0] = np.float32(-0.0)
    k[0, 0, ::2] = -1.0
    assert shifted(k, np.zeros(50, np.int64), KINDS[kind]).tobytes() == k.tobytes()
    some = shifted(k, np.arange(50) % 2, KINDS[kind])
    assert some[:, ::2].tobytes() == k[:, ::2].tobytes()
    assert some[:, 1::2].tobytes() != k[:, 1::2].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", [1, -1, 37, -1000, 2**24 - 1])
def test_keys_are_rotated_by_the_angle_and_by_no_factor(kind: str, by: int) -> None:
    """Within 3 units of rounding (cos or sin, product, sum) of the exact rotation of each pair.

    The angle is RN32(shift * inv_freq), taken as it stands; yarn's factor is in k already.
    """
    rope = KINDS[kind]
    k = np.random.default_rng(2).standard_normal((1, 1, WIDTH)).astype(np.float32)
    found = shifted(k, np.array([by]), rope)[0, 0].tolist()
    half, x = rope.rotary_dim // 2, k[0, 0].tolist()
    for i, inv_freq in enumerate(rope_constants(rope)[0]):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        with mpmath.workprec(200):
            angle = mpmath.mpf(float(np.float32(by) * inv_freq))
            cos, sin = mpmath.cos(angle), mpmath.sin(angle)
            for at, (p, q) in ((a, (x[a] * cos, -x[b] * sin)), (b, (x[b] * cos, x[a] * sin))):
                assert abs(found[at] - (p + q)) <= 3 * 2.0**-24 * (abs(p) + abs(q))
    assert found[rope.rotary_dim :] == x[rope.rotary_dim :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_key_is_near_the_key_of_its_new_position(kind: str) -> None:
    """What the model would have computed there, but for rounding: the direction is the right one.

    Angles of p, p + s and s are each rounded: they add up but for 2^-23 of the largest.
    """
    rope, by, count = KINDS[kind], -13, 20
    x = np.random.default_rng(3).standard_normal((count, HEADS, WIDTH)).astype(np.float32)
    there = rotate(x, *cos_sin(rope, np.arange(40, 40 + count)), rope.interleaved)
    wanted = rotate(x, *cos_sin(rope, np.arange(40 + by, 40 + by + count)), rope.interleaved)
    found = shifted(there.swapaxes(0, 1), np.full(count, by), rope).swapaxes(0, 1)
    factor = float(rope_constants(rope)[1])
    bound = factor * (60 * 2.0**-23 + 8 * 2.0**-24) * 2 * np.abs(x).max()
    assert np.abs(found - wanted).max() <= bound
    assert np.abs(found - there)[..., : rope.rotary_dim].max() > 100 * bound


def test_an_angle_is_rounded_to_float32_first() -> None:
    rope, by = ROPE, 12345
    k = np.ones((1, 1, WIDTH), np.float32)
    inv_freq = rope_constants(rope)[0]
    exact = [Fraction(by) * Fraction(float(f)) for f in inv_freq]
    rounded = [Fraction(float(np.float32(by) * f)) for f in inv_freq]
    assert exact != rounded
    cos = f32([float(mpmath.cos(mpmath.mpf(float(r)))) for r in rounded])
    sin = f32([float(mpmath.sin(mpmath.mpf(float(r)))) for r in rounded])
    assert_same(shifted(k, np.array([by]), rope)[0, 0, :6], cos - sin)


# A model's chunks.


@pytest.mark.parametrize("config", [LLAMA_SMALL, QWEN2_SMALL])
def test_the_first_layer_of_a_model_moves_as_it_should(config: str) -> None:
    """Its k and v depend on token and position alone: v is the same, k but for rounding."""
    model = small(config)
    pool = model.new_pool(originals=True)
    old, new = tokens_of(50, 32), np.r_[tokens_of(50, 32)[:10], 1, 2, 3, tokens_of(50, 32)[15:]]
    source, target, fresh = KVCache(pool), KVCache(pool), KVCache(pool)
    model.forward(old, source)
    model.forward(new[:13], target)
    move(source, 15, 50, target, model.config.rope)
    model.forward(new, fresh)
    assert target.length == fresh.length == 48
    a, b = (cache.views()[0].stored(13, 48) for cache in (target, fresh))
    assert_same(a["v"], b["v"])
    assert np.abs(a["k"] - b["k"]).max() <= 1e-4 * np.abs(b["k"]).max()
    assert np.isfinite(model.forward([5], target)).all()


def test_source_and_target_may_share_pages_and_be_one() -> None:
    pool = new_pool("int8", (None, 100))
    source = filled(pool, 30)
    before = [view.stored(0, 30) for view in source.views()]
    target = source.fork()
    target.truncate(10)
    move(source, 15, 30, target, ROPE)
    apart = KVCache(pool)
    move(source, 0, 10, apart, ROPE)
    move(source, 15, 30, apart, ROPE)
    for view, kept in zip(source.views(), before, strict=True):
        assert same(view.stored(0, 30), kept)
    for one, two in zip(target.views(), apart.views(), strict=True):
        assert same(one.stored(0, 25), two.stored(0, 25))
    move(source, 5, 30, source, ROPE)
    for view, kept in zip(source.views(), before, strict=True):
        assert same(view.stored(0, 30), kept)
        moved, from_there = view.stored(30, 55), {n: x[:, 5:30] for n, x in kept.items()}
        assert (moved["shift"] == 25).all()
        assert_same(moved["v"], from_there["v"])


# What is refused, and leaves everything as it was.


def refused(
    error: type[Exception], text: str, source: KVCache, start: int, stop: int, target: KVCache,
    rope: RopeParameters = ROPE,
) -> None:  # fmt: skip
    pool = target.pool
    before = (target.length, [list(t.pages) for t in target.tables], pool.used_bytes)
    with pytest.raises(error, match=text):
        move(source, start, stop, target, rope)
    assert before == (target.length, [list(t.pages) for t in target.tables], pool.used_bytes)


def test_what_cannot_be_moved_is_refused() -> None:
    pool = new_pool(windows=(None, 5))
    source, target = filled(pool, 30), filled(pool, 3)
    dynamic = replace(ROPE, kind="dynamic", factor=2.0, original_max_positions=64)
    factors = (1.0,) * (ROPE.rotary_dim // 2)
    long = replace(dynamic, kind="longrope", short_factor=factors, long_factor=factors)
    for rope in (dynamic, long):
        refused(RequestError, f"keys of {rope.kind} rope", source, 5, 9, target, rope)
    refused(CacheError, "positions 5 to 31 are not all held", source, 5, 31, target)
    refused(CacheError, "one pool", filled(new_pool(windows=(None, 5)), 30), 5, 9, target)
    plain = PagePool(replace(pool.shape, originals=False))
    refused(CacheError, "keeps originals", filled(plain, 9), 2, 5, KVCache(plain))
    source.trim()
    refused(CacheError, "positions 23 to 30 are not all held", source, 23, 30, target)
    move(source, 24, 30, target, ROPE)
    assert target.length == 9


def test_a_pool_without_room_for_a_chunk() -> None:
    shape = PageShape(HEADS, WIDTH, (None,), 4, originals=True)
    pool = PagePool(shape, 10 * shape.layer_bytes())
    source = filled(pool, 30)
    target = filled(pool, 4)
    refused(CacheError, "raise cache_bytes", source, 10, 20, target)
    move(source, 10, 14, target, ROPE)


def test_a_move_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool(windows=(None, None, 9))
    source, target = filled(pool, 30), filled(pool, 3)
    put, left = LayerPages.put, [1]

    def failing(self: LayerPages, *arguments: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        put(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerPages, "put", failing)
    refused(MemoryError, "^$", source, 5, 20, target)
    monkeypatch.undo()
    move(source, 5, 20, target, ROPE)
