"""The router and the experts against the oracle and against transformers (SPEC 9.2, 9.3)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from reference import threads
from reference.arithmetic import matmul
from reference.errors import ConfigError
from reference.experts import (
    Router,
    Routing,
    Shared,
    by_expert,
    by_token,
    gates_of,
    moe,
    route,
)
from reference.feedforward import ACTIVATIONS, Function, gated_mlp
from reference.weights import linear
from tests.oracle import experts as oracle
from tests.oracle import layers, nasty
from tests.oracle.arrays import Float32, assert_bits, assert_same, f32


@dataclass(frozen=True)
class MoE:
    """A router and its experts, put together as a model does."""

    logits: Function
    router: Router
    experts: tuple[Function, ...]
    shared: Shared | None = None

    def __call__(self, x: Float32, trace: Callable[[Routing], object] | None = None) -> Float32:
        """(T, K) float32 -> (T, K) float32; `trace` is shown the routing."""
        routing = route(self.logits(x), self.router)
        if trace is not None:
            trace(routing)
        return moe(x, routing, self.experts, self.shared)


pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

INF, NAN = np.inf, np.nan


def normal(seed: int, *shape: int, spread: float = 1.0) -> Float32:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


# The router.

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 3, "score": "softmax"},
    "renormalised": {"top_k": 5, "score": "softmax", "renormalise": True},
    "logits": {"top_k": 4, "score": "logits"},
    "sigmoid": {"top_k": 4, "score": "sigmoid", "renormalise": True, "epsilon": 1e-20},
    "bare sigmoid": {"top_k": 2, "score": "sigmoid", "renormalise": True, "scale": 1.8},
    "best": {"top_k": 3, "score": "softmax", "groups": 4, "kept_groups": 2, "scale": 16.0},
    "best two": {"top_k": 6, "score": "sigmoid", "groups": 3, "kept_groups": 2, "group_best": 2},
    "logits in groups": {"top_k": 2, "score": "logits", "groups": 6, "group_best": 2},
    "all": {"top_k": 12, "score": "softmax", "renormalise": True},
    "all of the groups": {"top_k": 6, "score": "sigmoid", "groups": 2, "kept_groups": 1},
}


def hard_logits(seed: int, rows: int, experts: int) -> Float32:
    """Nasty rows, rows full of ties, and some that are not finite."""
    rng = np.random.default_rng(seed)
    ties = rng.integers(-2, 3, (rows, experts)) * rng.choice([-0.0, 1.0, 60.0], (rows, 1))
    near = 1 + rng.integers(0, 3, (rows, experts)) * 2.0**-23
    x = np.concatenate([nasty.matrix(rng, rows, experts), normal(seed, rows, experts), ties, near])
    x = nasty.with_specials(rng, x.astype(np.float32), 0.2)
    return np.where(rng.random(x.shape) < 0.05, f32(-INF), x)


def assert_routed(logits: Float32, router: Router, about: dict[str, Any], note: str = "") -> None:
    bias = router.selection_bias
    extra = {} if bias is None else {"selection_bias": nasty.tolist(bias)}
    found = route(logits, router)
    expected = [oracle.route(row, **about, **extra) for row in nasty.tolist(logits)]
    assert found.experts.dtype == np.int64
    assert found.experts.tolist() == [experts for experts, _, _ in expected], note
    assert_bits(found.gates, [gates for _, gates, _ in expected], f"{note} gates")
    assert_bits(found.margins, [margin for _, _, margin in expected], f"{note} margins")


@pytest.mark.parametrize("name", ROUTERS)
def test_route_is_the_oracles(name: str) -> None:
    about = ROUTERS[name]
    logits = hard_logits(len(name), 12, 12)
    assert_routed(logits, Router(12, **about), about, name)
    if about["score"] != "logits":
        for spread in (0.1, 3.0):
            bias = normal(5, 12, spread=spread)
            bias[3] = bias[7] = -2.0
            assert_routed(logits, Router(12, selection_bias=bias, **about), about, name)


def test_one_expert() -> None:
    for score in ("softmax", "sigmoid", "logits"):
        about: dict[str, Any] = {"top_k": 1, "score": score, "renormalise": True}
        assert_routed(f32([[3.0], [-INF], [NAN]]), Router(1, **about), about)


def test_equal_scores_go_to_the_lowest_index() -> None:
    equal = np.zeros((1, 300), np.float32)
    equal[0, 1::2] = -0.0
    for score in ("softmax", "sigmoid", "logits"):
        routing = route(equal, Router(300, 17, score))
        assert routing.experts[0].tolist() == list(range(17))
        assert_bits(routing.margins, [0.0])
    groups = Router(300, 17, "sigmoid", groups=10, kept_groups=3, group_best=2)
    assert route(equal, groups).experts[0].tolist() == list(range(17))


def test_experts_come_in_rank_order() -> None:
    logits = normal(3, 50, 20, spread=4.0)
    routing = route(logits, Router(20, 20, "logits"))
    assert (np.diff(np.take_along_axis(logits, routing.experts, axis=1)) <= 0).all()
    few = route(logits, Router(20, 6, "logits"))
    assert_same(few.experts, routing.experts[:, :6])


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = f32([[1.0, 0.0, -1.0, -2.0]])
    bias = f32([0.0, 0.0, 0.0, 5.0])
    plain = route(logits, Router(4, 4, "sigmoid"))
    biased = route(logits, Router(4, 2, "sigmoid", bias))
    assert biased.experts.tolist() == [[3, 0]]
    assert_same(biased.gates, plain.gates[:, [3, 0]])


def test_experts_of_dropped_groups_do_not_exist() -> None:
    # All scores plus bias are below zero: a mask of zeros would bring the dropped ones back.
    logits = normal(4, 200, 16)
    bias = normal(5, 16, spread=0.1) - np.float32(3)
    router = Router(16, 6, "sigmoid", bias, groups=4, kept_groups=2, group_best=2)
    routing = route(logits, router)
    assert all(len(set(row // 4)) <= 2 for row in routing.experts)
    # The best expert of all is not chosen where its group is dropped.
    lone = f32([[9, -9, -9, -9, 1, 1, 0, 0, 2, 2, 0, 0, -1, -1, -1, -1]])
    assert 0 not in route(lone, Router(16, 4, "sigmoid", None, 4, 2, 2)).experts
    assert 0 in route(lone, Router(16, 4, "sigmoid", None, 4, 2, 1)).experts


def test_gates_sum_up_in_rank_order() -> None:
    # The last two are lost one by one, but would count together; 1 / total is at a midpoint.
    scores = f32([[1.0, 2.0**-25, 2.0**-50, 2.0**-53, 2.0**-53]])
    router = Router(5, 5, "sigmoid", renormalise=True)
    assert_bits(gates_of(scores, router)[0, 0], 1.0)
    assert_bits(gates_of(scores[:, ::-1].copy(), router)[0, 4], 1 - 2.0**-24)


def test_what_cannot_be_routed() -> None:
    logits = normal(6, 6, 5)
    logits[0, 4], logits[1, 0], logits[2], logits[3, 1:] = NAN, INF, -INF, -INF
    for score in ("softmax", "sigmoid", "logits"):
        routing = route(logits, Router(5, 2, score))
        assert routing.experts[:3].tolist() == [[0, 1]] * 3
        assert np.isnan(routing.gates).any(axis=1).tolist() == [True] * 3 + [False] * 3
        assert_bits(routing.gates[:3], np.full((3, 2), NAN))
        assert_bits(routing.margins[:3], [NAN] * 3)
        assert routing.experts[3].tolist() == [0, 1]
        assert_bits(routing.gates[3, 1:], [0.0])
        clean = route(logits[4:], Router(5, 2, score))
        for name in ("experts", "gates", "margins"):
            assert_same(getattr(routing, name)[4:], getattr(clean, name))


def test_epsilon_is_added_to_the_sum() -> None:
    vanishing = f32([[-120.0, -130.0, -120.0]])
    for epsilon, gates in ((0.0, [NAN, NAN]), (1e-20, [0.0, 0.0])):
        router = Router(3, 2, "sigmoid", renormalise=True, epsilon=epsilon)
        assert_bits(route(vanishing, router).gates, [gates])
    halves = Router(2, 2, "sigmoid", renormalise=True, epsilon=1.0)
    assert_bits(route(f32([[0.0, 0.0]]), halves).gates, [[0.25, 0.25]])


def test_minus_infinity_comes_last() -> None:
    logits = f32([[-INF, -300.0, -INF, 0.0, -200.0]])
    bias = f32([9.0, 0.0, 9.0, 0.0, 0.0])
    for score in ("softmax", "sigmoid"):
        for b in (None, bias):
            routing = route(logits, Router(5, 4, score, b))
            assert routing.experts.tolist() == [[3, 1, 4, 0]]
            assert_bits(routing.margins, [0.0])
    assert route(logits, Router(5, 4, "logits")).experts.tolist() == [[3, 4, 1, 0]]


def test_margins_tell_how_far_a_choice_is_from_another() -> None:
    logits = normal(7, 300, 10)
    router = Router(10, 3, "logits")
    routing = route(logits, router)
    assert (routing.margins > 0).all()
    following = route(logits, Router(10, 4, "logits")).experts[:, 3]
    for share, same in ((0.999, True), (1.001, False)):
        moved = logits.copy()
        moved[np.arange(300), following] += routing.margins * np.float32(share)
        chosen = np.sort(route(moved, router).experts, axis=1)
        equal = (chosen == np.sort(routing.experts, axis=1)).all(axis=1)
        assert equal.mean() > 0.99 if same else equal.mean() < 0.01
    # Two groups that are as good: any rounding could choose the other.
    even = f32([[3.0, 1.0, 3.0, 0.0]])
    grouped = Router(4, 1, "logits", groups=2, kept_groups=1)
    assert_bits(route(even, grouped).margins, [0.0])
    assert_bits(route(even + f32([0, 0, -0.5, 0]), grouped).margins, [0.5])
    assert_bits(route(even, Router(4, 4, "logits")).margins, [INF])


def test_rows_are_routed_alone() -> None:
    logits = hard_logits(8, 10, 24)
    bias = normal(9, 24, spread=0.5)
    router = Router(24, 5, "sigmoid", bias, 6, 3, 2, True, 1e-20, 2.5)
    whole = route(logits, router)
    for t in range(len(logits)):
        alone = route(logits[t : t + 1], router)
        for name in ("experts", "gates", "margins"):
            assert_same(getattr(alone, name), getattr(whole, name)[t : t + 1])
    none = route(logits[:0], router)
    assert none.experts.shape == none.gates.shape == (0, 5)
    assert none.margins.shape == (0,)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 7}, "top_k"),
        ({"experts": 0}, "groups"),
        ({"groups": 5}, "groups"),
        ({"groups": 0}, "groups"),
        ({"groups": -1}, "groups"),
        ({"kept_groups": 5}, "kept_groups"),
        ({"kept_groups": 0}, "kept_groups"),
        ({"group_best": 0}, "group_best"),
        ({"group_best": 3}, "group_best"),
        ({"groups": 12, "kept_groups": 12, "group_best": 2}, "group_best"),
        ({"score": "tanh"}, "score"),
        ({"score": "logits", "selection_bias": np.zeros(12, np.float32)}, "selection_bias"),
        ({"selection_bias": np.zeros(11, np.float32)}, "selection_bias"),
        ({"selection_bias": np.full(12, NAN, np.float32)}, "selection_bias"),
        ({"epsilon": -1e-20}, "epsilon"),
        ({"epsilon": NAN}, "epsilon"),
        ({"scale": INF}, "scale"),
        ({"scale": 1e39}, "scale"),
        ({"scale": NAN}, "scale"),
    ],
)
def test_routers_that_contradict_themselves(changed: dict[str, Any], word: str) -> None:
    sound: dict[str, Any] = {"experts": 12, "top_k": 6, "groups": 4, "kept_groups": 2}
    Router(**sound)
    with pytest.raises(ConfigError, match=rf"^router: {word} [^\n]*$"):
        Router(**{**sound, **changed})


# The experts.


Weights = tuple[Float32, Float32, Float32]


def weights(seed: int, count: int, width: int, inner: int) -> list[Weights]:
    gates, ups = (normal(seed + i, count, inner, width) for i in (0, 1))
    return list(zip(gates, ups, normal(seed + 2, count, width, inner), strict=True))


def expert(gate: Float32, up: Float32, down: Float32, mode: Any = "float32") -> Function:
    gate_up = linear(np.concatenate([gate, up]), None, mode, "exact")
    last = linear(down, None, mode, "exact")
    return lambda x: gated_mlp(x, gate_up, last, ACTIVATIONS["silu"])


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


# Against transformers.

SIZES: dict[str, Any] = {"hidden_size": 40, "moe_intermediate_size": 24, "hidden_act": "silu"}
GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 2,
}
GROUPED: dict[str, Any] = {"top_k": 3, "groups": 4, "kept_groups": 2, "scale": 2.5}
BLOCKS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        "MixtralSparseMoeBlock",
        "MixtralConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
        {"top_k": 2, "renormalise": True},
    ),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock",
        "Qwen2MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 30,
        },
        {"top_k": 4},
    ),
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True},
        {"top_k": 4, "renormalise": True},
    ),
    "olmoe": (
        "OlmoeSparseMoeBlock",
        "OlmoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 24},
        {"top_k": 4},
    ),
    "deepseek_v2": (
        "DeepseekV2Moe",
        "DeepseekV2Config",
        {
            **GROUPS,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
        },
        GROUPED,
    ),
    "deepseek_v3": (
        "DeepseekV3MoE",
        "DeepseekV3Config",
        {
            **GROUPS,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
        {
            **GROUPED,
            "score": "sigmoid",
            "group_best": 2,
            "renormalise": True,
            "epsilon": 1e-20,
        },
    ),
}


def theirs(family: str, name: str, config: str, options: dict[str, Any]) -> Any:
    """A block of transformers with random weights, and the biases that its router may have."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import importlib

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    settings = getattr(importlib.import_module("transformers"), config)(**SIZES, **options)
    settings._experts_implementation = "eager"
    block = getattr(module, name)(settings).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*block.parameters(), *block.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return block


