"""Whole models: the small trained fixture with experts (SPEC 9.2, 10.2, 14).

Its goldens are judged by bits alone: a choice of experts is no smooth function of its input, so no
gauge holds what rounding may do to a logit.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.cases.model import prompt
from conformance.cases.recipe import Recipe

MODEL = "tiny-moe"


def recipes() -> Iterator[Recipe]:
    """Prompts within a window and beyond it, each weight mode, and a continuation."""
    for name, length, last, weights, note in (
        ("short", 40, 40, "float32", "less than a window"),
        ("above_the_floor", 520, 16, "float32", "four windows, every expert computes many rows"),
        ("short_int4", 40, 16, "int4", "router and shared gate as stored"),
        ("short_int4_row", 40, 16, "int4-row", "router and shared gate as stored"),
    ):
        yield Recipe(
            f"model/forward/moe_{name}",
            "10.2" if weights == "float32" else "10.1",
            {"model": MODEL, "weights": weights, "last": last},
            {"tokens": prompt(length)},
            note=f"{MODEL}, {length} tokens of held-out text: {note}",
        )
    chunks = [30, 1, 1, 98, 1, 13, 1, 1]
    yield Recipe(
        "model/forward/moe_chunked",
        "9.3",
        {"model": MODEL, "weights": "float32", "last": 16, "chunks": chunks},
        {"tokens": prompt(sum(chunks))},
        note=f"{MODEL}, fed in chunks of {chunks} tokens: by expert and by token, past a window",
    )
    yield Recipe(
        "generation/generate/moe",
        "14",
        {"model": MODEL, "weights": "float32", "max_new_tokens": 24, "exact_prefill": False},
        {"prompt": prompt(120)},
        note=f"{MODEL}, greedy, from within a window to beyond it",
    )
