"""The small random models are what their recipe makes, and use what they are there to use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from conformance.paths import data_folder, model_folder
from reference.config import ModelConfig
from reference.loading import load_folder

RECIPE = run_path(str(data_folder("fixtures") / "make_random.py"))
MODELS: Mapping[str, Mapping[str, Any]] = RECIPE["MODELS"]


def config(name: str) -> ModelConfig:
    return load_folder(model_folder(name)).config


@pytest.mark.parametrize("name", list(MODELS))
def test_making_one_again_gives_the_same(name: str) -> None:
    folder = model_folder(name)
    stored = json.loads((folder / "config.json").read_text())
    assert stored == {**RECIPE["COMMON"], **MODELS[name]}
    for key, tensor in load_file(folder / "model.safetensors").items():
        again = RECIPE["tensor"](f"{name}/{key}", tensor.shape)
        assert np.array_equal(tensor.view(np.uint16), again.view(np.uint16)), key


def test_between_them_they_use_every_switch() -> None:
    mistral, qwen2, llama = (config(f"random-{name}") for name in ("mistral", "qwen2", "llama"))
    assert mistral.windows == (9, 9, 9)
    assert qwen2.windows == (None, None, 7)
    assert llama.windows == (None, None, None)
    assert (mistral.rope.theta, qwen2.rope.kind, llama.rope.kind) == (1e6, "yarn", "llama3")
    assert llama.rope.rotary_dim == 8
    assert (mistral.activation, qwen2.activation) == ("gelu_tanh", "silu")
    assert (mistral.tied, qwen2.tied) == (False, True)
    assert mistral.head_dim * mistral.heads != mistral.hidden_size
    assert qwen2.qkv_bias
    assert llama.o_bias
    assert llama.mlp_bias
    assert mistral.rms_norm_eps == 1e-5
