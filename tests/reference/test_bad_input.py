"""Damaged files, at random: they load, or they are refused in one line, and nothing else happens.

Several thousand mutations of headers, tensors, configurations, indices and tokenizers. None may
end in an error of another kind, and none may ask for memory that the file cannot fill.
"""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from reference.config import parse_config
from reference.errors import BitforbitError
from reference.loading import load_folder
from reference.loading.safetensors_file import open_safetensors
from reference.tokenizer import Tokenizer
from tests.reference.loading.folders import (
    FAMILIES,
    QWEN3,
    random_tensors,
    read_index,
    safetensors_bytes,
    with_keys,
    write_folder,
    write_shards,
)

ODD: list[Any] = [None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e300]
ODD += [float("inf"), float("nan"), "", "F32", "yarn", "\ud800", "a\nb", "../x", [], [[]], {}]
ODD += [[0, 8], [8, 0], [2**62, 4], [-1], {"a": 1}, ["full_attention"] * 2, {"rope_type": "yarn"}]
ROPES: list[Any] = [
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 8}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    {},
]
MOST_MEMORY = 32 * 2**20


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Fail where the peak of all allocations, arrays included, is out of proportion."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_MEMORY


def loads_or_is_refused(load: Callable[[], object]) -> bool:
    """Whether it loads; a refusal must be ours, and one line."""
    try:
        load()
    except BitforbitError as error:
        text = str(error)
        assert text.isprintable()
        assert len(text) < 1000
        return False
    return True


def mutate_value(rng: Random, value: Any) -> Any:
    """Copy of a JSON value with one thing changed, somewhere within it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        value, key = dict(value), rng.choice(list(value))
        if rng.random() < 0.1:
            del value[key]
        elif rng.random() < 0.1:
            value[str(rng.choice(ODD))] = value[key]
        else:
            value[key] = mutate_value(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], mutate_value(rng, value[index]), *value[index + 1 :]]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-8, -4, -1, 1, 4, 8, 2**32, 2**64])
    return copy.deepcopy(rng.choice(ODD))


def mutate_bytes(rng: Random, data: bytes, most: int | None = None) -> bytes:
    """Copy of some bytes with a few flipped, cut out, put in or cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(min(len(changed), most or len(changed)) or 1)
        kind = rng.random()
        if kind < 0.5 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind < 0.7:
            del changed[at : at + rng.choice([1, 4, 64])]
        elif kind < 0.9:
            changed[at:at] = rng.choice([b"\0", b"9", b'"', b"[", b"}", rng.randbytes(4)])
        else:
            del changed[at:]
    return bytes(changed)


def test_configurations_changed_at_random() -> None:
    rng, loaded = Random(1), 0
    for _ in range(1500):
        raw: Any = {**rng.choice(list(FAMILIES.values())), **rng.choice(ROPES)}
        for _ in range(rng.choice([1, 1, 1, 3])):
            raw = mutate_value(rng, raw)
        if isinstance(raw, dict):
            loaded += loads_or_is_refused(partial(parse_config, raw, "config.json"))
    assert 20 < loaded < 1400


def test_text_of_configurations_changed_at_random(tmp_path: Path) -> None:
    rng = Random(2)
    write_folder(tmp_path, QWEN3)
    text = (tmp_path / "config.json").read_bytes()
    results = []
    for _ in range(400):
        (tmp_path / "config.json").write_bytes(mutate_bytes(rng, text))
        results.append(loads_or_is_refused(lambda: load_folder(tmp_path)))
    assert True in results
    assert False in results


def test_headers_changed_at_random(tmp_path: Path) -> None:
    rng, loaded = Random(3), 0
    path = tmp_path / "model.safetensors"
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "F16", "shape": [], "data_offsets": [32, 34]},
    }
    for _ in range(1000):
        changed: Any = mutate_value(rng, header) if rng.random() < 0.95 else rng.choice(ODD)
        path.write_bytes(safetensors_bytes(changed, bytes(range(34))))

        def load() -> None:
            file = open_safetensors(path)
            file.read(list(file.entries))

        loaded += loads_or_is_refused(load)
    assert 5 < loaded < 900


def test_bytes_of_weight_files_changed_at_random(tmp_path: Path) -> None:
    rng, results = Random(4), []
    raw = with_keys(QWEN3, num_hidden_layers=1)
    write_folder(tmp_path, raw, random_tensors(raw, "F16"))
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(500):
        most = rng.choice([8, header, header, len(content)])
        path.write_bytes(mutate_bytes(rng, content, most))
        results.append(loads_or_is_refused(lambda: load_folder(tmp_path)))
    assert True in results, "a flipped bit of a weight goes unnoticed, and none did"
    assert results.count(False) > 300


def test_indices_changed_at_random(tmp_path: Path) -> None:
    rng = Random(5)
    raw = with_keys(QWEN3, num_hidden_layers=1)
    write_shards(tmp_path, raw, random_tensors(raw), 3)
    index = {"metadata": {}, "weight_map": read_index(tmp_path)}
    path = tmp_path / "model.safetensors.index.json"
    results = []
    for _ in range(200):
        path.write_text(json.dumps(mutate_value(rng, index)))
        results.append(loads_or_is_refused(lambda: load_folder(tmp_path)))
    assert results.count(False) > 50


def test_generation_defaults_changed_at_random(tmp_path: Path) -> None:
    rng = Random(6)
    write_folder(tmp_path, QWEN3)
    good = {"eos_token_id": [1, 2], "bos_token_id": 0, "temperature": 0.5, "top_k": 4, "top_p": 0.5}
    for _ in range(200):
        text = json.dumps(mutate_value(rng, good))
        (tmp_path / "generation_config.json").write_text(text)
        loads_or_is_refused(lambda: load_folder(tmp_path))


def test_tokenizers_changed_at_random(tmp_path: Path) -> None:
    rng, results = Random(7), []
    path = tmp_path / "tokenizer.json"
    good = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": "<end>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "vocab": {"<end>": 0, "a": 1, "b": 2, "ab": 3},
            "merges": [["a", "b"]],
        },
    }

    def load() -> None:
        tokenizer = Tokenizer.load(path, 64)
        tokenizer.decode(tokenizer.encode("abba<end>é"))

    for _ in range(400):
        changed = json.dumps(mutate_value(rng, good)).encode()
        path.write_bytes(changed if rng.random() < 0.7 else mutate_bytes(rng, changed))
        results.append(loads_or_is_refused(load))
    assert True in results
    assert False in results
