"""The router against the oracle, and what it does with ties, groups and NaN (SPEC 9.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.errors import ConfigError
from reference.experts import Router, gates_of, route
from tests.oracle import experts as oracle
from tests.oracle import nasty
from tests.oracle.arrays import Float32, assert_bits, assert_same, f32
from tests.reference.experts.layer import INF, NAN, normal

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

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
