"""Choosing tokens (SPEC 13)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.cases.recipe import Recipe, array32
from conformance.generator import integers, normal
from reference.arithmetic import F32
from reference.sampling import philox

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature_1": {},
    "temperature_hot": {"temperature": 1.7},
    "temperature_cold": {"temperature": 1e-6},
    "temperature_subnormal": {"temperature": 1e-44},
    "top_k": {"top_k": 5},
    "top_k_1_top_p": {"top_k": 1, "top_p": 0.8},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.5},
    "together": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    },
}


def _sample(
    name: str, logits: F32, seed: int = 1, previous: Sequence[int] | None = None, **options: Any
) -> Recipe:
    at = f"kernel/sample/{name}"
    drawn = integers(f"{at}/previous", len(logits), 12)
    seen = drawn if previous is None else np.array(previous, np.int64)
    parameters = {**PLAIN, **options, "seed": seed, "request": 3, "position": 17}
    return Recipe(at, "13.1", parameters, {"logits": logits, "previous": seen})


def _seed(low: float, high: float) -> int:
    """The first seed whose random number for these cases is a fraction in [low, high)."""
    where = np.array([17], np.int64)
    return next(
        s for s in itertools.count() if low <= int(philox(s, 3, where)[0]) * 2.0**-64 < high
    )


def _decided(name: str, shares: Sequence[float], note: str, **options: Any) -> Iterator[Recipe]:
    """A distribution drawn from with a small, a middle and a large random number.

    What is kept at the brink is then drawn, or is drawn in place of what should be.
    """
    for form, low, high in (("low", 0.0, 0.05), ("middle", 0.5, 0.6), ("high", 0.95, 1.0)):
        recipe = _sample(f"{name}_{form}", np.log(array32(shares)), _seed(low, high), **options)
        yield replace(recipe, note=note)


def recipes() -> Iterator[Recipe]:
    """Philox, every filter alone and together over several seeds, ties and forbidden tokens."""
    positions = np.array([0, 1, 2, 1000, 2**31, 2**32 - 1], np.int64)
    for seed, request in ((0, 0), (1, 7), (2**64 - 1, 2**32 - 1)):
        name = f"kernel/philox/seed_{seed:x}_request_{request:x}"
        yield Recipe(name, "13.2", {"seed": seed, "request": request}, {"positions": positions})
    for form, options in FORMS.items():
        for seed in range(1 if form == "greedy" else 4):
            name = f"{form}_{seed}"
            yield _sample(
                name, normal(f"kernel/sample/{name}/logits", 300) * np.float32(3), seed, **options
            )
    tie = array32([1, 5, 5, 2, 5])
    yield _sample("greedy_tie", tie, temperature=0.0)
    near = tie.copy()
    near[4] = np.nextafter(np.float32(5), np.float32(6))
    yield _sample("greedy_one_ulp", near, temperature=0.0)
    low = array32([0.05, np.nextafter(np.float32(0.1), np.float32(1)), 0.1, 0.02])
    yield _sample("greedy_one_ulp_small", low[::-1].copy(), temperature=0.0)
    yield from _decided("top_p_crossing", [0.4, 0.3, 0.2, 0.1], "two are kept", top_p=0.65)
    yield from _decided(
        "top_p_after_top_k", [0.4, 0.3, 0.2, 0.1], "one is kept, for 0.4 of 0.7", top_k=2, top_p=0.5
    )
    yield from _decided("top_k_ties", [0.3, 0.3, 0.3, 0.1], "two of three equal ones", top_k=2)
    yield from _decided(
        "min_p_hot", [0.6, 0.3, 0.08, 0.02], "three, for the heat comes first", min_p=0.2,
        temperature=2.0,
    )  # fmt: skip
    for name, logits, previous, note in (
        ("negative", [-1.0, -1.5, -3.0], [0], "a negative logit becomes smaller"),
        ("once", [4.0, 1.5, 0.5], [0, 0, 0], "once, however often the token occurred"),
    ):
        recipe = _sample(
            f"penalty_{name}",
            array32(logits),
            previous=previous,
            temperature=0.0,
            repetition_penalty=2.0,
        )
        yield replace(recipe, note=note)
    for seed in range(4):
        yield _sample(
            f"tie_at_the_cut_{seed}", np.log(array32([0.3, 0.3, 0.3, 0.1])), seed, top_k=2
        )
        crossing = np.log(array32([0.4, 0.3, 0.2, 0.1]))
        yield _sample(f"crossing_{seed}", crossing, seed, top_p=0.65)
        yield _sample(f"forbidden_{seed}", array32([-np.inf, 1, -np.inf, 1]), seed)
