"""How far a computation may stray, element by element, from the data alone (SPEC 16.5, 16.6).

Everything is computed by the exact lane on absolute values, so that a golden is the same to the
byte on every machine. `terms` are multiplied by an error model; `distance` is the exact lane's own
way from the real value, and is found from what alignment really took off the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reference import elementary
from reference.arithmetic import (
    F32,
    F64,
    Aligned,
    align,
    align_rows,
    dot64,
    matmul,
    sequential,
    sum64,
    to_float32,
    weighted_sum,
)
from reference.attention import default_scale
from reference.experts import Ints, Router
from reference.feedforward import Function

U32 = 2.0**-24
"""Unit roundoff of float32."""

TINY = 2.0**-149
"""The least float32: what two roundings may take off where the result is subnormal."""


@dataclass(frozen=True)
class Gauge:
    """How far each element of an output may stray (SPEC 16.3).

    terms: gauge arrays by name, each of the output's shape, or one that is broadcast to it.
    models: the error model of each. distance: of the exact lane from the real value, float64 of the
    output's shape; None where there is none.
    """

    terms: dict[str, Any] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    distance: F64 | None = None


def _rows(aligned: Aligned, width: int) -> F32:
    """The aligned values in their places, (B, R, 32) -> (R, K) float32."""
    values = np.moveaxis(aligned.values, 0, -2)
    return values.reshape(*values.shape[:-2], -1)[..., :width].astype(np.float32)


def _lost(x: F32) -> tuple[F32, F32]:
    """|x| after alignment, and what alignment took off each element: both exact float32."""
    kept = _rows(align(x), x.shape[-1])
    return np.abs(kept), np.abs(np.where(np.isfinite(x), x, 0) - kept)


def _sum(x: F32, w: F32) -> F64:
    """Products summed in float64, k ascending: alignment would lose again what was lost before."""
    return sequential(x.astype(np.float64), w.astype(np.float64))


def _slack(x: F64 | F32) -> F64:
    """A little more than x, for the roundings of the bound's own computation."""
    return np.asarray(x, np.float64) * (1 + 2.0**-16) + 2 * TINY


def _finite(x: F32) -> F32:
    return np.where(np.isfinite(x), x, np.float32(0))


def product_gauge(x: F32, w: F32) -> tuple[F32, F64]:
    """Sum |x_k| |w_k| and the distance of the exact dot before its rounding: (T, N) each.

    x: (T, K) float32. w: (N, K) float32. What is not finite counts as 0.
    """
    x, w = _finite(x), _finite(w)
    kept_x, lost_x = _lost(x)
    _, lost_w = _lost(w)
    lost = _sum(lost_x, np.abs(w)) + _sum(kept_x, lost_w)
    return matmul(np.abs(x), np.abs(w)) + to_float32(lost), _slack(lost)


def linear(x: F32, w: F32, bias: F32 | None, y: F32) -> Gauge:
    """A linear layer with its optional bias (SPEC 16.5).

    x: (T, K) float32. w: (N, K) float32. bias: (N,) float32. y: (T, N) float32, the exact result.
    """
    gauge, lost = product_gauge(x, w)
    terms, models = {"products": gauge}, {"products": f"dot({x.shape[1]})"}
    distance = lost + U32 * np.abs(_finite(y))
    if bias is not None:
        before = matmul(x, w)
        terms["products"] = gauge + np.abs(_finite(bias))  # the sum may begin with it
        terms["bias"] = np.abs(before) + np.abs(_finite(bias))
        models["bias"] = "ops(2)"
        distance += U32 * np.abs(_finite(before))
    return Gauge(terms, models, _slack(distance))


