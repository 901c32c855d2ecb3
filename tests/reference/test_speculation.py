"""Speculation: drafts, and tokens whose law no draft can change (SPEC 13.2 to 13.6)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import sampling as sampling_module
from reference import speculation
from reference.engine import Engine
from reference.errors import RequestError
from reference.model import Model, load_model
from reference.sampling import Ints, Law, Sampling, Words, law_of, philox, sample
from reference.speculation import (
    Draft,
    ModelDraft,
    NgramDraft,
    Proposal,
    Tally,
    acceptance,
    point_mass,
    residual,
    verify,
)
from reference.tokenizer import Tokenizer
from tests.oracle import sampling as oracle
from tests.oracle.arrays import Float32, assert_same, f32
from tests.oracle.nasty import tolist
from tests.reference.test_model import (
    MISTRAL_SMALL,
    QWEN2_SMALL,
    QWEN3_SMALL,
    ROOT,
    small,
    tiny,
    tokens_of,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

GREEDY = Sampling()
WARM = Sampling(temperature=1.0)
Row = Callable[[tuple[int, ...]], Float32]


def ids(tokens: Sequence[int]) -> Ints:
    return np.array(tokens, np.int64)


# a loop, and models and drafts to run it with


@dataclass
class Run:
    """What a request gave, the logits that chose each token, and what speculation was worth."""

    tokens: list[int] = field(default_factory=list)
    rows: list[Float32] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


def passes(
    model: Model,
    prompt: Sequence[int],
    draft: Draft,
    length: int,
    count: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    request: int = 0,
    ends: Sequence[int] = (),
    at_pass: Callable[[Ints, Proposal], None] = lambda context, proposal: None,
) -> Iterator[Run]:
    """Drafts of up to `length` tokens, verified in one pass each; yields after every pass."""
    run, held = Run(), model.new_cache()
    if len(prompt) > 1:
        model.forward(prompt[:-1], held)
    while len(run.tokens) < count and held.length < model.config.max_positions:
        context = ids([*prompt, *run.tokens])
        room = model.config.max_positions - held.length - 1
        most = min(length, count - len(run.tokens), room)
        proposal = draft.propose(context, most, sampling, seed, request)
        assert len(proposal.tokens) <= most
        at_pass(context, proposal)
        logits = model.forward([int(context[-1]), *proposal.tokens], held)
        verdict = verify(logits, proposal, sampling, context, seed, request, len(context))
        assert len(verdict.tokens) == verdict.accepted + 1
        assert list(proposal.tokens[: verdict.accepted]) == verdict.tokens[:-1]
        held.truncate(len(context) + verdict.accepted)
        run.tally.add(proposal, verdict)
        for row, token in zip(logits, verdict.tokens, strict=False):
            if len(run.tokens) == count:
                break
            run.tokens.append(token)
            run.rows.append(row)
            if token in ends:
                yield run
                return
        yield run


def speculate(*arguments: Any, **options: Any) -> Run:
    *_, run = passes(*arguments, **options)
    return run


class TableCache:
    """The tokens fed so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class TableModel:
    """Stands for a Model: logits by a function of all tokens so far. `fed` counts its tokens."""

    tokenizer: Tokenizer | None = None

    def __init__(self, row: Row, vocab_size: int, max_positions: int = 10_000) -> None:
        self.row = row
        self.config = SimpleNamespace(vocab_size=vocab_size, max_positions=max_positions)
        self.fed: list[int] = []

    def new_cache(self) -> TableCache:
        return TableCache()

    def forward(self, tokens: Sequence[int], held: TableCache, last_only: bool = False) -> Float32:
        assert len(tokens) > 0
        assert held.length + len(tokens) <= self.config.max_positions
        self.fed.append(len(tokens))
        rows = []
        for token in tokens:
            held.tokens.append(int(token))
            rows.append(self.row(tuple(held.tokens)))
        return np.stack(rows[-1:] if last_only else rows)


