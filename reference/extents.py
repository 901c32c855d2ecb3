"""Where the positions of a sequence are stored: runs of slots that are contiguous (SPEC 11.1).

Positions are logical. The pages that hold them may be anywhere in the pool; pages that happen to
follow one another in memory form one extent, and attention reads each extent in place, as a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Piece = tuple[slice, slice]
"""Part of a range of positions, counted from the start of the range, and the slots that hold it."""


@dataclass(frozen=True)
class Extents:
    """Positions and their slots: extent i holds `length[i]` positions from `position[i]` on.

    They are in the slots from `slot[i]` on. The extents are in ascending order and leave out no
    position between the first and the last.
    """

    position: tuple[int, ...]
    slot: tuple[int, ...]
    length: tuple[int, ...]

    def pieces(self, low: int, high: int, base: int | None = None) -> list[Piece]:
        """The parts of the positions [low, high) that are held, each within one extent.

        They are counted from position `base`; None is `low`.
        """
        base = low if base is None else base
        parts = []
        for position, slot, length in zip(self.position, self.slot, self.length, strict=True):
            first, last = max(low, position), min(high, position + length)
            if first < last:
                there = slot + first - position
                parts.append((slice(first - base, last - base), slice(there, there + last - first)))
        return parts


def whole(length: int) -> Extents:
    """The extents of `length` positions that are contiguous from slot 0 on."""
    return Extents((0,), (0,), (length,))


def of_pages(pages: Sequence[int], first: int, size: int) -> Extents:
    """The extents of pages of `size` slots; pages[0] is page `first` of its sequence."""
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
    """The slots of the pieces, of x along an axis: a view if there is one piece, else a copy."""
    before = (slice(None),) * axis
    parts = [x[(*before, there)] for _, there in pieces] or [x[(*before, slice(0, 0))]]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
