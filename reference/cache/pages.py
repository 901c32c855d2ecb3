"""Pages: where keys and values are stored, and who holds them (SPEC 11.1, 11.2).

A page holds `page_size` positions of every layer of its group. Layers with the same window form a
group, for they need the same positions. A page may be held by several sequences, and is free when
none holds it: its owners are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from reference.arguments import whole
from reference.arithmetic import (
    BLOCK,
    F32,
    AlignedRows,
    Bools,
    align,
    align_rows,
    all_finite,
)
from reference.attention import AlignedKeyValues, KeyValues, widened
from reference.errors import CacheError, RequestError
from reference.extents import Extents, Piece, gathered
from reference.quantization import quantize_int8

KVType = Literal["float32", "float16", "bfloat16", "int8"]

PAGE_SIZE = 16
"""Positions of a page, unless said otherwise."""

_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
}

_DERIVED = ("finite", "keys", "digits", "scale")
"""Arrays that are computed from the others of a layer, and so need not be saved."""


@dataclass(frozen=True)
class PageShape:
    """What the pages of a model hold (SPEC 11.1).

    windows: of each layer, None for one that sees everything. dtype: of k and v (SPEC 11.2).
    aligned: whether the aligned values, which exact attention reads, are kept too. originals:
    whether k is also kept as it was first computed, for chunks to be moved (SPEC 11.5). Raises
    RequestError for a page size or a type that does not exist.
    """

    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    page_size: int = PAGE_SIZE
    dtype: KVType = "float32"
    aligned: bool = True
    originals: bool = False

    def __post_init__(self) -> None:
        if self.page_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise RequestError(f"page_size: {self.page_size} is not a power of two from 1 to 256")
        object.__setattr__(self, "page_size", whole("page_size", self.page_size, 1, 257))
        if self.dtype not in get_args(KVType):
            raise RequestError(f"kv_dtype: {self.dtype!r} is none of {', '.join(get_args(KVType))}")

    def alike(self, other: PageShape) -> bool:
        """Whether another shape's pages serve the same model; page size and dtype may differ."""
        return (self.kv_heads, self.head_dim, self.windows, self.aligned) == (
            other.kv_heads, other.head_dim, other.windows, other.aligned
        )  # fmt: skip

    def stored(self, slots: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Those of `arrays` from which the others are computed."""
        return {n: kind for n, kind in self.arrays(slots).items() if n not in _DERIVED}

    def arrays(self, slots: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each array of a layer; the slots are their second axis."""
        heads, width, dtype = self.kv_heads, self.head_dim, _DTYPES[self.dtype]
        kinds: dict[str, tuple[tuple[int, ...], Any]] = {
            "k": ((heads, slots, width), dtype),
            "v": ((heads, slots, width), dtype),
            "finite": ((heads, slots), np.bool_),
        }
        if self.dtype == "int8":
            kinds |= dict.fromkeys(("k_scale", "v_scale"), ((heads, slots), np.float32))
        if self.originals:
            kinds |= {"original": ((heads, slots, width), np.float32)}
            kinds |= {"shift": ((1, slots), np.int64)}
        if self.aligned:
            blocks = -(-width // BLOCK)
            kinds |= {
                "keys": ((blocks * heads, slots, BLOCK), np.float64),
                "digits": ((heads, slots, width), np.float64),
                "scale": ((heads, slots), np.float64),
            }
        return kinds

    def layer_bytes(self) -> int:
        """Bytes of one layer's share of a page."""
        kinds = self.arrays(self.page_size).values()
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in kinds)


class LayerPages:
    """One layer's keys and values in all pages of its group, by slot: page * page_size + offset.

    What is written is rounded to the pool's type first, and everything else is computed from the
    rounded values: on these the contract of exact attention holds (SPEC 11.2).
    """

    def __init__(self, shape: PageShape, slots: int) -> None:
        self._shape = shape
        # Zeros that nobody has touched take no memory.
        self._arrays = {n: np.zeros(size, kind) for n, (size, kind) in shape.arrays(slots).items()}

    def write(self, k: F32, v: F32, pieces: Sequence[Piece]) -> None:
        """Store k and v, (T, Hkv, D) float32, the rows of each piece in its slots."""
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        stored = narrowed("k", k, self._shape.dtype) | narrowed("v", v, self._shape.dtype)
        if self._shape.originals:
            stored |= {"original": k, "shift": np.zeros((1, k.shape[1]), np.int64)}
        self.put(stored, pieces)

    def put(self, stored: Mapping[str, NDArray[Any]], pieces: Sequence[Piece]) -> None:
        """Store arrays that `stored` gave of T positions, the rows of each piece in its slots."""
        k, v = (widened(stored[n], stored.get(f"{n}_scale")) for n in ("k", "v"))
        rows = dict(stored)
        rows["finite"] = finite_rows(k) & finite_rows(v)
        if self._shape.aligned:
            keys, values = align(k), align_rows(v)
            rows["keys"] = keys.values.reshape(len(self._arrays["keys"]), -1, BLOCK)
            rows["digits"], rows["scale"] = values.digits, values.scale
        for here, there in pieces:
            for name, array in self._arrays.items():
                array[:, there] = rows[name][:, here]

    def stored(self, pieces: Sequence[Piece]) -> dict[str, NDArray[Any]]:
        """Copies of what `put` takes, for the positions of the pieces."""
        return {
            name: np.array(gathered(array, pieces, 1))
            for name, array in self._arrays.items()
            if name not in _DERIVED
        }

    def copy(self, source: slice, target: slice) -> None:
        """Copy everything that some slots hold to others."""
        for array in self._arrays.values():
            array[:, target] = array[:, source]

    def grown(self, slots: int) -> dict[str, NDArray[Any]]:
        """Copies of its arrays with room for `slots` slots."""
        fresh = {n: np.zeros(size, kind) for n, (size, kind) in self._shape.arrays(slots).items()}
        for name, array in self._arrays.items():
            fresh[name][:, : array.shape[1]] = array
        return fresh

    def replace(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Use the arrays that `grown` made from now on."""
        self._arrays = arrays

    def poison(self, slots: slice) -> None:
        """Fill slots with what must never be read: NaN, or the largest int8 code times NaN.

        The suite does it to slots that hold no position of a sequence.
        """
        for name, array in self._arrays.items():
            if name == "finite":
                array[:, slots] = True
            else:
                array[:, slots] = 127 if array.dtype.kind == "i" else np.nan

    def plain(self, where: Extents) -> KeyValues:
        """What fast attention reads, with positions at `where`."""
        get = self._arrays.get
        return KeyValues(
            self._arrays["k"],
            self._arrays["v"],
            self._arrays["finite"],
            where,
            get("k_scale"),
            get("v_scale"),
        )

    def aligned(self, where: Extents) -> AlignedKeyValues:
        """What exact attention reads, with positions at `where`, if the shape is `aligned`."""
        keys, heads = self._arrays["keys"], self._shape.kv_heads
        values = (self._arrays[name] for name in ("digits", "scale", "finite"))
        return AlignedKeyValues(
            keys.reshape(-1, heads, *keys.shape[1:]), AlignedRows(*values), where
        )


def finite_rows(x: F32) -> Bools:
    """Which rows of x (..., D) float32 are finite throughout, (...) bool."""
    if all_finite(x):
        return np.ones(x.shape[:-1], np.bool_)
    return np.asarray(np.isfinite(x).all(axis=-1))


def narrowed(name: str, x: F32, dtype: KVType) -> dict[str, NDArray[Any]]:
    """x (Hkv, T, D) float32, rounded to the type it is stored in, by name of array (SPEC 11.2).

    name: `k` or `v`. int8 has a scale for each row besides, (Hkv, T) float32.
    """
    if dtype == "int8":
        codes, scale = quantize_int8(np.ascontiguousarray(x).reshape(-1, x.shape[-1]))
        return {name: codes.reshape(x.shape), f"{name}_scale": scale.reshape(x.shape[:-1])}
    with np.errstate(over="ignore", under="ignore"):
        return {name: x.astype(_DTYPES[dtype], copy=False)}


class PageGroup:
    """The pages of the layers with one window, and how many sequences hold each (`owners`)."""

    def __init__(self, shape: PageShape, window: int | None, pages: int) -> None:
        self.window = window
        self.layers = tuple(i for i, w in enumerate(shape.windows) if w == window)
        self.page_bytes = len(self.layers) * shape.layer_bytes()
        self.pages = {i: LayerPages(shape, pages * shape.page_size) for i in self.layers}
        self.owners = np.zeros(pages, np.int32)
        self._size, self._reach = shape.page_size, 0

    def find(self, count: int, after: int | None) -> list[int]:
        """`count` free pages, contiguous as far as there is room, following page `after`.

        Only the first pages, those within reach, are considered, because memory that was never
        written is slow to write. The reach doubles whenever less than half of it would stay free,
        so that sequences have room to grow.
        """
        free = self.owners[: self._reach] == 0
        while free.sum() - count < self._reach // 2 and self._reach < len(self.owners):
            self._reach = min(len(self.owners), 2 * max(self._reach, count))
            free = self.owners[: self._reach] == 0
        chosen: list[int] = []
        start = len(free) if after is None else after + 1
        while len(chosen) < count:
            if not (start < len(free) and free[start]):
                start = _roomiest(free, count - len(chosen))
            taken = free[start : start + count - len(chosen)]
            run = len(taken) if taken.all() else int(taken.argmin())
            chosen += range(start, start + run)
            free[start : start + run] = False
            start += run
        return chosen

    def room(self, count: int) -> int:
        """How many pages there must be in all for `count` of them to be free.

        If that is more than there are, it is at least twice as many: so each page is copied only a
        few times while a pool grows.
        """
        pages = len(self.owners)
        missing = count - int((self.owners == 0).sum())
        return pages if missing <= 0 else max(2 * pages, pages + missing)

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages in all."""
        fresh = [layer.grown(pages * self._size) for layer in self.pages.values()]
        for layer, arrays in zip(self.pages.values(), fresh, strict=True):
            layer.replace(arrays)  # only now that there was memory for all
        self.owners = np.concatenate([self.owners, np.zeros(pages - len(self.owners), np.int32)])

    def copy(self, source: int, target: int) -> None:
        """Copy a page, in every layer."""
        for layer in self.pages.values():
            layer.copy(*(slice(p * self._size, (p + 1) * self._size) for p in (source, target)))

    def hold(self, pages: Sequence[int]) -> None:
        """One more owner for each page."""
        self.owners[list(pages)] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One owner less for each page; a page without owners is free."""
        self.owners[list(pages)] -= 1


def _roomiest(free: NDArray[np.bool_], count: int) -> int:
    """A free page to start at: the middle of the largest gap, or its start if that is page 0.

    Starting in the middle leaves room for the sequence before the gap to grow.
    """
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    widest = int(lengths.argmax())
    start, length = int(starts[widest]), int(lengths[widest])
    return start + max(0, length - count) // 2 if start > 0 else start


class PagePool:
    """All pages of a model, within a budget of bytes (SPEC 11.1).

    budget: None for no limit; the arrays then grow. With one, they are made at once, and take up
    memory as they are written. Whoever keeps sequences that may be given up sets three functions:
    reclaim frees so many bytes, reclaimable says how many can be freed, and reclaimable_owners how
    many of these sequences hold a page of a group. Raises CacheError for a budget that the machine
    cannot give, RequestError for one that is no whole number.
    """

    def __init__(self, shape: PageShape, budget: int | None = None) -> None:
        budget = None if budget is None else whole("cache_bytes", budget)
        self.shape, self.budget = shape, budget
        self.reclaim: Callable[[int], None] = lambda missing: None
        self.reclaimable: Callable[[], float] = lambda: math.inf
        self.reclaimable_owners: Callable[[int, int], int] = lambda group, page: 0
        self.used_bytes = 0
        self.groups = tuple(PageGroup(shape, window, 0) for window in dict.fromkeys(shape.windows))
        if budget is not None:
            self._grow([budget // group.page_bytes for group in self.groups])

    def _grow(self, pages: Sequence[int]) -> None:
        """Make room for so many pages of each group in all. Raises CacheError."""
        try:
            for group, count in zip(self.groups, pages, strict=True):
                if count > len(group.owners):
                    group.grow(count)
        except (MemoryError, OverflowError, ValueError):
            raise CacheError(
                f"cache: {self.bytes_for(pages)} bytes are more than this machine can give; "
                "lower cache_bytes, or ask for less"
            ) from None

    def take(self, wanted: Sequence[tuple[int, int | None]]) -> list[list[int]]:
        """Take pages of each group: `wanted` says how many, and which page they should follow.

        Raises CacheError where the budget or the machine does not allow it; none is taken then.
        """
        missing = self.bytes_for([count for count, _ in wanted])
        if not self.make_room(missing):
            raise CacheError(
                f"cache: {missing} bytes of pages are needed, and of the {self.budget} of the "
                f"whole cache {self.used_bytes} are in use; raise cache_bytes, or ask for less "
                "at once"
            )
        self._grow([g.room(count) for g, (count, _) in zip(self.groups, wanted, strict=True)])
        taken = []
        for group, (count, after) in zip(self.groups, wanted, strict=True):
            pages = group.find(count, after)
            group.hold(pages)
            taken.append(pages)
        self.used_bytes += missing
        return taken

    def make_room(self, size: int, spared: int = 0) -> bool:
        """Whether `size` bytes are free, or could be freed by reclaiming, which is then done.

        If reclaiming everything would not be enough, nothing is reclaimed. spared: how many of the
        bytes are not needed any more once everything is.
        """
        if self.budget is None:
            return True
        missing = self.used_bytes + size - self.budget
        if size - spared <= self.budget and 0 < missing <= self.reclaimable() + spared:
            self.reclaim(missing)
        return self.used_bytes + size <= self.budget

    @property
    def position_bytes(self) -> int:
        """Bytes of one position, in all layers."""
        return self.bytes_for([1] * len(self.groups)) // self.shape.page_size

    @property
    def most_positions(self) -> float:
        """Positions of the longest sequence that there is room for, if none is trimmed."""
        if self.budget is None:
            return math.inf
        return self.budget // self.bytes_for([1] * len(self.groups)) * self.shape.page_size

    def bytes_for(self, counts: Sequence[int]) -> int:
        """Bytes of so many pages of each group."""
        return sum(g.page_bytes * count for g, count in zip(self.groups, counts, strict=True))

    def release(self, group: int, pages: Sequence[int]) -> None:
        """Give up pages of a group; those that no other sequence holds are free again."""
        held = self.groups[group]
        held.release(pages)
        self.used_bytes -= held.page_bytes * int((held.owners[list(pages)] == 0).sum())
