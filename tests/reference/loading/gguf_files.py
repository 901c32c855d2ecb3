"""Small GGUF files, written with the `gguf` package as llama.cpp's converters write them.

Names of tensors come from the package's own map, and keys from its writer, so that they are not
taken from the tables under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter

from reference.config import parse_config
from tests.reference.loading.folders import Arrays

ARCHS: Mapping[str, MODEL_ARCH] = {
    "LlamaForCausalLM": MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": MODEL_ARCH.QWEN3,
    "Qwen2MoeForCausalLM": MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": MODEL_ARCH.QWEN3MOE,
    "OlmoeForCausalLM": MODEL_ARCH.OLMOE,
    "Olmo2ForCausalLM": MODEL_ARCH.OLMO2,
    "MixtralForCausalLM": MODEL_ARCH.LLAMA,
    "Phi3ForCausalLM": MODEL_ARCH.PHI3,
    "Gemma2ForCausalLM": MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": MODEL_ARCH.GEMMA3,
    "SmolLM3ForCausalLM": MODEL_ARCH.SMOLLM3,
    "Olmo3ForCausalLM": MODEL_ARCH.OLMO2,
    "GptOssForCausalLM": MODEL_ARCH.GPT_OSS,
    "MellumForCausalLM": MODEL_ARCH.QWEN3MOE,  # the package does not know it; the names are these
}
NAMES: Mapping[str, str] = {"MellumForCausalLM": "mellum"}
PERMUTED = (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3)
F32 = GGMLQuantizationType.F32


def permuted(w: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k in the order of llama.cpp: the two halves of a head take turns."""
    out = np.empty_like(w)
    size = len(w) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = w[head * size + i]
            out[head * size + 2 * i + 1] = w[head * size + size // 2 + i]
    return out


def converted(raw: Mapping[str, Any], tensors: Arrays) -> Arrays:
    """Tensors of a folder under their names in a GGUF file, changed as converters change them."""
    arch, layers = ARCHS[raw["architectures"][0]], raw["num_hidden_layers"]
    names = gguf.get_tensor_name_map(arch, layers)
    stacks: dict[str, list[np.ndarray[Any, Any]]] = {}
    found: Arrays = {}
    for name, tensor in (pair for item in tensors.items() for pair in _separate(*item)):
        if arch in PERMUTED and re.search(r"\.[qk]_proj\.", name):
            key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            tensor = permuted(tensor, raw[key])
        if arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
            tensor = np.float32(1) + tensor.astype(np.float32)
        if re.search(r"experts\.\d+\.", name):
            stacked = re.sub(r"experts\.\d+\.", "experts.", name)
            stacks.setdefault(stacked, []).append(tensor)
            continue
        found[_named(names, name)] = tensor.squeeze() if "shared_expert_gate" in name else tensor
    return found | {_named(names, name): np.stack(parts) for name, parts in stacks.items()}


def _separate(name: str, tensor: np.ndarray[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Stacked experts of gpt-oss as projections, outputs before inputs; others as they are."""
    stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
    ending = ".bias" if bias else ".weight"
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif not stem.endswith("_proj"):
        yield name, tensor
    else:
        rows = tensor if bias else np.swapaxes(tensor, 1, 2)
        if stem.endswith("gate_up_proj"):
            yield stem.replace("gate_up_proj", "gate_proj") + ending, rows[:, 0::2]
            yield stem.replace("gate_up_proj", "up_proj") + ending, rows[:, 1::2]
        else:
            yield stem + ending, rows


def _named(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def writer(raw: Mapping[str, Any], path: Path) -> GGUFWriter:
    """A writer that holds the metadata of a configuration, and no tokenizer yet."""
    arch = ARCHS[raw["architectures"][0]]
    out = GGUFWriter(path, NAMES.get(raw["architectures"][0], gguf.MODEL_ARCH_NAMES[arch]))
    config = parse_config(dict(raw), "config.json")
    out.add_name("miniature")
    out.add_block_count(config.layers)
    out.add_context_length(raw["max_position_embeddings"])
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.heads)
    out.add_head_count_kv(config.kv_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope.theta)
    if "head_dim" in raw:
        out.add_key_length(config.head_dim)
        out.add_value_length(config.head_dim)
    if arch in PERMUTED:
        out.add_vocab_size(config.vocab_size)
        out.add_rope_dimension_count(config.head_dim)
    _add_scaling(out, raw.get("rope_scaling"))
    if arch == MODEL_ARCH.PHI3:
        out.add_rope_dimension_count(config.rope.rotary_dim)
        out.add_sliding_window(raw["sliding_window"] or 0)
    if "num_experts_per_tok" in raw:
        out.add_expert_count(raw.get("num_experts") or raw["num_local_experts"])
        out.add_expert_used_count(raw["num_experts_per_tok"])
    if "moe_intermediate_size" in raw:
        out.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in raw:
        out.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    if arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3):
        out.add_sliding_window(raw["sliding_window"])
    if raw["architectures"][0] in ("Olmo3ForCausalLM", "MellumForCausalLM", "GptOssForCausalLM"):
        out.add_sliding_window(raw["sliding_window"])
    if raw["architectures"][0] in ("Olmo3ForCausalLM", "MellumForCausalLM"):
        out.add_sliding_window_pattern([window is not None for window in config.windows])
    if raw["architectures"][0] == "MellumForCausalLM":
        by_type = raw["rope_parameters"]
        out.add_rope_freq_base_swa(by_type["sliding_attention"]["rope_theta"])
        _add_scaling(out, by_type["full_attention"])
    if arch == MODEL_ARCH.GPT_OSS:
        out.add_expert_feed_forward_length(raw["intermediate_size"])
    if arch == MODEL_ARCH.GEMMA2:
        out.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        out.add_final_logit_softcapping(raw["final_logit_softcapping"])
    return out


def _add_scaling(out: GGUFWriter, scaling: Mapping[str, Any] | None) -> None:
    kind = (scaling or {}).get("rope_type")
    if scaling is None or kind not in ("linear", "yarn"):
        return
    out.add_rope_scaling_type(gguf.RopeScalingType(kind))
    out.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        out.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        for key, add in (
            ("beta_fast", out.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", out.add_rope_scaling_yarn_beta_slow),
            ("attention_factor", out.add_rope_scaling_yarn_attn_factor),
        ):
            if key in scaling:
                add(scaling[key])


def finish(out: GGUFWriter, tensors: Arrays, kind: GGMLQuantizationType = F32) -> None:
    """Write a file of these tensors; matrices in the given type, where their rows allow it."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, tensor in tensors.items():
        wide = np.ascontiguousarray(tensor, np.float32)
        if kind == F32 or wide.ndim < 2 or wide.shape[-1] % block:
            out.add_tensor(name, wide)
        else:
            out.add_tensor(name, gguf.quants.quantize(wide, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_gguf(
    path: Path,
    raw: Mapping[str, Any],
    tensors: Arrays,
    kind: GGMLQuantizationType = F32,
    more: Arrays | None = None,
) -> Path:
    """A file of a folder's tensors, and of further ones under their own names."""
    finish(writer(raw, path), {**converted(raw, tensors), **(more or {})}, kind)
    return path


def add_byte_level(out: GGUFWriter, tokenizer: Path, pre: str) -> None:
    """Add the tokenizer of a `tokenizer.json` as a converter does."""
    description = json.loads(tokenizer.read_text())
    added = {token["content"]: token for token in description["added_tokens"]}
    vocab = {**description["model"]["vocab"], **{t: added[t]["id"] for t in added}}
    tokens = sorted(vocab, key=lambda text: vocab[text])
    types = [
        gguf.TokenType.NORMAL
        if text not in added
        else gguf.TokenType.CONTROL
        if added[text]["special"]
        else gguf.TokenType.USER_DEFINED
        for text in tokens
    ]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types(types)
    merges = description["model"]["merges"]
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
