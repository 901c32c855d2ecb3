"""Judging drafted tokens, and the streams of random words that this takes (SPEC 13.2, 13.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases.recipe import Recipe, array32
from conformance.cases.sampling import PLAIN
from conformance.generator import integers, normal
from reference.arithmetic import F32
from reference.sampling import Sampling, draw, law_of
from reference.speculation import DRAFT

Ints = NDArray[np.int64]

REQUEST, POSITION = 5, 23
DRAFTED, VOCABULARY = 4, 60
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.6},
    "greedy": {"temperature": 0.0},
    "greedy_penalty": {"temperature": 0.0, "repetition_penalty": 1.6},
}


def _verify(
    name: str,
    logits: F32,
    draft: Sequence[int] | Ints,
    weights: Ints | None = None,
    seed: int = 1,
    previous: Ints | None = None,
    **options: Any,
) -> Recipe:
    """A pass over rows of logits; without weights each drafted token is a point mass."""
    tokens = np.array(draft, np.int64)
    if weights is None:
        weights = (np.arange(logits.shape[1]) == tokens[:, None]).astype(np.int64)
    previous = np.zeros(0, np.int64) if previous is None else previous
    at = {"seed": seed, "request": REQUEST, "position": POSITION}
    inputs = {"logits": logits, "draft": tokens, "draft_weights": weights, "previous": previous}
    return Recipe(f"kernel/verify_draft/{name}", "13.4", {**PLAIN, **options, **at}, inputs)


def _drawn(name: str, seed: int, noise: float, **options: Any) -> Recipe:
    """Tokens drawn as a draft model would whose logits are the target's with noise."""
    at = f"kernel/verify_draft/{name}"
    logits = normal(f"{at}/logits", DRAFTED + 1, VOCABULARY) * np.float32(2)
    guessed = logits + normal(f"{at}/noise", DRAFTED + 1, VOCABULARY) * np.float32(noise)
    previous = integers(f"{at}/previous", VOCABULARY, 12)
    sampling = Sampling(**{**PLAIN, **options})
    weights = np.zeros((DRAFTED, VOCABULARY), np.int64)
    tokens = np.zeros(0, np.int64)
    for i in range(DRAFTED):
        law = law_of(guessed[i], sampling, np.append(previous, tokens))
        weights[i, law.ids] = law.weights
        tokens = np.append(tokens, draw(law, seed, REQUEST, POSITION + i, DRAFT))
    return _verify(name, logits, tokens, weights, seed, previous, **options)


def _cancelling(name: str, size: int, taken: int) -> Recipe:
    """A draft law that is nearly the target's: 1 is `taken` from token 2 and given to the last.

    The last is drafted and the target does not allow it, so it is rejected. Where 1 is taken, the
    residual is token 2 alone, though its share differs by one part in 2^40. Where nothing is, every
    share differs by one part in W, 2^53 for size 10,000, and the residual is the target's law.
    """
    logits = normal(f"kernel/verify_draft/{name}/logits", 2, size) * np.float32(0.1)
    logits[:, -1] = -np.inf
    law = law_of(logits[0], Sampling(temperature=1.0), np.zeros(0, np.int64))
    weights = np.zeros((1, size), np.int64)
    weights[0, law.ids] = law.weights
    weights[0, 2] -= taken
    weights[0, -1] = 1
    return _verify(name, logits, [size - 1], weights)


def recipes() -> Iterator[Recipe]:
    """Streams; drafts near and far, by every filter; greedy; and laws that nearly cancel."""
    positions = np.array([0, 1, 2, 1000, 2**31, 2**32 - 1], np.int64)
    for stream in (1, 2, 3):
        parameters = {"seed": 2**64 - 1, "request": 7, "stream": stream}
        name = f"kernel/philox/stream_{stream}"
        yield Recipe(name, "13.2", parameters, {"positions": positions})
    for form, options in FORMS.items():
        for seed in range(6):
            noise = (0.3, 1.0)[seed % 2]
            yield _drawn(f"{form}_{seed}", seed, noise, **options)
    yield from _by_hand()
    yield _cancelling("cancelling_float32", 10, 1)
    yield _cancelling("cancelling_float64", 10_000, 0)


def _by_hand() -> Iterator[Recipe]:
    rows = normal("kernel/verify_draft/by_hand/logits", 6, 12)
    best = rows.argmax(axis=1)
    for seed in range(2):
        yield _verify(f"nothing_drafted_{seed}", rows[:1], [], seed=seed)
    for wrong in (0, 2, 4, 5):
        draft = best[:5].copy()
        draft[wrong:] = (draft[wrong:] + 1) % 12
        yield _verify(f"greedy_right_until_{wrong}", rows, draft, temperature=0.0)
    tie = array32([[1, 5, 5, 2], [1, 5, 5, 2], [0, 0, 0, 0]])
    yield _verify("greedy_tie", tie, [1, 2], temperature=0.0)
    # The first drafted token is penalised in the second row, where it would be chosen again.
    again = array32([[0, 3, 2, 1], [0, 3, 2.5, 1], [0, 3, 2.5, 1]])
    yield _verify("greedy_again", again, [1, 1], temperature=0.0, repetition_penalty=1.3)
    for seed in range(4):
        yield _verify(f"point_masses_{seed}", rows * np.float32(2), best[:5], seed=seed)
        yield _verify(f"unlikely_{seed}", rows, np.argsort(rows[:5], axis=1)[:, 3], seed=seed)
    # Of equal weights in both laws, all are accepted; of tokens that are not kept, none.
    flat = np.zeros((4, 8), np.float32)
    yield _verify("same_law", flat, [7, 0, 3], np.full((3, 8), 2**40))
    yield _verify("same_law_other_total", flat, [7, 0, 3], np.full((3, 8), 5))
    yield _verify("not_kept", flat, [3, 0, 1], np.full((3, 8), 2**40), top_k=3)
    yield _verify("narrower", flat, [1, 1, 1], np.array([[0, 1, 1] + [0] * 5] * 3), seed=3)
