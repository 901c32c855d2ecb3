"""How many terms of a sum are alike, so that they round to the same side (SPEC 16.4).

A running sum s takes a term p as far as it lies on s's grid and drops the rest. Terms that are
equal, or that lie closer to each other than the grid is fine, drop the same rest every time: their
roundings add up, where those of other terms are as often up as down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from conformance.golden import Array, Golden
from conformance.rules.codes import BLOCK_TYPES, weights_of
from reference import elementary
from reference.arithmetic import F32, F64, matmul
from reference.attention import default_scale
from reference.experts import SCORES
from reference.feedforward import ACTIVATIONS
from reference.quantization import quantize_int8

FEW = 49
"""Up to so many terms the worst case is the smaller bound, whatever they are (SPEC 16.4)."""

CELLS = 32
"""Parts of a unit in the last place of the sum; terms of one part count as equal. Terms that lie
within one and a half units fill 49 parts: what holds for all of them, 7 / sqrt(49), is 1."""


def roundings(count: float, squares: F64 | float) -> F64:
    """How many roundings of its size a sum of `count` products may err by (SPEC 16.4).

    squares: C of SPEC 16.4, of any shape, which the result has too.
    """
    return np.asarray(np.minimum(count + 1, 7 * np.sqrt(squares) + 1))


@lru_cache(maxsize=1024)  # diagnosis measures by one bound the answers of all faults
def more_roundings(golden: Golden, u: float) -> dict[str, F64]:
    """How many more each long sum may err by than `dot(K)` says, since terms of it are alike.

    By term of the gauge, an array that can be broadcast to it; u: the unit roundoff of sums.
    """
    terms = _COUNTS.get(golden.operation)
    counts = {name: _count(model) for name, model in golden.terms.items()}
    if terms is None or max(counts.values(), default=0) <= FEW:
        return {}
    with np.errstate(all="ignore"):
        found = {name: squares for name, squares in terms(golden, u) if counts[name] > FEW}
    return {
        name: roundings(counts[name], squares) - roundings(counts[name], counts[name])
        for name, squares in found.items()
    }


def _count(model: str) -> int:
    """K of `dot(K)`; 0 of any other model."""
    match = re.fullmatch(r"dot\((\d+)\)", model)
    return 0 if match is None else int(match[1])


def squares_of(terms: F64, u: float) -> F64:
    """C of SPEC 16.4, (...) for terms (..., K): K, and n^2 - n for n of them in one cell.

    A term of less than half a unit counts as that part of it which it is: an addition loses no more
    than the smaller of its two. Zeros lose nothing.
    """
    rows = terms.reshape(-1, terms.shape[-1])
    sizes = np.add.accumulate(np.abs(rows), axis=1)[:, -1:]
    unit = np.ldexp(2 * u / CELLS, np.frexp(sizes)[1] - 1)
    cells = np.floor(rows / np.where(unit > 0, unit, 1))
    cells[rows == 0] = -np.inf
    cells.sort(axis=1)
    row, column = np.nonzero((cells[:, 1:] == cells[:, :-1]) & np.isfinite(cells[:, 1:]))
    opens = np.ones(len(row), bool)
    opens[1:] = (row[1:] != row[:-1]) | (column[1:] != column[:-1] + 1)
    count = np.diff(np.append(np.flatnonzero(opens), len(row))) + 1.0
    row, cell = row[opens], cells[row[opens], column[opens]]
    lost = np.minimum(1, np.maximum(-cell, cell + 1) / (CELLS / 2))
    pairs = np.bincount(row, (count**2 - count) * lost**2, len(rows))
    return np.asarray(terms.shape[-1] + pairs.reshape(terms.shape[:-1]))


def _finite(x: Array) -> F64:
    return np.where(np.isfinite(x), x, 0).astype(np.float64)


def _products(x: Array, w: Array, u: float) -> F64:
    """Those of x (T, K) with w (N, K), row by row of x, (T, N)."""
    wide = _finite(w)
    return np.stack([squares_of(row * wide, u) for row in _finite(x)])


Found = Iterator[tuple[str, F64]]


def _linear(golden: Golden, u: float) -> Found:
    """The sum may begin with the bias, on whose grid products are then added."""
    x, w = golden.inputs["x"], golden.inputs["w"]
    if "bias" not in golden.inputs:
        yield "products", _products(x, w, u)
        return
    first = _finite(golden.inputs["bias"])[:, None]
    sums = [np.append(row * _finite(w), first, axis=1) for row in _finite(x)]
    yield "products", np.stack([squares_of(terms, u) for terms in sums]) - 1


def _on_codes(golden: Golden, u: float) -> Found:
    codes, _ = quantize_int8(golden.inputs["x"])
    yield "products", _products(codes, weights_of(golden), u)


def _weight_only(golden: Golden, u: float) -> Found:
    """Zero points may be multiplied by sums of activations alone."""
    x = golden.inputs["x"]
    apart = squares_of(_finite(x), u)[:, None]
    yield "products", np.maximum(_products(x, weights_of(golden), u), apart)


def _exponentials(x: F32, u: float) -> F64:
    """Those of the sum of a softmax over the last axis, (..., 1)."""
    low = np.where(np.isfinite(x), x - x.max(axis=-1, keepdims=True), np.float32(-np.inf))
    return squares_of(elementary.exp(low).astype(np.float64), u)[..., None]


def _softmax(golden: Golden, u: float) -> Found:
    yield "sum", _exponentials(golden.inputs["x"], u)


def _route(golden: Golden, u: float) -> Found:
    """The sum of the softmax over all experts, or over the chosen ones, and that of the gates."""
    logits, score = golden.inputs["logits"], golden.parameters["score"]
    chosen = np.take_along_axis(SCORES[score](logits), golden.outputs["experts"], axis=1)
    if score != "sigmoid":
        yield "sum", _exponentials(chosen if score == "logits" else logits, u)
    if golden.parameters.get("renormalise"):
        gates = elementary.softmax(chosen) if score == "logits" else chosen
        yield "total", squares_of(_finite(gates), u)[:, None]


def _rms_norm(golden: Golden, u: float) -> Found:
    yield "square", squares_of(_finite(golden.inputs["x"]) ** 2, u)[..., None]


def _gated_mlp(golden: Golden, u: float) -> Found:
    layer = [golden.inputs[name] for name in ("gate", "up", "down")]
    found = _layer(golden.inputs["x"], layer, golden.parameters["activation"], u)
    yield from zip(("inputs", "output"), found, strict=True)


def _layer(x: F32, weights: Sequence[F32], activation: str, u: float) -> tuple[F64, F64]:
    """Of a gated layer: the most of its first products, (T, 1), and of the last one, (T, K)."""
    gate, up, down = weights
    first = np.maximum(_products(x, gate, u), _products(x, up, u)).max(axis=1, keepdims=True)
    hidden = ACTIVATIONS[activation](matmul(x, gate)) * matmul(x, up)
    return first, _products(hidden, down, u)


def _moe(golden: Golden, u: float) -> Found:
    """The most of a token's experts."""
    inputs, parts = golden.inputs, ("gate", "up", "down")
    x, activation = inputs["x"], golden.parameters["activation"]
    most = [np.zeros((len(x), 1)), np.zeros(x.shape)]

    def take(tokens: Array, weights: list[F32]) -> None:
        for total, found in zip(most, _layer(x[tokens], weights, activation, u), strict=True):
            total[tokens] = np.maximum(total[tokens], found)

    for expert in np.unique(inputs["experts"]):
        tokens, _ = np.nonzero(inputs["experts"] == expert)
        take(tokens, [inputs[part][expert] for part in parts])
    if "shared_gate" in inputs:
        take(np.arange(len(x)), [inputs[f"shared_{part}"] for part in parts])
    if "shared_router" in inputs:
        most[0] = np.maximum(most[0], _products(x, inputs["shared_router"], u))
    yield from zip(("inputs", "output"), most, strict=True)


