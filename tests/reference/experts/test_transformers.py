"""Routers and sparse layers against the blocks of transformers (SPEC 9.2, 9.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reference.experts import Router, Routing, Shared, route
from reference.weights import linear
from tests.oracle.arrays import Float32, assert_same
from tests.reference.experts.layer import MoE, expert, normal

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

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