def table(
    vocab_size: int, spread: float, name: int, decimals: int = 9, max_positions: int = 10_000
) -> Model:
    """Random logits, that depend on the last two tokens and on the position."""

    @cache
    def row(text: tuple[int, ...]) -> Float32:
        rng = np.random.default_rng([name, len(text), *text[-2:]])
        logits = (rng.standard_normal(vocab_size) * spread).round(decimals)
        return logits.astype(np.float32)

    return cast(Model, TableModel(row, vocab_size, max_positions))


@dataclass
class Known:
    """Proposes what it is told follows each position, point masses."""

    text: Sequence[int]

    def propose(
        self, context: Ints, count: int, sampling: Sampling, seed: int = 0, request: int = 0
    ) -> Proposal:
        tokens = [int(t) for t in self.text[len(context) : len(context) + count]]
        return Proposal(tokens, [point_mass(token) for token in tokens])


# 13.2: streams


def test_streams_are_words_of_their_own() -> None:
    positions = np.array([0, 1, 77, 2**32 - 1])
    seen: set[int] = set()
    for stream in range(4):
        words = philox(2**63 + 5, 9, positions, stream).tolist()
        assert words == [oracle.philox(2**63 + 5, 9, int(p), stream) for p in positions]
        seen |= set(words)
    assert len(seen) == 16
    assert philox(3, 4, positions, stream=0).tolist() == philox(3, 4, positions).tolist()


# 13.3: n-grams


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


# 13.3: a draft model


@given(
    contexts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8),
    count=st.integers(0, 4),
)
def test_a_draft_models_cache_is_as_good_as_new(contexts: list[list[int]], count: int) -> None:
    """Whatever sequence of contexts it meets: longer, shorter, or another altogether."""
    model = table(4, 2.0, 5)
    kept = ModelDraft(model, model)
    for context in contexts:
        found = kept.propose(ids(context), count, WARM, 3, 1)
        fresh = ModelDraft(model, model).propose(ids(context), count, WARM, 3, 1)
        assert list(found.tokens) == list(fresh.tokens)
        for law, other in zip(found.laws, fresh.laws, strict=True):
            assert_same(law.weights, other.weights)


def test_a_draft_model_is_fed_what_is_missing() -> None:
    model = table(50, 1.0, 6)
    fed = cast(Any, model).fed
    draft = ModelDraft(model, model)
    context = ids([*range(20)])
    tokens = list(draft.propose(context, 3, GREEDY).tokens)
    assert fed == [20, 1, 1]
    # The third was never fed; the first two were right, and a correction and it follow.
    draft.propose(ids([*context, *tokens[:2], 49]), 1, GREEDY)
    assert fed == [20, 1, 1, 1]
    draft.propose(ids([*context, (tokens[0] + 1) % 50, 7]), 1, GREEDY)
    assert fed == [20, 1, 1, 1, 2]
    draft.propose(context, 0, GREEDY)
    assert fed == [20, 1, 1, 1, 2]


def test_a_draft_model_drafts_what_it_would_generate() -> None:
    draft_model = load_model(ROOT / "fixtures" / "tiny-draft")
    draft = ModelDraft(draft_model, tiny())
    prompt = tokens_of(30, 1024).tolist()
    result = Engine(draft_model).generate(prompt, 12, stop_tokens=())
    assert list(draft.propose(ids(prompt), 12, GREEDY).tokens) == result.tokens
    penalty = Sampling(repetition_penalty=1.3)
    result = Engine(draft_model).generate(prompt, 12, sampling=penalty, stop_tokens=())
    assert list(draft.propose(ids(prompt), 12, penalty).tokens) == result.tokens


@pytest.mark.parametrize(
    "options",
    [Sampling(0.7), Sampling(1.0, top_k=3, repetition_penalty=2.0), Sampling(2.0, 0, 0.6)],
)
def test_a_draft_model_draws_under_the_requests_sampling(options: Sampling) -> None:
    model, context = table(9, 2.0, 7), [4, 4, 1]
    proposal = ModelDraft(model, model).propose(ids(context), 6, options, 11, 2)
    for i, (token, law) in enumerate(zip(proposal.tokens, proposal.laws, strict=True)):
        text = [*context, *proposal.tokens[:i]]
        logits = tolist(cast(Any, model).row(tuple(text)))
        filters = options.top_k, options.top_p, options.min_p
        penalty = float(np.float32(options.repetition_penalty))
        temperature = float(np.float32(options.temperature))
        wanted = oracle.law(logits, temperature, filters, penalty, text)
        assert shares_of(law) == wanted
        word = oracle.philox(11, 2, len(text), stream=1)
        assert token == oracle.draw_share(wanted, Fraction(word, 2**64))


