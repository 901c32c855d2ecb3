"""Extents against a table of every position's slot (SPEC 11.1)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.extents import Extents, gathered, of_pages, whole

PAGES = st.lists(st.integers(0, 12), max_size=8, unique=True)
SIZES = st.sampled_from([1, 2, 4, 16])


def slots(pages: list[int], size: int) -> NDArray[np.int64]:
    """The slot of each position, one by one."""
    return np.array([page * size + i for page in pages for i in range(size)], np.int64)


@given(PAGES, st.integers(0, 5), SIZES, st.integers(0, 100), st.integers(0, 100))
def test_pieces_are_the_slots_of_their_positions(
    pages: list[int], first: int, size: int, low: int, high: int
) -> None:
    table, start = slots(pages, size), first * size
    low, high = sorted((start + low % (len(table) + 1), start + high % (len(table) + 1)))
    pieces = of_pages(pages, first, size).pieces(low, high)
    here = [i for piece, _ in pieces for i in range(high - low)[piece]]
    there = [i for _, piece in pieces for i in range(piece.start, piece.stop)]
    assert here == list(range(high - low))
    assert there == table[low - start : high - start].tolist()


@given(PAGES, st.integers(0, 5), SIZES)
def test_there_is_one_extent_for_each_run(pages: list[int], first: int, size: int) -> None:
    extents = of_pages(pages, first, size)
    jumps = sum(b != a + 1 for a, b in pairwise(pages))
    assert len(extents.slot) == len(extents.position) == len(extents.length)
    assert len(extents.slot) == (jumps + 1 if pages else 0)


def test_positions_that_are_not_there_are_in_no_piece() -> None:
    extents = of_pages([3, 4, 9], 2, 4)
    assert extents == Extents((8, 16), (12, 36), (8, 4))
    assert extents.pieces(0, 100) == [(slice(8, 16), slice(12, 20)), (slice(16, 20), slice(36, 40))]
    assert extents.pieces(11, 11) == []
    assert whole(5).pieces(1, 4) == [(slice(0, 3), slice(1, 4))]


@given(PAGES, SIZES)
def test_gathered_is_fancy_indexing(pages: list[int], size: int) -> None:
    x = np.arange(3 * 13 * size * 2).reshape(3, 13 * size, 2)
    table = slots(pages, size)
    pieces = of_pages(pages, 0, size).pieces(0, len(table))
    assert np.array_equal(gathered(x, pieces, 1), x[:, table])
    assert np.array_equal(gathered(x.swapaxes(0, 1), pieces, 0), x.swapaxes(0, 1)[table])
    assert (gathered(x, pieces, 1).base is not None) == (len(pieces) < 2)
