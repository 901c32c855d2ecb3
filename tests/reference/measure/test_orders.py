"""Orders of sums: float32 has many bits, the exact lane one, and flips are found where they are."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.arithmetic import F32, Aligned, matmul_float32
from reference.errors import RequestError
from reference.experts import Routing
from reference.measure import orders as module
from reference.measure.orders import (
    EXACT,
    FLOAT32,
    Answer,
    Arm,
    Orders,
    Prompt,
    answer,
    first_expert_flip,
    first_flip,
    margin,
    moved_margin,
    prompts,
    windows,
)
from reference.model import Model, load_model
from reference.weights import ExactLinear, Linear, add, linear
from tests.reference.models import QWEN2_SMALL, small, tokens_of

MOE = Path(__file__).parents[3] / "fixtures" / "families" / "qwen3-moe"
Row = dict[str, Any]


def plain() -> Model:
    return small(QWEN2_SMALL, "float32", "float32")


@cache
def rows(output: int = 4) -> list[Row]:
    prompt = Prompt(tuple(tokens_of(20, 32).tolist()), "spaced")
    return list(Orders(small(QWEN2_SMALL), plain(), output).rows(prompt))


def test_the_exact_lane_has_one_continuation_and_float32_many_bits() -> None:
    float32, exact = rows()
    assert (float32["lane"], exact["lane"]) == ("float32", "exact")
    assert (exact["repetitions"], float32["repetitions"]) == (8, 7)
    assert (exact["bits"], exact["first_tokens"], exact["continuations"]) == (1, 1, 1)
    assert exact["continuation"] == [0] * 8
    assert (exact["flipped"], exact["flip_step"], exact["logit_change_most"]) == (0, None, 0.0)
    assert float32["bits"] > 3
    assert 0 < float32["margin_change_most"] < 1e-3
    assert exact["margin_change_most"] == 0
    assert 0 < float32["logit_change_least"] <= float32["logit_change_most"] < 1e-3
    assert json.loads(json.dumps(rows())) == rows()
    assert len({arm.name for arm in (*EXACT, *FLOAT32)}) == 15


def test_each_order_is_the_one_that_it_names() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 40), np.float32), rng.standard_normal((5, 40), np.float32)
    bias = rng.standard_normal(5).astype(np.float32)
    layer = linear(w, bias, "float32", "float32")
    named = [arm.name.removesuffix("-fma") for arm in FLOAT32]
    assert named == ["blas", *(n for n in ("sequential", "pairwise", "lanes8") for _ in range(2))]
    for arm, order in zip(FLOAT32, named, strict=True):
        assert arm.product is not None
        y = matmul_float32(x, w, order, arm.name.endswith("fma"))  # type: ignore[arg-type]
        assert np.array_equal(arm.product(layer, x), y + bias)


def test_every_exact_way_has_the_bits_of_the_engine_and_really_is_another() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 70), np.float32)
    layer = linear(rng.standard_normal((5, 70), np.float32), None, "float32", "exact")
    for arm in EXACT:
        if arm.product is not None:
            assert np.array_equal(arm.product(layer, x).view(np.int32), layer(x).view(np.int32))
    model, tokens = small(QWEN2_SMALL), tokens_of(20, 32).tolist()
    seen: list[list[int]] = []

    def forward(tokens: Any, *rest: Any, **named: Any) -> Any:
        seen[-1].append(len(tokens))
        return Model.forward(model, tokens, *rest, **named)

    for arm in EXACT[:5]:
        seen.append([])
        watched = replace(model)
        object.__setattr__(watched, "forward", forward)
        answer(watched, arm, tokens, 2)
    assert seen == [[20, 1], [20, 1], [20, 1], [7, 7, 6, 1], [1] * 21]


def test_a_lane_that_is_not_exact_is_found() -> None:
    """The check can fail: an order that rounds once more has other bits."""

    def wrong(layer: Linear, x: F32) -> F32:
        assert isinstance(layer, ExactLinear)
        y = ExactLinear(Aligned(layer.weight.values, layer.weight.finite), None)(x)
        return add(y * np.float32(1 + 2**-20), layer.bias)

    prompt = Prompt(tuple(tokens_of(20, 32).tolist()), "spaced")
    orders = Orders(small(QWEN2_SMALL), plain(), 2, (*EXACT[:1], Arm("wrong", "exact", wrong)))
    (row,) = orders.rows(prompt)
    assert row["bits"] == 2
    assert row["logit_change_most"] > 0


def made(tokens: tuple[int, ...], experts: dict[int, list[list[int]]]) -> Answer:
    routed = {
        layer: Routing(
            np.array(chosen),
            np.zeros((len(chosen), 2), np.float32),
            np.arange(1, 1 + len(chosen), dtype=np.float32) * np.float32(0.25),
        )
        for layer, chosen in experts.items()
    }
    return Answer(tokens, (0.5,) * len(tokens), np.zeros(3, np.float32), routed)


def test_the_first_flip_is_the_first() -> None:
    base = made((1, 2, 3), {0: [[0, 1], [2, 3], [0, 2]], 2: [[0, 1], [0, 1], [0, 1]]})
    assert first_flip(base, base) is None
    assert first_flip(base, made((1, 5, 6), {})) == 1
    other = made((1, 2, 3), {0: [[1, 0], [2, 3], [0, 1]], 2: [[0, 1], [0, 3], [2, 3]]})
    assert first_expert_flip(base, other, 3) == (1, 2, 0.5)  # another rank order is no flip
    assert first_expert_flip(base, other, 1) is None
    assert first_expert_flip(base, base, 3) is None


def test_a_flip_is_told_with_its_margin_and_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"engine": (1, 2, 3), "a": (1, 2, 9), "b": (1, 7, 7), "c": (1, 2, 3)}

    def fake(model: Model, arm: Arm, prompt: Any, count: int) -> Answer:
        steps = (0.5, 0.25, 0.125) if arm.name == "engine" else (0.1, 0.2, 0.3)
        return Answer(texts[arm.name], steps, np.full(2, len(arm.name), np.float32), {})

    monkeypatch.setattr(module, "answer", fake)
    arms = (Arm("engine", "exact"), *(Arm(name, "float32") for name in "abc"))
    told, exact = Orders(small(QWEN2_SMALL), plain(), 3, arms).rows(Prompt((1,) * 8, "spaced"))
    assert (told["first_tokens"], told["continuations"], told["flipped"]) == (1, 3, 2)
    assert told["continuation"] == [0, 1, 2]
    assert (told["flip_step"], told["flip_arm"]) == (1, "b")
    assert (told["flip_margin"], told["flip_own_margin"]) == (0.25, 0.2)
    assert told["experts_flipped"] is None
    assert exact["continuations"] == 1


def test_experts_are_traced_up_to_the_last_token() -> None:
    model = load_model(MOE)
    found = [answer(model, arm, tokens_of(12, 48).tolist(), 3) for arm in EXACT[:5]]
    for each in found:
        assert sorted(each.routed) == [0, 2]
        for layer, routing in each.routed.items():
            assert np.array_equal(routing.experts, found[0].routed[layer].experts)
            assert len(routing.experts) == 14


def test_ties_are_the_smallest_margins_of_the_text() -> None:
    model, tokens = plain(), tokens_of(64, 32).tolist()
    calls = itertools.count()
    found = prompts(model, windows(tokens, 16, 64), 2, 3, lambda: next(calls))
    assert [prompt.chosen for prompt in found] == ["spaced"] * 2 + ["near a tie"] * 3
    assert found[0].tokens == tuple(tokens[:16])
    assert found[1].tokens == tuple(tokens[48:])
    assert next(calls) == module.search_passes(4) == 1
    every = sorted(
        margin(model.forward(tokens[first : first + n], None, "fast", last_only=True)[0])
        for first in range(0, 64, 16)
        for n in range(module.LEAST, 17)
    )
    told = [prompt.margin for prompt in found[2:]]
    assert told == pytest.approx(every[:3], abs=1e-5)
    for prompt in found[2:]:
        own = model.forward(prompt.tokens, None, "fast", last_only=True)[0]
        assert margin(own) == pytest.approx(prompt.margin, abs=1e-5)


def test_a_text_is_cut_again_from_further_in() -> None:
    text = list(range(20))
    assert windows(text, 8, 16).tolist() == [text[:8], text[8:16]]
    assert windows(text, 8, 1).tolist() == [text[:8]]
    assert windows(text, 8, 10**6).tolist() == [text[:8], text[8:16], text[5:13]]
    model = plain()
    same = np.array([[3] * 16] * 2)
    assert len(prompts(model, same, 0, 99)) == 9  # each prompt once, from 8 tokens to 16


def test_a_margin_is_that_of_the_two_largest() -> None:
    assert margin(np.array([1, 5, 4.5, -9], np.float32)) == 0.5
    assert margin(np.array([3, 3, 1], np.float32)) == 0.0


def test_a_margin_moves_as_its_two_logits_do_against_each_other() -> None:
    base, other = np.array([[1, 5, 4], [9, 6, 7]], np.float32)
    assert moved_margin(base, other) == 2.0  # from 1 to -1; the 9 is none of the two
    assert moved_margin(base, base + np.float32(3)) == 0.0


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^output: 0 is out of range"):
        Orders(small(QWEN2_SMALL), plain(), 0)
    orders = Orders(small(QWEN2_SMALL), plain(), 10)
    orders.check(246)
    for length, message in ((7, "7 is out of range"), (247, "257 positions are needed")):
        with pytest.raises(RequestError, match=f"^prompt: {message}"):
            orders.check(length)
