"""The sum over experts against the oracle, by token and by expert (SPEC 9.3)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from reference import threads
from reference.arithmetic import matmul
from reference.experts import Router, Routing, Shared, by_expert, by_token, moe, route
from reference.feedforward import Function
from reference.weights import linear
from tests.oracle import experts as oracle
from tests.oracle import layers, nasty
from tests.oracle.arrays import Float32, assert_bits, assert_same, f32
from tests.reference.experts.layer import INF, NAN, MoE, expert, normal, weights

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def oracles(gate: Float32, up: Float32, down: Float32) -> oracle.Layer:
    g, u, d = (layers.linear(nasty.tolist(w)) for w in (gate, up, down))
    return lambda row: layers.gated_mlp(row, g, u, d, "silu")


def routing(chosen: Any, gates: Any) -> Routing:
    gates = f32(gates)
    return Routing(np.array(chosen, np.int64), gates, np.zeros(len(gates), np.float32))


def drawn(seed: int, tokens: int, experts: int, k: int) -> Routing:
    return route(normal(seed, tokens, experts), Router(experts, k, renormalise=True))


def test_moe_is_the_oracles() -> None:
    w = weights(10, 4, 33, 12)
    x = np.concatenate([normal(11, 4, 33), nasty.matrix(np.random.default_rng(12), 4, 33)])
    router, own = normal(13, 1, 33), weights(14, 1, 33, 17)[0]
    r = drawn(15, 8, 4, 3)
    gate = layers.linear(nasty.tolist(router))
    shares = {
        "none": (None, (None, None)),
        "plain": (Shared(expert(*own)), (oracles(*own), None)),
        "gated": (Shared(expert(*own), lambda x: matmul(x, router)), (oracles(*own), gate)),
    }
    for name, (shared, expected) in shares.items():
        rows = zip(nasty.tolist(x), r.experts.tolist(), nasty.tolist(r.gates), strict=True)
        each = [oracles(*v) for v in w]
        wanted = [oracle.moe(row, e, g, each, *expected) for row, e, g in rows]
        found = moe(x, r, [expert(*v) for v in w], shared)
        assert_bits(found, wanted, name)


@pytest.mark.parametrize("mode", ["float32", "int4", "int4-row"])
def test_by_token_and_by_expert_are_the_same_bits(mode: str) -> None:
    experts = [expert(*w, mode=mode) for w in weights(20, 8, 64, 48)]
    x = np.concatenate([nasty.matrix(np.random.default_rng(21), 20, 64), normal(21, 20, 64)])
    x[27, 3] = NAN
    r = drawn(22, 40, 8, 3)
    tokens, gathered = by_token(x, r.experts, experts), by_expert(x, r.experts, experts)
    assert tokens.shape == (40, 3, 64)
    assert_same(tokens, gathered)
    shared = Shared(experts[0], lambda x: matmul(x, f32(np.ones((1, 64)))))
    whole = moe(x, r, experts, shared)
    for t in range(40):
        one = Routing(r.experts[t : t + 1], r.gates[t : t + 1], r.margins[t : t + 1])
        assert_same(moe(x[t : t + 1], one, experts, shared), whole[t : t + 1])
    assert np.isnan(whole[27]).all()
    assert np.isfinite(whole[20:]).all(axis=1).tolist() == [t != 27 for t in range(20, 40)]


def test_neither_threads_nor_chunks_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = [expert(*w) for w in weights(23, 6, 96, 64)]
    x, r = normal(24, 70, 96), drawn(25, 70, 6, 2)
    whole = moe(x, r, experts)
    parts = [
        moe(x[s], Routing(r.experts[s], r.gates[s], r.margins[s]), experts)
        for s in (slice(0, 1), slice(1, 33), slice(33, 70))
    ]
    assert_same(np.concatenate(parts), whole)
    for count in (1, 2, 5):
        monkeypatch.setattr(threads, "thread_count", lambda count=count: count)
        assert_same(moe(x, r, experts), whole)


def test_an_expert_is_called_once_and_only_for_its_tokens() -> None:
    calls: dict[int, list[list[float]]] = {e: [] for e in range(6)}
    lock = threading.Lock()

    def recorded(e: int) -> Function:
        def compute(x: Float32) -> Float32:
            with lock:
                calls[e].append(x[:, 0].tolist())
            return x

        return compute

    x = f32([[10.0], [11.0], [12.0], [13.0]])
    r = routing([[0, 3], [3, 5], [3, 0], [0, 3]], np.ones((4, 2)))
    moe(x, r, [recorded(e) for e in range(6)])
    assert calls == {0: [[10, 12, 13]], 1: [], 2: [], 3: [[10, 11, 12, 13]], 4: [], 5: [[11]]}
    moe(x[:1], routing([[4, 1]], [[1, 1]]), [recorded(e) for e in range(6)])
    assert calls[4] == calls[1] == [[10]]


def test_no_token_at_all() -> None:
    empty = moe(normal(1, 0, 4), routing(np.zeros((0, 2)), np.zeros((0, 2))), [lambda x: x])
    assert empty.shape == (0, 4)


def times(factor: float) -> Function:
    return lambda x: x * np.float32(factor)


def test_the_sum_is_in_rank_order_and_the_shared_expert_last() -> None:
    one, experts = f32([[1.0]]), [times(1.0), times(2.0**24), times(-(2.0**24))]
    both = f32([[1.0], [1.0]])  # two rows go by expert, one by token
    for chosen, shared, wanted in (
        ([1, 0, 2], None, 0.0),
        ([1, 2, 0], None, 1.0),
        ([0, 1, 2], None, 0.0),
        ([1, 2], Shared(times(1.0)), 1.0),
        ([1, 0], Shared(times(-(2.0**24))), 0.0),
        ([1, 2], Shared(times(3.0), lambda x: x * 0), 1.5),
    ):
        gates = np.ones((1, len(chosen)))
        assert_bits(moe(one, routing([chosen], gates), experts, shared), [[wanted]])
        twice = routing([chosen] * 2, np.repeat(gates, 2, axis=0))
        assert_bits(moe(both, twice, experts, shared), [[wanted]] * 2)


def test_gate_and_output_are_rounded_before_they_are_added() -> None:
    x, gates = normal(60, 1, 100), f32([[0.3, 0.7]])
    found = moe(x, routing([[0, 1]], gates), [times(1.1), times(-0.9)])
    first, second = x * f32(1.1) * gates[0, 0], x * f32(-0.9) * gates[0, 1]
    assert_same(found, first + second)
    exact = (x * f32(-0.9)).astype(np.float64) * np.float64(gates[0, 1])
    assert (found != (first + exact).astype(np.float32)).any(), "a fused addition would not show"


def test_sums_start_at_plus_zero() -> None:
    found = moe(f32([[-0.0]]), routing([[0, 1]], [[1.0, 0.0]]), [times(1.0), times(1.0)])
    assert_bits(found, [[0.0]])


def test_what_is_not_finite_spoils_its_own_row() -> None:
    experts = [expert(*w) for w in weights(30, 4, 20, 16)]
    experts[3] = lambda x: x * f32(INF)
    x, r = normal(31, 6, 20), drawn(32, 6, 3, 2)
    clean = moe(x, r, experts)
    spoiled, gates = x.copy(), r.gates.copy()
    spoiled[0, 0], gates[1], gates[2, 1] = INF, NAN, INF
    found = moe(spoiled, Routing(r.experts, gates, r.margins), experts)
    assert_bits(found[:2], np.full((2, 20), NAN))
    assert np.isinf(found[2]).all()
    assert_same(found[3:], clean[3:])
    # Zero times infinity, and infinity minus infinity.
    assert_bits(moe(f32([[1.0]]), routing([[3]], [[0.0]]), experts), [[NAN]])
    assert_bits(moe(f32([[1.0]]), routing([[3, 3]], [[1.0, -1.0]]), experts), [[NAN]])
    assert_bits(Shared(experts[3], times(-200.0))(f32([[1.0]])), [[NAN]])


def test_a_layer_routes_and_can_be_traced() -> None:
    router, w = normal(40, 5, 24), weights(41, 5, 24, 16)
    x = normal(42, 7, 24)
    x[2, 5] = NAN
    layer = MoE(
        linear(router, None, "float32", "exact"),
        Router(5, 2, renormalise=True),
        tuple(expert(*v) for v in w),
    )
    seen: list[Routing] = []
    y = layer(x, seen.append)
    expected = route(matmul(x, router), layer.router)
    assert len(seen) == 1
    for name in ("experts", "gates", "margins"):
        assert_same(getattr(seen[0], name), getattr(expected, name))
    assert_same(y, moe(x, expected, layer.experts))
    assert_same(layer(x), y)
    assert np.isnan(y).all(axis=1).tolist() == [t == 2 for t in range(7)]
