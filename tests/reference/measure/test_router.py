"""Flips of routers against plain loops, and the arm that does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.generator import integers
from reference.errors import RequestError
from reference.experts import Router, Routing, route
from reference.measure.router import ARMS, BASE, EDGES, NOTHING, Arm, Tracing, flips, joined, load
from reference.model import Model, load_model

FAMILIES = Path(__file__).parents[3] / "fixtures" / "families"
SPARSE = ("gpt-oss", "mellum", "mixtral", "olmoe", "qwen2-moe", "qwen3-moe")


@cache
def model(name: str, **options: Any) -> Model:
    return load_model(FAMILIES / name, **options)


def tracing(
    name: str = "qwen2-moe", arm: Arm = BASE, context: int = 20, count: int = 45
) -> Tracing:
    loaded = model(name, weights=arm.weights, arithmetic=arm.arithmetic)
    return Tracing(loaded, integers("router", 48, count), context, arm)


def decisions(traced: Tracing) -> dict[int, Routing]:
    windows = list(traced.run())
    return {layer: joined([window[layer] for window in windows]) for layer in windows[0]}


def routing(experts: Sequence[Sequence[int]], margins: Sequence[float]) -> Routing:
    chosen = np.array(experts, np.int64)
    return Routing(chosen, np.ones(chosen.shape, np.float32), np.array(margins, np.float32))


# what is counted


def test_another_order_is_no_flip_and_bins_hold_their_lower_edges() -> None:
    base = routing([[0, 1], [2, 3], [0, 1], [4, 5], [0, 2]], [0.0, 1e-6, 0.1, 2.0, np.inf])
    other = routing([[1, 0], [2, 4], [0, 1], [1, 0], [0, 2]], [9.0] * 5)
    found = flips(base, other)
    assert (found["decisions"], found["flips"], found["share"]) == (5, 2, 0.4)
    assert found["calls"] == 3 / 10
    assert found["largest"] == 2.0
    assert found["bin_decisions"] == [1, 1, 0, 0, 0, 0, 3]
    assert found["bin_flips"] == [0, 1, 0, 0, 0, 0, 1]
    assert found["moved"] == np.float32(9.0)  # the third one's is 8.9, an infinite margin's none
    assert (flips(base, base)["largest"], flips(base, base)["moved"]) == (None, 0.0)
    two = routing([[0], [1]], [1.0, 1.0])
    assert flips(two, routing([[1], [0]], [1.0, 1.0]))["moved"] is None


@given(st.integers(1, 40), st.integers(2, 7), st.data())
def test_flips_are_those_of_plain_loops(count: int, experts: int, data: Any) -> None:
    k = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    sets = [[rng.permutation(experts)[:k].tolist() for _ in range(count)] for _ in "ab"]
    margins = (10.0 ** rng.uniform(-8, 1, count)).astype(np.float32).tolist()
    found = flips(routing(sets[0], margins), routing(sets[1], [0.0] * count))
    flipped = [set(a) != set(b) for a, b in zip(*sets, strict=True)]
    edges = [0.0, *(float(np.float32(edge)) for edge in EDGES), float("inf")]
    inside = [[low <= m < high for m in margins] for low, high in pairwise(edges)]
    assert found["flips"] == sum(flipped)
    assert found["calls"] == pytest.approx(
        sum(len(set(a) - set(b)) for a, b in zip(*sets, strict=True)) / (count * k)
    )
    assert found["bin_decisions"] == [sum(here) for here in inside]
    assert found["bin_flips"] == [
        sum(f for f, h in zip(flipped, here, strict=True) if h) for here in inside
    ]
    shares = load(routing(sets[0], margins), experts)
    calls = [e for chosen in sets[0] for e in chosen]
    assert shares == pytest.approx([calls.count(e) / len(calls) for e in range(experts)])


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([1e-6, 1e-3, 0.1]))
def test_no_decision_flips_whose_margin_is_twice_what_scores_move(seed: int, by: float) -> None:
    """c of rank k falls by no more than the largest change, and the next rises by no more."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((200, 8)).astype(np.float32)
    moved = logits + by * rng.uniform(-1, 1, logits.shape).astype(np.float32)
    router = Router(8, 3, "logits")
    largest = flips(route(logits, router), route(moved, router))["largest"]
    change = float(np.abs(moved.astype(np.float64) - logits).max())
    assert largest is None or largest <= 2 * change + 1e-6  # the margin is rounded, near 4 at most


