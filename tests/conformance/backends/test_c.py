"""The C and the Node backend: written from SPEC.md alone, exact, behind the process door."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.backends import resolve_process
from conformance.backends.frames import decode, encode
from conformance.backends.process import ProcessBackend, ProgramError
from conformance.backends.reference import ReferenceBackend
from conformance.fuzzing.case import OPERATIONS as DRAWN
from conformance.fuzzing.running import Fuzzer
from conformance.golden import Array
from conformance.operations import Sessions, call
from conformance.paths import data_folder
from conformance.results import Result
from conformance.rules import same_bits
from conformance.runner import run
from conformance.selection import Selection

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 2.0, 3.0],
}
ROOT = Path(__file__).parents[3]
GOLDENS = data_folder("goldens")
EXACT = ReferenceBackend()
needs_c = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("make") is None, reason="no C compiler"
)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node")

OPERATIONS = frozenset(
    [
        "exp",
        "log",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "silu",
        "gelu_tanh",
        "softmax",
        "linear",
        "quantize_int4",
        "quantize_int8",
        "linear_int4",
        "linear_w4a16",
        "linear_q4_0",
        "linear_q8_0",
        "rms_norm",
        "rope_constants",
        "rope",
        "attention",
        "gated_mlp",
        "philox",
        "sample",
    ]
)
"""What the C backend has: all of SPEC 17's first table but `load`."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both builds, made afresh, and without a warning."""
    folder = tmp_path_factory.mktemp("c")
    made = subprocess.run(
        ["make", "-j2", "-C", str(ROOT / "examples" / "c"), f"BUILD={folder}"],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    return folder


@pytest.fixture(scope="module")
def c(build: Path) -> Iterator[ProcessBackend]:
    backend = resolve_process(str(build / "backend"), 60)
    yield backend
    backend.close()


def judged(program: str, *levels: str) -> list[Result]:
    backend = resolve_process(program, 60)
    try:
        return list(run(backend, GOLDENS, Selection(levels)))
    finally:
        backend.close()


def operation_of(result: Result) -> str:
    return result.id.split("/")[1]


@needs_c
def test_c_passes_every_case_of_what_it_has(build: Path) -> None:
    results = judged(str(build / "backend"))
    had = [r for r in results if operation_of(r) in OPERATIONS]
    assert [(r.id, r.message) for r in had if r.outcome != "pass"] == []
    assert {operation_of(r) for r in had if r.rule == "bits"} == OPERATIONS
    assert {r.level for r in had} == {"elementary", "kernel", "cache", "invariance"}
    others = {r.outcome for r in results if operation_of(r) not in OPERATIONS}
    assert others <= {"not implemented"}


@needs_c
def test_c_passes_what_is_drawn(c: ProcessBackend) -> None:
    fuzzer = Fuzzer(c, [name for name in DRAWN if hasattr(c, name)])
    for _ in fuzzer.run(17, 12, None):
        pass
    failures = [f.least for tally in fuzzer.tallies.values() for f in tally.failures]
    assert [(str(f.made.case), f.verdict.message) for f in failures] == []
    assert len(fuzzer.tallies) >= 20


@needs_c
def test_fused_everywhere_fails_bits_and_no_bound(build: Path) -> None:
    if not _fuses(build):
        pytest.skip("this machine has no fused multiply-add")
    failed = [
        r for r in judged(str(build / "contracted"), "elementary", "kernel") if r.outcome == "fail"
    ]
    assert {r.rule for r in failed} == {"bits"}
    assert {operation_of(r) for r in failed} == {"gelu_tanh", "gated_mlp", "rope"}


def _fuses(build: Path) -> bool:
    """Whether the compiler may fuse for this machine."""
    asked = ["cc", "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    macros = subprocess.run(asked, capture_output=True, text=True).stdout
    return "__FP_FAST_FMAF" in macros


@needs_c
def test_c_settles_every_hard_input(c: ProcessBackend) -> None:
    table = json.loads((ROOT / "reference" / "hard_cases.json").read_text())
    for name, cases in table.items():
        x = np.array([int(bits, 16) for bits in cases], np.uint32).view(np.float32)
        y = np.array([int(bits, 16) for bits in cases.values()], np.uint32).view(np.float32)
        assert same_bits({"y": getattr(c, name)(x=x)}, {"y": y}), name


@needs_c
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_c_and_numpy_agree_on_any_float32(c: ProcessBackend, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    for name in ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh"):
        assert same_bits({"y": getattr(c, name)(x=x)}, {"y": getattr(EXACT, name)(x)}), name


def _wild(rng: np.random.Generator, *shape: int) -> Array:
    """Normals over many binades, some zeros, subnormals and equals among them."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 31, shape)
    x = np.where(rng.random(shape) < 0.1, np.round(x), x)
    x = np.where(rng.random(shape) < 0.02, x * 2.0**-140, x)
    return np.where(rng.random(shape) < 0.1, 0, x).astype(np.float32)


def _blocks(rng: np.random.Generator, N: int, G: int, size: int) -> Array:
    """Blocks of any codes, with scales of either sign, some of them subnormal or zero."""
    blocks = rng.integers(0, 256, (N, G, size), np.uint8)
    scales = np.ldexp(rng.uniform(-1, 1, (N, G)), rng.integers(-27, 7, (N, G))).astype("<f2")
    blocks[:, :, :2] = scales[:, :, None].view(np.uint8)
    return blocks


def _calls(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """One call of each operation that sums, with shapes and data drawn at random."""
    T, K, N, D, kv = (int(n) for n in rng.integers(1, [9, 150, 70, 80, 4]))
    S, heads = T + int(rng.integers(0, 70)), kv * int(rng.integers(1, 3))
    w = _wild(rng, N, K)
    packed, scales = EXACT.quantize_int4(rng.standard_normal((N, K)).astype(np.float32), 32)
    G = -(-K // 32)
    whole = _wild(rng, T, 32 * G)
    return {
        "linear": {"x": _wild(rng, T, K), "w": w, "bias": _wild(rng, N)},
        "softmax": {"x": (3 * rng.standard_normal((T, K))).astype(np.float32)},
        "rms_norm": {"x": _wild(rng, T, K), "weight": _wild(rng, K), "eps": 1e-6},
        "quantize_int4": {"w": rng.standard_normal((N, K)).astype(np.float32), "group": 0},
        "quantize_int8": {"x": _wild(rng, T, K)},
        "linear_int4": {"x": _wild(rng, T, K), "packed": packed, "scales": scales, "group": 32},
        "linear_w4a16": {
            "x": _wild(rng, T, K),
            "packed": rng.integers(0, 256, packed.shape, np.uint8),
            "scales": np.negative(scales) if rng.random() < 0.5 else scales,
            "group": 32,
        }
        | ({} if rng.random() < 0.5 else {"zeros": rng.integers(0, 16, scales.shape, np.uint8)}),
        "linear_q4_0": {"x": whole, "blocks": _blocks(rng, N, G, 18)},
        "linear_q8_0": {"x": whole, "blocks": _blocks(rng, N, G, 34)},
        "attention": {
            "q": rng.standard_normal((T, heads, D)).astype(np.float32),
            "k": rng.standard_normal((S, kv, D)).astype(np.float32),
            "v": _wild(rng, S, kv, D),
            "scale": None if rng.random() < 0.5 else float(rng.random()),
            "window": None if rng.random() < 0.5 else int(rng.integers(1, S + 2)),
            "softcap": None if rng.random() < 0.5 else 5.0,
            "sinks": None if rng.random() < 0.5 else _wild(rng, heads),
            "mode": "exact",
        },
        "sample": {
            "logits": (2 * rng.standard_normal(K)).astype(np.float32),
            "temperature": float(rng.random() + 0.1),
            "top_k": int(rng.integers(0, K + 1)),
            "top_p": float(1 - rng.random() / 2),
            "min_p": float(rng.random() / 4),
            "repetition_penalty": float(rng.random() + 0.5),
            "previous": rng.integers(0, K, 5),
            "seed": int(rng.integers(0, 2**64, dtype=np.uint64)),
            "request": int(rng.integers(0, 2**32)),
            "position": int(rng.integers(0, 2**32)),
        },
    }


@needs_c
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_c_and_numpy_agree_on_any_call(c: ProcessBackend, seed: int) -> None:
    for operation, arguments in _calls(np.random.default_rng(seed)).items():
        wanted = call(EXACT, Sessions(EXACT), operation, arguments)
        got = call(c, Sessions(c), operation, arguments)
        for name in wanted:
            assert got[name].dtype == wanted[name].dtype, operation
        assert same_bits(got, wanted), operation


@needs_c
@pytest.mark.parametrize(
    "top_p", [np.nextafter(0.5, 0), 0.5, np.nextafter(0.5, 1), 2.0**-1074, 1.0]
)
@pytest.mark.parametrize("min_p", [0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(0.5, 1), 1.0])
def test_c_compares_shares_exactly(c: ProcessBackend, top_p: float, min_p: float) -> None:
    """Weights of 1 and a half, on the very edge of a share: 1 in 2^53 decides."""
    logits = np.array([0, -0.6931472, 0, -0.6931472, 0, 0, 0], np.float32)
    given = {"temperature": 1.0, "top_k": 0, "top_p": float(top_p), "min_p": float(min_p)}
    fixed = {"repetition_penalty": 1.0, "previous": np.zeros(0, np.int64), "seed": 3, "request": 1}
    for position in range(40):
        all_of_it: dict[str, Any] = {**given, **fixed, "logits": logits, "position": position}
        assert c.sample(**all_of_it).tolist() == EXACT.sample(**all_of_it).tolist()


@needs_c
def test_threads_change_no_bit(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    q, k = (rng.standard_normal((130, heads, 32)).astype(np.float32) for heads in (4, 2))
    calls: dict[str, dict[str, Any]] = {
        "linear": {"x": _wild(rng, 33, 300), "w": _wild(rng, 90, 300)},
        "attention": {"q": q, "k": k, "v": k[::-1].copy(), "mode": "exact"},
    }
    answers = []
    for threads in (1, 3):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        backend = resolve_process(str(build / "backend"), 60)
        answers.append({o: getattr(backend, o)(**arguments) for o, arguments in calls.items()})
        backend.close()
    assert same_bits(*answers)


# Bad input to the C program: it answers with an error, and does not fall.


@needs_c
@pytest.mark.parametrize(
    ("operation", "arguments", "part"),
    [
        ("exp", {}, "x is missing"),
        ("exp", {"x": np.zeros((2, 2), np.float32)}, "another dtype or rank"),
        ("exp", {"x": np.zeros(2)}, "another dtype or rank"),
        ("rms_norm", {"x": np.zeros((2, 2), np.float32), "eps": 1}, "weight is missing"),
        ("linear", {"x": np.zeros((2, 2), np.float32), "w": np.zeros((2, 3), np.float32)}, "fit"),
        ("quantize_int4", {"w": np.full((1, 2), np.inf, np.float32), "group": 32}, "not finite"),
        ("quantize_int4", {"w": np.full((1, 2), 1e7, np.float32), "group": 32}, "65504"),
        ("quantize_int4", {"w": np.zeros((1, 2), np.float32), "group": -1}, "no integer"),
        ("philox", {"seed": 1, "request": 2**32, "positions": np.zeros(1, np.int64)}, "outside"),
        ("philox", {"seed": "1", "request": 0, "positions": np.zeros(1, np.int64)}, "kind"),
        ("rope_constants", {"parameters": {"head_dim": 3}, "position": 0}, "even and positive"),
        ("rope_constants", {"parameters": 3, "position": 0}, "missing or of another kind"),
        ("rope_constants", {"parameters": LONGROPE, "position": 0}, "short_factor must be 2"),
        ("rope_constants", {"parameters": LONGROPE, "position": 9}, "needs long_factor"),
    ],
)
def test_c_refuses(c: ProcessBackend, operation: str, arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ProgramError, match="answered with an error") as caught:
        getattr(c, operation)(**arguments)
    assert part in str(caught.value)
    assert list(c.exp(x=np.zeros(1, np.float32))) == [1]


def _heard(build: Path, blobs: list[bytes]) -> list[str]:
    """The statuses with which the C program answers these blobs, one each; it must not fall."""
    frames = b"".join(struct.pack("<Q", len(blob)) + blob for blob in blobs)
    told = subprocess.run([str(build / "backend")], input=frames, capture_output=True, timeout=60)
    assert told.returncode == 0
    statuses, rest = [], told.stdout
    while rest:
        length = int.from_bytes(rest[:8], "little")
        statuses.append(decode(rest[8 : 8 + length]).text["status"])
        rest = rest[8 + length :]
    return statuses


@needs_c
def test_c_survives_altered_calls(build: Path) -> None:
    """Every call is altered in a few bytes of its header, or cut short; each gets an answer."""
    rng = np.random.default_rng(11)
    blobs = []
    for _ in range(60):
        for operation, arguments in _calls(rng).items():
            blob = bytearray(encode(operation, "1", arguments)[8:])
            header = 8 + int.from_bytes(blob[:8], "little")
            for _ in range(rng.integers(1, 4)):
                blob[rng.integers(0, header)] = rng.choice(list(b'{}[]":,0123456789\\u -x\x00\xff'))
            cut = len(blob) if rng.random() < 0.8 else int(rng.integers(0, len(blob)))
            blobs.append(bytes(blob[:cut]))
    statuses = _heard(build, blobs)
    assert len(statuses) == len(blobs)
    assert set(statuses) == {"ok", "error", "not implemented"}


ABOUT = '"__metadata__":{"id":"1","operation":"exp","parameters":"{}"}'
HOSTILE = {
    "deep": '{"x":' + "[" * 1_000_000,
    "deep parameters": "{" + ABOUT.replace("{}", "[" * 1_000_000) + "}",
    "long data": "{" + ABOUT + ',"x":{"dtype":"F32","shape":[200000000],"data_offsets":[0,16]}}',
    "far data": "{" + ABOUT + ',"x":{"dtype":"F32","shape":[4],"data_offsets":[9000000,9000016]}}',
    "turned": "{" + ABOUT + ',"x":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}',
    "overflow": "{"
    + ABOUT
    + ',"x":{"dtype":"F32","shape":[1073741824,1073741824,16],"data_offsets":[0,0]}}',
    "negative": "{" + ABOUT + ',"x":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}',
    "odd place": "{" + ABOUT + ',"x":{"dtype":"F32","shape":[3],"data_offsets":[1,13]}}',
    "five axes": "{" + ABOUT + ',"x":{"dtype":"F32","shape":[1,1,1,1,4],"data_offsets":[0,16]}}',
    "many": "{" + ABOUT + "".join(f',"x{i}":{{}}' for i in range(100_000)) + "}",
    "long name": "{" + ABOUT + ',"' + "x" * 100_000 + '":{}}',
    "no close": "{" + ABOUT + ',"x',
    "half an escape": "{" + ABOUT + ',"x\\u12"}',
    "half a pair": "{" + ABOUT + ',"x\\ud800"}',
    "half the header": ABOUT[:30],
    "empty": "",
}


@needs_c
@pytest.mark.parametrize("name", HOSTILE)
def test_c_survives_hostile_headers(build: Path, name: str) -> None:
    header = HOSTILE[name].encode()
    header += b" " * (-len(header) % 8)
    blob = struct.pack("<Q", len(header)) + header + bytes(16)
    right = encode("exp", "1", {"x": np.zeros(4, np.float32)})[8:]
    assert _heard(build, [blob, right]) == ["error", "ok"]


@needs_c
@pytest.mark.parametrize("sent", [b"", b"abc", b"\xff" * 8, struct.pack("<Q", 100) + b"{}"])
def test_c_ends_with_its_input(build: Path, sent: bytes) -> None:
    told = subprocess.run([str(build / "backend")], input=sent, capture_output=True, timeout=30)
    assert told.returncode == (1 if sent.startswith(b"\xff") else 0)
    assert told.stdout == b""


# Node.


@needs_node
def test_node_passes_what_it_has() -> None:
    program = shlex.join(["node", str(ROOT / "examples" / "node" / "backend.mjs")])
    results = judged(program, "kernel", "elementary", "invariance")
    had = [r for r in results if operation_of(r) in ("linear", "rms_norm", "quantize_int8")]
    assert [(r.id, r.message) for r in had if r.outcome != "pass"] == []
    assert len(had) >= 87
    assert {r.outcome for r in results if r not in had} == {"not implemented"}


@needs_node
def test_node_answers_with_an_error_and_goes_on() -> None:
    backend = resolve_process(f"node {shlex.quote(str(ROOT / 'examples/node/backend.mjs'))}", 60)
    try:
        with pytest.raises(ProgramError, match=r"error: .TypeError"):
            backend.linear(x=np.zeros((1, 1), np.float32))
        two = np.full((1, 1), 2, np.float32)
        assert backend.linear(x=two, w=two).tolist() == [[4]]
    finally:
        backend.close()
