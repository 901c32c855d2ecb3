"""One safetensors file: its header is checked in full before any of its bytes is used (SPEC 12.1).

A file consists of the length of the header (8 bytes, little-endian), the header (a JSON object with
the dtype, shape and byte range of each tensor), and the data. The ranges must tile the data
exactly, so that a file which was cut short, or holds anything besides its tensors, is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from reference.config import show
from reference.errors import WeightsError
from reference.loading.mapped import mapped
from reference.loading.strict_json import parse_object

F32 = npt.NDArray[np.float32]

MAX_HEADER = 100_000_000
"""Bytes of a header at most, as in the `safetensors` package."""

MAX_DIMENSIONS, MAX_ELEMENTS = 8, 2**48
"""Of a tensor at most: far beyond any, and within what an array can have."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

ALL = slice(None)

_AGAIN = "fetch or save the file again"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: name, stored dtype, shape, and the range of its bytes in the data."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header has been checked.

    header: all bytes before the data, its length included. metadata: that of the header.
    """

    path: Path
    entries: Mapping[str, Entry]
    header: bytes
    metadata: Mapping[str, Any]

    def read(self, names: list[str]) -> dict[str, F32]:
        """Tensors of these names, each widened to float32, exactly, in its own array (SPEC 12.1).

        Raises WeightsError where the file cannot be read, or holds a NaN or an infinity.
        """
        return {name: self._widened(name, stored) for name, stored in self.stored(names)}

    def rows(self, name: str, rows: slice | npt.NDArray[np.int64] = ALL) -> F32:
        """Rows of a tensor as `read` gives it, float32 (n, ...), read from a map (SPEC 12.3).

        Raises as `read` does.
        """
        entry = self.entries[name]
        begin = len(self.header) + entry.begin
        stored = mapped(self.path, entry.dtype, begin, entry.shape, _AGAIN)[rows]
        # A vector is used as it is, for as long as its layer stays: not in a file that may change.
        return self._widened(name, stored.copy() if stored.ndim == 1 else stored)

    def stored(self, names: list[str]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Name and array, as it is stored, of these tensors, in the order of the file.

        Raises WeightsError where the file cannot be read.
        """
        entries = sorted((self.entries[name] for name in names), key=lambda entry: entry.begin)
        try:
            with self.path.open("rb") as file:
                for entry in entries:
                    yield entry.name, self._read_one(file, entry)
        except OSError as reason:
            raise WeightsError(f"{self.path}: {reason.strerror}; {_AGAIN}") from None

    def _read_one(self, file: BinaryIO, entry: Entry) -> npt.NDArray[Any]:
        file.seek(len(self.header) + entry.begin)
        stored = np.fromfile(file, entry.dtype, math.prod(entry.shape))
        if stored.nbytes != entry.end - entry.begin:
            raise WeightsError(f"{self.path}: it became shorter while it was read; {_AGAIN}")
        return stored.reshape(entry.shape)

    def _widened(self, name: str, stored: npt.NDArray[Any]) -> F32:
        tensor = stored.astype(np.float32, copy=False)
        if not all_finite(tensor):
            raise WeightsError(
                f"{self.path}: tensor {show(name)} holds {_first_not_finite(tensor)}, and "
                "weights must be finite; save the model again"
            )
        tensor.flags.writeable = False
        return tensor


def open_safetensors(path: Path, dtypes: Mapping[str, np.dtype[Any]] = DTYPES) -> SafetensorsFile:
    """Read and check the header of a file (SPEC 12.1).

    Raises WeightsError where the file is unreadable, truncated or longer than its header says,
    where the header is not a JSON object of tensors, where a dtype is none of `dtypes`, or where
    the byte ranges contradict the shapes, overlap or leave holes.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _read_header(file, size, path)
    except OSError as reason:
        raise WeightsError(f"{path}: {reason.strerror}; check the path") from None
    raw = parse_object(header[8:], f"{path}: header", WeightsError)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise WeightsError(f"{path}: header: __metadata__ is not a JSON object; {_AGAIN}")
    entries = {name: _entry(name, value, path, dtypes) for name, value in raw.items()}
    _check_tiling(list(entries.values()), size - len(header), path)
    return SafetensorsFile(path, entries, header, metadata)


def all_finite(x: F32) -> bool:
    """Whether x holds no NaN and no infinity; the extremes tell, for NaN wins both."""
    return x.size == 0 or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def _first_not_finite(x: F32) -> str:
    at = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
    return f"{x[at]} at {list(at)}"


def _read_header(file: BinaryIO, size: int, path: Path) -> bytes:
    """The header and its length, which is compared with the size of the file first."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > size - 8:
        raise WeightsError(
            f"{path}: {size} bytes are too few for a header of {length}: the file is truncated "
            f"or not safetensors; {_AGAIN}"
        )
    if length > MAX_HEADER:
        raise WeightsError(
            f"{path}: a header of {length} bytes exceeds {MAX_HEADER}: the file is damaged or "
            f"not safetensors; {_AGAIN}"
        )
    header = file.read(length)
    if len(header) != length:
        raise WeightsError(f"{path}: it became shorter while it was read; {_AGAIN}")
    return prefix + header


def _entry(name: str, value: Any, path: Path, dtypes: Mapping[str, np.dtype[Any]]) -> Entry:
    """Check what the header says of one tensor."""
    where = f"{path}: tensor {show(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(
            f"{where}: its entry is {show(value)}, but must hold dtype, shape and data_offsets; "
            f"{_AGAIN}"
        )
    stored, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(stored, str) or stored not in dtypes:
        raise WeightsError(
            f"{where}: dtype {show(stored)} is not supported; save it as {', '.join(dtypes)}"
        )
    if not _is_shape(shape):
        raise WeightsError(f"{where}: shape {show(shape)} is no shape of a tensor; {_AGAIN}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise WeightsError(f"{where}: data_offsets {show(offsets)} is no range of bytes; {_AGAIN}")
    dtype, (begin, end) = dtypes[stored], offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise WeightsError(
            f"{where}: shape {show(shape)} of {stored} takes {math.prod(shape) * dtype.itemsize} "
            f"bytes, data_offsets {show(offsets)} give {end - begin}; {_AGAIN}"
        )
    return Entry(name, dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    """Whether this is a list of integers, none of them negative."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _is_shape(value: Any) -> bool:
    """Whether this is a shape that an array can have, even where it has no elements."""
    if not _are_sizes(value) or len(value) > MAX_DIMENSIONS:
        return False
    elements: int = math.prod(max(size, 1) for size in value)
    return elements <= MAX_ELEMENTS


def _check_tiling(entries: list[Entry], size: int, path: Path) -> None:
    """Refuse byte ranges that do not cover the data from its first byte to its last, each once."""
    at = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            what = (
                "overlaps the tensor before it" if entry.begin < at else "leaves a hole before it"
            )
            raise WeightsError(
                f"{path}: tensor {show(entry.name)} begins at byte {entry.begin} of the data, not "
                f"{at}: it {what}; {_AGAIN}"
            )
        at = entry.end
    if at != size:
        what = "truncated" if size < at else "longer than its tensors"
        raise WeightsError(
            f"{path}: the header describes {at} bytes of data, the file holds {size}: it is "
            f"{what}; {_AGAIN}"
        )