def array(tensor: Any) -> Float32:
    found: Float32 = tensor.detach().numpy()
    return found


def ours(block: Any, options: dict[str, Any]) -> MoE:
    """The same weights in our layer."""
    router = array(block.gate.weight)
    bias = getattr(block.gate, "e_score_correction_bias", None)
    both, down = array(block.experts.gate_up_proj), array(block.experts.down_proj)
    each = [expert(g[:24], g[24:], d) for g, d in zip(both, down, strict=True)]
    shared = None
    for name in ("shared_expert", "shared_experts"):
        if hasattr(block, name):
            mlp = getattr(block, name)
            projections = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            gate: Callable[[Float32], Float32] | None = None
            if hasattr(block, "shared_expert_gate"):
                weight = array(block.shared_expert_gate.weight)
                gate = linear(weight, None, "float32", "exact")
            shared = Shared(expert(*(array(p.weight) for p in projections)), gate)
    return MoE(
        linear(router, None, "float32", "exact"),
        Router(len(router), selection_bias=None if bias is None else array(bias), **options),
        tuple(each),
        shared,
    )


@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_of_transformers(family: str) -> None:
    name, config, settings, options = BLOCKS[family]
    torch = pytest.importorskip("torch")
    block = theirs(family, name, config, settings)
    layer = ours(block, options)
    x = normal(50, 200, 40)
    seen: list[Routing] = []
    found = layer(x, seen.append)
    with torch.no_grad():
        rows = torch.from_numpy(x)
        _, gates, experts = block.gate(rows)
        y = block(rows[None])[0].numpy()
    order = np.argsort(-array(gates), axis=1, kind="stable")
    mine = np.argsort(-seen[0].gates, axis=1, kind="stable")
    sure = seen[0].margins > 1e-4
    assert sure.mean() > 0.9
    for ours_, their in ((seen[0].experts, array(experts)), (seen[0].gates, array(gates))):
        same = np.isclose(
            np.take_along_axis(ours_, mine, 1), np.take_along_axis(their, order, 1), rtol=1e-5
        )
        assert same[sure].all()
    assert np.abs(found - y)[sure].max() < 1e-4 * np.abs(y).max()
    if options.get("groups"):
        assert (
            route(layer.logits(x), Router(8, options["top_k"])).experts != seen[0].experts
        ).any()


def test_the_router_of_gpt_oss() -> None:
    torch = pytest.importorskip("torch")
    options = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 24}
    router = theirs("gpt_oss", "GptOssTopKRouter", "GptOssConfig", options)
    x = normal(51, 200, 40)
    with torch.no_grad():
        _, gates, experts = router(torch.from_numpy(x))
    logits = linear(array(router.weight), array(router.bias), "float32", "exact")
    found = route(logits(x), Router(16, 4, "logits"))
    sure = found.margins > 1e-4
    assert sure.mean() > 0.9
    assert_same(found.experts[sure], array(experts)[sure])
    assert np.allclose(found.gates[sure], array(gates)[sure], rtol=1e-5)
