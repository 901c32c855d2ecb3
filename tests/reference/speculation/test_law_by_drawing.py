"""The output's law is the target's: draws from the trained models (SPEC 13.6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import mpmath
import numpy as np
import pytest

from reference import speculation
from reference.model import Model, load_model
from reference.sampling import Sampling
from reference.speculation import Draft, ModelDraft
from tests.oracle.arrays import Float32
from tests.reference.models import ROOT, tiny
from tests.reference.speculation.laws import PLANTED, Joint, World, target_joint
from tests.reference.speculation.loop import Known, speculate
from tests.reference.speculation.tables import TableModel

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

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
