"""Drafts by n-gram lookup, and greedy acceptance (SPEC 13.3, 13.4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

LONGEST = 3


def propose(context: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens: what followed the latest earlier occurrence of the end (13.3)."""
    for size in range(LONGEST, 0, -1):
        end = list(context[-size:])
        for stop in range(len(context) - 1, size - 1, -1):
            if list(context[stop - size : stop]) == end:
                return list(islice(cycle(context[stop:]), max(count, 0)))
    return []


def accepted(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """How many drafted tokens are the target's own choices, up to the first that is not (13.4)."""
    for i, token in enumerate(drafted):
        if token != chosen[i]:
            return i
    return len(drafted)
