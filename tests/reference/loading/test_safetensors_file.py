"""Weight files: exact widening, and headers that are believed only once they are checked."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from reference.errors import WeightsError
from reference.loading.safetensors_file import F32, _read_header, all_finite, open_safetensors
from tests.reference.loading.folders import DTYPES, safetensors_bytes
from tests.reference.refusals import told


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(folder: Path, content: bytes) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        open_safetensors(path)
    return told(caught, f"{path}: ")


def read_all(path: Path) -> dict[str, F32]:
    file = open_safetensors(path)
    return file.read(list(file.entries))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_value_is_widened_exactly(tmp_path: Path, dtype: str) -> None:
    kind = DTYPES[dtype]
    if dtype == "F32":
        bits = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32)
        stored = np.append(bits, np.array([1, 2**31, 0x7F7FFFFF], np.uint32)).view(kind)
    else:
        stored = np.arange(2**16, dtype=np.uint16).view(kind)
    stored = stored[np.isfinite(stored.astype(np.float32))]
    path = tmp_path / "model.safetensors"
    save_file({"a": stored, "empty": stored[:0], "scalar": stored[3:4].reshape(())}, path)
    tensors = read_all(path)
    wide = np.array([float(value) for value in stored], np.float32)
    assert tensors["a"].dtype == np.float32
    assert tensors["a"].tobytes() == wide.tobytes()
    assert tensors["empty"].shape == (0,)
    assert tensors["scalar"].shape == ()
    assert not tensors["a"].flags.writeable


def test_tensors_may_lie_at_any_offset_and_in_any_order(tmp_path: Path) -> None:
    first, second = np.array([1.5], np.float16), np.array([[2.5], [-0.0]], np.float32)
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "late": entry("F32", [2, 1], [2, 10]),
            "early": entry("F16", [1], [0, 2]),
        }
    ).encode()
    odd = header + b" " * (len(header) % 2 + 1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(odd, first.tobytes() + second.tobytes()))
    tensors = read_all(path)
    assert tensors["early"].tolist() == [1.5]
    assert tensors["late"].tobytes() == second.tobytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes are too few for a header of 0: the file is truncated"),
        (b"\x01\x00", "2 bytes are too few"),
        (b"\xff" * 8, "8 bytes are too few for a header of 18446744073709551615"),
        (b"\x03\x00\x00\x00\x00\x00\x00\x00{}", "10 bytes are too few for a header of 3"),
        (safetensors_bytes(b""), "header: this is not valid JSON"),
        (safetensors_bytes(b"\xff{}"), "header: this is not valid JSON: 'utf-8' codec"),
        (safetensors_bytes(b"[1]"), "header: this is [1], not a JSON object"),
        (safetensors_bytes(b"{" * 5000), "header: this is not valid JSON"),
        (
            safetensors_bytes(b"[" * 5000 + b"]" * 5000),
            "header: this is not valid JSON: it is nested",
        ),
        (safetensors_bytes({"__metadata__": 1}), "header: __metadata__ is not a JSON object"),
        (safetensors_bytes(b'{"a": 1, "a": 2}'), "the key 'a' occurs twice"),
        (safetensors_bytes(b'{"a": NaN}'), "NaN is not a JSON number"),
        (safetensors_bytes({"a": 1}), "tensor 'a': its entry is 1, but must hold dtype, shape"),
        (safetensors_bytes({"a": {"dtype": "F32"}}), "must hold dtype, shape and data_offsets"),
        (safetensors_bytes({"a": {**entry(), "x": 1}}), "must hold dtype, shape and data_offsets"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    assert expected in refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (entry("I64", [1]), "dtype 'I64' is not supported; save it as F32, F16, BF16"),
        (entry("F8_E4M3", [8]), "dtype 'F8_E4M3' is not supported"),
        (entry(["F32"]), "dtype ['F32'] is not supported"),
        (entry(shape=[-2]), "shape [-2] is no shape of a tensor"),
        (entry(shape=[2.0]), "shape [2.0] is no shape"),
        (entry(shape=[True]), "shape [True] is no shape"),
        (entry(shape=2), "shape 2 is no shape"),
        (entry(shape=[1] * 9), "shape [1, 1, 1, 1, 1, 1, 1, 1, 1] is no shape"),
        (entry(shape=[2**32, 2**31]), "is no shape of a tensor"),
        (entry(shape=[0, 2**62, 4]), "is no shape of a tensor"),
        (entry(shape=[2**63, 2]), "is no shape of a tensor"),
        (entry(offsets=[0]), "data_offsets [0] is no range of bytes"),
        (entry(offsets=[-8, 0]), "data_offsets [-8, 0] is no range"),
        (entry(offsets=[0, 8.0]), "data_offsets [0, 8.0] is no range"),
        (entry(offsets=None), "data_offsets None is no range"),
        (entry(offsets=[8, 0]), "takes 8 bytes, data_offsets [8, 0] give -8"),
        (entry(shape=[3]), "shape [3] of F32 takes 12 bytes, data_offsets (0, 8) give 8"),
        (entry("F16"), "shape (2,) of F16 takes 4 bytes"),
        (entry(shape=[2**40], offsets=[0, 2**42]), "describes 4398046511104 bytes of data"),
        (entry(offsets=[4, 12]), "begins at byte 4 of the data, not 0: it leaves a hole before it"),
    ],
)
def test_a_wrong_entry_is_refused(tmp_path: Path, wrong: dict[str, Any], expected: str) -> None:
    text = refusal(tmp_path, safetensors_bytes({"a\n": wrong}, b"\0" * 8))
    as_written = expected.replace("(0, 8)", "[0, 8]").replace("(2,)", "[2]")
    assert as_written in text
    assert "describes" in expected or "tensor 'a\\n'" in text


def test_overlaps_and_holes_are_refused(tmp_path: Path) -> None:
    for begin, what in ((4, "overlaps the tensor"), (12, "leaves a hole"), (0, "overlaps")):
        header = {"a": entry(), "b": entry(offsets=[begin, begin + 8])}
        text = refusal(tmp_path, safetensors_bytes(header, b"\0" * (begin + 8)))
        assert "tensor 'b'" in text or begin == 0
        assert f"begins at byte {begin} of the data, not 8: it {what}" in text


@pytest.mark.parametrize("change", [-64, -1, 1, 64])
def test_a_file_shorter_or_longer_than_its_tensors_is_refused(tmp_path: Path, change: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((8, 8), np.float32)}, path)
    content = path.read_bytes()
    content = content[:change] if change < 0 else content + b"\0" * change
    text = refusal(tmp_path, content)
    assert f"describes 256 bytes of data, the file holds {256 + change}" in text
    assert ("truncated" if change < 0 else "longer than its tensors") in text


def test_a_header_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        os.truncate(file.fileno(), 300_000_000)
    with pytest.raises(WeightsError, match="a header of 200000000 bytes exceeds 100000000"):
        open_safetensors(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(WeightsError, match=rf"^{path}: .*; check the path$"):
            open_safetensors(path)


def test_rows_are_those_of_the_tensor_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    first, second = np.arange(6, dtype=np.float16), np.arange(12, dtype=np.float32).reshape(4, 3)
    save_file({"a": first, "b": second}, path)
    file = open_safetensors(path)
    assert np.array_equal(file.rows("a"), first)
    assert np.array_equal(file.rows("b"), second)
    assert np.array_equal(file.rows("b", slice(1, 3)), second[1:3])
    assert np.array_equal(file.rows("b", np.array([3, 0])), second[[3, 0]])


def test_a_header_that_ends_early_though_the_file_was_longer_is_refused(tmp_path: Path) -> None:
    short = io.BytesIO((16).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightsError, match="became shorter while it was read"):
        _read_header(short, 100, tmp_path / "model.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(64, np.float32)}, path)
    file = open_safetensors(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(WeightsError, match="became shorter while it was read"):
        file.read(["a"])
    path.unlink()
    with pytest.raises(WeightsError, match="No such file"):
        file.read(["a"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, dtype: str, bad: float) -> None:
    weights = np.ones((3, 5), DTYPES[dtype])
    weights[1, 4] = bad
    path = tmp_path / "model.safetensors"
    save_file({"good": np.ones(2, np.float32), "w": weights}, path)
    with pytest.raises(WeightsError) as caught:
        read_all(path)
    expected = f"tensor 'w' holds {bad} at [1, 4], and weights must be finite; save the model again"
    assert str(caught.value) == f"{path}: {expected}"


@given(st.lists(st.floats(width=32), max_size=40))
def test_all_finite_agrees_with_every_element(values: list[float]) -> None:
    x = np.array(values, np.float32)
    assert all_finite(x) == bool(np.isfinite(x).all())
