"""Bounds hold for legitimate float32 (SPEC 16.3 to 16.6).

The orders of SPEC 3 with and without FMA, online softmax in tiles of any size, numpy's own float32
functions. The largest margin found is recorded beside each test (`pytest --junit-xml`), so that a
bound far too wide shows as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from conformance.rules import gauges
from reference import elementary
from reference.arithmetic import Order, matmul, matmul_float32, multiply_add
from reference.attention import attention_exact, attention_fast
from reference.feedforward import ACTIVATIONS, ACTIVATIONS_FLOAT32
from reference.normalization import rms_norm
from reference.rotary import RopeParameters, rope_constants, rotate, turn
from tests.conformance.rules.gauges.margins import F32, Dot, Record, Worst, heavy, margin, normal

ORDERS: tuple[Order, ...] = ("blas", "sequential", "pairwise", "lanes8", "float64")
WAYS = [
    (o, fma) for o in ORDERS for fma in (False, True) if o not in ("blas", "float64") or not fma
]


def dots() -> Iterator[tuple[str, Dot]]:
    """(T, K), (N, K) -> (T, N) in every order of SPEC 3."""
    for order, fma in WAYS:
        yield f"{order}{'+fma' if fma else ''}", partial(matmul_float32, order=order, fma=fma)


DOTS = dict(dots())


def test_linear(record_property: Record) -> None:
    worst = Worst()
    for seed, width in enumerate((1, 2, 3, 7, 31, 32, 33, 64, 100, 257, 1024, 3000)):
        for kind, make in (("normal", normal), ("heavy", heavy)):
            x, w = make(seed, 8, width), make(seed + 50, 12, width)
            for bias in (None, normal(seed, 12)):
                y = matmul(x, w) if bias is None else matmul(x, w) + bias
                gauge = gauges.linear(x, w, bias, y)
                for name, dot in DOTS.items():
                    answer = dot(x, w) if bias is None else dot(x, w) + bias
                    worst.add(margin(y, gauge, answer), f"{name} {kind} K={width}")
    worst.settle(record_property, 0.3, 300)


def test_linear_of_one_sign(record_property: Record) -> None:
    """Partial sums as large as they can be: rounding errors are at their largest."""
    worst = Worst()
    for width in (16, 64, 512, 4096):
        x, w = np.abs(normal(width, 4, width)), np.abs(normal(width + 1, 8, width))
        y = matmul(x, w)
        gauge = gauges.linear(x, w, None, y)
        for name, dot in DOTS.items():
            worst.add(margin(y, gauge, dot(x, w)), f"{name} K={width}")
    worst.settle(record_property, 0.05, 30)


@pytest.mark.parametrize(("accumulator", "bits"), [("bfloat16", 16), ("tf32", 13)])
def test_linear_of_rounded_operands(accumulator: str, bits: int, record_property: Record) -> None:
    """Operands rounded to the declared precision, sums in float32: within its bound."""
    worst = Worst()

    def rounded(x: F32) -> F32:
        half, keep = np.uint32(1 << (bits - 1)), np.uint32((0xFFFFFFFF << bits) & 0xFFFFFFFF)
        return ((x.view(np.uint32) + half) & keep).view(np.float32)

    u = {"bfloat16": 2.0**-8, "tf32": 2.0**-11}[accumulator]
    for width in (1, 2, 32, 300):
        x, w = normal(width, 16, width), normal(width + 1, 40, width)
        y = matmul(x, w)
        gauge = gauges.linear(x, w, None, y)
        worst.add(margin(y, gauge, rounded(x) @ rounded(w).T, u), f"K={width}")
        assert margin(y, gauge, rounded(x) @ rounded(w).T) > 1
    worst.settle(record_property, 0.3, 4)


def test_rms_norm(record_property: Record) -> None:
    worst = Worst()
    for seed, width in enumerate((1, 2, 31, 33, 192, 1000)):
        for kind, x in (("normal", normal(seed, 8, width)), ("heavy", heavy(seed, 4, width))):
            weight = normal(seed + 1, width)
            for eps in (1e-5, 1e-6):
                y = rms_norm(x, weight, eps)
                gauge = gauges.rms_norm(x, y)
                for name, dot in DOTS.items():
                    squares = np.concatenate([dot(row[None], row[None]) for row in x])
                    mean = squares / np.float32(width) + np.float32(eps)
                    roots = (np.float32(1) / np.sqrt(mean), mean ** np.float32(-0.5))
                    for r in roots:
                        answer = (x * r) * weight
                        worst.add(margin(y, gauge, answer), f"{name} {kind} K={width}")
                        worst.add(margin(y, gauge, x * (r * weight)), f"{name} {kind} K={width}")
                    divided = x / np.sqrt(mean) * weight
                    worst.add(margin(y, gauge, divided), f"{name} {kind} K={width} division")
    worst.settle(record_property, 0.2, 900)


def test_softmax(record_property: Record) -> None:
    worst = Worst()
    for seed, width in enumerate((1, 2, 3, 32, 33, 100, 1000)):
        for spread in (0.1, 1.0, 10.0, 100.0):
            x = normal(seed, 6, width, spread=spread)
            y = elementary.softmax(x)
            gauge = gauges.softmax(x, y)
            m = x.max(axis=-1, keepdims=True)
            p = np.exp(x - m)
            ones = np.ones((1, width), np.float32)
            for name, dot in DOTS.items():
                total = dot(p, ones)
                at = f"{name} K={width} spread={spread}"
                worst.add(margin(y, gauge, p / total), at)
                worst.add(margin(y, gauge, p * (np.float32(1) / total)), at)
    worst.settle(record_property, 0.1, 400)


def test_activations(record_property: Record) -> None:
    x = np.concatenate([normal(1, 4000, spread=4), np.linspace(-104, 104, 4001).astype(np.float32)])
    half, one = np.float32(0.5), np.float32(1)
    with np.errstate(all="ignore"):
        sigmoid = one / (one + np.exp(-x))
        ways = {
            "sigmoid": (3, [sigmoid, half + half * np.tanh(half * x)]),
            "silu": (4, [x / (one + np.exp(-x)), x * sigmoid]),
            "gelu_tanh": (8, [ACTIVATIONS_FLOAT32["gelu_tanh"](x)]),
        }
    worst = Worst()
    for name, (roundings, answers) in ways.items():
        y = getattr(elementary, name)(x)
        gauge = gauges.elementwise(y, y if name == "sigmoid" else x, roundings)
        for i, answer in enumerate(answers):
            if (name, i) != ("sigmoid", 1):  # 0.5 + 0.5 tanh cancels: no relative accuracy
                worst.add(margin(y, gauge, answer), name)
    worst.settle(record_property, 0.05, 4)


def test_rope(record_property: Record) -> None:
    worst = Worst()
    positions = np.array([0, 1, 2, 5, 33, 100, 1000, 4095, 30000, 131071])
    for seed, (d, interleaved, factor) in enumerate(
        itertools.product((64, 32, 2), (False, True), (1.0, 1.25))
    ):
        inv_freq, _ = rope_constants(RopeParameters("default", 10000.0, d))
        angle = positions.astype(np.float32)[:, None] * inv_freq
        scale = np.float32(factor)
        x = normal(seed, len(positions), 3, 64)
        cos, sin = turn(angle, scale)
        y = rotate(x, cos, sin, interleaved)
        gauge = gauges.rope(x, cos, sin, angle, interleaved, factor)
        first = slice(0, d, 2) if interleaved else slice(0, d // 2)
        second = slice(1, d, 2) if interleaved else slice(d // 2, d)
        exact_angle = positions[:, None] * inv_freq.astype(np.float64)
        for name, (c, s) in {
            "float32": (np.cos(angle) * scale, np.sin(angle) * scale),
            "float64": (
                (np.cos(exact_angle) * scale).astype(np.float32),
                (np.sin(exact_angle) * scale).astype(np.float32),
            ),
        }.items():
            worst.add(margin(y, gauge, rotate(x, c, s, interleaved)), f"{name} d={d}")
            fused = x.copy()
            a, b, c, s = x[..., first], x[..., second], c[:, None], s[:, None]
            fused[..., first] = multiply_add(a, c, -(b * s), True)
            fused[..., second] = multiply_add(b, c, a * s, True)
            worst.add(margin(y, gauge, fused), f"{name} fma d={d}")
    worst.settle(record_property, 0.2, 40)


def online(
    q: F32,
    k: F32,
    v: F32,
    dot: Dot,
    tile: int,
    scale: np.float32,
    window: int | None = None,
    softcap: np.float32 | None = None,
    sinks: F32 | None = None,
) -> F32:
    """Attention as other engines compute it: float32, an online softmax over tiles of keys."""
    rows, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    positions = np.arange(len(k) - rows, len(k))[:, None]
    for h in range(heads):
        m = np.full((rows, 1), -np.inf, np.float32)
        total, acc = np.zeros((rows, 1), np.float32), np.zeros((rows, width), np.float32)
        for start in range(0, len(k), tile):
            j = np.arange(start, min(start + tile, len(k)))
            u = dot(q[:, h], np.ascontiguousarray(k[j, h // group])) * scale
            if softcap is not None:
                u = softcap * np.tanh(u / softcap)
            back = positions - j
            visible = (back >= 0) & (back < (window or len(k)))
            u = np.where(visible, u, np.float32(-np.inf))
            higher = np.maximum(m, u.max(axis=-1, keepdims=True))
            safe = np.where(np.isfinite(higher), higher, np.float32(0))
            p, rescale = np.exp(u - safe), np.exp(m - safe)
            total = total * rescale + dot(p, np.ones((1, len(j)), np.float32))
            acc = acc * rescale + dot(p, np.ascontiguousarray(v[j, h // group].T))
            m = higher
        if sinks is not None and np.isfinite(sinks[h]):
            higher = np.maximum(m, sinks[h])
            total = total * np.exp(m - higher) + np.exp(sinks[h] - higher)
            acc = acc * np.exp(m - higher)
        out[:, h] = acc / total
    return out


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": np.array([-np.inf, 0.0, 20.0, -3.0], np.float32)},
    "all": {"window": 33, "softcap": 30.0, "sinks": np.array([0.5, 1, 5, 8], np.float32)},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention(options: dict[str, Any], record_property: Record) -> None:
    worst = Worst()
    shapes = ((5, 5, 8), (6, 40, 16), (3, 100, 64), (12, 130, 1))
    for seed, ((rows, keys, width), spread) in enumerate(
        itertools.product(shapes, (0.3, 2.0, 12.0))
    ):
        q = normal(seed, rows, 4, width, spread=spread)
        k, v = normal(seed + 100, keys, 2, width), normal(seed + 200, keys, 2, width)
        scale = np.float32(width**-0.5)
        about = {"scale": scale, **options}
        y = attention_exact(q, k, v, **about)
        gauge = gauges.attention(q, k, v, y, **about)
        worst.add(margin(y, gauge, attention_fast(q, k, v, **about)), "fast")
        exact = {
            **about,
            "softcap": None if "softcap" not in options else np.float32(options["softcap"]),
        }
        for name, dot in DOTS.items():
            for tile in (1, 13, keys):
                if tile == 1 and name not in ("blas", "sequential"):
                    continue
                with np.errstate(all="ignore"):
                    answer = online(q, k, v, dot, tile, **exact)
                at = f"{name} tile={tile} S={keys} D={width} spread={spread}"
                worst.add(margin(y, gauge, answer), at)
    worst.settle(record_property, 0.05, 200)


def test_gated_mlp(record_property: Record) -> None:
    worst = Worst()
    for seed, (width, inner) in enumerate(((1, 1), (7, 3), (32, 64), (100, 37), (192, 512))):
        for (name, act), spread in itertools.product(ACTIVATIONS.items(), (0.1, 1.0, 4.0)):
            x = normal(seed, 5, width, spread=spread)
            gate, up = normal(seed + 1, inner, width), normal(seed + 2, inner, width)
            down = normal(seed + 3, width, inner)
            g, u = matmul(x, gate), matmul(x, up)
            a = act(g)
            y = matmul(a * u, down)
            gauge = gauges.gated_mlp(x, gate, up, down, g, a, u)
            for order, dot in DOTS.items():
                hidden = ACTIVATIONS_FLOAT32[name](dot(x, gate)) * dot(x, up)
                worst.add(margin(y, gauge, dot(hidden, down)), f"{order} {name} K={width}")
    worst.settle(record_property, 0.02, 200)
