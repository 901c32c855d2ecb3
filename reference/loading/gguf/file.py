"""One GGUF file: its header is checked in full before any of its bytes is used (SPEC 12.2).

A file consists of a magic number, the version, the counts of tensors and of metadata, the metadata
(typed values by name), a description of each tensor (name, dimensions, type, offset), and the data.
The tensors must tile the data, each beginning at the next multiple of the alignment.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.config import show
from reference.errors import WeightsError
from reference.loading.mapped import mapped
from reference.loading.safetensors_file import ALL, all_finite

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_STRING = 2**26
"""Bytes of a string at most: far beyond any, and it is read at once."""

MAX_DIMENSIONS = 4
"""Dimensions of a tensor at most, as in ggml."""

MAX_ELEMENTS, MAX_ALIGNMENT = 2**48, 2**20
"""Elements of a tensor, and bytes of the alignment, at most: far beyond any."""

SLAB = 2**22
"""Bytes of a tensor that are dequantized at a time."""

SCALARS: Mapping[int, str] = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Types of metadata values, as `struct` writes them; 8 is a string, 9 an array."""
FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9

PLAIN: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Types of tensors that are read, by the names of the `gguf` package."""

_AGAIN = "fetch or convert the file again"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file. shape: outermost dimension first. begin, end: its bytes in the data."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the elements of the last dimension."""
        return (self.end - self.begin) // math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GGUFFile:
    """A file whose header has been checked. data: where the data begins, in bytes."""

    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]
    data: int

    def read(
        self, name: str, index: int | None = None, rows: slice | NDArray[np.int64] = ALL
    ) -> F32:
        """A tensor of the file, or its part `index` along the first dimension, as float32.

        rows: which rows of a tensor of two dimensions. Raises WeightsError where the file cannot be
        read, or holds a NaN or an infinity.
        """
        entry = self.entries[name]
        shape = entry.shape if index is None else entry.shape[1:]
        tensor = _dequantize(self.rows(name, index)[rows], entry.kind)
        tensor = tensor.reshape(-1, *shape[1:])
        if not all_finite(tensor):
            raise WeightsError(
                f"{self.path}: tensor {show(name)} holds a NaN or an infinity, and weights must be "
                "finite; convert the model again"
            )
        tensor.flags.writeable = False
        return tensor

    def rows(self, name: str, index: int | None = None) -> NDArray[np.uint8]:
        """The bytes of a tensor, or of its part `index`, (R, row_bytes). Raises WeightsError."""
        entry = self.entries[name]
        begin, end = entry.begin, entry.end
        if index is not None:
            size = (end - begin) // entry.shape[0]
            begin, end = begin + index * size, begin + (index + 1) * size
        shape = ((end - begin) // entry.row_bytes, entry.row_bytes)
        return mapped(self.path, np.dtype(np.uint8), self.data + begin, shape, _AGAIN)


def _dequantize(rows: NDArray[np.uint8], kind: str) -> F32:
    """The values of rows of bytes (R, B), as float32, slab by slab, by the package `gguf`."""
    if kind in PLAIN:
        return rows.view(PLAIN[kind]).astype(np.float32)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    step = max(1, SLAB // rows.shape[1])
    with np.errstate(all="ignore"):
        parts = [
            dequantize(rows[at : at + step], GGMLQuantizationType[kind])
            for at in range(0, len(rows), step)
        ]
    return np.concatenate(parts, dtype=np.float32)


# ----------------------------------------------------------------------------------------- header


def open_gguf(path: Path) -> GGUFFile:
    """Read and check the header of a file (SPEC 12.2).

    Raises WeightsError, in one line that names the file, the field and the remedy, where it is
    truncated, contradicts itself or is of a kind that is not supported, and where the package
    `gguf` is not installed.
    """
    sizes = _type_sizes(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _Header(file, size, path)
            header.check_magic()
            tensors, pairs = header.count("tensors", 24), header.count("metadata pairs", 13)
            metadata = header.metadata(pairs)
            alignment = _alignment(metadata, path)
            entries = header.entries(tensors, sizes)
    except OSError as reason:
        raise WeightsError(f"{path}: {reason.strerror}; check the path") from None
    if metadata.get("split.count", 1) != 1:
        raise WeightsError(
            f"{path}: split.count is {show(metadata['split.count'])}: split files are not "
            "supported; merge the parts into one file"
        )
    data = -(-header.at // alignment) * alignment
    _check_tiling(list(entries.values()), size - data, alignment, path)
    return GGUFFile(path, metadata, entries, data)


def _type_sizes(path: Path) -> dict[int, tuple[str, int, int]]:
    """By its number, the name of each type that is read, and a block's elements and bytes."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise WeightsError(
            f"{path}: the package gguf, which reads such files, is not installed; "
            "pip install 'bitforbit[gguf]'"
        ) from None
    known = GGMLQuantizationType.__members__
    return {int(known[n]): (n, *GGML_QUANT_SIZES[known[n]]) for n in TYPES if n in known}


class _Header:
    """A header that is read from its beginning; no length in it is believed before it is checked.

    at: bytes read so far.
    """

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path = file, size, path
        self.at = 0

    def refuse(self, what: str, remedy: str = _AGAIN) -> NoReturn:
        """Raise WeightsError."""
        raise WeightsError(f"{self._path}: {what}; {remedy}")

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes, which the file must have."""
        if count > self._size - self.at:
            left = self._size - self.at
            self.refuse(f"{what} takes {count} bytes, but {left} are left: the file is truncated")
        taken = self._file.read(count)
        if len(taken) != count:
            self.refuse("it became shorter while it was read")
        self.at += count
        return taken

    def number(self, form: str, what: str) -> Any:
        """A number in the form of `struct`, little-endian."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))[0]

    def check_magic(self) -> None:
        """Refuse what is not GGUF, not little-endian, or of another version."""
        magic = self.take(4, "the magic")
        if magic != MAGIC:
            self.refuse(f"it begins with {show(magic)}, not {show(MAGIC)}: it is no GGUF file")
        version = self.number("I", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            kind = "is big-endian" if swapped else f"has version {version}"
            self.refuse(f"it {kind}; supported are versions 2 and 3, little-endian")

    def count(self, what: str, least: int) -> int:
        """A count of things of at least that many bytes each, which the file must have."""
        count: int = self.number("Q", f"the count of {what}")
        if count > (self._size - self.at) // least:
            self.refuse(f"{count} {what} do not fit into its {self._size} bytes")
        return count

    def string(self, what: str, most: int = MAX_STRING) -> str:
        """A string of at most that many bytes."""
        length = self.number("Q", f"the length of {what}")
        if length > most:
            self.refuse(f"{what} is said to have {length} bytes, more than {most}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8")

    def metadata(self, count: int) -> dict[str, Any]:
        """The values by their names: numbers, strings, and lists of either."""
        found: dict[str, Any] = {}
        for index in range(count):
            key = self.string(f"the name of metadata pair {index}", 2**16)
            if key in found:
                self.refuse(f"the key {show(key)} occurs twice")
            found[key] = self._value(self.number("I", f"the type of {show(key)}"), show(key))
        return found

    def _value(self, kind: int, what: str) -> Any:
        """A value; a float32 stands for the shortest decimal that rounds to it (SPEC 12.2)."""
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self._array(what)
        if kind not in SCALARS:
            self.refuse(f"the type of {what} is {kind}, which does not exist")
        if kind == BOOL:
            return self._bool(self.take(1, what)[0], what)
        value = self.number(SCALARS[kind], what)
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def _array(self, what: str) -> list[Any]:
        """A list of strings or numbers."""
        kind = self.number("I", f"the type of {what}")
        if kind == STRING:
            count = self.count(f"strings of {what}", 8)
            return [self.string(f"string {index} of {what}") for index in range(count)]
        if kind not in SCALARS:
            self.refuse(f"{what} is an array of type {kind}; supported are numbers and strings")
        form = "B" if kind == BOOL else SCALARS[kind]
        count = self.count(f"numbers of {what}", struct.calcsize(f"<{form}"))
        bytes_ = self.take(count * struct.calcsize(f"<{form}"), what)
        values: list[Any] = np.frombuffer(bytes_, f"<{np.dtype(form).str[1:]}").tolist()
        return [self._bool(value, what) for value in values] if kind == BOOL else values

    def _bool(self, value: int, what: str) -> bool:
        if value > 1:
            self.refuse(f"{what} is a truth value of {value}")
        return value == 1

    def entries(self, count: int, sizes: Mapping[int, tuple[str, int, int]]) -> dict[str, Entry]:
        """What the header says of each tensor, by its name."""
        found: dict[str, Entry] = {}
        for index in range(count):
            entry = self._entry(index, sizes)
            if entry.name in found:
                self.refuse(f"the tensor {show(entry.name)} occurs twice")
            found[entry.name] = entry
        return found

    def _entry(self, index: int, sizes: Mapping[int, tuple[str, int, int]]) -> Entry:
        """What the header says of the next tensor, number `index`."""
        name = self.string(f"the name of tensor {index}", 2**10)
        what = f"tensor {show(name)}"
        rank = self.number("I", f"the number of dimensions of {what}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            self.refuse(f"{what} has {rank} dimensions; supported are 1 to {MAX_DIMENSIONS}")
        number = partial(self.number, what=f"what is said of {what}")
        shape = tuple(reversed([number("Q") for _ in range(rank)]))
        kind, begin = number("I"), number("Q")
        if kind not in sizes:
            self.refuse(f"{what} has type {kind}; supported are {', '.join(TYPES)}")
        label, block, block_bytes = sizes[kind]
        elements = math.prod(shape)
        if not 0 < elements <= MAX_ELEMENTS:
            self.refuse(f"{what}: shape {list(shape)} is no shape of a tensor")
        if shape[-1] % block:
            self.refuse(f"{what}: a row of {shape[-1]} is no multiple of {block}, as {label} needs")
        return Entry(name, label, shape, begin, begin + elements // block * block_bytes)


def _alignment(metadata: Mapping[str, Any], path: Path) -> int:
    """The alignment of the data, a power of two of at least 8; 32 where none is given."""
    alignment = metadata.get("general.alignment", 32)
    if (
        type(alignment) is not int
        or not 8 <= alignment <= MAX_ALIGNMENT
        or alignment.bit_count() > 1
    ):
        raise WeightsError(
            f"{path}: general.alignment is {show(alignment)}; it must be a power of two from 8 to "
            f"{MAX_ALIGNMENT}"
        )
    return alignment


def _check_tiling(entries: list[Entry], size: int, alignment: int, path: Path) -> None:
    """Refuse tensors that do not fill the data one after another, each at the next alignment."""
    at = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        at = -(-at // alignment) * alignment
        if entry.begin != at:
            what = "overlaps the tensor before" if entry.begin < at else "leaves a hole before it"
            raise WeightsError(
                f"{path}: tensor {show(entry.name)} begins at byte {entry.begin} of the data, not "
                f"{at}: it {what}; {_AGAIN}"
            )
        at = entry.end
        if at > size:
            raise WeightsError(
                f"{path}: tensor {show(entry.name)} ends at byte {at} of the data, but the file "
                f"holds {max(size, 0)}: it is truncated; {_AGAIN}"
            )
    if size - at >= alignment:
        raise WeightsError(f"{path}: its tensors take {at} bytes, but {size} are there; {_AGAIN}")
