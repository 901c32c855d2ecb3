"""The model against transformers in float32, on random weights, fed the same inv_freq."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.model import Model, load_model
from reference.rotary import rope_constants

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LIMIT = 2e-6
"""The largest difference of a logit that float32 in another order makes on these models."""

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
HALVES: list[Any] = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 19}
BY_TYPE = {
    "full_attention": ROPES["yarn"],
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
    "original_max_position_embeddings": 800,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama-{kind}": ("Llama", {"rope_parameters": rope}) for kind, rope in ROPES.items()},
    "llama-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-head_dim": ("Llama", {"head_dim": 48, "num_key_value_heads": 1}),
    "llama-groups_of_8": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 17, "head_dim": 32}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias-yarn": (
        "Qwen3",
        {"head_dim": 24, "attention_bias": True, "rope_parameters": ROPES["yarn"]},
    ),
    "qwen3-window": (
        "Qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "sliding_window": None}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 6, "sliding_window": 25}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "head_dim": 24}),
    "qwen3-moe-some": (
        "Qwen3Moe",
        {
            **MOE,
            "num_hidden_layers": 4,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 30,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "olmoe-norm": ("Olmoe", {"num_experts": 8, "norm_topk_prob": True, "attention_bias": True}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**MOE, "shared_expert_intermediate_size": 56, "norm_topk_prob": False},
    ),
    "qwen2-moe-some": (
        "Qwen2Moe",
        {
            **MOE,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 0.02,
            "final_logit_softcapping": 0.5,
        },
    ),
    "gemma2-uncapped": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", *HALVES],
            "rope_parameters": {
                "full_attention": {**ROPES["linear"], "rope_theta": 1000000.0},
                "sliding_attention": ROPES["default"],
            },
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 18, "rope_parameters": BY_TYPE},
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    ),
    "smollm3-window": (
        "SmolLM3",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 33, "original_max_position_embeddings": 1024}),
    "phi3-longrope": (
        "Phi3",
        {"original_max_position_embeddings": 800, "rope_parameters": LONGROPE},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 24,
            "sliding_window": 22,
            "num_hidden_layers": 3,
            "swiglu_limit": 0.2,
        },
    ),
    "mellum": (
        "Mellum",
        {
            **MOE,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": 26,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rope_parameters": BY_TYPE,
        },
    ),
}


def random_model(folder: Path, family: str, options: dict[str, Any]) -> Any:
    """A transformers model with random weights, biases and norms included, saved to `folder`."""
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")) or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def feed_constants(theirs: Any, ours: Model) -> None:
    """Give transformers our inv_freq and attention factor, in the place of its own float32 ones."""
    config, rotary = ours.config, theirs.model.rotary_emb
    kinds = {"": config.rope}
    if config.local_rope is not None:
        kinds = {"full_attention_": config.rope, "sliding_attention_": config.local_rope}
    for kind, rope in kinds.items():
        inv_freq, factor = rope_constants(rope)
        setattr(rotary, f"{kind}inv_freq", torch.from_numpy(inv_freq.copy()))
        setattr(rotary, f"{kind}original_inv_freq", torch.from_numpy(inv_freq.copy()))
        setattr(rotary, f"{kind}attention_scaling", float(factor))


def tokens_of(count: int) -> Any:
    return np.random.default_rng(count).integers(0, SMALL["vocab_size"], count)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_model(tmp_path, *CASES[name])
    exact, plain = load_model(tmp_path), load_model(tmp_path, arithmetic="float32")
    feed_constants(theirs, exact)
    for count in (40, 700):
        tokens = tokens_of(count)
        with torch.no_grad():
            expected = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
        for model, attention in ((exact, "exact"), (exact, "fast"), (plain, "fast")):
            worst = np.abs(model.forward(tokens, attention=attention) - expected).max()  # type: ignore[arg-type]
            assert worst < LIMIT, (count, attention, worst)


def test_own_constants_of_transformers_cost_little(tmp_path: Path, record_property: Any) -> None:
    """transformers computes inv_freq in float32; what its last bits do is no more than this."""
    theirs = random_model(tmp_path, "Llama", {})
    ours = load_model(tmp_path)
    tokens = tokens_of(700)
    with torch.no_grad():
        own = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
        feed_constants(theirs, ours)
        fed = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    record_property("own_inv_freq", float(np.abs(own - fed).max()))
    assert 0 < np.abs(own - fed).max() < 1e-4


BEYOND: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("Llama", {"max_position_embeddings": 48, "rope_parameters": ROPES["dynamic"]}),
    "longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 48,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 48},
        },
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_rope_beyond_its_length_is_that_of_a_decoder(name: str, tmp_path: Path) -> None:
    """Past the original length a token is rotated as if it were the last (SPEC 7.2)."""
    theirs = random_model(tmp_path, *BEYOND[name])
    tokens = tokens_of(64)
    ours = load_model(tmp_path).forward(tokens)
    rows, past = [], None
    with torch.no_grad():
        for token in tokens:
            out = theirs(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            rows.append(out.logits[0, 0].numpy())
    assert np.abs(ours - np.stack(rows)).max() < 10 * LIMIT
