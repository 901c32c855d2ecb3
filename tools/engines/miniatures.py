"""Random models of every family of SPEC 10.3, as folders and as GGUF files of the same weights.

Sizes are such that windows, ropes and softcaps tell within 40 tokens. Projections keep the size of
what they are given; heads are narrower, so that logits stay below 1 and 2e-6 is 32 units in the
last place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import save_file

from conformance.generator import integers, normal
from reference.config import parse_config
from reference.loading import expected_tensors
from reference.rotary import rope_constants
from tests.reference.loading.folders import Arrays
from tests.reference.loading.gguf_files import ARCHS, PERMUTED, converted, finish, writer
from tools.engines import mechanisms
from tools.engines.mechanisms import Mechanism

COMMON: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
SPARSE = {**EXPERTS, "moe_intermediate_size": 40}
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": ...,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "sliding_window": 19,
    "tie_word_embeddings": True,
}
OLMO3 = {"num_hidden_layers": 4, "sliding_window": 18}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 24,
    "attention_bias": True,
    "sliding_window": 22,
    "num_hidden_layers": 4,
    "swiglu_limit": 7.0,
    "intermediate_size": 64,
    "rope_theta": 150000.0,
    "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}


@dataclass(frozen=True)
class Miniature:
    """A row of the table: a configuration, and what llama.cpp does otherwise with it."""

    architecture: str
    model_type: str
    keys: Mapping[str, Any]
    mechanisms: tuple[Mechanism, ...] = ()

    @property
    def raw(self) -> dict[str, Any]:
        """Its `config.json`."""
        about = {"architectures": [self.architecture], "model_type": self.model_type}
        whole = {**about, **COMMON, **self.keys}
        return {key: value for key, value in whole.items() if value is not ...}


MINIATURES: Mapping[str, Miniature] = {
    "llama": Miniature("LlamaForCausalLM", "llama", {}),
    "llama, linear": Miniature(
        "LlamaForCausalLM", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    ),
    "llama, llama3": Miniature("LlamaForCausalLM", "llama", {"rope_scaling": LLAMA3}),
    "llama, yarn": Miniature("LlamaForCausalLM", "llama", {"rope_scaling": YARN}),
    "mistral": Miniature("MistralForCausalLM", "mistral", {"sliding_window": None}),
    "mistral, window": Miniature(
        "MistralForCausalLM", "mistral", {"sliding_window": 17}, (mechanisms.NO_WINDOW,)
    ),
    "mixtral": Miniature(
        "MixtralForCausalLM",
        "mixtral",
        {"sliding_window": None, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "qwen2": Miniature("Qwen2ForCausalLM", "qwen2", {}),
    "qwen2, window": Miniature(
        "Qwen2ForCausalLM",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1},
        (mechanisms.NO_WINDOW,),
    ),
    "qwen2-moe": Miniature(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **SPARSE,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen3": Miniature("Qwen3ForCausalLM", "qwen3", {"head_dim": 32}),
    "qwen3-moe": Miniature(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**SPARSE, "decoder_sparse_step": 1, "norm_topk_prob": True, "head_dim": 24},
    ),
    "mellum": Miniature(
        "MellumForCausalLM",
        "mellum",
        {
            **SPARSE,
            "norm_topk_prob": True,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": 26,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["sparse"] * 4,
            "rope_theta": ...,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        (mechanisms.ONE_THETA,),
    ),
    "olmoe": Miniature(
        "OlmoeForCausalLM",
        "olmoe",
        {**EXPERTS, "num_key_value_heads": 4, "norm_topk_prob": False},
    ),
    "olmo2": Miniature("Olmo2ForCausalLM", "olmo2", {}),
    "olmo3": Miniature("Olmo3ForCausalLM", "olmo3", {**OLMO3, "rope_scaling": YARN}),
    "olmo3, own factor": Miniature(
        "Olmo3ForCausalLM",
        "olmo3",
        {**OLMO3, "rope_scaling": {**YARN, "attention_factor": 1.25}},
        (mechanisms.FACTOR_IGNORED,),
    ),
    "olmo3, old file": Miniature(
        "Olmo3ForCausalLM",
        "olmo3",
        {**OLMO3, "rope_scaling": {**YARN, "attention_factor": 1.138629436}},
        (mechanisms.FACTOR_TWICE,),
    ),
    "gemma2": Miniature(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.0,
        },
        (mechanisms.GELU_TABLE, mechanisms.GELU_INDEX),
    ),
    "gemma3": Miniature(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            **GEMMA,
            "num_hidden_layers": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        (mechanisms.GELU_TABLE, mechanisms.GELU_INDEX),
    ),
    "smollm3": Miniature(
        "SmolLM3ForCausalLM",
        "smollm3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    "phi3": Miniature("Phi3ForCausalLM", "phi3", {"sliding_window": None}),
    "phi3, window": Miniature(
        "Phi3ForCausalLM", "phi3", {"sliding_window": 33}, (mechanisms.NO_WINDOW,)
    ),
    "phi3, longrope": Miniature(
        "Phi3ForCausalLM",
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 800,
            "rope_scaling": LONGROPE,
        },
        (mechanisms.LONG_FACTORS,),
    ),
    "gpt-oss": Miniature("GptOssForCausalLM", "gpt_oss", GPT_OSS, (mechanisms.YARN_ROUNDED,)),
    "gpt-oss, limit": Miniature(
        "GptOssForCausalLM",
        "gpt_oss",
        {**GPT_OSS, "swiglu_limit": 0.5},
        (mechanisms.LIMIT_7, mechanisms.YARN_ROUNDED),
    ),
}


def tokens_of(count: int) -> list[int]:
    """A prompt of that many tokens."""
    found: list[int] = integers(f"engines/{count}", COMMON["vocab_size"], count).tolist()
    return found


def weights(name: str) -> Arrays:
    """The weights of a miniature, float32 by their names in a folder."""
    config = parse_config(MINIATURES[name].raw, name)
    stacked = config.sparse is not None and config.sparse.stored.stacked
    found: Arrays = {}
    for key, shape in sorted(expected_tensors(config).items()):
        if "norm" in key:
            mean, scale = np.float32(not config.family.norm_offset), 0.1
        elif len(shape) == 1 or key.endswith("bias"):
            mean, scale = np.float32(0), 0.1
        elif "lm_head" in key or ("embed" in key and config.tied):
            mean, scale = np.float32(0), 0.1 / config.hidden_size**0.5
        elif "embed" in key:
            mean, scale = np.float32(0), 1.0
        else:
            inputs = shape[-2] if stacked and len(shape) == 3 else shape[-1]
            mean, scale = np.float32(0), inputs**-0.5
        found[key] = mean + normal(f"engines/{name}/{key}", *shape) * np.float32(scale)
    return found


def write(name: str, folder: Path) -> Path:
    """Write a miniature to a folder, and as a GGUF file in it, whose path is returned."""
    miniature, tensors = MINIATURES[name], weights(name)
    raw = miniature.raw
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    file, as_stored = folder / "model.gguf", _as_converters_know_it(miniature)
    out = writer(as_stored, file)
    out.add_tokenizer_model("no_vocab")
    if ARCHS[as_stored["architectures"][0]] not in PERMUTED:
        out.add_vocab_size(raw["vocab_size"])
    finish(out, {**converted(as_stored, tensors), **_rope_tensors(out, miniature)})
    return file


def _as_converters_know_it(miniature: Miniature) -> dict[str, Any]:
    """Mistral is written as a llama, which has no window; an old file's factor apart."""
    raw = miniature.raw
    if raw["model_type"] == "mistral":
        as_llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return {key: raw[key] for key in raw if key != "sliding_window"} | as_llama
    if mechanisms.FACTOR_TWICE in miniature.mechanisms:
        return {**raw, "rope_scaling": YARN}
    return raw


def _rope_tensors(out: GGUFWriter, miniature: Miniature) -> Arrays:
    """What files say of rope beside the keys of `writer`: divisors of frequencies, and factors."""
    raw = miniature.raw
    rope = parse_config(raw, "config.json").rope
    if mechanisms.FACTOR_TWICE in miniature.mechanisms:
        out.add_rope_scaling_attn_factors(raw["rope_scaling"]["attention_factor"])
    if rope.kind == "llama3":
        return {"rope_freqs.weight": mechanisms.divisors(rope)}
    if rope.kind == "longrope":
        out.add_rope_scaling_orig_ctx_len(rope.original_max_positions)
        out.add_rope_scaling_attn_factors(float(rope_constants(rope)[1]))
        return {
            "rope_factors_short.weight": np.array(rope.short_factor, np.float32),
            "rope_factors_long.weight": np.array(rope.long_factor, np.float32),
        }
    return {}
