"""Model folders: what transformers writes is read back, and what does not fit is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from reference.config import parse_config
from reference.errors import BitforbitError, ConfigError, TokenizerError, WeightsError
from reference.loading import Checkpoint, expected_tensors, load_folder
from tests.reference.loading.folders import (
    DTYPES,
    FAMILIES,
    LLAMA,
    QWEN3,
    random_tensors,
    read_index,
    with_keys,
    write_config,
    write_folder,
    write_index,
    write_shards,
)
from tests.reference.refusals import told

FIXTURE = Path(__file__).parents[3] / "fixtures" / "tiny-dense"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM = "model.layers.1.input_layernorm.weight"


def refusal(folder: Path, error: type[BitforbitError] = WeightsError) -> str:
    with pytest.raises(error) as caught:
        load_folder(folder)
    return told(caught, str(folder))


# ----------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("style", ["new", "old"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_read_back(
    tmp_path: Path, family: str, tied: bool, style: str
) -> None:
    raw = with_keys(FAMILIES[family], tie_word_embeddings=tied, attention_bias=...)
    if family in ("llama", "qwen3"):
        raw["attention_bias"] = tied
    if family == "llama":
        raw["mlp_bias"] = tied
    architecture = raw.pop("architectures")[0]
    theirs = transformers.AutoConfig.for_model(**raw)
    torch.manual_seed(1)
    model = getattr(transformers, architecture)(theirs)
    model.save_pretrained(tmp_path)
    if style == "old":
        saved = json.loads((tmp_path / "config.json").read_text())
        saved["rope_theta"] = saved.pop("rope_parameters")["rope_theta"]
        write_config(tmp_path, {**saved, "rope_scaling": None})
    checkpoint = load_folder(tmp_path)
    state = model.state_dict()
    state = {name: w for name, w in state.items() if not (tied and name == HEAD)}
    assert checkpoint.config.architecture == architecture
    assert set(checkpoint.tensors) == set(state)
    for name, tensor in state.items():
        assert checkpoint.tensors[name].tobytes() == tensor.numpy().tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_widened_to_float32(tmp_path: Path, dtype: str) -> None:
    stored = write_folder(tmp_path, LLAMA, random_tensors(LLAMA, dtype))
    for name, tensor in load_folder(tmp_path).tensors.items():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, stored[name].astype(np.float32))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_are_the_same_model(tmp_path: Path, count: int) -> None:
    tensors = random_tensors(LLAMA, "BF16")
    for name in ("whole", "shards", "wide"):
        (tmp_path / name).mkdir()
    write_folder(tmp_path / "whole", LLAMA, tensors)
    write_shards(tmp_path / "shards", LLAMA, tensors, count)
    write_folder(tmp_path / "wide", LLAMA, {k: w.astype(np.float32) for k, w in tensors.items()})
    checkpoints = [load_folder(tmp_path / name) for name in ("whole", "shards", "wide")]
    assert len({checkpoint.digest for checkpoint in checkpoints}) == 1
    for name in tensors:
        assert np.array_equal(checkpoints[0].tensors[name], checkpoints[1].tensors[name])


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path, LLAMA)
    digests = [load_folder(tmp_path).digest, load_folder(str(tmp_path)).digest]
    assert digests[0] == digests[1]
    tensors[NORM][0] = np.nextafter(tensors[NORM][0], np.float32(9))
    write_folder(tmp_path, LLAMA, tensors)
    digests.append(load_folder(tmp_path).digest)
    write_folder(tmp_path, with_keys(LLAMA, rms_norm_eps=1e-6), tensors)
    digests.append(load_folder(tmp_path).digest)
    assert len(set(digests)) == 3


def test_nothing_of_a_checkpoint_can_be_written_to(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    checkpoint = load_folder(tmp_path)
    with pytest.raises(TypeError):
        checkpoint.tensors["x"] = checkpoint.tensors[NORM]  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.tensors[NORM][0] = 1


def test_the_committed_model_loads() -> None:
    checkpoint = load_folder(FIXTURE)
    assert checkpoint.eos_token_ids == (0,)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.eos_ids == (0,)
    assert checkpoint.path == FIXTURE


def test_expected_tensors_are_those_of_transformers() -> None:
    for raw in FAMILIES.values():
        config = transformers.AutoConfig.for_model(**with_keys(raw, architectures=...))
        with torch.device("meta"):
            model = getattr(transformers, raw["architectures"][0])(config)
        state = {name: tuple(w.shape) for name, w in model.state_dict().items()}
        assert expected_tensors(parse_config(raw, "config.json")) == state


# -------------------------------------------------------------------------- tensors that do not fit


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    del tensors[NORM]
    write_folder(tmp_path, LLAMA, tensors)
    text = refusal(tmp_path)
    assert f"no weight file holds tensor '{NORM}', expected with shape [16]; check that" in text


def test_a_missing_head_of_an_untied_model_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    del tensors[HEAD]
    write_folder(tmp_path, LLAMA, tensors)
    assert f"tensor '{HEAD}', expected with shape [32, 16]" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.2.input_layernorm.weight", "odd\nname", HEAD + "s"])
def test_an_unknown_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, LLAMA, {**random_tensors(LLAMA), name: np.ones((3, 1), np.float32)})
    text = refusal(tmp_path)
    assert f"model.safetensors: tensor {name!r} of shape [3, 1] is not expected; check" in text


@pytest.mark.parametrize("shape", [(17,), (16, 1), (), (0,)])
def test_a_misshapen_tensor_is_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_folder(tmp_path, LLAMA, {**random_tensors(LLAMA), NORM: np.ones(shape, np.float32)})
    text = refusal(tmp_path)
    assert f"tensor '{NORM}' has shape {list(shape)}, expected [16]; check that config" in text


def test_a_transposed_matrix_is_named(tmp_path: Path) -> None:
    tensors, name = random_tensors(LLAMA), "model.layers.0.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    write_folder(tmp_path, LLAMA, tensors)
    assert f"'{name}' has shape [24, 16], expected [16, 24]" in refusal(tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN3)
    tensors[NORM][3] = np.nan
    write_folder(tmp_path, QWEN3, tensors)
    assert f"model.safetensors: tensor '{NORM}' holds nan at [3]" in refusal(tmp_path)


def test_a_tied_model_may_store_an_equal_head_only(tmp_path: Path) -> None:
    tied = with_keys(LLAMA, tie_word_embeddings=True)
    tensors = random_tensors(tied)
    tensors[HEAD] = tensors[EMBEDDING].copy()
    write_folder(tmp_path, tied, tensors)
    assert HEAD not in load_folder(tmp_path).tensors
    tensors[HEAD][0, 0] += 1
    write_folder(tmp_path, tied, tensors)
    assert f"tensor '{HEAD}' differs from '{EMBEDDING}', though config.json ties" in refusal(
        tmp_path
    )
    tensors[HEAD] = tensors[HEAD][:-1]
    write_folder(tmp_path, tied, tensors)
    assert f"'{HEAD}' has shape [31, 16], expected [32, 16]" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
def test_stored_rope_frequencies_are_left_aside(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, LLAMA, {**random_tensors(LLAMA), name: np.ones(2, np.float32)})
    assert name not in load_folder(tmp_path).tensors


# ------------------------------------------------------------------------- files that do not fit


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    assert "config.json: it cannot be read: No such file" in refusal(tmp_path, ConfigError)
    assert "config.json: it cannot be read" in refusal(tmp_path / "absent", ConfigError)
    write_config(tmp_path, LLAMA)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "neither model.safetensors nor model.safetensors.index.json; save" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "config.json: this is not valid JSON"),
        (b"[]", "config.json: this is [], not a JSON object"),
        (b"\xff\xfe{}", "config.json: this is not valid JSON: 'utf-8' codec"),
        (b'{"rope_theta": 1e4, "rope_theta": 1e6}', "the key 'rope_theta' occurs twice"),
        (b'{"rms_norm_eps": Infinity}', "Infinity is not a JSON number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "config.json: this is not valid JSON"),
        (b'{"a":' * 50 + b"1" + b"}" * 50, "it is nested too deeply"),
    ],
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert expected in refusal(tmp_path, ConfigError)


def test_a_config_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100_000_001)
    assert "100000001 bytes are more than 100000000; check the file" in refusal(
        tmp_path, ConfigError
    )


def test_a_path_with_a_null_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it cannot be read: .*; check the path"):
        load_folder(f"{tmp_path}/\0")


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, LLAMA, write_folder(tmp_path, LLAMA), 2)
    text = refusal(tmp_path)
    assert "model.safetensors: model.safetensors.index.json lies beside it; remove" in text


Damage = Callable[[Path, list[Path]], object]


def change_index(**changes: object) -> Damage:
    def damage(folder: Path, shards: list[Path]) -> None:
        placed = {**read_index(folder), **changes}
        write_index(folder, {name: shard for name, shard in placed.items() if shard is not ...})

    return damage


def add_tensor(name: str) -> Damage:
    def damage(folder: Path, shards: list[Path]) -> None:
        save_file({**load_file(shards[1]), name: np.ones(16, np.float32)}, shards[1])

    return damage


def remove_tensor(folder: Path, shards: list[Path]) -> None:
    tensors = load_file(shards[0])
    del tensors[sorted(tensors)[0]]
    save_file(tensors, shards[0])


FIRST = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder, shards: shards[0].unlink(), f"shard '{FIRST}' is not in the folder; fetch"),
        (change_index(**{NORM: "../x.safetensors"}), "in '../x.safetensors'; give the plain name"),
        (change_index(**{NORM: "/tmp/x.safetensors"}), "in '/tmp/x.safetensors'; give the plain"),
        (change_index(**{NORM: "a\\b.safetensors"}), "; give the plain name"),
        (change_index(**{NORM: "a\0.safetensors"}), "in 'a\\x00.safetensors'; give the plain name"),
        (change_index(**{NORM: "model.bin"}), "in 'model.bin'; give the plain name"),
        (change_index(**{NORM: 1}), f"places tensor '{NORM}' in 1; give the plain name"),
        (change_index(**{NORM: "absent.safetensors"}), "shard 'absent.safetensors' is not in"),
        (change_index(**{NORM: ...}), f"tensor '{NORM}' is in shard 'model-0000"),
        (change_index(absent=FIRST), f"{FIRST}: tensor 'absent' is missing, though"),
        (change_index(**{EMBEDDING: FIRST, NORM: FIRST, HEAD: FIRST}), "but the index places it"),
        (remove_tensor, f"{FIRST}: tensor 'lm_head.weight' is missing, though"),
        (add_tensor("extra"), "tensor 'extra' is in shard 'model-00002-of-00002.safetensors', but"),
        (add_tensor(HEAD), f"tensor '{HEAD}' is in two shards, '{FIRST}' and 'model-00002"),
    ],
)
def test_shards_and_index_must_agree(tmp_path: Path, damage: Damage, expected: str) -> None:
    write_shards(tmp_path, LLAMA, random_tensors(LLAMA), 2)
    damage(tmp_path, sorted(tmp_path.glob("model-*.safetensors")))
    assert expected in refusal(tmp_path)


@pytest.mark.parametrize("placed", [{}, [], None, "model.safetensors"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, placed: Any) -> None:
    write_config(tmp_path, LLAMA)
    write_index(tmp_path, placed)
    assert f"weight_map is {placed!r}; it must name the shard" in refusal(tmp_path)


def test_an_index_that_is_no_json_is_a_matter_of_the_weights(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "index.json: this is not valid JSON" in refusal(tmp_path)


# ----------------------------------------------------------------------- tokenizer and generation


def load_with(folder: Path, generation: object = None, **changes: Any) -> Checkpoint:
    write_folder(folder, with_keys(LLAMA, **changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_folder(folder)


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        (None, {"eos_token_id": ...}, ()),
        (None, {"eos_token_id": 3, "bos_token_id": 1}, (3,)),
        (None, {"eos_token_id": [3, 4, 3]}, (3, 4)),
        ({"eos_token_id": 5}, {"eos_token_id": 3}, (5,)),
        ({"eos_token_id": [5, 6], "bos_token_id": 0}, {"eos_token_id": 3}, (5, 6)),
        ({"eos_token_id": None}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": []}, {"eos_token_id": 3}, ()),
        ({}, {"eos_token_id": 3}, (3,)),
    ],
)
def test_ends_come_from_generation_config_first(
    tmp_path: Path, generation: object, config: dict[str, Any], eos: object
) -> None:
    assert load_with(tmp_path, generation, **config).eos_token_ids == eos


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": 32}, "eos_token_id is 32; a token id is an integer from 0 to 31"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]; a token id"),
        ({"eos_token_id": True}, "eos_token_id is True; a token id"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'; a token id"),
        ({"eos_token_id": [[1]]}, "eos_token_id is [[1]]; a token id"),
        ([], "this is [], not a JSON object"),
    ],
)
def test_bad_ends_are_named(tmp_path: Path, generation: object, expected: str) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert f"generation_config.json: {expected}" in refusal(tmp_path, ConfigError)


def test_a_bad_end_in_config_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, with_keys(LLAMA, eos_token_id=99))
    assert "/config.json: eos_token_id is 99; a token id" in refusal(tmp_path, ConfigError)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    shutil.copy(FIXTURE / "tokenizer.json", tmp_path)
    text = refusal(tmp_path, TokenizerError)
    assert (
        "tokenizer.json: the largest token id is 1023, but vocab_size in config.json is 32" in text
    )
