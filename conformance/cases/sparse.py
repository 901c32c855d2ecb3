"""Whole models: the small trained fixture with experts (SPEC 9.2, 10.2, 14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conformance.cases.model import prompt
from conformance.cases.recipe import BOTH, Recipe
from conformance.golden import Array
from conformance.paths import model_folder
from conformance.rules.gauges import Gauge
from conformance.rules.noise import gauge_of_logits
from reference.model import load_model

MODEL = "tiny-moe"


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    tokens, name = arguments["tokens"], f"noise/{MODEL}/{len(arguments['tokens'])}"
    model = load_model(model_folder(MODEL))
    return gauge_of_logits(model, "float32", name, tokens, len(outputs["y"]))


def _continued(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    """Along the golden's own text, whose last token nothing is computed from."""
    text = np.concatenate([arguments["prompt"], outputs["tokens"][:-1]])
    model, name = load_model(model_folder(MODEL)), f"noise/generate/{MODEL}/{len(text)}"
    return gauge_of_logits(model, "float32", name, text, len(outputs["tokens"]))


def recipes() -> Iterator[Recipe]:
    """Prompts within a window and beyond it, each weight mode, and a continuation."""
    for name, length, last, weights, note in (
        ("short", 40, 40, "float32", "less than a window"),
        ("above_the_floor", 520, 16, "float32", "four windows, every expert computes many rows"),
        ("short_int4", 40, 16, "int4", "router and shared gate as stored"),
        ("short_int4_row", 40, 16, "int4-row", "router and shared gate as stored"),
    ):
        bounded = weights == "float32"
        yield Recipe(
            f"model/forward/moe_{name}",
            "10.2" if bounded else "10.1",
            {"model": MODEL, "weights": weights, "last": last},
            {"tokens": prompt(length)},
            BOTH if bounded else ("bits",),
            _gauge if bounded else None,
            f"{MODEL}, {length} tokens of held-out text: {note}",
        )
    chunks = [30, 1, 1, 98, 1, 13, 1, 1]
    yield Recipe(
        "model/forward/moe_chunked",
        "9.3",
        {"model": MODEL, "weights": "float32", "last": 16, "chunks": chunks},
        {"tokens": prompt(sum(chunks))},
        BOTH,
        _gauge,
        f"{MODEL}, fed in chunks of {chunks} tokens: by expert and by token, past a window",
    )
    yield Recipe(
        "generation/generate/moe",
        "14",
        {"model": MODEL, "weights": "float32", "max_new_tokens": 24, "exact_prefill": False},
        {"prompt": prompt(120)},
        ("bits", "gauge", "tokens"),
        _continued,
        f"{MODEL}, greedy, from within a window to beyond it",
    )
