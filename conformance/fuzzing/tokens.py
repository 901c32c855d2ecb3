"""Draws for random words, sampling and the verification of drafts (SPEC 13)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.fuzzing.draw import Draw, data
from conformance.fuzzing.drawn import Drawer, Drawn
from reference.arithmetic import F32
from reference.sampling import Sampling, law_of
from reference.sampling import draw as drawn_token
from reference.speculation import DRAFT

Ints = NDArray[np.int64]


def philox(draw: Draw) -> Drawn:
    """Keys, streams and positions over their whole range (SPEC 13.2)."""
    about = {**_keys(draw), "stream": draw.pick("stream", (0, 1, 2, 3))}
    most = draw.pick("positions", (1 << 12, 1 << 32))
    return Drawn(about, {"positions": draw.integers("positions", most, draw.size("count", 65))})


def _keys(draw: Draw) -> dict[str, Any]:
    """Seed and request."""
    large = draw.flag("large-seed")
    return {
        "seed": int(draw.integers("seed", 1 << 63, 1)[0]) * 2 + 1
        if large
        else draw.size("seed", 99),
        "request": int(draw.integers("request", 1 << 32, 1)[0]) if large else 0,
    }


def _options(draw: Draw) -> dict[str, Any]:
    """The parameters of SPEC 13.1, each at its default as often as not."""
    return {
        "temperature": draw.pick("temperature", (1.0, 0.0, 0.0, 0.7, 1.7, 1e-6, 1e-44, 100.0)),
        "top_k": draw.pick("top_k", (0, 0, 0, 1, 2, 5, 40, 5000)),
        "top_p": draw.pick("top_p", (1.0, 1.0, 0.9, 0.5, 0.75, 0.1, 1e-9)),
        "min_p": draw.pick("min_p", (0.0, 0.0, 0.05, 0.2, 0.5, 1.0)),
        "repetition_penalty": draw.pick("penalty", (1.0, 1.3, 2.0, 0.5)),
    }


def _logits(draw: Draw, name: str, rows: int, width: int) -> F32:
    """Ties, flat laws, forbidden tokens; something finite in each row."""
    kinds = ("normal", "whole-numbers", "zeros", "one-hot", "forbidden", "near-ties")
    kind = draw.pick(name, kinds)
    plain = {"forbidden": "normal", "near-ties": "whole-numbers"}.get(kind, kind)
    x = data(f"{draw.name}/{name}", plain, rows, width)
    x = x * np.float32(draw.pick(f"{name}-scale", (1.0, 3.0, 0.1)))
    if kind == "forbidden":
        x[:, 1:][draw.integers("forbidden", 2, rows, width - 1) == 0] = -np.inf
    if kind == "near-ties":
        x = np.where(draw.integers("raised", 2, rows, width), np.nextafter(x, np.float32(9)), x)
    return x


def _previous(draw: Draw, logits: F32, most: int) -> Ints:
    """Tokens that came before: any, or the likeliest, with repetitions."""
    count = draw.size("previous", most, 0)
    if draw.pick("repeated", ("any", "likely")) == "any":
        return draw.integers("previous", len(logits), count)
    likely = np.argsort(-logits, kind="stable")[:8]
    return np.asarray(likely[draw.integers("previous", len(likely), count)])


def sample(draw: Draw) -> Drawn:
    """Every filter alone and together (SPEC 13.1)."""
    width = draw.size("vocabulary", 2049)
    logits = _logits(draw, "logits", 1, width)[0]
    about = {**_options(draw), **_keys(draw), "position": draw.size("position", 4097, 0)}
    return Drawn(about, {"logits": logits, "previous": _previous(draw, logits, 33)})


def verify_draft(draw: Draw) -> Drawn:
    """Drafts drawn from a law near the target's or far, and point masses (SPEC 13.4)."""
    width, count = draw.size("vocabulary", 300, least=2), draw.size("drafted", 6, 0)
    options, at = _options(draw), {**_keys(draw), "position": draw.size("position", 4097, 0)}
    logits = _logits(draw, "logits", count + 1, width)
    previous = _previous(draw, logits[0], 17)
    guessed = logits + draw.normal("guess", count + 1, width) * np.float32(
        draw.pick("noise", (0.0, 0.3, 1.0))
    )
    points, sampling = draw.flag("point-masses"), Sampling(**options)
    weights, tokens = np.zeros((count, width), np.int64), np.zeros(0, np.int64)
    for i in range(count):
        law = law_of(guessed[i], sampling, np.append(previous, tokens))
        token = drawn_token(law, at["seed"], at["request"], at["position"] + i, DRAFT)
        if points:
            weights[i, token] = 1
        else:
            weights[i, law.ids] = law.weights
        tokens = np.append(tokens, token)
    inputs: dict[str, Any] = {
        "logits": logits, "draft": tokens, "draft_weights": weights, "previous": previous,
    }  # fmt: skip
    return Drawn({**options, **at}, inputs)


TOKENS: Mapping[str, Drawer] = {"philox": philox, "sample": sample, "verify_draft": verify_draft}
