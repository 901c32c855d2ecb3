"""Drafts that end with the text, and requests side by side (SPEC 13.5)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reference.engine import Engine
from reference.sampling import Sampling
from reference.speculation import ModelDraft, NgramDraft
from tests.reference.models import MISTRAL_SMALL, QWEN2_SMALL, QWEN3_SMALL, small, tokens_of
from tests.reference.speculation.loop import (
    GREEDY,
    WARM,
    Known,
    Run,
    assert_same_run,
    passes,
    plain,
    speculate,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


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
