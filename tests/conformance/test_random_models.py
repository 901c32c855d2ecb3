"""The small random models are what their recipe makes, and use what they are there to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.paths import model_folder
from fixtures.make_random import MODELS, make
from reference.config import ModelConfig
from reference.loading import load_folder


def config(name: str) -> ModelConfig:
    return load_folder(model_folder(name)).config


@pytest.mark.parametrize("name", list(MODELS))
def test_making_one_again_gives_the_same(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (model_folder(name) / file).read_bytes(), file


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
