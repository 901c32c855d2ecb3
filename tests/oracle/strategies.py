"""Hypothesis strategies for float32 values that are hard to sum."""

from __future__ import annotations

from hypothesis import strategies as st

LARGEST = 2.0**128 - 2.0**104
finite32: st.SearchStrategy[float] = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-4, 4, width=32),
    st.sampled_from(
        [
            *(0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-127, LARGEST, -LARGEST),
            *(1.0, 1.5, 2.0**-24, 3 * 2.0**-25, -(2.0**-24), 1 + 2.0**-23, 2.0**64, -(2.0**-75)),
        ]
    ),
)


def lists(minimum: int, maximum: int) -> st.SearchStrategy[list[float]]:
    return st.lists(finite32, min_size=minimum, max_size=maximum)


def paired(minimum: int, maximum: int) -> st.SearchStrategy[tuple[list[float], list[float]]]:
    """Two lists of one length."""
    pairs = st.lists(st.tuples(finite32, finite32), min_size=minimum, max_size=maximum)
    return pairs.map(lambda p: ([a for a, _ in p], [b for _, b in p]))
