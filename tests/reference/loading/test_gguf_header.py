"""Headers of GGUF files that lie, and thousands of files changed at random."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from reference.errors import BitforbitError, WeightsError
from reference.loading import load_gguf
from reference.loading.gguf.file import open_gguf
from tests.reference.loading.folders import LLAMA, random_tensors, with_keys
from tests.reference.loading.gguf_files import add_byte_level, converted, finish, writer
from tests.reference.refusals import told

FIXTURE = Path(__file__).parents[3] / "fixtures" / "tiny-draft"
HUGE = (2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
DATA = b"\0" * 64


def string(text: str | bytes) -> bytes:
    content = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(content)) + content


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(
    name: str | bytes = "w", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0
) -> bytes:
    """What a header says of a tensor; the shape is in the file's order."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def header(
    *parts: bytes,
    tensors: int = 0,
    pairs: int = 0,
    version: int = 3,
    magic: bytes = b"GGUF",
    data: bytes = DATA[:0],
) -> bytes:
    """A file of these parts, its data aligned to 32."""
    whole = magic + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)
    return whole + (b"\0" * (-len(whole) % 32) + data if data else b"")


def refusal(folder: Path, content: bytes) -> str:
    path = folder / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        open_gguf(path)
    return told(caught, f"{path}: ")


def test_a_small_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = (
        pair("a", 0, b"\xff")
        + pair("b", 1, b"\xff")
        + pair("c", 2, b"\xff\xff")
        + pair("d", 3, b"\xfe\xff")
        + pair("e", 4, b"\xff" * 4)
        + pair("f", 5, b"\xff" * 4)
        + pair("g", 6, struct.pack("<f", 1e-6))
        + pair("h", 7, b"\1")
        + pair("i", 8, string("\u00e9\n"))
        + pair("j", 9, struct.pack("<IQ2h", 3, 2, 1, -1))
        + pair("k", 9, struct.pack("<IQ", 8, 2) + string("x") + string(""))
        + pair("l", 9, struct.pack("<IQ", 7, 2) + b"\0\1")
        + pair("m", 10, b"\xff" * 8)
        + pair("n", 11, b"\xff" * 8)
        + pair("o", 12, struct.pack("<d", 0.1))
    )
    content = header(values, tensor("w", (4, 2)), tensors=1, pairs=15, version=2, data=DATA[:32])
    path.write_bytes(content)
    file = open_gguf(path)
    assert dict(file.metadata) == {
        "a": 255,
        "b": -1,
        "c": 65535,
        "d": -2,
        "e": 2**32 - 1,
        "f": -1,
        "g": 1e-6,
        "h": True,
        "i": "\u00e9\n",
        "j": [1, -1],
        "k": ["x", ""],
        "l": [False, True],
        "m": 2**64 - 1,
        "n": -1,
        "o": 0.1,
    }
    assert file.read("w").tobytes() == np.zeros((2, 4), np.float32).tobytes()
    assert file.read("w").shape == (2, 4)
    assert file.read("w", 1).shape == (4,)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the magic takes 4 bytes, but 0 are left: the file is truncated"),
        (header(magic=b"ggjt"), "it begins with b'ggjt', not b'GGUF': it is no GGUF file"),
        (header(version=1), "it has version 1; supported are versions 2 and 3, little-endian"),
        (header(version=4), "it has version 4; supported"),
        (header(version=0x03000000), "it is big-endian; supported are versions 2 and 3"),
        (header()[:7], "the version takes 4 bytes, but 3 are left"),
        (header()[:20], "the count of metadata pairs takes 8 bytes, but 4 are left"),
        (header(pairs=1), "1 metadata pairs do not fit into its 24 bytes"),
        (header(tensors=1), "1 tensors do not fit into its 24 bytes"),
        (header(pair(b"\xff", 0, b"1") + DATA, pairs=1), "name of metadata pair 0 is not UTF-8"),
        (header(pair("a", 8, string(b"\xff")) + DATA, pairs=1), "'a' is not UTF-8"),
        (header(pair("a", 13, DATA), pairs=1), "the type of 'a' is 13, which does not exist"),
        (header(pair("a", 7, b"\2"), pairs=1), "'a' is a truth value of 2"),
        (header(pair("a", 0, b"1") * 2, pairs=2), "the key 'a' occurs twice"),
        (header(pair("a", 12, b"1234"), pairs=1), "'a' takes 8 bytes, but 4 are left"),
        (header(pair("a", 9, struct.pack("<IQ", 9, 1) + DATA), pairs=1), "an array of type 9;"),
        (header(pair("a", 9, struct.pack("<IQ", 7, 1) + b"\3"), pairs=1), "a truth value of 3"),
        (header(tensor() * 2, tensors=2, data=DATA), "the tensor 'w' occurs twice"),
        (header(tensor(shape=()), tensors=1, data=DATA), "tensor 'w' has 0 dimensions; supported"),
        (header(tensor(shape=(1,) * 5), tensors=1, data=DATA), "tensor 'w' has 5 dimensions"),
        (
            header(tensor(shape=(0, 8)), tensors=1, data=DATA),
            "shape [8, 0] is no shape of a tensor",
        ),
        (header(tensor(kind=4), tensors=1, data=DATA), "tensor 'w' has type 4; supported are F32,"),
        (header(tensor(kind=28), tensors=1, data=DATA), "tensor 'w' has type 28; supported"),
        (header(tensor(kind=2), tensors=1, data=DATA), "a row of 8 is no multiple of 32, as Q4_0"),
        (
            header(tensor(offset=32), tensors=1, data=DATA),
            "begins at byte 32 of the data, not 0: it",
        ),
        (header(tensor(shape=(17,)), tensors=1, data=DATA), "ends at byte 68 of the data, but the"),
        (header(tensor(), tensors=1), "ends at byte 32 of the data, but the file holds 0"),
        (header(tensor(), tensors=1, data=DATA), "its tensors take 32 bytes, but 64 are there"),
        (
            header(tensor("a"), tensor("b"), tensors=2, data=DATA),
            "'b' begins at byte 0 of the data, not 32: it overlaps the tensor before",
        ),
        (
            header(tensor("a"), tensor("b", offset=16), tensors=2, data=DATA),
            "'b' begins at byte 16 of the data, not 32: it overlaps the tensor before",
        ),
        (
            header(tensor("a"), tensor("b", offset=64), tensors=2, data=DATA * 2),
            "'b' begins at byte 64 of the data, not 32: it leaves a hole before it",
        ),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    assert expected in refusal(tmp_path, content)


