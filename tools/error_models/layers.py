"""Random computations of several steps: attention, gated layers, routing and experts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backends.reference import ReferenceBackend
from conformance.rules import gauges
from reference.arithmetic import matmul
from reference.attention import attention_exact
from reference.experts import Router, Score, route
from reference.feedforward import ACTIVATIONS, gated_mlp
from tools.error_models.data import KINDS, Computed, data, kinds, length
from tools.error_models.kernels import activated
from tools.error_models.machine import F32, F64, Machine, Rng


def attention(rng: Rng, m: Machine) -> Computed:
    """One key-value head and two query heads; an online softmax over tiles of any size."""
    t, s, d = length(rng, 3), length(rng, 96), length(rng, 64)
    s = max(s, t)
    kind, other = kinds(rng)
    q, k = data(rng, kind, m, t, 2, d), data(rng, other, m, s, 1, d)
    q, k = np.clip(q, -8, 8), np.clip(k, -8, 8)
    v = data(rng, str(rng.choice(KINDS)), m, s, 1, d)
    window = int(rng.integers(1, s + 1)) if rng.random() < 0.3 else None
    softcap = 5.0 if rng.random() < 0.3 else None
    sinks = rng.standard_normal(2).astype(np.float32) if rng.random() < 0.3 else None
    scale = float(np.float32(d**-0.5))
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    y = attention_exact(**arrays, **options)
    gauge = gauges.attention(out=y, **arrays, **options)
    back = np.arange(s - t, s)[:, None] - np.arange(s)
    visible = (back >= 0) & (back < (window or s))
    answer = np.empty(q.shape)
    for head in range(2):
        sink = -np.inf if sinks is None else float(m.store(sinks[head]))
        answer[:, head] = _head(m, q[:, head], k[:, 0], v[:, 0], scale, softcap, sink, visible)
    return Computed("attention", arrays, options, y, gauge, answer)


def _head(
    m: Machine,
    q: F32,
    k: F32,
    v: F32,
    scale: float,
    softcap: float | None,
    sink: float,
    visible: NDArray[np.bool_],
) -> F64:
    t = m.rn(m.dot(q.astype(np.float64), k.astype(np.float64)) * scale)
    u = t if softcap is None else m.rn(softcap * m.function(np.tanh, m.rn(t / softcap)))
    u = np.where(visible, u, -np.inf)
    step = length(m.rng, u.shape[1])
    top = np.full((len(q), 1), sink)
    num, den = np.zeros((len(q), v.shape[1])), np.where(np.isfinite(top), 1.0, 0.0)
    for first in range(0, u.shape[1], step):
        here = slice(first, first + step)
        higher = np.maximum(top, u[:, here].max(axis=1, keepdims=True))
        safe = np.where(np.isfinite(higher), higher, 0.0)
        low = np.where(visible[:, here], u[:, here] - safe, 0.0)
        p = np.where(visible[:, here], m.function(np.exp, m.rn(low)), 0.0)
        old = np.where(np.isfinite(top), top - safe, 0.0)
        again = np.where(np.isfinite(top), m.function(np.exp, m.rn(old)), 0.0)
        part = m.dot(p, v[here].astype(np.float64).T)
        num = m.rn(m.rn(num * again) + part)
        den = m.rn(m.rn(den * again) + m.total(p)[:, None])
        top = higher
    return m.divide(num, den)


def mlp(rng: Rng, m: Machine) -> Computed:
    """A gated feed-forward layer."""
    name = str(rng.choice(("silu", "gelu_tanh")))
    t, k, inner = length(rng, 3), length(rng, 96), length(rng, 96)
    x = data(rng, str(rng.choice(KINDS[:5])), m, t, k)
    gate, up, down = (
        (data(rng, "normal", m, *shape) / np.float32(math.sqrt(shape[1]))).astype(np.float32)
        for shape in ((inner, k), (inner, k), (k, inner))
    )
    g, u = matmul(x, gate), matmul(x, up)
    a = ACTIVATIONS[name](g)
    answer = layer(m, name, x.astype(np.float64), gate, up, down)
    y = gated_mlp(
        x, lambda x: matmul(x, np.concatenate([gate, up])), lambda h: matmul(h, down),
        ACTIVATIONS[name],
    )  # fmt: skip
    inputs = {"x": x, "gate": gate, "up": up, "down": down}
    gauge = gauges.gated_mlp(x, gate, up, down, g, a, u)
    return Computed("gated_mlp", inputs, {"activation": name}, y, gauge, answer)


def layer(m: Machine, name: str, x: F64, gate: F32, up: F32, down: F32) -> F64:
    """A gated layer, each of its steps rounded and each of its results stored."""
    hidden = activated(m, name, m.store(m.dot(x, gate)))
    return m.dot(m.rn(m.store(hidden) * m.store(m.dot(x, up))), down)


def gates(rng: Rng, m: Machine) -> Computed:
    """The gates of experts whose choice is given."""
    t, e = length(rng, 3), 2 * length(rng, 32)
    k = int(rng.integers(1, min(e, 8) + 1))
    scores: tuple[Score, ...] = ("softmax", "sigmoid", "logits")
    score = scores[int(rng.integers(3))]
    renormalise, scale = bool(rng.random() < 0.5), float(rng.integers(1, 3))
    about: dict[str, Any] = {"score": score, "renormalise": renormalise, "scale": scale}
    router = Router(e, k, **about)
    logits = data(rng, "normal", m, t, e) * np.float32(rng.choice((0.5, 3)))
    routing = route(logits, router)
    kept = m.store(logits)
    chosen = np.take_along_axis(kept, routing.experts, axis=1)
    if score == "sigmoid":
        found = activated(m, "sigmoid", chosen)
    else:
        rows = chosen if score == "logits" else kept
        top = rows.max(axis=1, keepdims=True)
        total = m.total(m.function(np.exp, m.rn(rows - top)))[:, None]
        found = m.divide(m.function(np.exp, m.rn(chosen - top)), total)
    if router.renormalise:
        found = m.divide(found, m.total(found)[:, None])
    gauge = gauges.route(logits, router, routing.experts, routing.gates)
    answer = m.rn(found * router.scale)
    given = {"experts": routing.experts}
    return Computed("route", {"logits": logits}, about, routing.gates, gauge, answer, given)


def experts(rng: Rng, m: Machine) -> Computed:
    """The sum over experts whose choice is given, with a shared one or none, in any order."""
    name = str(rng.choice(("silu", "gelu_tanh")))
    t, k, inner = length(rng, 3), length(rng, 64), length(rng, 64)
    count = int(rng.integers(2, 7))
    ranks = int(rng.integers(1, count + 1))
    x = data(rng, str(rng.choice(KINDS[:5])), m, t, k)
    chosen = np.stack([rng.permutation(count)[:ranks] for _ in range(t)])
    weight = np.abs(data(rng, str(rng.choice(("normal", "heavy"))), m, t, ranks))

    def drawn(*lead: int) -> list[F32]:
        shapes = ((inner, k), (inner, k), (k, inner))
        parts = (data(rng, "normal", m, *lead, *s) / np.float32(math.sqrt(s[1])) for s in shapes)
        return [part.astype(np.float32) for part in parts]

    gate, up, down = drawn(count)
    inputs: dict[str, Any] = {
        "x": x,
        "experts": chosen,
        "gates": weight,
        "gate": gate,
        "up": up,
        "down": down,
    }
    wide, terms = x.astype(np.float64), np.zeros((t, k, ranks))
    for token, rank in np.ndindex(t, ranks):
        e = chosen[token, rank]
        made = m.store(layer(m, name, wide[token, None], gate[e], up[e], down[e])[0])
        terms[token, :, rank] = m.store(weight[token, rank]) * made
    shared, router = None, None
    if rng.random() < 0.5:
        shared = drawn()
        inputs |= {f"shared_{p}": w for p, w in zip(("gate", "up", "down"), shared, strict=True)}
        beside = m.store(layer(m, name, wide, *shared))
        if rng.random() < 0.5:
            router = (data(rng, "normal", m, 1, k) / np.float32(math.sqrt(k))).astype(np.float32)
            inputs["shared_router"] = router
            beside *= m.store(activated(m, "sigmoid", m.store(m.dot(wide, router))))
        terms = np.concatenate([terms, beside[:, :, None]], axis=2)
    answer = m.total(terms if m.fma else m.rn(terms), m.fma)
    weights = list(zip(gate, up, down, strict=True))
    apart = None if shared is None else (shared[0], shared[1], shared[2])
    gauge = gauges.moe(x, chosen, weight, weights, ACTIVATIONS[name], apart, router)
    y = ReferenceBackend().moe(**inputs, activation=name)
    return Computed("moe", inputs, {"activation": name}, y, gauge, answer)
