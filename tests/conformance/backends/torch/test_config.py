"""What of a config.json is not supported is refused by name (SPEC 10.3)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from conformance.backends.torch.config import parse
from tests.conformance.backends.torch.models import (
    FAMILIES,
    SIZES,
    family_config,
)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("mixtral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("mixtral", {"num_experts": 5}, "one number"),
        ("qwen2-moe", {"layer_types": ["sliding_attention"] * 3}, "no window is in use"),
        ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 5}, "layer_types"),
        ("qwen2-moe", {"qkv_bias": False}, "qkv_bias"),
        ("qwen3-moe", {"decoder_sparse_step": None}, "decoder_sparse_step"),
        ("mellum", {"rope_theta": 5.0, "rope_parameters": None}, "rope_parameters"),
        ("mellum", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "gelu"}, "gelu"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt-oss", {"swiglu_limit": None}, "swiglu_limit"),
        ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers"),
        ("olmo2", {"num_experts": 4}, "num_experts"),
    ],
)
def test_what_a_family_refuses(name: str, change: dict[str, Any], named: str) -> None:
    config = family_config(name) | change
    with pytest.raises(ValueError, match=named):
        parse(config)
    parse(family_config(name))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"attention_multiplier": 2.0}, "attention_multiplier"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "turns": 3}}, "turns"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta"),
    ],
)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(SIZES | FAMILIES["llama"] | change)
