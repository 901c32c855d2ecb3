"""Drafts within an engine's requests: how long, where they end, who owns them (SPEC 13.5)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from reference import speculation
from reference.engine import Engine
from reference.errors import RequestError
from reference.model import Model
from reference.speculation import NgramDraft, Proposal
from reference.trace import Pass
from tests.reference.engine.decoding import PROMPT, argmax_chain, generate
from tests.reference.engine.script import scripted, spelled
from tests.reference.models import LLAMA_SMALL, QWEN2_SMALL, QWEN3_SMALL, small, tiny, tokens_of
from tests.reference.traffic import check_empty, drain

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def test_a_draft_must_be_one() -> None:
    lookup: Any = "lookup"
    with pytest.raises(RequestError, match="draft"):
        Engine(small(QWEN3_SMALL), draft=lookup)


def test_who_waits_for_its_draft_comes_next() -> None:
    """Two drafts never fit one pass; both requests go on in turns."""
    engine = Engine(small(QWEN3_SMALL), max_batched_tokens=5, draft="ngram", draft_tokens=4)
    prompt, passes = [1, 2, 3, 1, 2, 3, 1, 2], list[Pass]()
    engine.on_pass = passes.append
    requests = [engine.submit([*prompt, n], 30, stop_tokens=()) for n in (1, 2)]
    while not any(request.done for request in requests):
        engine.step()
    took_part = Counter(number for done in passes[5:] for number, _, _ in done.shares)
    assert 3 * min(took_part.values()) > 2 * max(took_part.values())
    drain(engine)


def test_a_draft_model_of_another_vocabulary_is_refused_at_once() -> None:
    for other, message in ((small(QWEN3_SMALL), "has 32 tokens, the target's 1024"),):
        with pytest.raises(RequestError, match=f"^draft model: .*{message}"):
            Engine(tiny(), draft=other)


def test_a_request_that_is_done_has_no_draft_and_names_are_compared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = list[Model]()
    monkeypatch.setattr(speculation, "_names", compared.append)
    model = small(QWEN3_SMALL)
    engine = Engine(model, draft=model)
    done, gone = (engine.submit([n] * 9, 9, stop_tokens=()) for n in (1, 2))
    assert done.draft is not gone.draft
    engine.step()
    engine.step()
    engine.cancel(gone)
    drain(engine)
    assert done.result().draft.accepted == 7
    assert (done.draft, gone.draft) == (None, None)
    assert compared == [model, model]


def test_a_draft_model_with_a_shorter_context_drafts_no_further() -> None:
    model, prompt = small(LLAMA_SMALL), tokens_of(245, 32).tolist()
    assert small(QWEN2_SMALL).config.max_positions == 256
    engine = Engine(model, draft=small(QWEN2_SMALL))
    assert engine.generate(prompt, 30, stop_tokens=()).tokens == generate(model, prompt, 30).tokens


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_draft_is_no_longer_than_what_is_left(count: int) -> None:
    """The target as its own draft: whatever is proposed is right."""
    model = small(QWEN3_SMALL)
    result = Engine(model, draft=model, draft_tokens=20).generate(PROMPT, count, stop_tokens=())
    assert result.tokens == argmax_chain(model, PROMPT, count)
    assert result.draft.drafted == result.draft.accepted == count - 1
    ending = Engine(model, draft=model, draft_tokens=20).generate(
        tokens_of(1024 - count, 32).tolist(), 100, stop_tokens=(), exact_prefill=True
    )
    assert (len(ending.tokens), ending.stop) == (count + 1, "context")


def test_a_stop_token_inside_a_draft_ends_the_text_there() -> None:
    model = small(QWEN3_SMALL)
    chain = argmax_chain(model, PROMPT, 12)
    for token in chain[2:9]:
        length = chain.index(token) + 1
        engine = Engine(model, draft=model, draft_tokens=8)
        result = engine.generate(PROMPT, 12, stop_tokens=[token])
        assert (result.tokens, result.stop) == (chain[:length], "token")
        follow = engine.generate([*PROMPT, *result.tokens, 5], 4, stop_tokens=())
        assert follow.cache_n == len(PROMPT) + length - 1, "what was drafted beyond is not kept"
        again = generate(model, [*PROMPT, *result.tokens, 5], 4)
        assert follow.tokens == again.tokens
        check_empty(engine)


def test_a_stop_string_inside_a_draft() -> None:
    """A script that repeats itself, so that n-grams find it."""
    script = spelled("abcabcabcabXabc")
    engine = Engine(scripted(script), draft="ngram", draft_tokens=8)
    result = engine.generate([65], len(script), stop=["bX"], stop_tokens=())
    assert (result.text, result.stop) == ("abcabcabca", "string")
    assert result.draft.accepted > 0


def test_a_draft_that_fails_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(QWEN3_SMALL)
    prompts = [tokens_of(20, 32).tolist(), tokens_of(9, 31).tolist()]
    expected = [Engine(model).generate(prompt, 8, stop_tokens=()).tokens for prompt in prompts]
    original = NgramDraft.propose

    def propose(self: NgramDraft, context: Any, *arguments: Any) -> Proposal:
        if len(context) == 12:
            raise RequestError("draft: no more")
        return original(self, context, *arguments)

    monkeypatch.setattr(NgramDraft, "propose", propose)
    engine = Engine(model, draft="ngram")
    good, bad = (engine.submit(prompt, 8, stop_tokens=()) for prompt in prompts)
    while engine.busy:
        engine.step()
    assert good.result().tokens == expected[0]
    with pytest.raises(RequestError, match="no more"):
        bad.result()
    engine.prefixes.evict(1 << 40)
    assert engine.pool.used_bytes == 0
