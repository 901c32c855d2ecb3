"""Types of tensors in GGUF files: each against its formula, in exact arithmetic or by the package.

The blocks are random bytes, so that every code occurs; scales are any finite float16.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from reference.loading.gguf.file import SLAB, TYPES, open_gguf
from reference.model import load_model
from tests.reference.loading.folders import LLAMA, random_tensors, with_keys, write_folder
from tests.reference.loading.gguf_files import write_gguf

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
QUANTIZED = [name for name in TYPES if name not in ("F32", "F16")]

SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Where the float16 scales of a block lie."""


def random_rows(kind: str, rows: int, blocks: int) -> Bytes:
    """Bytes of random blocks, whose scales are finite."""
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    rng = np.random.default_rng(len(kind) * size)
    stored = rng.integers(0, 256, (rows, blocks, size), np.uint8)
    if kind == "BF16":
        stored[..., 1] &= 0xBF
    for at in SCALES.get(kind, ()):
        stored[..., at + 1] &= 0xBB  # no exponent of 31
    if kind == "IQ1_M":
        stored[..., 55] &= 0xBF  # the exponent lies in the top nibbles of four scales
    if kind == "MXFP4":
        stored[..., 0] %= 252
    return stored.reshape(rows, -1)


def read_back(folder: Path, kind: str, stored: Bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    out = gguf.GGUFWriter(folder / "types.gguf", "llama")
    out.add_tensor("first", np.ones(5, np.float32))
    out.add_tensor("w", stored, raw_dtype=GGMLQuantizationType[kind])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return open_gguf(folder / "types.gguf").read("w")


# ------------------------------------------------------------------- formulas in exact arithmetic


def half(block: bytes, at: int) -> Fraction:
    """A float16, from its bits."""
    bits = block[at] | block[at + 1] << 8
    exponent, fraction = bits >> 10 & 31, bits & 1023
    if exponent == 0:
        size = Fraction(fraction, 2**24)
    else:
        size = Fraction(1024 + fraction, 2**10) * Fraction(2) ** (exponent - 15)
    return -size if bits >> 15 else size


def nibbles(packed: bytes) -> list[int]:
    """The low ones of all bytes, then the high ones."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def bits_of(packed: bytes) -> list[int]:
    return [byte >> place & 1 for byte in packed for place in range(8)]


def q4_0(b: bytes) -> list[Fraction]:
    return [half(b, 0) * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: bytes) -> list[Fraction]:
    return [half(b, 0) * q + half(b, 2) for q in nibbles(b[4:])]


def q5_0(b: bytes) -> list[Fraction]:
    codes = zip(nibbles(b[6:]), bits_of(b[2:6]), strict=True)
    return [half(b, 0) * (q + 16 * top - 16) for q, top in codes]


def q5_1(b: bytes) -> list[Fraction]:
    codes = zip(nibbles(b[8:]), bits_of(b[4:8]), strict=True)
    return [half(b, 0) * (q + 16 * top) + half(b, 2) for q, top in codes]


def q8_0(b: bytes) -> list[Fraction]:
    return [half(b, 0) * (q - 256 if q > 127 else q) for q in b[2:]]


def mxfp4(b: bytes) -> list[Fraction]:
    sizes = [Fraction(s) for s in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
    scale = Fraction(2) ** (b[0] - 127)
    return [scale * (-sizes[q - 8] if q > 7 else sizes[q]) for q in nibbles(b[1:])]


def q4_k(b: bytes) -> list[Fraction]:
    six = [b[4 + i] & 63 for i in range(4)], [b[8 + i] & 63 for i in range(4)]
    scales = six[0] + [b[12 + i] & 15 | (b[4 + i] >> 6) << 4 for i in range(4)]
    mins = six[1] + [b[12 + i] >> 4 | (b[8 + i] >> 6) << 4 for i in range(4)]
    codes = [q for at in range(16, 144, 32) for q in nibbles(b[at : at + 32])]
    return [
        half(b, 0) * scales[i // 32] * q - half(b, 2) * mins[i // 32] for i, q in enumerate(codes)
    ]


def q6_k(b: bytes) -> list[Fraction]:
    out = []
    for i in range(256):
        part, place = divmod(i, 128)
        quarter, at = divmod(place, 32)
        low = b[64 * part + 32 * (quarter % 2) + at] >> (4 * (quarter // 2)) & 15
        high = b[128 + 32 * part + at] >> (2 * quarter) & 3
        scale = b[192 + i // 16]
        out.append(half(b, 208) * (scale - 256 if scale > 127 else scale) * (low + 16 * high - 32))
    return out


FORMULAS: dict[str, Callable[[bytes], list[Fraction]]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "MXFP4": mxfp4,
    "Q4_K": q4_k,
    "Q6_K": q6_k,
}


def nearest(x: Fraction) -> np.float32:
    """The float32 nearest to x, ties to even."""
    near = np.float32(float(x))
    ends = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    return min(
        (near, *ends), key=lambda f: (abs(Fraction(float(f)) - x), int(f.view(np.int32)) & 1)
    )


@pytest.mark.parametrize("kind", FORMULAS)
def test_values_are_the_nearest_to_the_formula(tmp_path: Path, kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    stored = random_rows(kind, 4, 768 // block)
    exact = [x for b in stored.reshape(-1, size) for x in FORMULAS[kind](b.tobytes())]
    tensor = read_back(tmp_path, kind, stored)
    assert tensor.shape == (4, 768)
    assert len(set(exact)) > 200
    np.testing.assert_array_equal(tensor.ravel(), np.array([nearest(x) for x in exact]))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_every_type_is_as_the_package_has_it(tmp_path: Path, kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    stored = random_rows(kind, SLAB // size // 7 + 3, 7)  # a slab and a bit
    expected = dequantize(stored, GGMLQuantizationType[kind])
    assert np.isfinite(expected).all()
    tensor = read_back(tmp_path, kind, stored)
    assert tensor.dtype == np.float32
    assert tensor.shape == (len(stored), 7 * block)
    assert tensor.tobytes() == expected.tobytes()


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = np.ascontiguousarray(every[np.isfinite(every)])
    stored = finite.view(np.uint8).reshape(2, -1)
    tensor = read_back(tmp_path, "F16", stored)
    assert tensor.ravel().tobytes() == finite.astype(np.float32).tobytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_a_quantized_file_is_the_folder_of_its_values(tmp_path: Path, kind: str) -> None:
    """Rows of q and k are permuted before they are quantized; the values are those of rows."""
    raw = with_keys(LLAMA, hidden_size=64, intermediate_size=32)
    tensors, type_ = random_tensors(raw), GGMLQuantizationType[kind]
    stored = {
        name: dequantize(gguf.quants.quantize(w, type_), type_) if w.ndim == 2 else w
        for name, w in tensors.items()
    }
    write_folder(tmp_path, raw, stored)
    file = write_gguf(tmp_path / "model.gguf", raw, tensors, type_)
    assert load_model(file).digest == load_model(tmp_path).digest
    assert load_model(file, "int4").digest == load_model(tmp_path, "int4").digest
