"""Whole models in little memory: pieces that are made when they are needed (SPEC 12.3).

A model is a sequence of pieces: its layers, and its output head in slices of rows. Under a limit a
piece is made from its memory-mapped tensors when it is entered, and dropped when it is left. Only
the first ones stay, as many as there is room for: every pass uses all pieces in the same order, and
no rule for what to keep then saves more than to keep a fixed set.
"""

from __future__ import annotations

import math
import re
import resource
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.config import ModelConfig
from reference.errors import RequestError
from reference.threads import ROWS, thread_count

T = TypeVar("T")

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

SLICE = 1 << 20
"""Elements of a slice of the output head, or of the embedding."""

WHOLE = 128
"""The rows of a slice are a multiple of this: BLAS then mostly tiles outputs as in the whole."""

LOOKUPS = 64
"""Rows of the embedding looked up in one map: for each, Linux maps up to 64 KiB around it too."""

FIXED = 32 << 20
"""Bytes that a pass takes whatever its size: buffers of BLAS, and tiles of attention."""


class StoredTensors(Mapping[str, F32]):
    """Tensors by their Hugging Face names, each read, as float32, when it is asked for.

    Asking raises WeightsError where the file cannot be read, or holds a NaN or an infinity.
    """

    @abstractmethod
    def rows(self, name: str, rows: slice | NDArray[np.int64]) -> F32:
        """Rows of the tensor `name`, (n, ...) float32."""


# ------------------------------------------------------------------------------------------ limits


def bytes_of(size: str) -> int:
    """Bytes of a size such as 512MiB or 4GiB. Raises RequestError for any other text."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]iB|B|)", size)
    if found is None or (count := int(float(found[1]) * UNITS[found[2]])) < 1:
        raise RequestError(f"memory: {size[:40]!r} is no size; give one such as 512MiB or 4GiB")
    return count


def shown(count: int) -> str:
    """A size in whole MiB, rounded up."""
    return f"{-(-count // 2**20)}MiB"


def resident() -> int:
    """Bytes that this process has in memory, mapped files included.

    On a system without /proc: the most that it ever had.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


