"""Whole models of every family of SPEC 10.3: logits of small models of random weights.

A prompt whole, and in chunks: what a cache keeps, and which of it a window shows, is a family's
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.cases.recipe import BOTH, Recipe
from conformance.generator import integers
from conformance.golden import Array
from conformance.paths import model_folder
from conformance.rules.gauges import Gauge
from conformance.rules.noise import gauge_of_logits
from reference.model import load_model

FAMILIES = {
    "mixtral": "experts, gates renormalised, a window",
    "qwen2_moe": "a gated shared expert, one dense layer, biases of q, k, v",
    "qwen3_moe": "gates renormalised, one dense layer, q and k normed per head",
    "mellum": "every fourth layer sees everything and has yarn, the others a rope of their own",
    "olmoe": "gates as they are, q and k normed as rows",
    "olmo2": "norms after attention and feed-forward, q and k normed as rows",
    "olmo3": "the same, three windows in four layers, yarn on the fourth alone",
    "gemma2": "two softcaps, four norms of 1 + w, a scaled embedding, a query scale",
    "gemma3": "a rope of their own for layers with a window, q and k normed per head",
    "smollm3": "the fourth layer has no rope",
    "phi3": "fused projections, longrope beyond its original length, a window",
    "gpt_oss": "sinks, stacked experts with biases, clamped quick_gelu, yarn not truncated",
}
"""What the model of each family, fixtures/families/NAME, shows."""


SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "mellum", "olmoe", "gpt_oss")
"""Those with experts: with int4 weights codes flip, and experts with them (SPEC 16.5)."""

RANDOM = ("mistral", "qwen2", "llama")
"""Families with a model fixtures/random-NAME, whose whole prompts are in cases/model.py."""

CHUNKS = [24, 5, 1, 1, 9, 1, 1, 3, 1, 1, 1]
"""A first chunk longer than any window, then a few tokens and single ones: windows move on while
the cache holds more than they show."""


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    tokens, weights, folder = (arguments[name] for name in ("tokens", "weights", "model"))
    name = f"noise/{folder}" + (f"/{weights}" if weights != "float32" else "")
    model = load_model(model_folder(folder), weights)
    return gauge_of_logits(model, weights, name, tokens, len(outputs["y"]))


def _folders() -> Iterator[tuple[str, str, int]]:
    """Every family, the fixture of its model, and how many tokens that knows."""
    for name in FAMILIES:
        yield name, f"families/{name.replace('_', '-')}", 48
    for name in RANDOM:
        yield name, f"random-{name}", 64


def _in_chunks() -> Iterator[Recipe]:
    """The same over a cache, of weights as stored and as int4."""
    for name, folder, vocabulary in _folders():
        for weights, suffix in (("float32", ""), ("int4", "_int4")):
            bounded = weights == "float32" or name not in SPARSE
            yield Recipe(
                f"model/forward/{name}_chunked{suffix}",
                "10.2" if weights == "float32" else "10.1",
                {
                    "model": folder,
                    "weights": weights,
                    "last": sum(CHUNKS[1:]),
                    "chunks": CHUNKS,
                },
                {"tokens": integers(f"model/forward/{name}/tokens", vocabulary, sum(CHUNKS))},
                BOTH if bounded else ("bits",),
                _gauge if bounded else None,
                f"{folder}, fed in chunks of {CHUNKS} tokens over one cache",
            )


def recipes() -> Iterator[Recipe]:
    """48 tokens of each family, whole and in chunks."""
    for name, note in FAMILIES.items():
        folder = f"families/{name.replace('_', '-')}"
        yield Recipe(
            f"model/forward/{name}",
            "10.3",
            {"model": folder, "weights": "float32"},
            {"tokens": integers(f"model/forward/{name}/tokens", 48, 48)},
            BOTH,
            _gauge,
            f"{folder}: {note}",
        )
    yield from _in_chunks()
