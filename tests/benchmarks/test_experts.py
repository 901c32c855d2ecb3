"""Experts one by one beside tokens one by one: the same bits, in one run.

    pytest tests/benchmarks/test_experts.py --benchmark-only -s

prints the ratios; the sides take turns, as in `test_speed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference import experts as experts_module
from reference.arithmetic import F32
from reference.experts import Router, by_expert, by_token, route
from reference.feedforward import ACTIVATIONS, ACTIVATIONS_FLOAT32, Function, gated_mlp
from reference.model import load_model
from reference.weights import Arithmetic, linear
from tests.benchmarks.test_speed import compare, normal

FIXTURES = Path(__file__).parents[2] / "fixtures"
TOKENS, EXPERTS, TOP_K, WIDTH, INNER = 512, 16, 4, 192, 256


def expert(seed: int, arithmetic: Arithmetic) -> Function:
    gate_up = linear(normal(2 * INNER, WIDTH, seed=seed), None, "float32", arithmetic)
    down = linear(normal(WIDTH, INNER, seed=seed + 1), None, "float32", arithmetic)
    table = ACTIVATIONS if arithmetic == "exact" else ACTIVATIONS_FLOAT32
    return lambda x: gated_mlp(x, gate_up, down, table["silu"])


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_by_expert_against_by_token(benchmark: Any, arithmetic: Arithmetic) -> None:
    experts = [expert(2 * e, arithmetic) for e in range(EXPERTS)]
    x = normal(TOKENS, WIDTH, seed=100)
    chosen = route(normal(TOKENS, EXPERTS, seed=101), Router(EXPERTS, TOP_K)).experts
    if arithmetic == "exact":
        gathered, single = (run(x, chosen, experts) for run in (by_expert, by_token))
        assert np.array_equal(gathered.view(np.uint32), single.view(np.uint32))
    compare(
        benchmark,
        f"{arithmetic} prefill of {TOKENS} tokens, {EXPERTS} experts, by expert against by token",
        lambda: by_expert(x, chosen, experts),
        lambda: by_token(x, chosen, experts),
        "3",
        rounds=2,
    )


def test_a_prefill_by_expert_against_by_token(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of `tiny-moe`, attention and head included, on 512 tokens of held-out text."""
    model = load_model(FIXTURES / "tiny-moe")
    assert model.tokenizer is not None
    text = (FIXTURES / "prompts" / "512.txt").read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text)
    assert len(tokens) == TOKENS

    def by_tokens() -> F32:
        with monkeypatch.context() as patch:
            patch.setattr(experts_module, "by_expert", by_token)
            return model.forward(tokens)

    assert np.array_equal(model.forward(tokens).view(np.uint32), by_tokens().view(np.uint32))
    compare(
        benchmark,
        f"exact prefill of tiny-moe, {TOKENS} tokens, by expert against by token",
        lambda: model.forward(tokens),
        by_tokens,
        "3",
        rounds=2,
    )
