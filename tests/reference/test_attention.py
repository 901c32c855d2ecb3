"""Exact attention against the oracle, fast attention against its bound (SPEC 8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference import attention as module
from reference import threads
from reference.attention import attention_exact, attention_fast, default_scale
from tests.oracle import attention as oracle
from tests.oracle import nasty
from tests.oracle.arrays import Float32, assert_bits, assert_same, bits, f32
from tests.oracle.strategies import lists

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

Inputs = tuple[Float32, Float32, Float32]
Float64 = NDArray[np.float64]

LANES = {"exact": attention_exact, "fast": attention_fast}
MIXED_SINKS = f32([-np.inf, 0.0, 20.0, -3.5])


def inputs(
    seed: int, rows: int, length: int, heads: int, kv_heads: int, width: int, spread: float = 2.0
) -> Inputs:
    """Normal q, k, v."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, heads, width)) * spread
    k, v = (rng.standard_normal((length, kv_heads, width)) for _ in range(2))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def hard(seed: int, rows: int, length: int, heads: int, kv_heads: int, width: int) -> Inputs:
    """q, k of moderate rows and v of every kind, so that scores are finite and values are hard."""
    rng = np.random.default_rng(seed)
    kinds = ("normal", "subnormal", "halves", "zero blocks", "spike", "signed zeros", "cancelling")

    def moderate(count: int) -> Float32:
        picked = rng.integers(0, len(kinds), count)
        return np.stack([nasty.row(rng, kinds[int(i)], width) for i in picked])

    q = moderate(rows * heads).reshape(rows, heads, width)
    k = moderate(length * kv_heads).reshape(length, kv_heads, width)
    v = nasty.matrix(rng, length * kv_heads, width).reshape(length, kv_heads, width)
    v[rng.random(length) < 0.15] = 0
    return q, k, v


def expected(q: Float32, k: Float32, v: Float32, **options: Any) -> Any:
    sinks = options.pop("sinks", None)
    return oracle.attention(
        nasty.tolist(q),
        nasty.tolist(k),
        nasty.tolist(v),
        sinks=None if sinks is None else nasty.tolist(sinks),
        **options,
    )


def check(q: Float32, k: Float32, v: Float32, **options: Any) -> Float32:
    found = attention_exact(q, k, v, **options)
    assert_bits(found, expected(q, k, v, **options), str(options))
    return found


# 8.2 exact


@pytest.mark.parametrize("width", [1, 31, 32, 33, 48, 64])
def test_exact_is_the_oracles(width: int) -> None:
    check(*inputs(width, 3, 35, 2, 1, width))
    check(*hard(width, 2, 40, 1, 1, width))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_exact_with_groups_of_heads(heads: int, kv_heads: int) -> None:
    check(*inputs(heads, 3, 20, heads, kv_heads, 8))


@pytest.mark.parametrize("window", [1, 2, 5, 31, 32, 33, 64, 1000])
def test_exact_with_a_window(window: int) -> None:
    check(*inputs(window, 3, 68, 2, 1, 8), window=window)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_exact_with_a_softcap(softcap: float) -> None:
    check(*inputs(3, 2, 20, 2, 2, 8, spread=10.0), softcap=softcap)


@pytest.mark.parametrize("scale", [1.0, 0.3, -0.5, 0.0, 2.0**-40])
def test_exact_with_a_scale(scale: float) -> None:
    check(*inputs(4, 2, 20, 2, 2, 8), scale=float(np.float32(scale)))


def test_the_default_scale_is_a_float64_quotient() -> None:
    widths = range(1, 600)
    assert_bits([default_scale(d) for d in widths], [oracle.default_scale(d) for d in widths])


def test_the_output_is_a_quotient_rounded_to_float32() -> None:
    """q = 0, and n values whose mean lies halfway between two float32 just below 2."""
    for n in range(3, 64):
        for odd, even in ((1, 2.0), (3, 2 - 2.0**-22)):
            v = np.full((n, 1, 1), 2.0, np.float32)
            v[:2, 0, 0] = 4, -n * odd * 2.0**-24
            found = attention_exact(np.zeros((1, 1, 1), np.float32), v, v)
            assert_bits(found, [[[even]]], f"{n}")


