"""Greedy decoding with a draft is plain decoding, to the bit (SPEC 13.4)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from reference.model import load_model
from reference.sampling import Sampling
from reference.speculation import ModelDraft, NgramDraft
from tests.reference.models import (
    MISTRAL_SMALL,
    QWEN2_SMALL,
    QWEN3_SMALL,
    ROOT,
    small,
    tiny,
    tokens_of,
)
from tests.reference.speculation.loop import Known, Run, assert_same_run, plain, speculate

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_right(temperature: float) -> None:
    model, prompt = small(MISTRAL_SMALL), tokens_of(9, 32).tolist()
    run = speculate(model, prompt, ModelDraft(model, model), 5, 24, Sampling(temperature), 7)
    assert run.tally.acceptance_rate == 1.0
    assert run.tally.tokens_per_pass == 6.0
