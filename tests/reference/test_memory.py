"""Layers one at a time: the bits of loading everything, in the memory given (SPEC 12.3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from reference.config import parse_config
from reference.engine import Engine
from reference.errors import RequestError, WeightsError
from reference.loading import expected_tensors, load_folder
from reference.measure.perplexity import Evaluation
from reference.memory import FIXED, Memory, OnDemand, arrays, bytes_of, resident, row_slices
from reference.model import AttentionKind, Model, Part, load_model
from reference.weights import Arithmetic, Mode, SlicedLinear
from tests.oracle.arrays import assert_same
from tests.reference.loading.folders import (
    LLAMA,
    QWEN3,
    random_tensors,
    with_keys,
    write_folder,
)
from tests.reference.loading.gguf_files import write_gguf

ENOUGH = 2**40
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 128}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied and a plain model would do; this one has norms of q and k, and windows."""
    raw = with_keys(QWEN3, **SIZES, num_hidden_layers=3)
    tensors = {n: x / np.float32(x.shape[-1]) for n, x in random_tensors(raw).items()}
    write_folder(tmp_path, raw, tensors)
    return tmp_path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a few rows of the head and of the embedding, and no piece that stays."""
    monkeypatch.setattr("reference.memory.SLICE", 5 * 64)
    monkeypatch.setattr("reference.memory.WHOLE", 5)
    monkeypatch.setattr("reference.memory.LOOKUPS", 3)


def forgetful(path: Path, weights: Mode, arithmetic: Arithmetic) -> Model:
    """A model that keeps no piece."""
    model = load_model(path, weights, arithmetic, ENOUGH)
    assert model.memory is not None
    model.memory.keep = lambda pieces, index, piece: None  # type: ignore[method-assign]
    return model


# the same bits


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("weights", ["float32", "int4", "int4-row"])
@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
@pytest.mark.parametrize("keeps", [True, False])
def test_layers_one_at_a_time_give_the_bits_of_all(
    folder: Path, weights: Mode, arithmetic: Arithmetic, keeps: bool
) -> None:
    whole = load_model(folder, weights, arithmetic)
    parts = load_model(folder, weights, arithmetic, ENOUGH)
    if not keeps:
        parts = forgetful(folder, weights, arithmetic)
    tokens, caches = np.arange(31) % 32, (whole.new_cache(), parts.new_cache())
    for given in (tokens[:20], tokens[20:21], tokens[21:]):
        one, other = whole.forward(given, caches[0]), parts.forward(given, caches[1])
        if arithmetic == "exact":
            assert_same(one, other)
        else:  # the head is cut, and BLAS may sum a column otherwise at its edges
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert parts.digest == whole.digest


@pytest.mark.usefixtures("short")
def test_a_gguf_file_gives_the_bits_of_loading_it_whole(tmp_path: Path) -> None:
    raw, file = with_keys(LLAMA, **SIZES, tie_word_embeddings=True), tmp_path / "model.gguf"
    tensors = {n: x / np.float32(x.shape[-1]) for n, x in random_tensors(raw).items()}
    write_gguf(file, raw, tensors, gguf.GGMLQuantizationType.Q8_0)
    whole, parts = load_model(file), forgetful(file, "float32", "exact")
    assert_same(whole.forward(np.arange(25)), parts.forward(np.arange(25)))
    assert whole.digest == parts.digest


def test_an_engine_writes_the_same(folder: Path) -> None:
    answers = [
        Engine(model).generate([1, 2, 3], 12, stop_tokens=()).tokens
        for model in (load_model(folder), forgetful(folder, "float32", "exact"))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_narrow_tensors_are_widened(tmp_path: Path, dtype: str) -> None:
    raw = with_keys(LLAMA, tie_word_embeddings=True)
    write_folder(tmp_path, raw, random_tensors(raw, dtype))
    whole, parts = load_model(tmp_path), forgetful(tmp_path, "float32", "exact")
    assert_same(whole.forward([3, 1, 2]), parts.forward([3, 1, 2]))


# batches that pass each layer together


def test_batches_pass_a_layer_before_the_next(folder: Path) -> None:
    model, whole = forgetful(folder, "float32", "exact"), load_model(folder)
    assert model.memory is not None
    entered: list[int] = []
    model.memory.on_layer = entered.append
    prompts = [[1, 2, 3], [9], list(range(30))]
    found = model.forward_batches([[Part(tokens, None)] for tokens in prompts])
    for tokens, (logits,) in zip(prompts, found, strict=True):
        assert_same(logits, whole.forward(tokens))
    assert entered == [0, 1, 2]


def test_a_sequence_without_a_cache_gives_the_bits_of_one_with(folder: Path) -> None:
    model = load_model(folder)
    for attention in get_args(AttentionKind):
        without = model.forward_batch([Part(np.arange(30), None, attention)])
        held = model.forward_batch([Part(np.arange(30), model.new_cache(), attention)])
        assert_same(without[0], held[0])


def test_caches_whose_turn_does_not_come_stay_as_they_were(folder: Path) -> None:
    model = load_model(folder)
    caches = [model.new_cache(), model.new_cache()]
    found = model.forward_batches([[Part([1, 2], cache)] for cache in caches])
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert [cache.length for cache in caches] == [2, 0]
    assert caches[1].pool.used_bytes == 0
    with pytest.raises(RequestError, match="the same; fork it"):
        next(model.forward_batches([[Part([1], caches[0])], [Part([1], caches[0])]]))


def test_windows_of_a_text_pass_the_layers_together(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 32, 100)
    whole, parts = load_model(folder), load_model(folder, memory=ENOUGH)
    scores = [list(Evaluation(model, tokens, 16).run()) for model in (whole, parts)]
    assert len(Evaluation(parts, tokens, 16).runs) == 1
    assert len(Evaluation(whole, tokens, 16).runs) == 6
    for one, other in zip(*scores, strict=True):
        assert_same(one.logits, other.logits)
        assert one.window == other.window


# what stays


def pieces(room: int, count: int, size: int) -> tuple[Memory, OnDemand[Any], list[int]]:
    made: list[int] = []

    def make(index: int) -> Any:
        made.append(index)
        return np.zeros(size, np.uint8)

    memory = Memory(resident() + 2**26 + room, 2**26, lambda batches: batches[0][0])
    memory._room = room
    return memory, OnDemand(count, make, memory), made


def test_the_first_pieces_stay_as_far_as_there_is_room() -> None:
    memory, some, made = pieces(room=100, count=5, size=30)
    for _ in range(2):
        for index in range(5):
            assert some[index].nbytes == 30
    assert made == [0, 1, 2, 3, 4, 3, 4]
    memory.prepare([(45, 1)])
    del made[:]
    assert [len(piece) for piece in some] == [30] * 5
    assert made == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        some[5]
    with pytest.raises(RequestError, match="too little for a pass of 101 tokens"):
        memory.prepare([(101, 1)])


# refusals


def test_a_limit_too_small_is_refused_with_the_smallest_that_works(folder: Path) -> None:
    with pytest.raises(RequestError) as caught:
        load_model(folder, memory="1MiB")
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("memory: 1MiB are too little for a pass of 1 token; the smallest limit")
    smallest = int(text.rpartition(" ")[2].removesuffix("MiB"))
    load_model(folder, memory=f"{smallest + 8}MiB").forward([1])  # the process may have grown
    with pytest.raises(RequestError, match="smallest limit"):
        load_model(folder, memory=f"{smallest - 8}MiB")


def test_a_pass_too_large_is_refused_and_changes_nothing(folder: Path) -> None:
    model = load_model(folder, memory=ENOUGH)
    assert model.memory is not None
    model.memory._room = FIXED + (64 << 10)
    cache = model.new_cache()
    with pytest.raises(RequestError, match=r"pass of 100 tokens; .* \d+MiB, or compute fewer at"):
        model.forward(np.zeros(100, int), cache)
    assert (cache.length, cache.pool.used_bytes) == (0, 0)


def test_an_engine_shares_out_what_a_pass_has_room_for(folder: Path) -> None:
    """Long prompts come in chunks, and one whose logits are all wanted in shorter ones."""
    whole, model = Engine(load_model(folder)), load_model(folder, memory=ENOUGH)
    assert model.memory is not None
    room = FIXED + (64 << 10)
    model.memory._room = room
    engine, counts = Engine(model), list[dict[int, int]]()
    engine.on_pass = lambda done: counts.append({n: count for n, _, count in done.shares})
    long, scored = list(range(1, 30)) * 4, list(range(3, 30)) * 3
    expected = [whole.generate(p, 4, stop_tokens=()).tokens for p in ([1, 2], long, scored)]
    requests = [
        engine.submit([1, 2], 4, stop_tokens=()),
        engine.submit(long, 4, stop_tokens=()),
        engine.submit(scored, 4, stop_tokens=(), on_prompt=lambda first, logits: None),
    ]
    while engine.busy:
        engine.step()
    assert [request.result().tokens for request in requests] == expected
    assert counts[0][1] == 2
    most = max(count for done in counts for count in done.values())
    assert 1 < most < len(long)
    assert model.memory.holds(most, 1)
    assert not model.memory.holds(len(long), 1)


def test_wanted_logits_count_against_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder, memory=ENOUGH)
    monkeypatch.setattr(Memory, "holds", lambda self, rows, logits: rows + logits <= 20)
    engine, counts = Engine(model), list[tuple[int, ...]]()
    engine.on_pass = lambda done: counts.append(tuple(count for _, _, count in done.shares))
    engine.submit([1, 2, 3] * 10, 1, on_prompt=lambda first, logits: None)
    engine.submit([1, 2, 3] * 10, 1)
    while engine.busy:
        engine.step()
    assert counts == [(10,), (10,), (10,), (19,), (11,)]


def test_drafts_must_fit_a_pass_within_the_limit(folder: Path) -> None:
    model = load_model(folder, memory=ENOUGH)
    assert model.memory is not None
    model.memory._room = FIXED + (64 << 10)
    Engine(model, draft="ngram", draft_tokens=4)
    with pytest.raises(RequestError, match=r"^draft_tokens: 400 .*memory; give that more, or dr"):
        Engine(model, draft="ngram", draft_tokens=400)


@pytest.mark.parametrize(
    ("text", "count"),
    [("512MiB", 2**29), ("4GiB", 2**32), ("1.5 KiB", 1536), ("77", 77), ("3B", 3), ("1TiB", 2**40)],
)
def test_sizes(text: str, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize(
    "text", ["", "0", "-1MiB", "4 G", "4GB", "1e9", "\u0664GiB", "GiB", "9" * 40, "0.1B", "1MiB\n"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is no size; give one such as 512MiB or 4GiB"):
        bytes_of(text)


@pytest.mark.parametrize("memory", [0, -5, 1.5, float("nan"), [1 << 40], b"4GiB"])
def test_what_is_no_count_of_bytes_is_refused(folder: Path, memory: Any) -> None:
    with pytest.raises(RequestError, match=r"^memory: .* it must be 1 or more$"):
        load_model(folder, memory=memory)


@pytest.mark.parametrize("where", ["model.embed_tokens", "model.layers.1.mlp.up_proj", "lm_head"])
def test_a_weight_that_is_not_finite_is_found_before_anything_is_computed(
    tmp_path: Path, where: str
) -> None:
    tensors = random_tensors(LLAMA)
    tensors[f"{where}.weight"][2, 3] = np.nan
    write_folder(tmp_path, LLAMA, tensors)
    model = load_model(tmp_path, memory=ENOUGH)
    with pytest.raises(WeightsError, match=rf"{where}\.weight' holds nan at"):
        Engine(model)


def test_a_file_that_shrinks_meanwhile_is_refused(folder: Path) -> None:
    model = forgetful(folder, "float32", "exact")
    cache = model.new_cache()
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 8)
    with pytest.raises(WeightsError, match="became shorter while it was read"):
        model.forward([1, 2], cache)
    assert (cache.length, cache.pool.used_bytes) == (0, 0)


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_nothing_that_stays_lies_in_the_map(folder: Path, arithmetic: Arithmetic) -> None:
    """But for slices of the head in plain float32, which are used as they lie there."""
    model = load_model(folder, "float32", arithmetic, ENOUGH)
    model.forward([1, 2], model.new_cache())
    weights = model.weights
    assert isinstance(weights.layers, OnDemand)
    assert isinstance(weights.head, SlicedLinear)
    assert isinstance(weights.head.pieces, OnDemand)
    head = list(weights.head.pieces._pieces.values()) if arithmetic == "exact" else []
    kept = [*weights.layers._pieces.values(), *head]
    assert len(kept) == model.config.layers + len(head)
    for name, array in [*arrays("kept", tuple(kept)), ("norm", weights.final_norm)]:
        owner: Any = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        assert isinstance(owner, np.ndarray), name


def test_a_stored_head_of_a_tied_model_must_be_the_embedding(tmp_path: Path) -> None:
    raw = with_keys(LLAMA, tie_word_embeddings=True)
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_folder(tmp_path, raw, tensors)
    assert "lm_head.weight" not in load_folder(tmp_path, mapped=True).tensors
    tensors["lm_head.weight"][31, 15] += 1
    write_folder(tmp_path, raw, tensors)
    with pytest.raises(WeightsError, match="differs from"):
        load_folder(tmp_path, mapped=True)


def test_slices_of_rows_are_all_rows() -> None:
    for rows, width in ((1, 7), (900, 1 << 19), (5, 1 << 30), (8192, 512)):
        found = np.concatenate([np.arange(rows)[part] for part in row_slices(rows, width)])
        assert found.tolist() == list(range(rows))


# a model four times as large as the limit

LIMIT = 136 << 20
LARGE = {
    **LLAMA,
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

RUN = """
import hashlib, json, sys
import numpy as np
from reference.model import Part, load_model