class Memory:
    """The room that a limit leaves, and the pieces kept in it, for one pass at a time (SPEC 12.3).

    limit: bytes for the whole process, the cache not counted. making: bytes that the largest piece
    takes while it is made. pass_bytes: bytes that a pass works with. on_layer: is called with the
    number of each layer that is entered. Raises RequestError for a limit under which one token
    cannot be computed.
    """

    def __init__(self, limit: int, making: int, pass_bytes: Callable[[Rows], int]) -> None:
        self._base = resident() + making
        self._limit, self._room = limit, limit - self._base
        self._pass_bytes = pass_bytes
        self._kept: list[tuple[dict[int, Any], int, int]] = []
        self._used = self._work = 0
        self.on_layer: Callable[[int], object] = lambda index: None
        self.prepare([(1, 1)])

    def prepare(self, batches: Rows) -> None:
        """Make room for a pass, and drop pieces for it. Raises RequestError if there is none."""
        work = self._pass_bytes(batches)
        if work > self._room:
            most = max(rows for rows, _ in batches)
            raise RequestError(
                f"memory: {shown(self._limit)} are too little for a pass of {most} "
                f"token{'s' * (most > 1)}; the smallest limit that works for it is "
                f"{shown(self._base + work)}{', or compute fewer at once' * (most > 1)}"
            )
        self._work = work
        while self._used + work > self._room:
            pieces, index, size = self._kept.pop()
            del pieces[index]
            self._used -= size

    def holds(self, rows: int, logits: int) -> bool:
        """Whether there is room for a pass of so many tokens, and of logits for so many."""
        return self._pass_bytes([(rows, logits)]) <= self._room

    def at_once(self, rows: int, logits: int) -> int:
        """How many batches of that size may pass a layer together, in at most half of the room."""
        one, two = (self._pass_bytes([(rows, logits)] * count) for count in (1, 2))
        return max(1, 1 + (self._room // 2 - one) // (two - one))

    def keep(self, pieces: dict[int, Any], index: int, piece: object) -> None:
        """Add a piece to `pieces` if there is room for it."""
        size = sum(array.nbytes for _, array in arrays("", piece))
        if self._used + self._work + size <= self._room:
            pieces[index] = piece
            self._kept.append((pieces, index, size))
            self._used += size


Rows = Sequence[tuple[int, int]]
"""Tokens and logits of each batch of a pass."""


class OnDemand(Sequence[T], Generic[T]):
    """Pieces that are made when they are asked for; the first ones stay while there is room."""

    def __init__(self, count: int, make: Callable[[int], T], memory: Memory) -> None:
        self._count, self._make, self._memory = count, make, memory
        self._pieces: dict[int, T] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        if index in self._pieces:
            return self._pieces[index]
        piece = self._make(index)
        self._memory.keep(self._pieces, index, piece)
        return piece


@dataclass(frozen=True)
class StoredRows:
    """A tensor (N, K) that stays in its file, and of which rows are looked up."""

    tensors: StoredTensors
    name: str

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> F32:
        """Rows of it, (n, K) float32."""
        if isinstance(rows, slice):
            return self.tensors.rows(self.name, rows)
        parts = [rows[at : at + LOOKUPS] for at in range(0, len(rows), LOOKUPS)]
        return np.concatenate([self.tensors.rows(self.name, part) for part in parts])


def row_slices(rows: int, width: int) -> list[slice]:
    """Cut the rows of a matrix into slices of about SLICE elements, in multiples of WHOLE rows."""
    step = max(1, SLICE // width // WHOLE) * WHOLE
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def arrays(name: str, x: object) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every array in a structure of dataclasses and tuples, and the path to it."""
    if isinstance(x, np.ndarray):
        yield name, x
    elif isinstance(x, tuple):
        for index, part in enumerate(x):
            yield from arrays(f"{name}.{index}", part)
    elif is_dataclass(x):
        for field in fields(x):
            yield from arrays(f"{name}.{field.name}", getattr(x, field.name))


# ------------------------------------------------------------------------------------ what it takes


def making_bytes(shapes: Mapping[str, tuple[int, ...]], held: int, besides: int) -> int:
    """Bytes that the largest piece takes while it is made.

    shapes: of all tensors. held: bytes of an element once it is ready. besides: more bytes of it
    while the linear layer that it belongs to is made, its mapped pages included.
    """
    layers, linears = dict[str, int](), {"head": SLICE}
    for name, shape in shapes.items():
        layer = re.match(r"model\.layers\.\d+\.", name)
        if layer:
            size = math.prod(shape)
            within = name.rpartition(".")[0].rpartition(".")[0]
            layers[layer[0]] = layers.get(layer[0], 0) + size
            linears[within] = linears.get(within, 0) + size
    return held * max(layers.values()) + besides * max(linears.values())


def pass_bytes(config: ModelConfig, exact: bool, batches: Rows) -> int:
    """Bytes that a pass of batches works with, its caches not counted (SPEC 12.3).

    All batches keep their rows x, and cos and sin, from layer to layer. One at a time has besides:
    q, k, v and the result of attention for all its rows, inner values of the feed-forward layer for
    the rows of the tiles that threads work on, and its logits at the end. The bytes of an element
    are counted from the arrays that are alive at once in `reference.model`, those that alignment
    makes (float64) among them; tests hold the sum against what processes really take.
    """
    hidden, heads = config.hidden_size, config.heads + 2 * config.kv_heads
    inner = config.intermediate_size
    if config.sparse is not None:
        inner = max(inner, config.sparse.width * config.sparse.router.top_k)
    waiting = 4 * (hidden + 2 * config.head_dim) * sum(rows for rows, _ in batches)
    local = (8 * hidden + 52 * inner if exact else 4 * hidden + 24 * inner) + 8 * config.head_dim
    most = max(rows for rows, _ in batches)
    tall = min(most, max(2 * ROWS, ROWS * thread_count()))
    qkv = 4 * (4 * hidden + 3 * heads * config.head_dim)
    logits = 8 * config.vocab_size * max(count for _, count in batches)
    return FIXED + waiting + most * qkv + tall * local + logits
