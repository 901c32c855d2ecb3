"""Small model folders, written as other programs write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from reference.config import parse_config
from reference.loading import expected_tensors

Arrays = dict[str, npt.NDArray[Any]]

DTYPES: Mapping[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
MISTRAL: Mapping[str, Any] = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 8,
}
QWEN2: Mapping[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
}
QWEN3: Mapping[str, Any] = {
    **QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 6,
}
FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}


def with_keys(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Copy of a configuration with keys changed, or removed where the value is Ellipsis."""
    changed = {**base, **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def random_tensors(raw: Mapping[str, Any], dtype: str = "F32") -> Arrays:
    """Tensors that a configuration needs."""
    rng = np.random.default_rng(len(str(raw)))
    shapes = expected_tensors(parse_config(dict(raw), "config.json"))
    return {name: rng.normal(size=shape).astype(DTYPES[dtype]) for name, shape in shapes.items()}


def write_config(folder: Path, raw: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(raw))


def write_folder(folder: Path, raw: Mapping[str, Any], tensors: Arrays | None = None) -> Arrays:
    """A folder of one weight file."""
    tensors = random_tensors(raw) if tensors is None else tensors
    write_config(folder, raw)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def write_shards(folder: Path, raw: Mapping[str, Any], tensors: Arrays, count: int) -> None:
    """A folder of `count` shards and their index."""
    write_config(folder, raw)
    names, placed = sorted(tensors), {}
    for index in range(count):
        shard = f"model-{index + 1:05}-of-{count:05}.safetensors"
        part = names[index::count]
        save_file({name: tensors[name] for name in part}, folder / shard)
        placed.update(dict.fromkeys(part, shard))
    write_index(folder, placed)


def write_index(folder: Path, placed: Mapping[str, Any]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    placed: dict[str, str] = index["weight_map"]
    return placed


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file from a header that need not be valid."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
