"""The Rust engine: whole models, exact, behind the process door."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from conformance.backends import resolve_process
from conformance.backends.frames import decode, encode
from conformance.backends.process import ProcessBackend
from conformance.backends.reference import ReferenceBackend
from conformance.fuzzing.case import OPERATIONS as DRAWN
from conformance.fuzzing.running import Fuzzer
from conformance.paths import data_folder
from conformance.results import Result
from conformance.rules import same_bits
from conformance.runner import run
from conformance.selection import Selection
from tests.reference.loading.gguf_files import write_gguf

SOURCE = Path(__file__).parents[3] / "examples" / "rust"
GOLDENS = data_folder("goldens")
EXACT = ReferenceBackend()
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "attention_factor": 1.25,
}
pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo")


def _built(source: Path, target: Path, level: str = "3") -> Path:
    """The engine of a source folder, built without the network and without a warning."""
    cargo = ["cargo", "build", "--release", "--offline", "--locked", "--quiet"]
    made = subprocess.run(
        [*cargo, "--manifest-path", str(source / "Cargo.toml"), "--target-dir", str(target)],
        capture_output=True,
        text=True,
        env={**os.environ, "RUSTFLAGS": "-D warnings", "CARGO_PROFILE_RELEASE_OPT_LEVEL": level},
    )
    assert made.returncode == 0, made.stderr
    return target / "release" / "engine"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built(SOURCE, tmp_path_factory.mktemp("rust"))


@pytest.fixture(scope="module")
def rust(engine: Path) -> Iterator[ProcessBackend]:
    backend = resolve_process(str(engine), 60)
    yield backend
    backend.close()


def judged(engine: Path, selection: Selection) -> list[Result]:
    backend = resolve_process(str(engine), 60)
    try:
        return list(run(backend, GOLDENS, selection))
    finally:
        backend.close()


def test_rust_passes_every_case(engine: Path) -> None:
    levels = ("elementary", "kernel", "cache", "generation")
    results = judged(engine, Selection(levels))
    assert [(r.id, r.message) for r in results if r.outcome != "pass"] == []
    assert {r.level for r in results if r.rule == "bits"} == set(levels)


def test_rust_passes_what_is_drawn(rust: ProcessBackend) -> None:
    fuzzer = Fuzzer(rust, list(DRAWN))
    for _ in fuzzer.run(17, 4, None):
        pass
    failures = [f.least for tally in fuzzer.tallies.values() for f in tally.failures]
    assert [(str(f.made.case), f.verdict.message) for f in failures] == []
    assert len(fuzzer.tallies) == len(DRAWN)


def test_rust_and_numpy_agree_on_any_float32(rust: ProcessBackend) -> None:
    x = np.random.default_rng(5).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    for name in ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh"):
        assert same_bits({"y": getattr(rust, name)(x=x)}, {"y": getattr(EXACT, name)(x)}), name


@pytest.mark.parametrize("fixture", ["random-llama", "families/mixtral", "families/gemma2"])
def test_rust_traces_the_same_steps(rust: ProcessBackend, fixture: str) -> None:
    model, tokens = str(data_folder("fixtures") / fixture), np.arange(20)
    ours, theirs = rust.load(model=model, weights="float32"), EXACT.load(model, "float32")
    ours.reset()
    got, wanted = (s.trace(tokens=tokens, attention="exact") for s in (ours, theirs))
    assert set(got) == set(wanted)
    assert same_bits(got, wanted)


@pytest.mark.parametrize("fixture", ["random-llama", "random-qwen2"])
def test_rust_reads_codes_from_gguf(rust: ProcessBackend, fixture: str, tmp_path: Path) -> None:
    folder, tokens = data_folder("fixtures") / fixture, np.arange(20)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"rope_scaling": YARN}
    tensors = load_file(folder / "model.safetensors")
    model = str(write_gguf(tmp_path / "model.gguf", raw, tensors, GGMLQuantizationType.Q4_0))
    sessions = rust.load(model=model, weights="native"), EXACT.load(model, "native")
    got, wanted = (s.forward(tokens=tokens, attention="exact") for s in sessions)
    assert same_bits({"y": got}, {"y": wanted})


def test_block_sums_from_the_last_fail_the_cases_of_order(tmp_path: Path) -> None:
    source = tmp_path / "rust"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("target"))
    aligned = source / "src" / "aligned.rs"
    ascending = "in panel.chunks_exact(BLOCK * PANEL).enumerate()"
    text = aligned.read_text()
    assert text.count(ascending) == 1
    aligned.write_text(text.replace(ascending, ascending + ".rev()"))
    engine = _built(source, tmp_path / "target", level="1")
    results = judged(engine, Selection(("kernel",), patterns=("kernel/linear/*:bits",)))
    failed = {r.id for r in results if r.outcome == "fail"}
    assert failed
    assert all("order" in name for name in failed)
    assert len(failed) < len(results)


def _arguments(shape: tuple[int, ...], **others: Any) -> dict[str, Any]:
    return {"x": np.zeros(shape, np.float32), **others}


ONES = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("operation", "arguments", "part"),
    [
        ("exp", {}, "x is missing"),
        ("exp", _arguments((2, 2)), "x has 2 axes, not 1"),
        ("exp", {"x": np.zeros(2)}, "F64 where a float belongs"),
        ("rms_norm", _arguments((2, 2), eps=1), "weight is missing"),
        ("rms_norm", _arguments((2, 2), weight=np.ones(2, np.float32), eps="1"), "another kind"),
        ("linear", _arguments((2, 2), w=np.zeros((2, 3), np.float32)), "does not fit"),
        ("quantize_int4", {"w": np.full((1, 2), np.inf, np.float32), "group": 32}, "not finite"),
        ("quantize_int4", {"w": np.full((1, 2), 1e7, np.float32), "group": 32}, "65504"),
        ("attention", {"q": ONES, "k": ONES[:, :2], "v": ONES[:, :2], "mode": "exact"}, "multiple"),
        ("rope_constants", {"parameters": {"head_dim": 3}, "position": 0}, "even and positive"),
        ("page_hashes", {"tokens": np.arange(3), "page_size": 0}, "page_size must be above 0"),
        ("paging", {"script": np.array([[2, 0, 1]]), "page_size": 4}, "is not there"),
        (
            "prefix_reuse",
            {"tokens": np.arange(9), "lengths": np.array([9]), "page_size": 4, "pages": 2},
            "needs 3 pages, and there are 2",
        ),
        ("load", {"model": "nowhere", "weights": "float32"}, "nowhere/config.json"),
        ("load", {"model": "nowhere", "weights": "int3"}, "weights int3 are unknown"),
        ("forward", {"session": "none", "tokens": np.arange(3)}, "there is no session none"),
    ],
)
def test_rust_refuses(engine: Path, operation: str, arguments: dict[str, Any], part: str) -> None:
    right = encode("exp", "2", {"x": np.zeros(1, np.float32)})
    told = _told(engine, encode(operation, "1", arguments) + right)
    assert [answer["status"] for answer in told] == ["error", "ok"]
    assert part in told[0]["message"]


def _told(engine: Path, frames: bytes) -> list[dict[str, str]]:
    """The metadata of the answers to these frames; the program must not fall."""
    told = subprocess.run([str(engine)], input=frames, capture_output=True, timeout=60)
    assert told.returncode == 0, told.stderr
    answers, rest = [], told.stdout
    while rest:
        length = int.from_bytes(rest[:8], "little")
        answers.append(dict(decode(rest[8 : 8 + length]).text))
        rest = rest[8 + length :]
    return answers


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"\xff" * 8, "longer than 2^30"),
        (struct.pack("<Q", 100) + b"{}", "the input ends within a frame"),
        (struct.pack("<QQ", 10, 99) + b"{}", "the header is longer than its file"),
        (struct.pack("<QQ", 10, 2) + b"[]", "the header is no object"),
        (struct.pack("<QQ", 10, 2) + b"{}", "the metadata has no text id"),
        (struct.pack("<QQ", 100_008, 100_000) + b"[" * 100_000, "less depth expected"),
    ],
)
def test_a_frame_that_is_none_ends_the_program(engine: Path, sent: bytes, message: str) -> None:
    told = subprocess.run([str(engine)], input=sent, capture_output=True, timeout=30)
    assert (told.returncode, told.stdout) == (1, b"")
    assert told.stderr.decode().startswith("engine: ")
    assert message in told.stderr.decode()


def test_the_program_ends_with_its_input(engine: Path) -> None:
    assert _told(engine, b"") == []
