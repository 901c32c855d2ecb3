"""Decoding with a draft and without one, a pass at a time, by nothing but the functions tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reference.model import Model
from reference.sampling import Ints, Sampling, sample
from reference.speculation import Draft, Proposal, Tally, point_mass, verify
from tests.oracle.arrays import Float32, assert_same

GREEDY = Sampling()
WARM = Sampling(temperature=1.0)


def ids(tokens: Sequence[int]) -> Ints:
    return np.array(tokens, np.int64)


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


@dataclass
class Known:
    """Proposes what it is told follows each position, point masses."""

    text: Sequence[int]

    def propose(
        self, context: Ints, count: int, sampling: Sampling, seed: int = 0, request: int = 0
    ) -> Proposal:
        tokens = [int(t) for t in self.text[len(context) : len(context) + count]]
        return Proposal(tokens, [point_mass(token) for token in tokens])


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