def linear_int4(codes: F32, scale: F32, weights: F32, y: F32) -> Gauge:
    """Codes and scales given, only the sum and two products round (SPEC 16.5).

    codes: (T, K) float32, int8 codes of the activations, and their scale (T,) float32. weights:
    (N, K) float32, dequantized. y: (T, N) float32, the exact result.
    """
    usable = np.where(np.isfinite(scale), scale, 0)[:, None]
    gauge = matmul(np.abs(codes), np.abs(weights)) * usable.astype(np.float32)
    return Gauge(
        {"products": gauge, "scale": np.abs(_finite(y))},
        {"products": f"dot({codes.shape[1]})", "scale": "ops(2)"},
        _slack(U32 * np.abs(_finite(y))),
    )


def linear_w4a16(x: F32, weights: F32, offsets: F32, y: F32) -> Gauge:
    """A linear layer whose zero points may be taken off its sums instead of its codes (SPEC 16.5).

    x: (T, K) float32. weights: (N, K) float32, dequantized. offsets: (N, K) float32, scale * z of
    every weight. y: (T, N) float32, the exact result.
    """
    plain = linear(x, weights, None, y)
    apart, _ = product_gauge(x, np.float32(2) * np.abs(offsets))
    both = plain.terms["products"] + apart
    models = {"products": plain.models["products"], "scale": "ops(2)"}
    return Gauge({"products": both, "scale": both}, models, plain.distance)


def elementwise(y: F32, size: F32, roundings: int, x: F32 | None = None) -> Gauge:
    """Some roundings of values of the given size, and underflow to zero (SPEC 16.5).

    y: (n,) float32, the exact result. size: (n,) float32. roundings: of the exact lane. x: (n,)
    float32, what y is a function of, where its relative error matters more than that of `size`.
    """
    size = np.abs(_finite(size))
    distance = U32 * roundings * size.astype(np.float64) + 2.0**-126 * np.maximum(size, 1)
    terms, models = {"value": size}, {"value": f"ops({2 * roundings + 2})"}
    if x is not None:
        terms["operand"], models["operand"] = size * np.abs(_finite(x)), "stored(1)"
    return Gauge(terms, models, _slack(distance))


def softmax(x: F32, y: F32) -> Gauge:
    """Softmax over the last axis (SPEC 16.5). x, and the exact result y: (R, K) float32."""
    low = x - x.max(axis=-1, keepdims=True)
    size: F32 = np.where(np.isfinite(low), np.abs(low), 0).astype(np.float32)
    share = _finite(y)
    mean = to_float32(sum64(np.where(share > 0, share * size, np.float32(0))))[..., None]
    exponent = share * (size + mean + np.float32(8))
    at = np.abs(_finite(x))
    mean_at = to_float32(sum64(np.where(share > 0, share * at, np.float32(0))))[..., None]
    taken = share * _lost_share(low)
    return Gauge(
        {"exp": exponent, "sum": share, "operand": share * (at + mean_at)},
        {"exp": "ops(1)", "sum": f"dot({x.shape[-1]})", "operand": "stored(1)"},
        _slack(U32 * (exponent.astype(np.float64) + 2 * share) + taken + TINY),
    )


