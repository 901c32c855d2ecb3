"""Where positions lie: runs of them that lie side by side in memory (SPEC 11.1).

A sequence's positions are logical. Its pages may lie anywhere; pages that happen to lie one behind
the other are one extent, and attention reads each extent in place, as a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Piece = tuple[slice, slice]
"""Part of a range of positions, counted from its start, and the slots where it lies."""


@dataclass(frozen=True)
class Extents:
    """Positions and their slots: `length[i]` of them from `position[i]` lie at `slot[i]`, ...

    The extents are ascending and leave no position out between the first and the last.
    """

    position: tuple[int, ...]
    slot: tuple[int, ...]
    length: tuple[int, ...]

    def pieces(self, low: int, high: int, base: int | None = None) -> list[Piece]:
        """The parts of [low, high), each in one extent, counted from `base`, which is `low`."""
        base = low if base is None else base
        parts = []
        for position, slot, length in zip(self.position, self.slot, self.length, strict=True):
            first, last = max(low, position), min(high, position + length)
            if first < last:
                there = slot + first - position
                parts.append((slice(first - base, last - base), slice(there, there + last - first)))
        return parts


def whole(length: int) -> Extents:
    """All positions side by side from slot 0."""
    return Extents((0,), (0,), (length,))


def of_pages(pages: Sequence[int], first: int, size: int) -> Extents:
    """Extents of pages of `size` slots that hold the positions from `first` pages on."""
    numbers = np.array(pages, np.int64)
    jumps = np.flatnonzero(numbers[1:] != numbers[:-1] + 1) + 1
    bounds = np.concatenate([[0], jumps, [len(numbers)]]) if len(numbers) else jumps
    starts, lengths = bounds[:-1], (bounds[1:] - bounds[:-1]) * size
    return Extents(
        tuple(((starts + first) * size).tolist()),
        tuple((numbers[starts] * size).tolist()),
        tuple(lengths.tolist()),
    )


def gathered(x: NDArray[Any], pieces: Sequence[Piece], axis: int) -> NDArray[Any]:
    """The slots of the pieces along an axis: a view of one piece, a copy of several."""
    before = (slice(None),) * axis
    parts = [x[(*before, there)] for _, there in pieces] or [x[(*before, slice(0, 0))]]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