def test_a_draft_ends_with_the_draft_models_context() -> None:
    model = table(5, 1.0, 8, max_positions=10)
    for held, wanted in ((6, 4), (7, 4), (8, 3), (9, 2), (10, 1), (11, 0), (30, 0)):
        draft = ModelDraft(model, model)
        assert len(draft.propose(ids([1] * held), 4, GREEDY).tokens) == wanted


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="32 tokens, the target's 1024"):
        ModelDraft(small(QWEN3_SMALL), tiny())
    draft_model = load_model(ROOT / "fixtures" / "tiny-draft")
    ModelDraft(draft_model, tiny())
    with pytest.raises(RequestError, match="tokenizer is not the target's"):
        ModelDraft(replace(draft_model, tokenizer=None), tiny())

    class Renamed:
        vocab_size = draft_model.config.vocab_size

        def token(self, id_: int) -> str | None:
            assert draft_model.tokenizer is not None
            return "other" if id_ == self.vocab_size - 1 else draft_model.tokenizer.token(id_)

    with pytest.raises(RequestError, match="tokenizer is not the target's"):
        ModelDraft(replace(draft_model, tokenizer=cast(Tokenizer, Renamed())), tiny())


# 13.4: one pass against the oracle's fractions


def shares_of(law: Law) -> oracle.Shares:
    weights = [int(w) for w in law.weights]
    return oracle.shares(dict(zip(law.ids.tolist(), weights, strict=True)))


OPTIONS = [
    GREEDY,
    Sampling(0.0, repetition_penalty=1.5),
    WARM,
    Sampling(0.6, top_k=3),
    Sampling(1.4, top_p=0.7, repetition_penalty=1.3),
    Sampling(1.0, min_p=0.2),
]


@given(data=st.data())
@settings(max_examples=200)
def test_a_pass_is_the_oracles(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    n = data.draw(st.integers(0, 4))
    logit: st.SearchStrategy[float] = st.one_of(
        st.floats(-4, 4, width=32), st.sampled_from([0.0, 1.0, -60.0])
    )
    row = st.lists(logit, min_size=size, max_size=size)
    rows: list[list[float]] = [data.draw(row) for _ in range(n + 1)]
    options = data.draw(st.sampled_from(OPTIONS))
    weight = st.sampled_from([0, 1, 2, 3, 2**40, 2**40 - 1, 2**20 + 1])
    laws, tokens = [], []
    for _ in range(n):
        weights = data.draw(
            st.lists(weight, min_size=size, max_size=size).filter(lambda x: sum(x) > 0)
        )
        kept = [i for i in range(size) if weights[i]]
        laws.append(Law(ids(kept), ids([weights[i] for i in kept])))
        tokens.append(data.draw(st.sampled_from(kept)))
    previous = data.draw(st.lists(st.integers(0, size - 1), max_size=4))
    key = data.draw(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9)))
    position = data.draw(st.integers(0, 2**20))

    def random(row: int, stream: int) -> Fraction:
        return Fraction(oracle.philox(*key, position + row, stream), 2**64)

    expected = oracle.verify(
        rows,
        tokens,
        [shares_of(law) for law in laws],
        float(np.float32(options.temperature)),
        (options.top_k, options.top_p, options.min_p),
        float(np.float32(options.repetition_penalty)),
        previous,
        random,
    )
    proposal = Proposal(tokens, laws)
    verdict = verify(f32(rows), proposal, options, ids(previous), *key, position)
    assert verdict.tokens == expected
    assert verdict.accepted == len(expected) - 1
    assert all(type(token) is int for token in verdict.tokens)


