"""Greedy texts that end by themselves, at an end token of the model's (SPEC 14.1)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from conformance.cases.model import continued
from conformance.cases.recipe import Recipe
from conformance.generator import integers

SEVERAL, ONE = "random-ends", "random-end"
"""Models of the same weights: two end tokens in one configuration, and one in the other."""

FIRST, SECOND = 51, 8
"""The end tokens of SEVERAL, in their order; SECOND is that of ONE."""

RULES = ("bits", "gauge", "tokens")


def _prompt(name: str) -> NDArray[np.int64]:
    """Random tokens, (12,) int64."""
    return integers(f"generation/complete/{name}", 64, 12)


def _answered() -> NDArray[np.int64]:
    """A prompt that has both end tokens in it, as the turns of a conversation do, (12,) int64."""
    text = _prompt("in_the_prompt")
    text[[5, -1]] = FIRST, SECOND
    return text


def recipes() -> Iterator[Recipe]:
    """What ends a text, where, and what does not."""
    ends, passes = _prompt("i"), _prompt("m")
    for name, model, prompt, most, note in (
        ("first_id", SEVERAL, ends, 16, "the first of two end tokens ends it, and is its last"),
        ("second_id", SEVERAL, passes, 16, "the second one, after that of config.json three times"),
        ("one_id", ONE, _prompt("w"), 16, "the only one, of config.json; 51 is none here"),
        ("at_once", SEVERAL, _prompt("l"), 16, "the first token ends it"),
        ("in_the_prompt", SEVERAL, _answered(), 16, "those of the prompt end nothing"),
        ("at_the_limit", SEVERAL, ends, 5, "the last token that is asked for ends it, too"),
        ("before_the_limit", SEVERAL, ends, 4, "no end token comes in so few"),
    ):
        parameters = {"model": model, "weights": "float32", "max_new_tokens": most}
        yield Recipe(
            f"generation/complete/{name}",
            "14.1",
            parameters,
            {"prompt": prompt},
            RULES,
            continued,
            f"{model}: {note}",
        )
