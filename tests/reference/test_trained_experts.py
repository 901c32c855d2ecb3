"""The trained fixture with experts: transformers' logits and choices, and experts in balance."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reference.experts import Routing
from reference.measure.router import load
from reference.model import Model, load_model
from tests.reference.test_model_transformers import LIMIT

FIXTURES = Path(__file__).parents[2] / "fixtures"
PATH = FIXTURES / "tiny-moe"


@cache
def model() -> Model:
    return load_model(PATH)


def tokens(count: int) -> NDArray[np.int64]:
    tokenizer = model().tokenizer
    assert tokenizer is not None
    text = (FIXTURES / "prompts" / "2000.txt").read_text(encoding="utf-8")
    return np.array(tokenizer.encode(text)[:count], np.int64)


def test_its_shape_is_what_the_fixtures_page_says() -> None:
    config = model().config
    assert config.sparse is not None
    assert (config.sparse.router.experts, config.sparse.router.top_k) == (16, 4)
    assert config.sparse.layers == (True,) * 4
    assert config.sparse.shared_width == config.sparse.width
    assert config.windows == (128, 128, 128, None)
    assert config.max_positions >= 2048


@pytest.mark.parametrize("count", [40, 600])
def test_logits_and_choices_are_those_of_transformers(count: int) -> None:
    """In float64, which is fed the same weights.

    The limit is that of random models, whose logits are near 1, times the largest logit here:
    errors are relative. No choice may differ, for one that did would move logits far more.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        PATH, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    seen: dict[int, Routing] = {}
    found = model().forward(tokens(count), routed=seen.__setitem__)
    with torch.no_grad():
        told: Any = theirs(torch.from_numpy(tokens(count))[None], output_router_logits=True)
    expected = told.logits[0].numpy()
    for layer, routing in seen.items():
        chosen = told.router_logits[layer].topk(4, dim=-1).indices.numpy()
        assert np.array_equal(np.sort(routing.experts), np.sort(chosen)), layer
    assert np.abs(found - expected).max() < LIMIT * np.abs(expected).max()


def test_experts_are_in_balance_and_the_record_says_so() -> None:
    """No expert is idle and none is overrun, and its share is about that of all held-out text."""
    record = json.loads((FIXTURES / "evaluation.json").read_text())["models"]["tiny-moe"]
    seen: dict[int, Routing] = {}
    model().forward(tokens(2000), last_only=True, routed=seen.__setitem__)
    for layer, routing in seen.items():
        shares = load(routing, 16)
        told = record["expert_load"][layer]
        assert 1 / 64 < told["smallest"] < 1 / 16 < told["largest"] < 1 / 8
        assert min(shares) > told["smallest"] / 2
        assert max(shares) < told["largest"] * 2


def test_it_predicts_better_than_the_dense_model_of_its_active_size() -> None:
    """By the record, which `fixtures/make.py evaluate` measures; and far better than bigrams."""
    record = json.loads((FIXTURES / "evaluation.json").read_text())
    for window in ("window_512", "window_2048"):
        sparse, dense = (
            record["models"][name]["held_out"][window]["perplexity"]
            for name in ("tiny-moe", "dense-of-active-size")
        )
        assert sparse < dense < 0.6 * record["baselines"]["bigram"]["perplexity"]
