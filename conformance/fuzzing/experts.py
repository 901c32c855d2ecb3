"""Draws for the router and for the experts (SPEC 9.2, 9.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.fuzzing.draw import Draw, data
from conformance.fuzzing.drawn import Drawer, Drawn
from conformance.fuzzing.kernels import TAME, layer_shapes, scaled
from reference.arithmetic import F32
from reference.elementary import log
from reference.experts import Router
from reference.experts import route as routed

WORK = 1 << 17
"""Products of all experts, at most, each counted as if it had every token."""

CLEAR = 2.0**-7
"""Share of the largest score by which choices must differ, so that no declared type changes one."""


def route(draw: Draw) -> Drawn:
    """Every score, bias, groups and scale (SPEC 9.2)."""
    score = draw.pick("score", ("softmax", "sigmoid", "logits"))
    groups = draw.pick("groups", (1, 1, 2, 4, 8))
    size = draw.size("group-size", 64 // groups if score == "sigmoid" else 256 // groups)
    kept = draw.size("kept_groups", groups)
    about: dict[str, Any] = {
        "top_k": draw.size("top_k", min(16, kept * size)),
        "score": score,
        "groups": groups,
        "kept_groups": kept,
        "group_best": draw.size("group_best", min(2, size)),
        "renormalise": draw.flag("renormalise"),
        "epsilon": draw.pick("epsilon", (0.0, 1e-20)),
        "scale": draw.pick("scale", (1.0, 2.5, 16.0)),
    }
    rows, experts = draw.size("rows", 33), groups * size
    bias = None
    if score != "logits" and draw.flag("biased"):
        bias = draw.normal("selection_bias", experts) * np.float32(draw.pick("bias", (0.03, 1.0)))
    if not draw.asked.exact:
        return _clear(draw, rows, about, bias, experts)
    return _routed(about, _any(draw, rows, experts), bias, bounded=False)


def _any(draw: Draw, rows: int, experts: int) -> F32:
    """Logits with ties, far apart, forbidden, or of which there is nothing to choose."""
    kinds = ("normal", "whole-numbers", "one-hot", "zeros", "huge", "not-finite")
    kind = draw.pick("logits", (*kinds, "forbidden", "vanishing"))
    name = f"{draw.name}/logits"
    if kind in kinds:
        return data(name, kind, rows, experts)
    if kind == "vanishing":  # scores of 0, or nearly
        return data(name, "normal", rows, experts) * np.float32(8) - np.float32(110)
    x = data(name, "normal", rows, experts)
    x[draw.integers("forbidden", 2, rows, experts) == 0] = -np.inf
    return x


def _clear(draw: Draw, rows: int, about: dict[str, Any], bias: F32 | None, experts: int) -> Drawn:
    """Scores so far apart that no rounding changes a choice or its order (SPEC 16.5)."""
    order = np.argsort(draw.integers("logits", 1 << 62, rows, experts), axis=1, kind="stable")
    if about["score"] == "sigmoid":
        wanted = 0.2 + order * (0.6 / experts) - (0 if bias is None else bias * np.float32(0.1))
        wide = np.clip(wanted, 0.05, 0.95).astype(np.float32)
        logits: F32 = log(wide / (1 - wide))
        bias = None if bias is None else bias * np.float32(0.1)
    else:
        # A step is more than any declared type moves a logit by. The last gate lies e^-16 below
        # the first, or e^-4: float16 has no more below its least normal number.
        step = np.float32(2.0 ** -max(0, experts.bit_length() - (2 if draw.asked.narrow else 4)))
        logits, bias = -order.astype(np.float32) * step, None
    options = {n: v for n, v in about.items() if n != "top_k"}
    routing = routed(logits, Router(experts, about["top_k"], selection_bias=bias, **options))
    clear = _apart(logits, about, bias, routing.experts) & (routing.margins > CLEAR / experts)
    if not clear.any():
        return _routed(about, logits, bias, bounded=False)
    return _routed(about, logits[clear], bias)


def _apart(
    logits: F32, about: Mapping[str, Any], bias: F32 | None, chosen: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Rows whose chosen experts keep their order under rounding."""
    if about["score"] != "sigmoid" or chosen.shape[1] == 1:
        return np.ones(len(logits), np.bool_)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64))) + (0 if bias is None else bias)
    ranked = np.take_along_axis(scores, chosen, axis=1)
    return np.asarray((-np.diff(ranked, axis=1) > CLEAR).all(axis=1))


def _routed(about: Mapping[str, Any], logits: F32, bias: F32 | None, bounded: bool = True) -> Drawn:
    inputs = {"logits": logits} | ({} if bias is None else {"selection_bias": bias})
    return Drawn(about, inputs, bounded)


def moe(draw: Draw) -> Drawn:
    """Experts with their routing given; shared ones, plain and gated (SPEC 9.3)."""
    experts = draw.size("experts", 9)
    ranks = draw.size("top_k", experts)
    width, inner = draw.size("width", 129), draw.size("inner", 65)
    rows = draw.size("rows", min(33, max(1, WORK // (width * inner * ranks))))
    order = np.argsort(draw.integers("routing", 1 << 62, rows, experts), axis=1, kind="stable")
    inputs: dict[str, Any] = {
        "x": draw.data("x", rows, width, kinds=TAME),
        "experts": order[:, :ranks],
        "gates": draw.data("gates", rows, ranks, kinds=TAME),
    }
    for part, s in layer_shapes(width, inner).items():
        inputs[part] = scaled(draw.normal(part, experts, *s))
    shared = draw.pick("shared", ("none", "plain", "gated"))
    if shared != "none":
        beside = draw.size("shared-inner", 65)
        for part, s in layer_shapes(width, beside).items():
            inputs[f"shared_{part}"] = scaled(draw.normal(f"shared_{part}", *s))
    if shared == "gated":
        inputs["shared_router"] = scaled(draw.normal("shared_router", 1, width))
    name = draw.pick("activation", ("silu", "gelu_tanh"))
    return Drawn({"activation": name}, inputs, not draw.extreme)


EXPERTS: Mapping[str, Drawer] = {"route": route, "moe": moe}