path, arithmetic, limit = sys.argv[1:]
model = load_model(path, "float32", arithmetic, int(limit) or None)
prompts = [np.arange(40 + i) * 7 % 4096 for i in range(2)]
batches = model.forward_batches([[Part(p, None, "exact", 8)] for p in prompts])
seen = hashlib.sha256(b"".join(logits.tobytes() for (logits,) in batches))
cache = model.new_cache()
for given in ([1, 2, 3], [4]):
    seen.update(model.forward(given, cache).tobytes())
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024 - cache.bytes
print(json.dumps({"bits": seen.hexdigest(), "peak": peak}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, 573 MiB of float32."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in expected_tensors(parse_config(dict(LARGE), "config.json")).items():
        tensors[name] = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
    save_file(tensors, folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size > 4 * LIMIT
    return folder


def run(folder: Path, arithmetic: str, limit: int) -> dict[str, Any]:
    """What RUN prints, in a process of its own."""
    command = [sys.executable, "-c", RUN, str(folder), arithmetic, str(limit)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, check=True, env=environment, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_a_model_four_times_the_limit_stays_below_it(large: Path, arithmetic: str) -> None:
    """VmHWM is the most that was resident, mapped pages of the file included."""
    below, whole = run(large, arithmetic, LIMIT), run(large, arithmetic, 0)
    assert below["peak"] < LIMIT < whole["peak"] / 4
    assert below["bits"] == whole["bits"]
