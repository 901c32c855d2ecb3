"""The output's law is the target's: every word of 64 bits is tried (SPEC 13.6)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from reference import sampling as sampling_module
from reference import speculation
from reference.sampling import Ints, Sampling, Words
from reference.speculation import ModelDraft, NgramDraft, Proposal
from tests.oracle import sampling as oracle
from tests.reference.speculation.laws import PLANTED, Joint, World, target_joint
from tests.reference.speculation.loop import GREEDY, WARM, speculate
from tests.reference.speculation.tables import table

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@dataclass
class Cell:
    """Words from `start` to `stop`, of 1 in all, that a decision cannot tell apart."""

    start: Fraction
    stop: Fraction

    def word(self, last: bool) -> int:
        first, end = self.edges()
        return end - 1 if last else first

    def edges(self) -> tuple[int, int]:
        return math.ceil(self.start * 2**64), math.ceil(self.stop * 2**64)

    @property
    def counted(self) -> Fraction:
        """Its share of the words of 64 bits."""
        first, end = self.edges()
        return Fraction(end - first, 2**64)


def cells(cuts: set[Fraction]) -> list[Cell]:
    edges = sorted({Fraction(0), Fraction(1), *(c for c in cuts if 0 < c < 1)})
    return [Cell(a, b) for a, b in pairwise(edges)]


def ends(law: oracle.Shares) -> set[Fraction]:
    """Where the cumulative shares of a law end."""
    total, out = Fraction(0), set()
    for token in sorted(law):
        total += law[token]
        out.add(total)
    return out


class EveryWord:
    """Takes the place of philox, and goes through every combination of cells, path by path.

    A word that is asked for again on a path (a position that is drafted again) is the same word.
    """

    def __init__(self, world: World, ngram: bool, last: bool, steps: int) -> None:
        self.world, self.ngram, self.last = world, ngram, last
        self.end = len(world.prompt) + steps
        self.path: list[tuple[tuple[int, int], list[Cell], int]] = []
        self.known: dict[tuple[int, int], int] = {}
        self.context: tuple[int, ...] = ()
        self.drafted: tuple[int, ...] = ()

    def __call__(self, seed: int, request: int, positions: Ints, stream: int = 0) -> Words:
        key = (int(positions[0]), stream)
        if key not in self.known:
            depth = len(self.known)
            if depth == len(self.path):
                self.path.append((key, cells(self.cuts(*key)), 0))
            expected, choices, at = self.path[depth]
            assert key == expected
            self.known[key] = choices[at].word(self.last)
        return np.array([self.known[key]], np.uint64)

    def at_pass(self, context: Ints, proposal: Proposal) -> None:
        self.context, self.drafted = tuple(context.tolist()), tuple(proposal.tokens)

    def cuts(self, position: int, stream: int) -> set[Fraction]:
        """Where a word of this position and stream may change what comes out."""
        world = self.world
        if position >= self.end:
            return set()
        if stream == 1:
            return set().union(*(ends(world.draft_law(t)) for t in world.texts(position)))
        row = position - len(self.context)
        text = (*self.context, *self.drafted[:row])
        target = world.target_law(text)
        if stream == 0:
            return ends(target)
        token = self.drafted[row]
        drafted = {token: Fraction(1)} if self.ngram else world.draft_law(text)
        if stream == 2:
            return {oracle.acceptance(target, drafted, token)}
        return ends(oracle.residual(target, drafted))

    def next_path(self) -> bool:
        """Go on to the next combination; False after the last."""
        self.known = {}
        while self.path:
            key, choices, at = self.path.pop()
            if at + 1 < len(choices):
                self.path.append((key, choices, at + 1))
                return True
        return False

    def chosen(self) -> list[Cell]:
        return [choices[at] for _, choices, at in self.path]


def laws_by_enumeration(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    length: int,
    steps: int,
    ngram: bool = False,
    last: bool = False,
) -> tuple[Joint, Joint]:
    """The law of the next tokens: for words that are real numbers, and for words of 64 bits."""
    ideal: Joint = Counter()  # type: ignore[assignment]
    counted: Joint = Counter()  # type: ignore[assignment]
    every = EveryWord(world, ngram, last, steps)
    monkeypatch.setattr(sampling_module, "philox", every)
    monkeypatch.setattr(speculation, "philox", every)
    while True:
        draft = NgramDraft() if ngram else ModelDraft(world.drafter, world.target)
        run = speculate(
            world.target,
            world.prompt,
            draft,
            length,
            steps,
            world.options,
            at_pass=every.at_pass,
        )
        tokens = tuple(run.tokens)
        ideal[tokens] += math.prod((c.stop - c.start for c in every.chosen()), start=Fraction(1))
        counted[tokens] += math.prod((c.counted for c in every.chosen()), start=Fraction(1))
        if not every.next_path():
            return ideal, counted


def nonzero(joint: Joint) -> Joint:
    return {tokens: p for tokens, p in joint.items() if p}


def begins(joint: Joint, tokens: tuple[int, ...]) -> Fraction:
    """The probability of texts that begin with these tokens."""
    return sum((p for t, p in joint.items() if t[: len(tokens)] == tokens), Fraction(0))


def world_of(size: int, options: Sampling, prompt: tuple[int, ...] = (0,)) -> World:
    return World(table(size, 1.0, 21), table(size, 1.5, 22), options, size, prompt)


CASES: dict[str, tuple[int, Sampling, int]] = {
    "plain": (3, WARM, 0),
    "one": (3, WARM, 1),
    "two": (3, WARM, 2),
    "longer_than_asked": (3, WARM, 4),
    "four_tokens": (4, Sampling(0.8), 2),
    "five_tokens": (5, Sampling(1.3, top_k=3), 2),
    "five_tokens_one": (5, WARM, 1),
    "five_tokens_two": (5, WARM, 2),
    "top_p_and_penalty": (4, Sampling(1.0, top_p=0.8, repetition_penalty=1.5), 2),
    "min_p": (4, Sampling(1.2, min_p=0.3), 2),
    "greedy": (4, GREEDY, 2),
}


@pytest.mark.parametrize("last", [False, True], ids=["first_words", "last_words"])
@pytest.mark.parametrize("name", CASES)
def test_the_law_of_two_tokens_is_the_targets(
    name: str, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word of 64 bits is tried: a cell's first or its last stands for all within.

    So the acceptance turns, and each token begins and ends, at exactly the word that it should.
    """
    size, options, length = CASES[name]
    world = world_of(size, options)
    ideal, counted = laws_by_enumeration(monkeypatch, world, length, 2, last=last)
    wanted = target_joint(world, 2)
    assert sum(ideal.values()) == sum(counted.values()) == 1
    assert nonzero(ideal) == wanted
    for step in (1, 2):  # the bound of 13.6, token by token
        for tokens in {t[:step] for t in wanted}:
            found, given = (begins(counted, part) for part in (tokens, tokens[:-1]))
            share = world.target_law((*world.prompt, *tokens[:-1]))[tokens[-1]]
            drafted = len(world.draft_law((*world.prompt, *tokens[:-1])))
            assert abs(found / given - share) <= Fraction(drafted + 4, 2**64)


@pytest.mark.parametrize("last", [False, True], ids=["first_words", "last_words"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_law_with_ngrams_is_the_targets(
    length: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(3, WARM, prompt=(1, 2, 0, 1, 2))
    ideal, counted = laws_by_enumeration(monkeypatch, world, length, 3, ngram=True, last=last)
    wanted = target_joint(world, 3)
    assert nonzero(ideal) == wanted
    for token in range(3):
        share = world.target_law(world.prompt)[token]
        assert abs(begins(counted, (token,)) - share) <= Fraction(2, 2**64)


@pytest.mark.parametrize("fault", PLANTED)
def test_enumeration_sees_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(3, WARM)
    monkeypatch.setattr(speculation, *PLANTED[fault])
    found = [laws_by_enumeration(monkeypatch, world, 2, 2, last=last)[0] for last in (False, True)]
    assert any(nonzero(ideal) != target_joint(world, 2) for ideal in found)
