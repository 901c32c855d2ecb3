"""Small models of random weights, the trained one, and tokens to feed them."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference.loading.huggingface import load_folder
from reference.model import Model, build_model, load_model
from reference.weights import Arithmetic, Mode
from tests.reference.loading.folders import (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    random_tensors,
    with_keys,
    write_folder,
)

ROOT = Path(__file__).parents[2]
TINY = ROOT / "fixtures" / "tiny-dense"
MODES: tuple[Mode, ...] = ("float32", "int4", "int4-row")  # `native` is of GGUF files
SIZES = {"hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 1024}
LLAMA_SMALL = json.dumps(with_keys(LLAMA, **SIZES, attention_bias=True, mlp_bias=True))
MISTRAL_SMALL = json.dumps(with_keys(MISTRAL, **SIZES, sliding_window=17))
QWEN2_SMALL = json.dumps(with_keys(QWEN2, **{**SIZES, "max_position_embeddings": 256}))

QWEN3_SMALL = json.dumps(with_keys(QWEN3, **SIZES, head_dim=40, use_sliding_window=False))
SMALL = {"llama": LLAMA_SMALL, "mistral": MISTRAL_SMALL, "qwen2": QWEN2_SMALL, "qwen3": QWEN3_SMALL}


@cache
def small(config: str, weights: Mode = "float32", arithmetic: Arithmetic = "exact") -> Model:
    """A model of random weights that keep activations near 1."""
    raw = json.loads(config)
    tensors = random_tensors(raw)
    for name, tensor in tensors.items():
        if name.endswith("bias") or "norm" in name:
            tensor *= np.float32(0.1)
            tensor += np.float32("norm" in name)
        else:
            tensor /= np.float32(np.sqrt(tensor.shape[1]))
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), raw, tensors)
        return build_model(load_folder(Path(folder)), weights, arithmetic)


@cache
def tiny(weights: Mode = "float32", arithmetic: Arithmetic = "exact") -> Model:
    return load_model(TINY, weights, arithmetic)


def tokens_of(count: int, vocabulary: int) -> NDArray[np.int64]:
    return np.random.default_rng(count).integers(0, vocabulary, count)