@given(
    w=st.lists(st.integers(0, 2**40), min_size=1, max_size=6).filter(lambda x: sum(x) > 0),
    q=st.lists(st.integers(0, 2**40), min_size=6, max_size=6),
)
def test_acceptance_and_residual_are_exact(w: list[int], q: list[int]) -> None:
    target = Law(np.arange(len(w)), ids(w))
    kept = [i for i in range(6) if q[i]]
    if not kept:
        return
    drafted = Law(ids(kept), ids([q[i] for i in kept]))
    t, d = shares_of(target), shares_of(drafted)
    rejected = Fraction(0)
    for token in kept:
        share, of = acceptance(target, drafted, token)
        assert min(Fraction(share, of), Fraction(1)) == oracle.acceptance(t, d, token)
        rejected += d[token] * (1 - oracle.acceptance(t, d, token))
    left = residual(target, drafted)
    assert left.ids.tolist() == target.ids.tolist()
    assert all(type(weight) is int for weight in left.weights)
    assert sum(left.weights) == rejected * sum(w) * sum(q)
    if rejected:
        assert shares_of(left) == oracle.residual(t, d)


def test_a_residual_survives_where_floats_cancel() -> None:
    """One unit in 2^40 more than the draft, on 2^17 tokens: the residual is exactly it."""
    count = 2**17
    weights = np.full(count, 2**40)
    drafted = weights.copy()
    drafted[[3, 70_000]] -= 1
    left = residual(Law(np.arange(count), weights), Law(np.arange(count), drafted))
    assert np.flatnonzero(left.weights).tolist() == [3, 70_000]
    total = 2**57
    assert left.weights[3] == 2**40 * (total - 2) - (2**40 - 1) * total > 2**56


def test_bad_logits_are_refused() -> None:
    logits = f32([[0.0, 1.0], [np.nan, 0.0]])
    with pytest.raises(RequestError, match="NaN"):
        verify(logits, Proposal([1], [point_mass(1)]), GREEDY, ids([]))


# 13.6: the law, by trying every word


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


@dataclass
class World:
    """Two tables, and the oracle's laws of both."""

    target: Model
    drafter: Model
    options: Sampling
    vocab_size: int
    prompt: tuple[int, ...] = (0,)

    def law(self, model: Model, text: tuple[int, ...]) -> oracle.Shares:
        o = self.options
        temperature, penalty = (float(np.float32(x)) for x in (o.temperature, o.repetition_penalty))
        logits = tolist(cast(Any, model).row(text))
        return oracle.law(logits, temperature, (o.top_k, o.top_p, o.min_p), penalty, text)

    def target_law(self, text: tuple[int, ...]) -> oracle.Shares:
        return cached_law(self, "target", text)

    def draft_law(self, text: tuple[int, ...]) -> oracle.Shares:
        return cached_law(self, "drafter", text)

    def texts(self, length: int) -> Iterator[tuple[int, ...]]:
        """Every text of that length which begins with the prompt."""
        extra = length - len(self.prompt)
        for index in np.ndindex(*(self.vocab_size,) * extra):
            yield (*self.prompt, *map(int, index))

    def __hash__(self) -> int:
        return id(self)


@cache
def cached_law(world: World, name: str, text: tuple[int, ...]) -> oracle.Shares:
    return world.law(getattr(world, name), text)


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


Joint = dict[tuple[int, ...], Fraction]


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


def target_joint(world: World, steps: int) -> Joint:
    joint: Joint = {(): Fraction(1)}
    for _ in range(steps):
        joint = {
            (*tokens, token): p * share
            for tokens, p in joint.items()
            for token, share in world.target_law((*world.prompt, *tokens)).items()
        }
    return joint


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


def from_the_target(target: Law, drafted: Law) -> Law:
    """A wrong residual: after a rejection the target's own law."""
    return target


def unweighted(target: Law, drafted: Law) -> Law:
    """A wrong residual: totals that differ are taken as equal."""
    q = dict(zip(drafted.ids.tolist(), drafted.weights.tolist(), strict=True))
    excess = [max(w - q.get(i, 0), 0) for i, w in zip(*map(np.ndarray.tolist, target), strict=True)]
    return Law(target.ids, ids(excess if any(excess) else target.weights.tolist()))