# how a text is routed


@pytest.mark.parametrize("name", SPARSE)
def test_doing_nothing_flips_nothing(name: str) -> None:
    base, same = decisions(tracing(name)), decisions(tracing(name, NOTHING))
    assert base.keys() == same.keys()
    for layer, found in base.items():
        assert (flips(found, same[layer])["flips"], flips(found, same[layer])["moved"]) == (0, 0.0)
        assert found.gates.tobytes() == same[layer].gates.tobytes()


def test_doing_nothing_feeds_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    forward = Model.forward

    def counted(self: Model, tokens: Any, *others: Any, **options: Any) -> Any:
        fed.append(len(tokens))
        return forward(self, tokens, *others, **options)

    monkeypatch.setattr(Model, "forward", counted)
    list(tracing().run())
    assert fed == [20, 20, 5]
    fed.clear()
    list(tracing(arm=NOTHING).run())
    assert fed == [1, 2, 4, 8, 5, 1, 2, 4, 8, 5, 1, 2, 2]


def test_weights_flip_what_rounding_hardly_does() -> None:
    base = decisions(tracing())
    count = {
        arm.name: sum(
            flips(base[layer], found)["flips"]
            for layer, found in decisions(tracing(arm=arm)).items()
        )
        for arm in ARMS
    }
    least = min(count["int4 weights"], count["int4-row weights"])
    assert least > 3 * max(count["fast attention"], count["float32 arithmetic"])
    assert count[NOTHING.name] == 0


@pytest.mark.parametrize("arm", ARMS[1:3], ids=lambda arm: arm.name)
def test_rounding_moves_margins_by_a_little(arm: Arm) -> None:
    """Scores lie in [0, 1], and a few float32 roundings of a small model move them so far."""
    base, found = decisions(tracing()), decisions(tracing(arm=arm))
    moved = [flips(base[layer], found[layer])["moved"] for layer in base]
    assert all(0 < move < 1e-5 for move in moved)


def test_windows_share_nothing_and_layers_keep_their_numbers() -> None:
    traced = tracing()
    seen: dict[int, Routing] = {}
    traced.model.forward(traced.tokens[20:40], routed=seen.__setitem__)
    assert list(seen) == [0, 2]  # layer 1 is dense
    _, second, third = traced.run()
    for layer, wanted in seen.items():
        assert second[layer].experts.tolist() == wanted.experts.tolist()
        assert second[layer].margins.tobytes() == wanted.margins.tobytes()
    assert [len(found.margins) for found in third.values()] == [5, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "olmo2"}, "^model: it has no experts"),
        ({"context": 1}, "^context: 1 is out of range; the model's has 2 to 256 positions"),
        ({"context": 257}, "^context: 257 is out of range"),
        ({"count": 1}, "^text: it has fewer than 2 tokens"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        tracing(**changes)
    assert "\n" not in str(error.value)


def test_a_token_that_cannot_be_routed_is_refused() -> None:
    traced = tracing()
    first, *others = traced.model.weights.layers
    broken = np.full(traced.model.config.hidden_size, np.nan, np.float32)
    first = replace(first, norms=replace(first.norms, before_mlp=broken))
    weights = replace(traced.model.weights, layers=(first, *others))
    with pytest.raises(RequestError, match="model: a token of layer 0 has no finite logits"):
        list(replace(traced, model=replace(traced.model, weights=weights)).run())