def test_exact_with_sinks() -> None:
    q, k, v = inputs(5, 3, 40, 4, 2, 16)
    check(q, k, v, sinks=MIXED_SINKS)
    check(q, k, v, sinks=MIXED_SINKS, window=7, softcap=3.0)
    plain = attention_exact(q, k, v)
    assert_same(attention_exact(q, k, v, sinks=np.full(4, -np.inf, np.float32)), plain)
    assert_same(attention_exact(q, k, v, sinks=MIXED_SINKS)[:, 0], plain[:, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("lane", LANES)
def test_a_bad_sink_spoils_its_head_alone(lane: str, bad: float) -> None:
    q, k, v = inputs(6, 3, 40, 4, 2, 16)
    clean = LANES[lane](q, k, v, sinks=f32([0, 1, 2, 3]))
    clean[:, 2] = np.nan
    assert_bits(LANES[lane](q, k, v, sinks=f32([0, 1, bad, 3])), clean)


@pytest.mark.parametrize("sink", [200.0, 3e38, -200.0, -3e38])
def test_exact_with_extreme_sinks(sink: float) -> None:
    check(*inputs(7, 2, 10, 1, 1, 4), sinks=f32([sink]))


@settings(max_examples=40)
@given(st.data())
def test_exact_on_anything(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    length = data.draw(st.integers(rows, 36))
    width = data.draw(st.integers(1, 3))
    q, k, v = (
        f32(data.draw(lists(count * width, count * width))).reshape(count, 1, width)
        for count in (rows, length, length)
    )
    window = data.draw(st.sampled_from([None, 1, 3, 32]))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    sinks = data.draw(st.sampled_from([None, f32([0.25])]))
    check(q, k, v, window=window, softcap=softcap, sinks=sinks)


def test_huge_scores() -> None:
    q, k, v = inputs(8, 4, 12, 1, 1, 4)
    q *= np.float32(2.0**60)
    k *= np.float32(2.0**60)
    found = check(q, k, v)  # one key takes all
    assert np.isfinite(found).all()
    q[1] *= np.float32(2.0**10)
    found = check(q, k, v)  # RN32(s) overflows for some pair: the row has no value
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2, 3]]).all()
    check(q, k, v, scale=2.0**-60)


def test_a_score_that_overflows_out_of_sight_is_harmless() -> None:
    q, k, v = inputs(9, 3, 3, 1, 1, 4)
    k[2] = 3e38
    q[:] = np.abs(q) * np.float32(100)
    found = check(q, k, v)
    assert np.isfinite(found[:2]).all()
    assert np.isnan(found[2]).all()


def test_zero_value_rows_stay_out_of_the_grid_but_count() -> None:
    q, k, v = inputs(10, 2, 40, 1, 1, 5)
    v[::2] = 0
    v[1] = -0.0
    check(q, k, v)
    assert_bits(attention_exact(q, k, np.zeros_like(v)), np.zeros((2, 1, 5)))
    # A zero row with nearly all the weight must not round the others away.
    q, k = f32([[[1.0]]]), f32([[[0.0]], [[-18.0]]])
    v = f32([[[0.0]], [[1.0 + 2.0**-23]]])
    check(q, k, v)
    assert check(q, k, v).ravel()[0] != 0


def test_probabilities_that_underflow() -> None:
    q = f32([[[1.0]]])
    for low in (-87.4, -103.9, -104.1, -3e38):
        k, v = f32([[[0.0]], [[low]]]), f32([[[0.0]], [[3e38]]])
        check(q, k, v)
        check(q, k, v[::-1].copy())


def test_blocks_fall_at_absolute_positions() -> None:
    """The same visible keys and values, but cut into blocks elsewhere, may differ in bits."""
    q, k, v = inputs(11, 1, 100, 1, 1, 8, spread=4.0)
    windowed = attention_exact(q, k, v, window=50)
    assert_bits(windowed, expected(q, k, v, window=50))
    aligned = attention_exact(q, k[32:], v[32:], window=50)
    assert_same(aligned, windowed)
    differs = 0
    for seed in range(20):
        q, k, v = inputs(seed, 1, 100, 1, 1, 8, spread=4.0)
        shifted = attention_exact(q, k[50:], v[50:])
        assert_bits(shifted, expected(q, k[50:], v[50:]))
        differs += int((shifted != attention_exact(q, k, v, window=50)).any())
    assert differs


# 8.1 what is visible