def _lost_share(low: F32) -> F64:
    """What alignment takes off a sum of exponentials, as a share of it, (..., 1) (SPEC 2.4)."""
    p = elementary.exp(np.where(np.isnan(low), np.float32(-np.inf), low))
    _, lost = _lost(p)
    total = p.sum(axis=-1, keepdims=True, dtype=np.float64)
    taken = lost.sum(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(np.divide(taken, total, out=np.zeros_like(total), where=total > 0))


def rms_norm(x: F32, y: F32) -> Gauge:
    """RMSNorm over the last axis (SPEC 16.5). x, and the exact result y: (T, K) float32."""
    x, size = _finite(x), np.abs(_finite(y))
    _, lost = _lost(x)
    squares = dot64(x, x)
    taken = 2 * np.abs(dot64(np.abs(x), lost))
    relative = np.divide(taken, squares, out=np.zeros_like(squares), where=squares > 0) / 2
    return Gauge(
        {"value": size, "square": size * np.float32(0.5)},
        {"value": "ops(4)", "square": f"dot({x.shape[-1]})"},
        _slack(size * (relative[..., None] + 3 * U32)),
    )


def rope(x: F32, cos: F32, sin: F32, angle: F32, interleaved: bool, factor: float = 1.0) -> Gauge:
    """Rotation, with the rounding of the angle itself (SPEC 16.5).

    x: (T, H, D) float32. cos, sin, which include the factor, and angle: (T, d/2) float32. Elements
    beyond the d first are passed on, and err where they are stored in less than float32.
    """
    half = cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    size = np.abs(_finite(x))
    a, b = size[..., first], size[..., second]
    c, s = np.abs(cos)[:, None], np.abs(sin)[:, None]
    turned, moved = np.zeros_like(size), np.zeros_like(size)
    turned[..., first], turned[..., second] = a * c + b * s, b * c + a * s
    moved[..., first] = moved[..., second] = np.float32(factor) * np.abs(angle)[:, None] * (a + b)
    terms = {"products": turned, "angle": moved}
    models = {"products": "ops(5)", "angle": "float32(1)"}
    if 2 * half < x.shape[-1]:
        rest = np.zeros_like(size)
        rest[..., 2 * half :] = size[..., 2 * half :]
        terms["rest"], models["rest"] = rest, "stored(1)"
    return Gauge(terms, models, _slack(U32 * (4.0 * turned + moved)))


def attention(
    q: F32,
    k: F32,
    v: F32,
    out: F32,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: F32 | None = None,
) -> Gauge:
    """Attention of every head (SPEC 16.6).

    q: (T, Hq, D) float32, the last T of S positions. k, v: (S, Hkv, D) float32. out: (T, Hq, D)
    float32, the exact result. sinks: (Hq,) float32. scale None is RN32(1/sqrt(D)).
    """
    group = q.shape[1] // k.shape[1]
    heads = [
        _head(
            _finite(q[:, h]),
            _finite(k[:, h // group]),
            _finite(v[:, h // group]),
            np.abs(_finite(out[:, h])),
            default_scale(q.shape[-1]) if scale is None else np.float32(scale),
            window,
            None if softcap is None else np.float32(softcap),
            None if sinks is None else np.float32(sinks[h]),
        )
        for h in range(q.shape[1])
    ]
    parts = [np.ascontiguousarray(np.stack(part, axis=1)) for part in zip(*heads, strict=True)]
    models = {"scores": f"dot({q.shape[-1]})", "exp": "ops(4)", "values": f"dot({len(k)})"}
    terms = {name: part.astype(np.float32) for name, part in zip(models, parts, strict=False)}
    return Gauge(terms, models, _slack(parts[3]))


def _head(
    q: F32,
    k: F32,
    v: F32,
    size: F32,
    scale: np.float32,
    window: int | None,
    softcap: np.float32 | None,
    sink: np.float32 | None,
) -> tuple[F64, F64, F64, F64]:
    """One head: the three gauges and the distance, (T, D) each."""
    back = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    visible = (back >= 0) if window is None else (back >= 0) & (back < window)
    products, lost = product_gauge(q, k)
    t = matmul(q, k) * scale
    u = t if softcap is None else softcap * elementary.tanh(t / softcap)
    u = np.where(visible, u, np.float32(-np.inf))
    m = u.max(axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None and np.isfinite(sink):
        m = np.maximum(m, sink)
    m = np.where(m == -np.inf, np.float32(0), m)  # a row that sees nothing
    low = np.where(visible, np.abs(u - m), np.float32(0))
    p = np.where(visible, elementary.exp(u - m), np.float32(0))
    rows = align_rows(np.abs(v))
    _, den = weighted_sum(p, rows)
    if sink is not None and np.isfinite(sink):
        den = den + elementary.exp(sink - m[:, 0])
    den = np.where(den > 0, den, 1.0)
    share = to_float32(p / den[:, None])
    share_sink, lost_sink = np.zeros((2, len(q)))
    if sink is not None and np.isfinite(sink):
        share_sink = elementary.exp(sink - m[:, 0]) / den
        lost_sink = share_sink * (np.abs(sink) + np.abs(sink - m[:, 0]) + 1.0)

    on_grid, lost_rows = _lost_by_rows(v)

    def spread(weight: F64) -> F64:
        """sum_j w_j (|v_j| + |out|), what alignment took off v_j included."""
        narrow = to_float32(weight)
        num, total = weighted_sum(narrow, rows)
        return num + _sum(narrow, lost_rows.T) + total[:, None] * size

    magnitude = np.where(visible, np.abs(t), 0)
    rough = np.abs(scale) * lost + U32 * (6.0 * magnitude + low + 2)
    misplaced = _lost_weights(p, on_grid) / den[:, None]
    unseen = _sum(share, lost_rows.T)
    distance = spread(share * rough + misplaced) + unseen
    return (
        spread(share * np.abs(scale) * products.astype(np.float64)),
        spread(share * (magnitude + low + 1.0)) + lost_sink[:, None] * (size + unseen),
        spread(share.astype(np.float64)) + share_sink[:, None] * size,
        distance + 2 * U32 * size,
    )


def _lost_by_rows(v: F32) -> tuple[F64, F32]:
    """2^e_j of each row (0 where zero), and what its alignment took off."""
    rows = align_rows(v)
    kept = (rows.digits * rows.scale[..., None]).astype(np.float32)
    return rows.scale, np.abs(v - kept)


def _lost_weights(p: F32, scale: F64) -> F64:
    """At most what the alignment of a weight takes off p_j: half a unit of its block's grid."""
    lost = np.zeros(p.shape)
    for first in range(0, p.shape[1], 32):
        block = slice(first, first + 32)
        w = p[:, block] * scale[block]
        half = np.ldexp(1.0, np.frexp(w.max(axis=-1, keepdims=True))[1] - 25)
        half = half * (w.max(axis=-1, keepdims=True) > 0)
        used = (scale[block] > 0) & (p[:, block] > 0)
        lost[:, block] = np.divide(half, scale[block], out=np.zeros(w.shape), where=used)
        peak = p[:, block].max(axis=-1, keepdims=True)
        lost[:, block] += used * np.ldexp(1.0, np.frexp(peak)[1] - 25)
    return lost


def gated_mlp(x: F32, gate: F32, up: F32, down: F32, g: F32, a: F32, u: F32) -> Gauge:
    """The feed-forward layer, its steps' gauges carried to the end (SPEC 16.5).

    x: (T, K) float32. gate, up: (I, K), down: (K, I) float32. g = gate(x), a = act(g), u = up(x),
    (T, I) float32 each. 1.13 bounds the slope of silu and of gelu_tanh.
    """
    gauge_g, lost_g = product_gauge(x, gate)
    gauge_u, lost_u = product_gauge(x, up)
    abs_a, abs_g, abs_u, h = np.abs(a), np.abs(g), np.abs(u), a * u
    carried = to_float32(
        1.13 * gauge_g * abs_u.astype(np.float64) + abs_a * gauge_u.astype(np.float64)
    )
    rounded = np.abs(h) + abs_g * abs_u
    last, lost_h = product_gauge(h, down)
    inner = 1.13 * (lost_g + U32 * abs_g) * abs_u + abs_a * (lost_u + U32 * abs_u)
    inner = inner + U32 * (8.0 * abs_g * abs_u + np.abs(h))
    weight = np.abs(down)
    return Gauge(
        {"inputs": matmul(carried, weight), "product": matmul(rounded, weight), "output": last},
        {"inputs": f"dot({x.shape[1]})", "product": "ops(9)", "output": f"dot({h.shape[1]})"},
        _slack(matmul(to_float32(inner), weight) + lost_h + U32 * last.astype(np.float64)),
    )


def route(logits: F32, router: Router, experts: Ints, gates: F32) -> Gauge:
    """Gates of the chosen experts, which the backend must choose too (SPEC 16.5).

    logits: (T, E) float32. experts: (T, k) int64 in rank order. gates: (T, k) float32.
    """
    size, relative = np.abs(_finite(gates)), np.full(gates.shape, np.float32(8))
    terms, models = {"scale": size}, {"scores": "ops(1)", "scale": "ops(2)"}
    taken: F64 | float = 0.0
    if router.score != "sigmoid":
        chosen = np.take_along_axis(logits, experts, axis=1)
        rows = chosen if router.score == "logits" else logits
        low = np.abs(_finite(rows - rows.max(axis=1, keepdims=True)))
        mean = to_float32(sum64(elementary.softmax(rows) * low))[:, None]
        relative += np.abs(_finite(chosen - rows.max(axis=1, keepdims=True))) + mean
        taken = 2 * _lost_share(rows - rows.max(axis=1, keepdims=True))
        terms["sum"] = size * np.float32(2 if router.renormalise else 1)
        models["sum"] = f"dot({rows.shape[1]})"
    if router.renormalise:
        share = size / np.abs(np.float32(router.scale))
        relative += to_float32(sum64(share * relative))[:, None]
        terms["total"], models["total"] = size, f"dot({router.top_k})"
    terms["scores"] = size * relative
    distance = U32 * (terms["scores"] + 4.0 * size) + taken * size
    return Gauge(terms, models, _slack(distance))


Weights = tuple[F32, F32, F32]
"""Gate and up (I, K) and down (K, I) of one expert, float32."""


def moe(
    x: F32,
    experts: Ints,
    gates: F32,
    weights: Sequence[Weights],
    activation: Function,
    shared: Weights | None = None,
    shared_router: F32 | None = None,
) -> Gauge:
    """The sum over experts, their routing given (SPEC 16.5).

    x: (T, K) float32. experts: (T, k) int64, and their gates (T, k) float32. shared_router: (1, K)
    float32, the gate of the shared expert; None where it has none.
    """
    names = ("inputs", "product", "output", "sum", "distance")
    total = {name: np.zeros(x.shape) for name in names}

    def take(tokens: Ints, gate: F32, expert: Weights) -> F64:
        """Add one expert's gauges, by gate, and return its |y|, (n, K)."""
        rows, weight = x[tokens], np.abs(gate).astype(np.float64)[:, None]
        g, u = matmul(rows, expert[0]), matmul(rows, expert[1])
        a = activation(g)
        y = np.abs(matmul(a * u, expert[2]).astype(np.float64))
        gauge = gated_mlp(rows, *expert, g, a, u)
        found = {**gauge.terms, "sum": y, "distance": np.asarray(gauge.distance)}
        for name, term in found.items():
            total[name][tokens] += weight * term
        return y

    for expert in np.unique(experts):
        tokens, ranks = np.nonzero(experts == expert)
        take(tokens, gates[tokens, ranks], weights[expert])
    if shared is not None:
        everyone, gate = np.arange(len(x)), np.ones((len(x), 1), np.float32)
        if shared_router is not None:
            gate = elementary.sigmoid(matmul(x, shared_router))
        y = take(everyone, gate[:, 0], shared)
        if shared_router is not None:
            products, lost = product_gauge(x, shared_router)
            logit = np.abs(matmul(x, shared_router))
            total["inputs"] += y * products / 4  # the slope of the sigmoid is at most a quarter
            total["product"] += y * gate
            total["distance"] += y * ((lost + U32 * logit) / 4 + 3 * U32 * gate)
    count = experts.shape[1] + (shared is not None)
    inner = max(len(expert[0]) for expert in [*weights, *([shared] if shared else [])])
    distance = total.pop("distance") + U32 * (count + 1) * total["sum"]
    models = (f"dot({x.shape[1]})", "ops(9)", f"dot({inner})", f"dot({count})")
    return Gauge(
        {name: to_float32(term) for name, term in total.items()},
        dict(zip(total, models, strict=True)),
        _slack(distance),
    )
