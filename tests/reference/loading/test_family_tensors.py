"""Tensors of experts and of fused projections: every one is needed, and no other is taken."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fixtures.make_families import configuration
from reference.errors import WeightsError
from reference.loading import load_folder
from reference.model import load_model
from reference.weights import Experts, GatedMLP
from tests.oracle.arrays import assert_same
from tests.reference.loading.folders import Arrays, random_tensors, write_folder, write_shards

MIXTRAL = "model.layers.1.block_sparse_moe"
GPT_OSS = "model.layers.2.mlp"


def without(name: str) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        del tensors[name]

    return change


def renamed(name: str, other: str) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        tensors[other] = tensors.pop(name)

    return change


def reshaped(name: str, *shape: int) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        tensors[name] = np.zeros(shape, np.float32)

    return change


def with_another_expert(tensors: Arrays) -> None:
    for part in ("w1", "w2", "w3"):
        stored = tensors[f"{MIXTRAL}.experts.3.{part}.weight"]
        tensors[f"{MIXTRAL}.experts.4.{part}.weight"] = stored.copy()


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (
            "mixtral",
            without(f"{MIXTRAL}.experts.3.w2.weight"),
            f"no weight file holds tensor '{MIXTRAL}.experts.3.w2.weight', expected with shape",
        ),
        (
            "mixtral",
            with_another_expert,
            f"tensor '{MIXTRAL}.experts.4.w1.weight' of shape [24, 32] is not expected",
        ),
        (
            "mixtral",
            reshaped(f"{MIXTRAL}.gate.weight", 5, 32),
            f"tensor '{MIXTRAL}.gate.weight' has shape [5, 32], expected [4, 32]",
        ),
        (
            "qwen2-moe",
            without("model.layers.0.mlp.shared_expert_gate.weight"),
            "'model.layers.0.mlp.shared_expert_gate.weight', expected with shape [1, 32]",
        ),
        (
            "qwen3-moe",
            without("model.layers.1.mlp.gate_proj.weight"),
            "'model.layers.1.mlp.gate_proj.weight', expected with shape [40, 32]",
        ),
        (
            "gpt-oss",
            reshaped(f"{GPT_OSS}.experts.down_proj", 3, 16, 32),
            f"tensor '{GPT_OSS}.experts.down_proj' has shape [3, 16, 32], expected [4, 16, 32]",
        ),
        (
            "gpt-oss",
            renamed(f"{GPT_OSS}.experts.gate_up_proj", f"{GPT_OSS}.experts.gate_up_proj_blocks"),
            f"no weight file holds tensor '{GPT_OSS}.experts.gate_up_proj', expected",
        ),
        (
            "gpt-oss",
            without("model.layers.0.self_attn.sinks"),
            "'model.layers.0.self_attn.sinks', expected with shape [4]",
        ),
        (
            "phi3",
            renamed("model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            "'model.layers.0.mlp.gate_up_proj.weight', expected with shape [80, 32]",
        ),
        (
            "olmo2",
            renamed(
                "model.layers.0.post_feedforward_layernorm.weight",
                "model.layers.0.input_layernorm.weight",
            ),
            "'model.layers.0.post_feedforward_layernorm.weight', expected with shape [32]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, change: Callable[[Arrays], None], expected: str, tmp_path: Path
) -> None:
    raw = configuration(name)
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, tensors)
    load_folder(tmp_path)
    change(tensors)
    write_folder(tmp_path, raw, tensors)
    with pytest.raises(WeightsError) as caught:
        load_folder(tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_experts_than_the_files_hold_are_never_counted_up(tmp_path: Path) -> None:
    """A line of a configuration may name more tensors than memory holds."""
    raw = configuration("mixtral")
    write_folder(tmp_path, raw | {"num_local_experts": 100_000}, random_tensors(raw))
    tracemalloc.start()
    with pytest.raises(
        WeightsError, match=r"holds tensor '.*\.0\.block.*\.experts\.4\.w1\.weight'"
    ):
        load_folder(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def test_shards_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    """An expert in bfloat16 among those in float32: a shard of another conversion."""
    raw = configuration("mixtral")
    write_shards(tmp_path, raw, random_tensors(raw), 3)
    load_folder(tmp_path)
    file = tmp_path / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    save_file({n: w.astype(ml_dtypes.bfloat16) for n, w in tensors.items()}, file)
    with pytest.raises(WeightsError, match=r"is (float32|bfloat16), but 'model\.layers\.\d.*fetch"):
        load_folder(tmp_path)


def test_a_kind_of_tensor_may_have_a_dtype_of_its_own(tmp_path: Path) -> None:
    raw = configuration("mixtral")
    tensors = random_tensors(raw)
    for name in tensors:
        if not name.endswith("norm.weight"):
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    write_shards(tmp_path, raw, tensors, 3)
    load_folder(tmp_path)


def test_layers_that_draft_are_not_read(tmp_path: Path) -> None:
    raw = configuration("mellum")
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, tensors)
    before = load_folder(tmp_path).digest
    drafting = np.ones((3, 5), np.float32)
    write_folder(tmp_path, raw, {**tensors, "mtp.layers.0.mlp.gate.weight": drafting})
    assert load_folder(tmp_path).digest == before


def test_stacked_experts_are_cut_where_gate_and_up_take_turns(tmp_path: Path) -> None:
    raw = configuration("gpt-oss")
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, tensors)
    x = np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32)
    layer = load_model(tmp_path, arithmetic="float32").weights.layers[2].mlp
    assert isinstance(layer, Experts)
    for expert, mlp in enumerate(layer.experts):
        both = x @ tensors[f"{GPT_OSS}.experts.gate_up_proj"][expert]
        both = both + tensors[f"{GPT_OSS}.experts.gate_up_proj_bias"][expert]
        expected = np.concatenate([both[:, 0::2], both[:, 1::2]], axis=1)
        np.testing.assert_allclose(mlp.gate_up(x), expected, rtol=1e-4, atol=1e-4)


def test_fused_and_separate_projections_are_one_model(tmp_path: Path) -> None:
    """Phi-3 without longrope is Mistral under other names."""
    raw = {**configuration("phi3"), "rope_scaling": None}
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, tensors)
    fused = load_model(tmp_path)
    mistral = {**raw, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    del mistral["original_max_position_embeddings"]
    split: Arrays = {}
    for name, w in tensors.items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", np.split(w, [32, 48]), strict=True):
                split[name.replace("qkv", part)] = rows.copy()
        elif "gate_up" in name:
            for part, rows in zip(("gate", "up"), np.split(w, 2), strict=True):
                split[name.replace("gate_up", part)] = rows.copy()
        else:
            split[name] = w
    write_folder(tmp_path, mistral, split)
    separate = load_model(tmp_path)
    assert isinstance(separate.weights.layers[0].mlp, GatedMLP)
    tokens = np.arange(30)
    assert_same(separate.forward(tokens), fused.forward(tokens))