def _attention(golden: Golden, u: float) -> Found:
    yield from _attended(golden.inputs, golden.parameters, u)


def _paged_attention(golden: Golden, u: float) -> Found:
    """Over the positions in order."""
    inputs, length = golden.inputs, golden.parameters["length"]
    pages = (inputs[f"{name}_pages"][inputs["block_table"]] for name in ("k", "v"))
    k, v = (x.reshape(-1, *x.shape[2:])[:length] for x in pages)
    yield from _attended({"q": inputs["q"], "k": k, "v": v}, golden.parameters, u)


def _attended(inputs: Mapping[str, Array], parameters: Mapping[str, Any], u: float) -> Found:
    """The most of a row's scores, (T, H, 1), and of its two weighted sums, (T, H, D)."""
    q, k, v = (np.where(np.isfinite(inputs[n]), inputs[n], np.float32(0)) for n in "qkv")
    sinks = inputs.get("sinks", np.full(q.shape[1], -np.inf, np.float32))
    heads = range(q.shape[1])
    group = q.shape[1] // k.shape[1]
    if q.shape[2] > FEW:
        each = [_products(q[:, h], k[:, h // group], u).max(axis=1) for h in heads]
        yield "scores", np.stack(each, axis=1)[:, :, None]
    if len(k) > FEW:
        shares = (_shares(q[:, h], k[:, h // group], sinks[h], parameters) for h in heads)
        sums = [_weighted(p, v[:, h // group], u) for h, p in enumerate(shares)]
        yield "values", np.stack(sums, axis=1)


def _weighted(p: F64, v: F32, u: float) -> F64:
    """Sums of p_j v_j and of p_j, (T, D), p (T, S + 1) with the sink's last, v (S, D)."""
    terms = np.ascontiguousarray(v.T.astype(np.float64))
    alone = squares_of(p, u)[:, None] - 1  # the sink is no term of `dot(S)`
    return np.maximum(np.stack([squares_of(row[:-1] * terms, u) for row in p]), alone)


def _shares(q: F32, k: F32, sink: np.float32, parameters: Mapping[str, Any]) -> F64:
    """p of SPEC 8.2 and that of the sink, (T, S + 1), 0 where not visible."""
    scale, cap, window = (parameters.get(name) for name in ("scale", "softcap", "window"))
    back = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    visible = (back >= 0) if window is None else (back >= 0) & (back < window)
    t = matmul(q, k) * (default_scale(q.shape[1]) if scale is None else np.float32(scale))
    t = t if cap is None else np.float32(cap) * elementary.tanh(t / np.float32(cap))
    last = np.full((len(q), 1), sink if np.isfinite(sink) else -np.inf, np.float32)
    u = np.append(np.where(visible, t, np.float32(-np.inf)), last, axis=1)
    top = u.max(axis=1, keepdims=True)
    return elementary.exp(u - np.where(np.isfinite(top), top, np.float32(0))).astype(np.float64)


_COUNTS: Mapping[str, Callable[[Golden, float], Found]] = {
    "linear": _linear,
    "linear_int4": _on_codes,
    **dict.fromkeys(BLOCK_TYPES, _on_codes),
    "linear_w4a16": _weight_only,
    "softmax": _softmax,
    "route": _route,
    "rms_norm": _rms_norm,
    "gated_mlp": _gated_mlp,
    "moe": _moe,
    "attention": _attention,
    "paged_attention": _paged_attention,
}
"""Operations whose gauges have sums that may be long."""