@pytest.mark.parametrize("huge", HUGE)
def test_huge_numbers_are_refused(tmp_path: Path, huge: int) -> None:
    length = struct.pack("<Q", huge)
    w = tensor()
    for content, expected in (
        (header(tensors=huge), f"{huge} tensors do not fit"),
        (header(pairs=huge), f"{huge} metadata pairs do not fit"),
        (header(length + DATA, pairs=1), f"is said to have {huge} bytes, more than 65536"),
        (header(pair("a", 8, length + DATA), pairs=1), f"'a' is said to have {huge} bytes, more"),
        (header(pair("a", 9, struct.pack("<I", 4) + length + DATA), pairs=1), f"{huge} numbers of"),
        (header(pair("a", 9, struct.pack("<I", 8) + length + DATA), pairs=1), f"{huge} strings of"),
        (
            header(length + w[8:] + DATA, tensors=1),
            f"0 is said to have {huge} bytes, more than 1024",
        ),
        (header(tensor(offset=huge), tensors=1, data=DATA), f"begins at byte {huge} of the data"),
        (header(tensor(shape=(huge,)), tensors=1, data=DATA), "'w'"),
        (header(tensor(shape=(8, huge)), tensors=1, data=DATA), "'w'"),
        (header(tensor(shape=(huge,) * 4), tensors=1, data=DATA), "is no shape of a tensor"),
    ):
        assert expected in refusal(tmp_path, content)
    if huge < 2**32:
        rank = string("w") + struct.pack("<I", huge) + DATA
        assert f"has {huge} dimensions" in refusal(tmp_path, header(rank, tensors=1))
        wrong = string("w") + struct.pack("<IQIQ", 1, 8, huge, 0)
        assert f"has type {huge}" in refusal(tmp_path, header(wrong, tensors=1, data=DATA))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(WeightsError, match=rf"^{path}: .*; check the path$"):
            open_gguf(path)


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf.constants", None)
    assert "the package gguf, which reads such files, is not installed; pip" in refusal(
        tmp_path, b""
    )