@pytest.mark.parametrize("lane", LANES)
def test_a_row_that_sees_nothing_is_plus_zero(lane: str) -> None:
    q, k, v = inputs(23, 3, 2, 1, 1, 4)  # the first of three rows lies before the two keys
    found = LANES[lane](q, k, v)
    assert_bits(found[0], np.zeros((1, 4)))
    assert_same(found[1:], LANES[lane](q[1:], k, v))
    assert_bits(LANES[lane](q[1:], k, v, window=0), np.zeros((2, 1, 4)))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("window", [1, 4, 31, 32, 33])
def test_one_hot_values_show_the_attended_set(lane: str, window: int) -> None:
    """q = 0 weighs all visible keys alike; v_j is the j-th unit vector."""
    for length in (window - 1, window, window + 1, 70):
        if length < 1:
            continue
        q = np.zeros((length, 1, length), np.float32)
        k = np.ones((length, 1, length), np.float32)
        v = np.eye(length, dtype=np.float32)[:, None]
        for limit in (window, None):
            t, j = np.arange(length)[:, None], np.arange(length)
            visible = (j <= t) & (j > t - window if limit else True)
            shares = np.where(visible, (1 / visible.sum(1, keepdims=True)), 0)
            assert_bits(LANES[lane](q, k, v, window=limit)[:, 0].copy(), shares.astype(np.float32))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_visible_is_never_read(lane: str, poison: float) -> None:
    q, k, v = inputs(12, 40, 70, 4, 2, 16)
    run = LANES[lane]
    clean = run(q, k, v, window=9)
    k[:22], v[:22] = poison, poison  # the first row is at position 30 and sees 22..30
    assert_same(run(q, k, v, window=9), clean)
    # The future: position 60 is seen by the rows at 60..68 alone.
    k[60], v[60] = poison, poison
    found = run(q, k, v, window=9)
    hidden = np.r_[0:30, 39:40]
    assert_same(found[hidden], clean[hidden])
    if not np.isfinite(poison):
        assert (bits(found[30:39].copy()) == 0x7FC00000).all()


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_non_finite_operand_spoils_who_sees_it(lane: str, special: float, where: str) -> None:
    q, k, v = inputs(13, 10, 12, 4, 2, 16)
    run = LANES[lane]
    clean = run(q, k, v)
    {"q": q[4, 1], "k": k[6, 1], "v": v[6, 1]}[where][3] = special
    if where == "q":
        clean[4, 1] = np.nan
    else:
        clean[4:, 2:] = np.nan  # row 4 is at position 6, and heads 2 and 3 read kv head 1
    assert_bits(run(q, k, v), clean)


def test_a_value_of_no_weight_still_spoils() -> None:
    q = f32([[[1.0]]])
    k, v = f32([[[0.0]], [[-300.0]]]), f32([[[1.0]], [[np.inf]]])
    check(q, k, v)
    assert np.isnan(attention_exact(q, k, v)).all()


# A row depends on its own q and what it sees


@pytest.mark.parametrize("options", [{}, {"window": 21, "softcap": 4.0, "sinks": MIXED_SINKS}])
def test_rows_do_not_know_each_other(options: dict[str, Any]) -> None:
    q, k, v = inputs(14, 90, 130, 4, 2, 24)
    whole = attention_exact(q, k, v, **options)
    for t in (0, 1, 44, 89):
        end = 41 + t
        alone = attention_exact(q[t : t + 1], k[:end], v[:end], **options)
        assert_same(alone, whole[t : t + 1])
    for start in range(0, 90, 17):
        stop = min(start + 17, 90)
        chunk = attention_exact(q[start:stop], k[: 40 + stop], v[: 40 + stop], **options)
        assert_same(chunk, whole[start:stop])


def test_extending_a_sequence_changes_no_earlier_row() -> None:
    q, k, v = inputs(15, 100, 100, 2, 1, 16)
    whole = attention_exact(q, k, v)
    for end in (1, 31, 32, 33, 64, 99):
        assert_same(attention_exact(q[:end], k[:end], v[:end]), whole[:end])


