"""The small random models are what their recipe makes, and use what they are there to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.cases import ending
from conformance.golden import read_all
from conformance.paths import data_folder, model_folder
from fixtures import make_ends
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


@pytest.mark.parametrize("name", ["random-ends", "random-end"])
def test_making_one_that_ends_again_gives_the_same(name: str, tmp_path: Path) -> None:
    make_ends.make(name, tmp_path)
    made = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert made == {file.name: file.read_bytes() for file in model_folder(name).iterdir()}


def test_texts_end_by_what_the_folder_says() -> None:
    ends = {
        name: load_folder(model_folder(name)).eos_token_ids
        for name in ("random-ends", "random-end")
    }
    assert ends == {"random-ends": (ending.FIRST, ending.SECOND), "random-end": (ending.SECOND,)}


@pytest.mark.parametrize(
    ("name", "count", "last"),
    [
        ("first_id", 5, ending.FIRST),
        ("second_id", 9, ending.SECOND),
        ("one_id", 5, ending.SECOND),
        ("at_once", 1, ending.FIRST),
        ("in_the_prompt", 6, ending.FIRST),
        ("at_the_limit", 5, ending.FIRST),
        ("before_the_limit", 4, 40),
    ],
)
def test_a_golden_ends_as_its_note_says(name: str, count: int, last: int) -> None:
    (one,) = read_all(data_folder("goldens"), {f"generation/complete/{name}"})
    tokens = one.outputs["tokens"].tolist()
    assert (len(tokens), tokens[-1]) == (count, last)
    several = one.parameters["model"] == ending.SEVERAL
    ends = {ending.FIRST, ending.SECOND} if several else {ending.SECOND}
    assert not ends & set(tokens[:-1])


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