def without_the_draft(target: Law, drafted: Law, token: int) -> tuple[int, int]:
    """A wrong acceptance: the draft's probability is left out."""
    return speculation.weight_of(target, token), speculation.total(target)


PLANTED = {
    "from_the_target": ("residual", from_the_target),
    "unweighted": ("residual", unweighted),
    "without_the_draft": ("acceptance", without_the_draft),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_enumeration_sees_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(3, WARM)
    monkeypatch.setattr(speculation, *PLANTED[fault])
    found = [laws_by_enumeration(monkeypatch, world, 2, 2, last=last)[0] for last in (False, True)]
    assert any(nonzero(ideal) != target_joint(world, 2) for ideal in found)


# 13.6: the law, by drawing from the trained models

SHORT = Sampling(1.0, top_k=5)
SEEDS = 1000


@cache
def trained(name: str) -> Model:
    """A trained model whose logits are computed once a context, to draw from many times."""
    model = load_model(ROOT / "fixtures" / name)
    prompt = trained_prompt()
    held = model.new_cache()
    model.forward(prompt[:-1], held)

    @cache
    def row(text: tuple[int, ...]) -> Float32:
        if len(text) < len(prompt):
            return np.zeros(1024, np.float32)
        held.truncate(len(prompt) - 1)
        logits: Float32 = model.forward(text[len(prompt) - 1 :], held)[-1]
        return logits

    double = TableModel(row, 1024)
    double.tokenizer = model.tokenizer
    return cast(Model, double)


@cache
def trained_prompt() -> tuple[int, ...]:
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    return tuple(tokenizer.encode("And the king said unto"))


def chi_squared(counts: dict[tuple[int, ...], int], law: Joint) -> float:
    """p of counts that no less likely ones have; cells that expect less than 5 are put together."""
    draws = sum(counts.values())
    assert set(counts) <= set(law), "a token that cannot be drawn"
    expected, found = [0.0], [0.0]
    for tokens, p in sorted(law.items(), key=lambda item: item[1]):
        if expected[-1] >= 5:
            expected.append(0.0)
            found.append(0.0)
        expected[-1] += float(p * draws)
        found[-1] += counts.get(tokens, 0)
    x = sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True))
    assert len(found) > 5
    return float(mpmath.gammainc((len(found) - 1) / 2, x / 2, mpmath.inf, regularized=True))


def drawn(length: int, draft: Callable[[], Draft]) -> dict[tuple[int, ...], int]:
    target, prompt = trained("tiny-dense"), trained_prompt()
    runs = (speculate(target, prompt, draft(), length, 2, SHORT, seed) for seed in range(SEEDS))
    return Counter(tuple(run.tokens) for run in runs)


def by_model() -> Draft:
    return ModelDraft(trained("tiny-draft"), trained("tiny-dense"))


def trained_law() -> Joint:
    """The target's law of two tokens after the prompt."""
    world = World(trained("tiny-dense"), trained("tiny-draft"), SHORT, 1024, trained_prompt())
    return target_joint(world, 2)


def test_draws_from_the_trained_models_follow_the_law() -> None:
    assert chi_squared(drawn(2, by_model), trained_law()) > 1e-3


def test_a_likely_wrong_guess_changes_no_law() -> None:
    """A point mass on the second likeliest token of each row."""
    target, prompt = trained("tiny-dense"), trained_prompt()
    text = list(prompt)
    for _ in range(2):
        logits = cast(Any, target).row(tuple(text))
        text.append(int(np.argsort(logits)[-2]))
    assert chi_squared(drawn(2, lambda: Known(text)), trained_law()) > 1e-3


@pytest.mark.parametrize("fault", PLANTED)
def test_the_same_draws_see_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, *PLANTED[fault])
    assert chi_squared(drawn(2, by_model), trained_law()) < 1e-9


# 13.4: greedy, to the bit