def test_heads_do_not_know_each_other() -> None:
    q, k, v = inputs(16, 20, 30, 6, 3, 16)
    whole = attention_exact(q, k, v, sinks=np.arange(6, dtype=np.float32))
    for h in range(6):
        alone = attention_exact(
            q[:, h : h + 1], k[:, h // 2 : h // 2 + 1], v[:, h // 2 : h // 2 + 1],
            sinks=f32([h]),
        )  # fmt: skip
        assert_same(alone, whole[:, h : h + 1])


@pytest.mark.parametrize("tile", [1, 1000, 5000])
def test_tiles_and_threads_leave_every_bit(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(17, 60, 90, 4, 2, 24)
    whole = attention_exact(q, k, v, window=40)
    monkeypatch.setattr(module, "EXACT_TILE", tile)
    monkeypatch.setattr(module, "EXACT_SHARED", 0)
    for count in (1, 2):
        for place in (module, threads):
            monkeypatch.setattr(place, "thread_count", lambda count=count: count)
        with threadpoolctl.threadpool_limits(count, user_api="blas"):
            assert_same(attention_exact(q, k, v, window=40), whole)


def test_a_permutation_within_blocks_leaves_every_bit() -> None:
    q, k, v = inputs(18, 1, 96, 2, 1, 64)
    whole = attention_exact(q, k, v)
    rng = np.random.default_rng(18)
    for _ in range(5):
        keys = np.concatenate([32 * b + rng.permutation(32) for b in range(3)])
        assert_same(attention_exact(q, k[keys], v[keys]), whole)
        across = np.concatenate([32 * b + rng.permutation(32) for b in range(2)])
        assert_same(attention_exact(q[..., across], k[..., across], v), whole)
        columns = rng.permutation(64)
        assert_same(attention_exact(q, k, v[..., columns]), whole[..., columns])


def test_inputs_are_left_alone_and_need_not_be_contiguous() -> None:
    q, k, v = inputs(19, 10, 12, 4, 2, 16)
    kept = [x.copy() for x in (q, k, v)]
    for run in LANES.values():
        whole = run(q, k, v)
        views = (np.asfortranarray(q), np.repeat(k, 2, axis=0)[::2], v[..., ::-1])
        assert_same(run(*views), run(q, k, np.ascontiguousarray(v[..., ::-1])))
        assert_same(run(q, k, v), whole)
    for x, before in zip((q, k, v), kept, strict=True):
        assert_same(x, before)


# 8.3 fast


@dataclass(frozen=True)
class Real:
    """Attention in float64; float32's bound around it; the distance of the exact lane from it."""

    value: Float64
    bound: Float64
    distance: Float64


def real(
    q: Float32,
    k: Float32,
    v: Float32,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float32 | None = None,
) -> Real:
    heads = q.shape[1]
    group = heads // k.shape[1]
    found = [
        real_head(
            q[:, h].astype(np.float64),
            k[:, h // group].astype(np.float64),
            v[:, h // group].astype(np.float64),
            window,
            softcap,
            -np.inf if sinks is None else float(sinks[h]),
        )
        for h in range(heads)
    ]
    return Real(*(np.stack(parts, axis=1) for parts in zip(*found, strict=True)))


def real_head(
    q: Float64, k: Float64, v: Float64, window: int | None, softcap: float | None, sink: float
) -> tuple[Float64, Float64, Float64]:
    """One head: the terms of SPEC 16.6, and what alignment adds.

    An aligned element is off by u times the largest of its grid, where float32 is off by u times
    itself. So the distance is the gauge with block maxima in place of absolute values.
    """
    u, width, length = 2.0**-24, q.shape[1], len(k)
    back = np.arange(length - len(q), length)[:, None] - np.arange(length)
    visible = (back >= 0) & (back < (window or length))
    scale = float(oracle.default_scale(width))
    t = q @ k.T * scale
    s = np.where(visible, t if softcap is None else softcap * np.tanh(t / softcap), -np.inf)
    m = np.maximum(s.max(axis=1, keepdims=True), sink)
    p = np.exp(s - m)
    den = p.sum(axis=1, keepdims=True) + np.exp(sink - m)
    share = p / den
    out = share @ v

    def spread(x: Float64) -> Float64:
        """sum_j P_j (|v_jd| + |out_d|) x_j: a change x_j of every score, in the output."""
        weight = share * np.where(visible, x, 0)
        total: Float64 = weight @ np.abs(v) + weight.sum(axis=1, keepdims=True) * np.abs(out)
        return total

    def dot_model(terms: int) -> float:
        return min(terms + 1, 7 * math.sqrt(terms) + 1) * u

    far = np.where(visible, np.abs(s - m), 0)
    values = share @ np.abs(v) + np.abs(out)
    bound = spread(np.abs(q) @ np.abs(k).T * scale) * dot_model(width)
    bound += spread(np.abs(t) + far + 1) * 4 * u + values * dot_model(length) + 2.0**-140

    off = np.zeros_like(t)
    for b in range(0, width, 32):
        left, right = np.abs(q[:, b : b + 32]), np.abs(k[:, b : b + 32])
        off += left.max(axis=1, keepdims=True) * right.sum(axis=1)
        off += left.sum(axis=1, keepdims=True) * right.max(axis=1)
    peak = 2 * np.abs(v).max(axis=1)
    distance = spread(off * scale + np.abs(t) + far + 1) * 2 * u + u * np.abs(out) + 2.0**-140
    distance += (share @ peak)[:, None] * u
    for b in range(0, length, 32):
        here = share[:, b : b + 32]
        heaviest = (here * peak[b : b + 32]).max(axis=1, keepdims=True)
        distance += 32 * u * (heaviest + here.max(axis=1, keepdims=True) * np.abs(out))
    return out, bound, distance


CONFIGURATIONS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((1, 1, 1, 1, 1), {}),
    ((40, 40, 4, 2, 33), {}),
    ((30, 70, 2, 1, 64), {"window": 9}),
    ((700, 700, 2, 1, 8), {}),
    ((5, 1100, 2, 2, 16), {"window": 600}),
    ((40, 60, 4, 4, 16), {"sinks": MIXED_SINKS}),
    ((40, 60, 4, 2, 16), {"softcap": 3.0, "sinks": MIXED_SINKS, "window": 20}),
]


@pytest.mark.parametrize(("shape", "options"), CONFIGURATIONS)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_both_lanes_are_within_the_bound(
    shape: tuple[int, int, int, int, int], options: dict[str, Any], spread: float
) -> None:
    q, k, v = inputs(20, *shape, spread=spread)
    exact, fast = (run(q, k, v, **options).astype(np.float64) for run in LANES.values())
    true = real(q, k, v, **options)
    assert (np.abs(exact - true.value) <= true.distance).all()
    assert (np.abs(fast - exact) <= true.bound + true.distance).all()


@pytest.mark.parametrize(("shape", "options"), CONFIGURATIONS[1:])
def test_a_dropped_key_leaves_the_bound(
    shape: tuple[int, int, int, int, int], options: dict[str, Any]
) -> None:
    q, k, v = inputs(21, *shape, spread=1.0)
    true = real(q, k, v, **options)
    k[-2], v[-2] = k[-1], v[-1]
    for run in LANES.values():
        error = np.abs(run(q, k, v, **options) - true.value)[-1]
        assert (error > (true.bound + true.distance)[-1]).any()


@pytest.mark.parametrize("seed", range(12))
def test_fast_is_a_number_wherever_exact_is(seed: int) -> None:
    q, k, v = hard(seed, 8, 40, 4, 2, 16)
    v = np.clip(v, -1e36, 1e36)
    options: dict[str, Any] = {"sinks": MIXED_SINKS} if seed % 2 else {"window": 5}
    if seed % 3 == 0:
        options["softcap"] = 2.0
    exact, fast = attention_exact(q, k, v, **options), attention_fast(q, k, v, **options)
    assert np.isfinite(exact).all()
    assert np.isfinite(fast).all()


@pytest.mark.parametrize("lane", LANES)
def test_far_scores_give_one_key_all(lane: str) -> None:
    q = f32([[[1.0]], [[-1.0]]])
    k = f32([[[3e4]], [[-3e4]]])
    v = f32([[[5.0]], [[7.0]]])
    assert_bits(LANES[lane](q, k, v), [[[5.0]], [[7.0]]])


@pytest.mark.parametrize("tile", [64, 3000])
@pytest.mark.parametrize("keys", [1, 7, 100])
def test_fast_tiles_stay_within_the_bound(
    tile: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAST_TILE", tile)
    monkeypatch.setattr(module, "FAST_SIDE", keys)
    q, k, v = inputs(22, 30, 50, 4, 2, 16)
    configurations: list[dict[str, Any]] = [{}, {"window": 9, "sinks": MIXED_SINKS}]
    for options in configurations:
        true = real(q, k, v, **options)
        found = attention_fast(q, k, v, **options)
        assert (np.abs(found - true.value) <= true.bound).all()
