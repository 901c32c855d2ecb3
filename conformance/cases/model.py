"""Whole models: logits and greedy continuations of the small trained fixture (SPEC 10, 14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases.recipe import BOTH, Recipe
from conformance.generator import integers
from conformance.golden import Array
from conformance.paths import data_folder, model_folder
from conformance.rules.gauges import Gauge
from conformance.rules.noise import MODEL as NOISE
from conformance.rules.noise import choices, gauge_of_logits, spread
from reference.arithmetic import F32
from reference.model import load_model
from reference.tokenizer import Tokenizer
from reference.weights import Mode

MODEL = "tiny-dense"

ROW_SEARCH = "random-row-search"
"""A model whose int4-row scales depend on the order in which their search adds (SPEC 5.3)."""


@cache
def _text() -> tuple[int, ...]:
    """The tokens of the longest prompt among the fixtures."""
    tokenizer = Tokenizer.load(model_folder(MODEL) / "tokenizer.json", 1024)
    return tuple(tokenizer.encode((data_folder("fixtures") / "prompts" / "2000.txt").read_text()))


def prompt(length: int) -> NDArray[np.int64]:
    """The first `length` tokens of held-out text, (length,) int64."""
    return np.array(_text()[:length], np.int64)


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    folder = arguments["model"]
    model = load_model(model_folder(folder), arguments["weights"])
    tokens = arguments["tokens"]
    about = "" if folder == MODEL else f"/{folder}"
    name = f"noise/{arguments['weights']}/{len(tokens)}{about}"
    return gauge_of_logits(model, arguments["weights"], name, tokens, len(outputs["y"]))


def continued(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    """The gauge of logits along a golden's own texts, of whose last tokens nothing is computed."""
    answers = outputs["tokens"].reshape(-1, outputs["tokens"].shape[-1])
    noises = [
        _along(arguments["model"], arguments["weights"], (*prompt, *answer[:-1]), len(answer))
        for prompt, answer in zip(_prompts(arguments), answers, strict=True)
    ]
    return Gauge({"noise": np.stack(noises).reshape(outputs["logits"].shape)}, {"noise": NOISE})


@cache
def _along(folder: str, weights: Mode, text: tuple[int, ...], last: int) -> F32:
    """The noise of the last rows' logits along a text, of which some goldens have the same."""
    model = load_model(model_folder(folder), weights)
    return spread(model, f"noise/generate/{len(text)}", np.array(text), last)


def _prompts(arguments: Mapping[str, Any]) -> list[NDArray[np.int64]]:
    """What the operations that go on from their own tokens are given to go on from (SPEC 17)."""
    if "lengths" in arguments:
        return np.split(arguments["tokens"], np.cumsum(arguments["lengths"])[:-1])
    return [arguments["longer"] if "longer" in arguments else arguments["prompt"]]


def _choices(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    model = load_model(model_folder(arguments["model"]), arguments["weights"])
    tokens, last = arguments["tokens"], arguments["last"]
    found = choices(model, f"choices/{len(tokens)}/{last}", tokens, last)
    return Gauge(found.gauges(), {"noise": NOISE})


def _forced() -> Iterator[Recipe]:
    """Greedy choices after every prefix of a text that is given."""
    texts = (
        ("prose", prompt(256), 256, "256 tokens of held-out text"),
        ("further_on", prompt(1096)[1000:], 96, "96 tokens from another place"),
    )
    for name, tokens, last, note in texts:
        yield Recipe(
            f"generation/forced/{name}",
            "16.7",
            {"model": MODEL, "weights": "float32", "last": last},
            {"tokens": tokens},
            ("bits", "tokens"),
            _choices,
            f"{MODEL}, {note}",
        )


def _to_the_end() -> Recipe:
    """Every position of the context chooses a token, the last one too (SPEC 14.1)."""
    at, model = "generation/generate/to_the_end", "random-llama"
    parameters = {"model": model, "weights": "float32", "max_new_tokens": 20}
    return Recipe(
        at,
        "14",
        {**parameters, "exact_prefill": False},
        {"prompt": integers(f"{at}/prompt", 64, 250)},
        ("bits", "gauge", "tokens"),
        continued,
        f"{model}, whose context is 256: 20 tokens are asked for after 250, and 7 come",
    )


def recipes() -> Iterator[Recipe]:
    """Prompts below and above the floor of fast attention, each weight mode, and generation."""
    for name, length, last, weights in (
        ("short", 40, 40, "float32"),
        ("above_the_floor", 520, 24, "float32"),
        ("short_int4", 40, 40, "int4"),
        ("short_int4_row", 40, 40, "int4-row"),
    ):
        yield Recipe(
            f"model/forward/{name}",
            "10.2" if weights == "float32" else "10.1",
            {"model": MODEL, "weights": weights, "last": last},
            {"tokens": prompt(length)},
            BOTH,
            _gauge,
            f"{MODEL}, {length} tokens of held-out text",
        )
    chunks = [16, 1, 1, 1, 5, 13, 1, 1, 1]
    yield Recipe(
        "model/forward/chunked",
        "10.2",
        {"model": MODEL, "weights": "float32", "last": 24, "chunks": chunks},
        {"tokens": prompt(sum(chunks))},
        BOTH,
        _gauge,
        f"{MODEL}, fed in chunks of {chunks} tokens over one cache",
    )
    for family, note in (
        ("mistral", "window, theta, eps, gelu, a head of its own"),
        ("qwen2", "biases, yarn, a window on some layers"),
        ("llama", "every bias, llama3, a partial rotation, a head of its own"),
    ):
        folder = f"random-{family}"
        yield Recipe(
            f"model/forward/{family}",
            "10.3",
            {"model": folder, "weights": "float32"},
            {"tokens": integers(f"model/forward/{family}/tokens", 64, 48)},
            BOTH,
            _gauge,
            f"{folder}: {note}",
        )
    yield Recipe(
        "model/forward/row_search",
        "5.3",
        {"model": ROW_SEARCH, "weights": "int4-row"},
        {"tokens": integers("model/forward/row_search/tokens", 32, 12)},
        ("bits",),
        note=f"{ROW_SEARCH}: two scales of a row are equally good, but for the order of their sums",
    )
    for name, length, count, exact_prefill in (
        ("short", 20, 24, False),
        ("below_the_floor", 511, 6, False),
        ("exact_prefill", 512, 6, True),
    ):
        bounded = name == "short"
        yield Recipe(
            f"generation/generate/{name}",
            "14",
            {
                "model": MODEL,
                "weights": "float32",
                "max_new_tokens": count,
                "exact_prefill": exact_prefill,
            },
            {"prompt": prompt(length)},
            ("bits", "gauge", "tokens") if bounded else ("bits",),
            continued if bounded else None,
            "greedy, every token and the logits that chose it",
        )
    yield _to_the_end()
    yield from _forced()
