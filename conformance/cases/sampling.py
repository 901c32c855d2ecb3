"""Choosing tokens (SPEC 13)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.cases.recipe import Recipe, array32
from conformance.generator import integers, normal
from reference.arithmetic import F32

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


def _sample(name: str, logits: F32, seed: int = 1, **options: Any) -> Recipe:
    at = f"kernel/sample/{name}"
    previous = integers(f"{at}/previous", len(logits), 12)
    parameters = {**PLAIN, **options, "seed": seed, "request": 3, "position": 17}
    return Recipe(at, "13.1", parameters, {"logits": logits, "previous": previous})


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
    for seed in range(4):
        yield _sample(
            f"tie_at_the_cut_{seed}", np.log(array32([0.3, 0.3, 0.3, 0.1])), seed, top_k=2
        )
        crossing = np.log(array32([0.4, 0.3, 0.2, 0.1]))
        yield _sample(f"crossing_{seed}", crossing, seed, top_p=0.65)
        yield _sample(f"forbidden_{seed}", array32([-np.inf, 1, -np.inf, 1]), seed)