# ---------------------------------------------------------------------------------- random changes

MOST_SECONDS = 2.0
MOST_MEMORY = 200 * 2**20
ODD = (0, 1, 2, 7, 8, 9, 31, 32, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, *HUGE)


def small_files(folder: Path) -> list[bytes]:
    """Two real files: a trained model with its tokenizer, and a quantized one without."""
    raw = json.loads((FIXTURE / "config.json").read_text())
    out = writer(raw, folder / "trained.gguf")
    add_byte_level(out, FIXTURE / "tokenizer.json", "gpt-2")
    finish(out, converted(raw, load_file(FIXTURE / "model.safetensors")))
    raw = with_keys(LLAMA, hidden_size=64, intermediate_size=32)
    tensors = converted(raw, random_tensors(raw))
    finish(writer(raw, folder / "quantized.gguf"), tensors, GGMLQuantizationType.Q4_0)
    return [(folder / f"{name}.gguf").read_bytes() for name in ("quantized", "trained")]


def mutated(rng: Random, content: bytes, header_bytes: int) -> bytes:
    """A copy with a few bytes, numbers or runs changed, mostly in the header."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(header_bytes if rng.random() < 0.9 else len(changed))
        kind = rng.random()
        if kind < 0.4:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind < 0.6:
            changed[at : at + 8] = struct.pack("<Q", rng.choice(ODD))
        elif kind < 0.7:
            changed[at : at + 4] = struct.pack("<I", rng.choice(ODD) % 2**32)
        elif kind < 0.8:
            del changed[at : at + rng.choice([1, 4, 8, 64])]
        elif kind < 0.9:
            changed[at:at] = rng.randbytes(rng.choice([1, 4, 8, 64]))
        elif kind < 0.97:
            other = rng.randrange(header_bytes)
            changed[at : at + 16] = changed[other : other + 16]
        else:
            del changed[at:]
    return bytes(changed)


def read_all(path: Path) -> None:
    checkpoint = load_gguf(path)
    for name in checkpoint.tensors:
        checkpoint.tensors[name]
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("In the 1st  day\n\U0001f600"))


@pytest.mark.parametrize("seed", range(8))
def test_files_changed_at_random_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    """640 mutations a seed, 5,120 in all; seconds are of this process, whatever else runs."""
    rng, path = Random(seed), tmp_path / "mutated.gguf"
    outcomes: dict[str, int] = {}
    quantized, trained = small_files(tmp_path)
    headers = {content: header_size(tmp_path, content) for content in (quantized, trained)}
    read_all(tmp_path / "trained.gguf")  # what is imported and cached once is no mutation's
    for index in range(640):
        content = trained if index % 16 == 0 else quantized
        path.write_bytes(mutated(rng, content, headers[content]))
        tracemalloc.start()
        begun = time.process_time()
        outcome = outcome_of(path)
        seconds, memory = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seconds < MOST_SECONDS, (outcome, seconds)
        assert memory < MOST_MEMORY, (outcome, memory)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert {"loaded", "WeightsError", "ConfigError"} <= set(outcomes)
    assert outcomes["loaded"] < 400, outcomes


def header_size(folder: Path, content: bytes) -> int:
    """Where the data of a file begins."""
    (folder / "whole.gguf").write_bytes(content)
    return open_gguf(folder / "whole.gguf").data


def outcome_of(path: Path) -> str:
    try:
        read_all(path)
    except BitforbitError as error:
        text: Any = str(error)
        assert text.isprintable()
        assert text.startswith(str(path)) or "; give other text" in text or "tokenizer.json" in text
        assert len(text) < 2000
        return type(error).__name__
    return "loaded"