def plain(model: Model, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> Run:
    """Decoding one token at a time, with nothing of this module."""
    run, held = Run(), model.new_cache()
    fed: Sequence[int] = prompt
    while len(run.tokens) < count and held.length < model.config.max_positions:
        run.rows.append(model.forward(fed, held)[-1])
        previous = ids([*prompt, *run.tokens])
        run.tokens.append(sample(run.rows[-1], sampling, previous, 0, 0, len(previous)))
        fed = run.tokens[-1:]
    return run


def assert_same_run(run: Run, expected: Run) -> None:
    assert run.tokens == expected.tokens
    assert_same(np.stack(run.rows), np.stack(expected.rows))


@cache
def trained_greedy() -> tuple[list[int], Run]:
    prompt = (ROOT / "fixtures" / "prompts" / "short.txt").read_text()
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    encoded = tokenizer.encode(prompt)
    return encoded, plain(tiny(), encoded, 50)


LENGTHS = (0, 1, 2, 5, 17)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_greedy_is_plain_decoding_of_the_trained_model(kind: str, length: int) -> None:
    prompt, expected = trained_greedy()
    draft_model = load_model(ROOT / "fixtures" / "tiny-draft")
    draft = NgramDraft() if kind == "ngram" else ModelDraft(draft_model, tiny())
    run = speculate(tiny(), prompt, draft, length, 50)
    assert_same_run(run, expected)
    assert run.tally.tokens_per_pass > 1 or length == 0
    assert run.tally.acceptance_rate > 0 or length == 0


MODELS = {"mistral": MISTRAL_SMALL, "qwen2": QWEN2_SMALL, "qwen3": QWEN3_SMALL}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", MODELS)
def test_greedy_is_plain_decoding_with_sliding_windows(family: str, length: int) -> None:
    """Windows of 17 and 8, and drafts that are right, wrong, and right up to a point."""
    model, prompt = small(MODELS[family]), tokens_of(21, 32).tolist()
    expected = plain(model, prompt, 40)
    right = [*prompt, *expected.tokens]
    wrong = [(token + 1) % 32 for token in right]
    mixed = [w if i % 4 == 3 else r for i, (r, w) in enumerate(zip(right, wrong, strict=True))]
    for draft in (NgramDraft(), Known(right), Known(wrong), Known(mixed)):
        run = speculate(model, prompt, draft, length, 40)
        assert_same_run(run, expected)
        if draft == Known(right):
            assert run.tally.accepted == run.tally.drafted
        if draft == Known(wrong):
            assert run.tally.accepted == 0


@pytest.mark.parametrize("weights", ["int4", "int4-row"])
def test_greedy_is_plain_decoding_in_other_weight_modes(weights: Any) -> None:
    model, prompt = small(QWEN3_SMALL, weights), tokens_of(21, 32).tolist()
    expected = plain(model, prompt, 40)
    draft = ModelDraft(small(QWEN3_SMALL, "int4"), model)
    assert_same_run(speculate(model, prompt, draft, 5, 40), expected)


def test_greedy_counts_the_draft_in_the_penalty() -> None:
    model, prompt = small(QWEN3_SMALL), tokens_of(9, 32).tolist()
    sampling = Sampling(repetition_penalty=1.4)
    expected = plain(model, prompt, 30, sampling)
    assert expected.tokens != plain(model, prompt, 30).tokens
    for draft in (Known([*prompt, *expected.tokens]), ModelDraft(model, model), NgramDraft()):
        assert_same_run(speculate(model, prompt, draft, 6, 30, sampling), expected)
    run = speculate(model, prompt, ModelDraft(model, model), 6, 30, sampling)
    assert run.tally.acceptance_rate == 1.0


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = f32([[1, 3, 3], [0, 0, 0]])
    lowest = Proposal([1], [point_mass(1)])
    assert verify(logits, lowest, GREEDY, ids([])).tokens == [1, 0]
    other = Proposal([2], [point_mass(2)])
    assert verify(logits, other, GREEDY, ids([])).tokens == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_right(temperature: float) -> None:
    model, prompt = small(MISTRAL_SMALL), tokens_of(9, 32).tolist()
    run = speculate(model, prompt, ModelDraft(model, model), 5, 24, Sampling(temperature), 7)
    assert run.tally.acceptance_rate == 1.0
    assert run.tally.tokens_per_pass == 6.0


# 13.5: passes


def test_with_no_draft_it_is_plain_decoding_of_the_engine() -> None:
    prompt = tokens_of(9, 32).tolist()
    model = small(QWEN3_SMALL)
    expected = Engine(model).generate(prompt, 20, sampling=WARM, seed=5, request=3, stop_tokens=())
    assert speculate(model, prompt, NgramDraft(), 0, 20, WARM, 5, 3).tokens == expected.tokens


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_fewer_tokens_are_a_prefix(sampling: Sampling, length: int) -> None:
    """A draft longer than the tokens left is cut, and that changes no token before the cut."""
    model, prompt = small(QWEN3_SMALL), tokens_of(12, 32).tolist()
    for draft in (lambda: ModelDraft(small(QWEN3_SMALL, "int4"), model), NgramDraft):
        whole = speculate(model, prompt, draft(), length, 25, sampling, 3).tokens
        assert len(whole) == 25
        for count in (1, 2, 5, 24):
            run = speculate(model, prompt, draft(), length, count, sampling, 3)
            assert run.tokens == whole[:count]


def test_a_stop_token_inside_a_draft_ends_the_text() -> None:
    model, prompt = small(QWEN3_SMALL), tokens_of(7, 32).tolist()
    expected = plain(model, prompt, 20)
    at = next(i for i in range(3, 20) if expected.tokens[i] not in expected.tokens[:i])
    stop = expected.tokens[at]
    run = speculate(model, prompt, Known([*prompt, *expected.tokens]), 17, 20, ends=[stop])
    assert run.tokens == expected.tokens[: at + 1]
    assert run.tally.passes == 1
    assert run.tally.accepted == 17


def test_the_end_of_the_context_is_reached_and_not_passed() -> None:
    model = small(QWEN2_SMALL)
    prompt = tokens_of(240, 32).tolist()
    expected = plain(model, prompt, 100)
    assert len(expected.tokens) == 256 - 240 + 1
    for length in (1, 5, 17, 40):
        for draft in (NgramDraft(), Known([*prompt, *expected.tokens]), ModelDraft(model, model)):
            assert_same_run(speculate(model, prompt, draft, length, 100), expected)


def test_requests_side_by_side_do_not_know_each_other() -> None:
    """Drafts of different lengths, pass by pass in turn, one of them with none."""
    target, drafter = small(MISTRAL_SMALL), small(MISTRAL_SMALL, "int4")

    def request(i: int) -> Iterator[Run]:
        prompt = tokens_of(5 + 6 * i, 32).tolist()
        draft = ModelDraft(drafter, target) if i % 2 else NgramDraft()
        return passes(target, prompt, draft, (0, 3, 1, 7)[i], 20, WARM, seed=2, request=i)

    alone = [[*request(i)][-1].tokens for i in range(4)]
    running = {i: request(i) for i in range(4)}
    together: dict[int, list[int]] = {}
    while running:
        for i, request_passes in list(running.items()):
            run = next(request_passes, None)
            if run is None:
                del running[i]
            else:
                together[i] = run.tokens
    assert [together[i] for i in range(4)] == alone


def test_figures() -> None:
    tally = Tally()
    assert (tally.acceptance_rate, tally.tokens_per_pass) == (0.0, 0.0)
    logits = f32([[0, 9], [9, 0], [0, 9]])
    for tokens in ([1, 0], [1, 1], [], [0, 0]):
        proposal = Proposal(tokens, [point_mass(token) for token in tokens])
        tally.add(proposal, verify(logits, proposal, GREEDY, ids([])))
    assert (tally.passes, tally.drafted, tally.accepted) == (4, 6, 3)
    assert (tally.acceptance_rate, tally.tokens_per_pass) == (0.5, 1.75)


def test_law_of_is_what_sample_draws_from() -> None:
    logits = f32([0.5, -1, 2, 0])
    for options in OPTIONS:
        law = law_of(logits, options, ids([2]))
        drawn = {sample(logits, options, ids([2]), 4, 0, p) for p in range(200)}
        assert drawn == set(law.ids[law.weights > 0].tolist())
