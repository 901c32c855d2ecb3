"""Drafts looked up in the text itself (SPEC 13.3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.errors import RequestError
from reference.sampling import Law
from reference.speculation import NgramDraft, Proposal, point_mass
from tests.reference.speculation.loop import GREEDY, WARM, ids

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def naive_ngram(context: list[int], count: int, longest: int, shortest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for start in range(len(context) - size - 1, -1, -1):
            if context[start : start + size] == context[len(context) - size :]:
                text = list(context)
                for _ in range(count):
                    text.append(text[start + size + len(text) - len(context)])
                return text[len(context) :]
    return []


@given(
    context=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    count=st.integers(0, 9),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@settings(max_examples=300)
def test_ngrams_are_found(context: list[int], count: int, sizes: tuple[int, int]) -> None:
    shortest, longest = sorted(sizes)
    proposal = NgramDraft(longest, shortest).propose(ids(context), count, WARM)
    assert list(proposal.tokens) == naive_ngram(context, count, longest, shortest)
    for token, law in zip(proposal.tokens, proposal.laws, strict=True):
        assert (law.ids.tolist(), law.weights.tolist()) == ([token], [1])


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([1], []),
        ([1, 2, 3], []),
        ([1, 2, 1], [2, 1, 2, 1]),
        ([4, 4], [4, 4, 4, 4]),
        ([1, 2, 8, 2, 9, 1, 2], [8, 2, 9, 1]),  # the longer end wins over the later one
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9]),  # the latest of equal length
        ([7, 1, 2, 3, 5, 0, 1, 2, 3, 6, 7, 1, 2, 3], [6, 7, 1, 2]),  # 4 long, 3 looked up
    ],
)
def test_ngrams_by_hand(context: list[int], expected: list[int]) -> None:
    assert list(NgramDraft().propose(ids(context), 4, GREEDY).tokens) == expected


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (1, 2), (-1, -1), (3, -2)])
def test_ngrams_of_no_size_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="n-gram"):
        NgramDraft(*sizes)


def test_a_proposal_must_agree_with_itself() -> None:
    Proposal([3], [point_mass(3)])
    with pytest.raises(RequestError, match="1 tokens and 0 laws"):
        Proposal([3], [])
    for law in (point_mass(2), Law(ids([2, 3]), ids([1, 0]))):
        with pytest.raises(RequestError, match="token 3 has no weight"):
            Proposal([3], [law])
