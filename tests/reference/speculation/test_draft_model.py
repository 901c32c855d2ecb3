"""Drafts by a model: its cache, its draws, its context (SPEC 13.3)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.engine import Engine
from reference.errors import RequestError
from reference.model import load_model
from reference.sampling import Sampling
from reference.speculation import ModelDraft
from reference.tokenizer import Tokenizer
from tests.oracle import sampling as oracle
from tests.oracle.arrays import assert_same
from tests.oracle.nasty import tolist
from tests.reference.models import QWEN3_SMALL, ROOT, small, tiny, tokens_of
from tests.reference.speculation.laws import shares_of
from tests.reference.speculation.loop import GREEDY, WARM, ids
from tests.reference.speculation.tables import table

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


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
