"""Random models of every family, for the tests of the torch backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.conformance.backends.torch.side_by_side import FIXTURES

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 20,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 9,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 20},
        "hidden_act": "gelu_pytorch_tanh",
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 33,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SPREAD: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in sorted(p.name for p in (FIXTURES / "families").iterdir())},
    "gemma2-biased": ("gemma2", {"attention_bias": True, "query_pre_attn_scalar": 7}),
    "gemma3-typed": (
        "gemma3",
        {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_theta": 300.0, "partial_rotary_factor": 0.5},
            },
            "sliding_window_pattern": None,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt-oss-unclamped": ("gpt-oss", {"swiglu_limit": 7.0}),
    "mixtral-without-window": ("mixtral", {"sliding_window": None, "num_experts_per_tok": 3}),
    "mellum-as-they-are": ("mellum", {"norm_topk_prob": False, "attention_bias": True}),
    "olmo3-named": (
        "olmo3",
        {"layer_types": ["full_attention", *["sliding_attention"] * 3], "attention_bias": True},
    ),
    "olmoe-biased": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "phi3-given-factor": (
        "phi3",
        {
            "original_max_position_embeddings": None,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [2.0, 3.0, 9.0],
                "original_max_position_embeddings": 31,
                "attention_factor": 1.3,
            },
            "partial_rotary_factor": 0.75,
            "sliding_window": None,
        },
    ),
    "qwen2-moe-windows": (
        "qwen2-moe",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-stepped": (
        "qwen3-moe",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
        },
    ),
    "smollm3-by-layer": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": None,
        },
    ),
}
"""A family's fixture, and changes of its switches, by name."""


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A random model of a family, in bfloat16, in two shards."""
    from safetensors.torch import save_file

    from reference.config import parse_config
    from reference.loading.huggingface import expected_tensors

    generator = torch.Generator().manual_seed(20)
    shapes = expected_tensors(parse_config(config, "config.json"))
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.3 + 0.1).bfloat16()
        for name, shape in shapes.items()
    }
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def family_config(name: str) -> dict[str, Any]:
    family, change = SPREAD[name]
    config: dict[str, Any] = json.loads(
        (FIXTURES / "families" / family / "config.json").read_text()
    )
    return config | change
