"""Try the error models of SPEC 16 on random legitimate computations; writes docs/error-models.md.

    python tools/prove_error_models.py                     all models, 10,000 computations each
    python tools/prove_error_models.py --models dot --each 500 --no-table

A computation is one draw of a shape, of data, of a precision and of a machine: an order of sums,
FMA or not, operands and sums of one precision or of two, subnormals kept or flushed. Machines are
emulated in float64, each result rounded to the precision that the machine declares. A model that
one of them violates is wrong, and one that none of them approaches is too wide.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from conformance.backends.composed import OwnOrderBackend
from conformance.backends.reference import ReferenceBackend
from conformance.golden import Golden
from conformance.paths import model_folder
from conformance.rules import Precision, bound, gauges, unit_roundoff
from conformance.rules.gauges import Gauge
from conformance.rules.noise import MODEL as NOISE
from conformance.rules.noise import spread
from reference import elementary
from reference.arithmetic import matmul
from reference.attention import attention_exact
from reference.experts import Router, Score, route
from reference.feedforward import ACTIVATIONS, gated_mlp
from reference.model import load_model
from reference.normalization import rms_norm
from reference.quantization import (
    Int4Matrix,
    dequantize,
    linear_int4,
    linear_w4a16,
    quantize_int4,
    quantize_int8,
)
from reference.rotary import rotate, turn

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Rng = np.random.Generator

TABLE = Path(__file__).parents[1] / "docs" / "error-models.md"
EACH = 10_000
"""Computations of each model, shared out over the precisions."""

LEAST_WORST = 0.02
"""A bound that no legitimate computation comes nearer to hides faults."""

EXACT = ("int4", "float64")
"""No order changes these sums, and float64 holds them (SPEC 5.6): their margin is 0."""


@dataclass(frozen=True)
class Format:
    """A binary format. bits: of the significand; least: exponent of the least normal number."""

    name: str
    bits: int
    least: int = -126

    def rounded(self, given: Any, flushes: bool = False) -> F64:
        """To nearest even, gradual underflow or none; no overflow."""
        x: F64 = np.asarray(given, np.float64)
        if self.name == "float64":
            return x
        _, exponent = np.frexp(x)
        unit = np.maximum(exponent, self.least + 1) - self.bits
        y: F64 = np.ldexp(np.rint(np.ldexp(x, -unit)), unit)
        return np.where(np.abs(y) < 2.0**self.least, 0.0, y) if flushes else y


FORMATS = {
    f.name: f
    for f in (
        Format("float64", 53, -1022),
        Format("float32", 24),
        Format("tf32", 11),
        Format("bfloat16", 8),
        Format("float16", 11, -14),
    )
}
ORDERS = ("sequential", "pairwise", "lanes", "tiles")


@dataclass
class Machine:
    """What computes: formats, an order, and chance for what a library may do either way."""

    rng: Rng
    operands: Format
    sums: Format
    order: str
    width: int
    fma: bool
    permuted: bool
    flushes: bool

    @classmethod
    def draw(cls, rng: Rng, precision: str) -> Machine:
        """A machine of a declared precision: throughout, or for operands with float32 sums."""
        operands = sums = FORMATS[precision]
        if operands.bits < 24 and rng.random() < 0.5:
            sums = FORMATS["float32"]
        order = str(rng.choice(ORDERS))
        width = int(rng.choice((2, 4, 8, 16, 32)))
        fma, permuted, flushes = (bool(rng.random() < p) for p in (0.5, 0.5, 0.25))
        return cls(rng, operands, sums, order, width, fma, permuted, flushes)

    @property
    def declared(self) -> Precision:
        """As `numerics` would say it."""
        return unit_roundoff(
            {
                "operands": self.operands.name,
                "accumulator": self.sums.name,
                "flush_to_zero": self.flushes,
            }
        )

    def store(self, x: Any) -> F64:
        """To an operand."""
        return self.operands.rounded(np.asarray(x, np.float64), self.flushes)

    def rn(self, x: Any) -> F64:
        """The result of one operation."""
        return self.sums.rounded(np.asarray(x, np.float64), self.flushes)

    def function(self, f: Callable[[F64], F64], x: F64) -> F64:
        """A library's function: a good one, which errs by one unit more than it must."""
        y = f(x)
        unit = float(np.ldexp(1.0, -self.sums.bits))
        return self.rn(y * (1 + self.rng.uniform(-unit, unit, y.shape)))

    def total(self, terms: F64, exact: bool = False) -> F64:
        """The sum over the last axis. exact: terms are products that FMA adds unrounded."""
        if exact and self.order == "pairwise":
            terms = self.rn(terms)
        if self.permuted:
            terms = terms[..., self.rng.permutation(terms.shape[-1])]
        if self.order == "pairwise":
            return self._halved(terms)
        if self.order == "sequential":
            return self._folded(terms)
        width = min(self.width, terms.shape[-1])
        filled = np.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, -terms.shape[-1] % width)])
        if self.order == "lanes":
            lanes = filled.reshape(*filled.shape[:-1], -1, width).swapaxes(-1, -2)
            return self._halved(self._folded(lanes))
        return self._folded(self._folded(filled.reshape(*filled.shape[:-1], -1, width)))

    def _folded(self, terms: F64) -> F64:
        acc = self.rn(terms[..., 0])
        for k in range(1, terms.shape[-1]):
            acc = self.rn(acc + terms[..., k])
        return acc

    def _halved(self, terms: F64) -> F64:
        while terms.shape[-1] > 1:
            if terms.shape[-1] % 2:
                terms = np.concatenate([terms, np.zeros((*terms.shape[:-1], 1))], axis=-1)
            terms = self.rn(terms[..., 0::2] + terms[..., 1::2])
        return self.rn(terms[..., 0])

    def dot(self, x: F32 | F64, w: F32 | F64) -> F64:
        """x (T, K) times w (N, K), of rounded operands."""
        terms = self.store(x)[:, None] * self.store(w)
        return self.total(terms if self.fma else self.rn(terms), self.fma)

    def divide(self, a: F64, b: F64) -> F64:
        """A quotient, or a product with the reciprocal."""
        if self.permuted:
            return self.rn(a / b)
        return self.rn(a * self.rn(1 / b))


# ------------------------------------------------------------------------------ data


KINDS = ("normal", "heavy", "outliers", "cancelling", "one sign", "subnormal")


def data(rng: Rng, kind: str, machine: Machine, *shape: int) -> F32:
    """Numbers of a kind; within the range of float16 where the machine has no more."""
    x = rng.standard_normal(shape)
    narrow = min(machine.operands.least, machine.sums.least) != -126 and (
        "float16" in (machine.operands.name, machine.sums.name)
    )
    if kind == "heavy":
        x *= 2.0 ** rng.integers(-20, 4, shape)
    elif kind == "outliers":
        x[..., rng.integers(0, shape[-1], max(1, shape[-1] // 20))] *= 8 if narrow else 1000
    elif kind == "cancelling":
        half = shape[-1] // 2
        x[..., half : 2 * half] = -x[..., :half] * (1 + 2.0**-12 * rng.standard_normal())
    elif kind == "one sign":
        x = np.abs(x)
    elif kind == "subnormal":
        x *= 2.0 ** rng.integers(-18 if narrow else -130, -10 if narrow else -100)
    if narrow:
        x = np.clip(x, -16, 16)
    return x.astype(np.float32)


def length(rng: Rng, most: int) -> int:
    """From 1 to `most`, each octave as likely as another."""
    return int(2 ** rng.uniform(0, math.log2(most + 0.99)))


# ------------------------------------------------------------------------------ computations


@dataclass(frozen=True)
class Computed:
    """What was asked, the exact answer with its gauge, and the machine's."""

    operation: str
    inputs: dict[str, Any]
    parameters: dict[str, Any]
    exact: F32
    gauge: Gauge
    answer: F64


def kinds(rng: Rng) -> tuple[str, str]:
    """A kind of data, and another one, as often the same; both subnormal never."""
    first, second = (str(k) for k in rng.choice(KINDS, 2))
    return first, "normal" if first == "subnormal" else second


def dot(rng: Rng, m: Machine) -> Computed:
    """A linear layer."""
    t, n, k = length(rng, 3), length(rng, 4), length(rng, 512)
    kind, other = kinds(rng)
    x, w = data(rng, kind, m, t, k), data(rng, other, m, n, k)
    bias = data(rng, "normal", m, n) if rng.random() < 0.5 else None
    y, answer = matmul(x, w), m.dot(x, w)
    if bias is not None:
        y, answer = y + bias, m.rn(answer + m.store(bias))
    inputs = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    return Computed("linear", inputs, {}, y, gauges.linear(x, w, bias, y), answer)


def alike(rng: Rng, m: Machine) -> Computed:
    """A linear layer of long sums whose terms are alike, as they lie, perhaps after a large one."""
    n, k = length(rng, 4), 50 * length(rng, 20)
    values = np.abs(data(rng, "normal", m, n, int(rng.choice((1, 1, 2, 5)))))
    w = np.take_along_axis(values, rng.integers(0, values.shape[1], (n, k)), axis=1)
    w *= (1 + 2.0 ** -rng.integers(8, 30) * rng.random((n, k))).astype(np.float32)
    if rng.random() < 0.5:
        w[:, 0] = min(4.0 * k, 2048.0)
    m.permuted = False
    x = np.ones((1, k), np.float32)
    y = matmul(x, w)
    answer = m.store(m.dot(x, w))
    return Computed("linear", {"x": x, "w": w}, {}, y, gauges.linear(x, w, None, y), answer)


def int4(rng: Rng, m: Machine) -> Computed:
    """A linear layer of int4 weights; codes are those of the reference."""
    t, n, k = length(rng, 3), length(rng, 4), length(rng, 256)
    x, w = data(rng, str(rng.choice(KINDS[:5])), m, t, k), data(rng, "normal", m, n, k)
    group = int(rng.choice((0, 32)))
    matrix = quantize_int4(w, group or k)
    packed = Int4Matrix(matrix.packed, matrix.scales, k, group or k)
    y = linear_int4(x, packed)
    weights = dequantize(packed)
    codes, scale = quantize_int8(x)
    gauge = gauges.linear_int4(codes.astype(np.float32), scale, weights, y)
    if m.fma:  # activations come as tensors of the declared type, and codes are made of those
        with np.errstate(invalid="ignore"):
            codes, scale = quantize_int8(m.store(x).astype(np.float32))
    wide, factor = codes.astype(np.float64), m.store(scale)[:, None]
    late = m.permuted
    answer = m.rn(m.dot(wide, weights) * factor) if late else m.dot(m.rn(wide * factor), weights)
    answer = m.store(answer)
    inputs = {"x": x, "packed": matrix.packed, "scales": matrix.scales}
    return Computed("linear_int4", inputs, {"group": group}, y, gauge, answer)


def w4a16(rng: Rng, m: Machine) -> Computed:
    """A linear layer of floats on int4 codes, scaled before its sums or after them."""
    t, n, k = length(rng, 3), length(rng, 4), length(rng, 256)
    x = data(rng, str(rng.choice(KINDS)), m, t, k)
    group = int(rng.choice((0, 32, 64, 128)))
    size = group or k
    groups = -(-k // size)
    packed = rng.integers(0, 256, (n, -(-k // 2)), np.uint8)
    steps = rng.uniform(0.5, 1, (n, groups)) * 2.0 ** rng.integers(-8, 1, (n, groups))
    scales = (steps * rng.choice((-1, 1), (n, groups))).astype(np.float16)
    zeros = rng.integers(0, 16, (n, groups), np.uint8) if rng.random() < 0.5 else None
    matrix = Int4Matrix(packed, scales, k, size)
    ones = Int4Matrix(packed, np.ones_like(scales), k, size)
    y, z = linear_w4a16(x, matrix, zeros), np.full((n, groups), 8) if zeros is None else zeros
    spread = np.repeat(scales.astype(np.float32) * z, size, axis=1)[:, :k].astype(np.float32)
    gauge = gauges.linear_w4a16(x, dequantize(matrix, zeros), spread, y)
    way, codes = int(rng.integers(3)), dequantize(ones, zeros).astype(np.float64)
    scale = m.store(scales)
    if way == 0:
        answer = m.dot(x, codes * np.repeat(scale, size, axis=1)[:, :k])
    else:
        parts = []
        for g in range(groups):
            here = slice(g * size, (g + 1) * size)
            if way == 1:
                part = m.dot(x[:, here], codes[:, here])
            else:
                sums = m.total(m.store(x[:, here]))[:, None]
                stored = m.dot(x[:, here], codes[:, here] + z[:, g, None])
                part = m.rn(stored - m.rn(sums * z[:, g]))
            parts.append(m.rn(part * scale[:, g]))
        answer = m.total(np.stack(parts, axis=-1))
    inputs = {"x": x, "packed": packed, "scales": scales}
    inputs |= {} if zeros is None else {"zeros": zeros}
    return Computed("linear_w4a16", inputs, {"group": group}, y, gauge, answer)


def activation(rng: Rng, m: Machine) -> Computed:
    """sigmoid, silu and gelu_tanh by their formulas."""
    name = str(rng.choice(("sigmoid", "silu", "gelu_tanh")))
    x = data(rng, str(rng.choice(KINDS)), m, length(rng, 64)) * np.float32(rng.choice((0.3, 1, 4)))
    y = getattr(elementary, name)(x)
    roundings = {"sigmoid": 3, "silu": 4, "gelu_tanh": 8}[name]
    sigmoid = name == "sigmoid"
    gauge = gauges.elementwise(y, y if sigmoid else x, roundings, x if sigmoid else None)
    return Computed(name, {"x": x}, {}, y, gauge, activated(m, name, m.store(x)))


def activated(m: Machine, name: str, x: F64) -> F64:
    """An activation, each of its steps rounded."""
    if name == "gelu_tanh":
        inner = m.rn(x * m.rn(1 + m.rn(m.store(0.044715) * m.rn(x * x))))
        turned = m.function(np.tanh, m.rn(m.store(math.sqrt(2 / math.pi)) * inner))
        return m.rn(m.rn(0.5 * x) * m.rn(1 + turned))
    with np.errstate(over="ignore"):
        below = m.rn(1 + m.function(np.exp, -x))
    return m.divide(np.ones_like(x) if name == "sigmoid" else x, below)


def softmax(rng: Rng, m: Machine) -> Computed:
    """Over the last axis."""
    spread = np.float32(rng.choice((0.1, 1, 5)))
    x = data(rng, str(rng.choice(KINDS[:5])), m, length(rng, 3), length(rng, 512)) * spread
    y = elementary.softmax(x)
    kept = m.store(x)
    p = m.function(np.exp, m.rn(kept - kept.max(axis=-1, keepdims=True)))
    answer = m.divide(p, m.total(p)[..., None])
    gauge = gauges.softmax(x, y)
    return Computed("softmax", {"x": x}, {}, y, gauge, answer)


def norm(rng: Rng, m: Machine) -> Computed:
    """RMSNorm, the root by division or reciprocal, the weight first or last."""
    t, k = length(rng, 3), length(rng, 512)
    kind, other = kinds(rng)
    kind = "normal" if kind == "subnormal" else kind
    x, weight = data(rng, kind, m, t, k), data(rng, other, m, k)
    eps = float(np.float32(rng.choice((1e-5, 1e-6))))
    y = rms_norm(x, weight, eps)
    kept, w = m.store(x), m.store(weight)
    squares = kept * kept
    total = m.total(squares if m.fma else m.rn(squares), m.fma)[:, None]
    mean = m.rn(m.rn(total / k) + eps)
    root = m.rn(np.sqrt(mean))
    if m.permuted:
        answer = m.rn(m.rn(kept / root) * w)
    else:
        r = m.rn(1 / root)
        answer = m.rn(m.rn(kept * r) * w) if m.fma else m.rn(kept * m.rn(r * w))
    inputs = {"x": x, "weight": weight}
    return Computed("rms_norm", inputs, {"eps": eps}, y, gauges.rms_norm(x, y), answer)


def rope(rng: Rng, m: Machine) -> Computed:
    """A rotation of all or the first part of a head; the angle is float32 or finer (SPEC 16.4)."""
    t, d = length(rng, 6), 2 * length(rng, 32)
    interleaved = bool(rng.random() < 0.5)
    rest = length(rng, 32) if rng.random() < 0.5 else 0
    x = data(rng, str(rng.choice(KINDS)), m, t, 2, d + rest)
    positions = rng.integers(0, 2 ** int(rng.integers(1, 17)), t)
    inv_freq = (10000.0 ** -(np.arange(d // 2) / (d / 2))).astype(np.float32)
    angle = positions.astype(np.float32)[:, None] * inv_freq
    cos, sin = turn(angle, np.float32(1))
    y = rotate(x, cos, sin, interleaved)
    gauge = gauges.rope(x, cos, sin, angle, interleaved)
    wide: F64 = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)
    turned = wide if m.permuted else FORMATS["float32"].rounded(wide)
    c, s = (m.store(m.function(f, turned))[:, None] for f in (np.cos, np.sin))
    first = slice(0, d, 2) if interleaved else slice(0, d // 2)
    second = slice(1, d, 2) if interleaved else slice(d // 2, d)
    kept = m.store(x)
    a, b, answer = kept[..., first], kept[..., second], kept.copy()
    left, right = (a * c, b * c) if m.fma else (m.rn(a * c), m.rn(b * c))
    answer[..., first], answer[..., second] = m.rn(left - m.rn(b * s)), m.rn(right + m.rn(a * s))
    answer = m.store(answer)
    inputs = {"x": x, "positions": positions, "inv_freq": inv_freq}
    return Computed("rope", inputs, {"interleaved": interleaved}, y, gauge, answer)


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


class MachineBackend(OwnOrderBackend):
    """Whole models whose sums a machine computes, and whose results it stores."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def product(self, x: F32, w: F32) -> F32:
        """A linear layer, or the scores of attention."""
        return self.machine.store(self.machine.dot(x, w)).astype(np.float32)

    def total(self, p: F32) -> F32:
        """The denominator of a softmax."""
        return self.machine.total(p.astype(np.float64)).astype(np.float32)

    def mean_square(self, x: F32) -> F32:
        """That of a norm."""
        fma, squares = self.machine.fma, np.square(self.machine.store(x))
        total = self.machine.total(squares if fma else self.machine.rn(squares), fma)
        return self.machine.rn(total / x.shape[-1]).astype(np.float32)


def whole(rng: Rng, m: Machine) -> Computed:
    """Logits of a model of random weights (SPEC 16.5)."""
    folder = model_folder(str(rng.choice(("random-mistral", "random-qwen2", "random-llama"))))
    model = load_model(folder)
    tokens = rng.integers(0, model.config.vocab_size, 12)
    noise = spread(model, f"prove/{rng.integers(2**40)}", tokens, len(tokens))
    session = MachineBackend(m).load(model=str(folder), weights="float32")
    session.reset()
    answer = session.forward(tokens, "fast").astype(np.float64)
    gauge = Gauge({"noise": noise}, {"noise": NOISE})
    return Computed("forward", {"tokens": tokens}, {}, model.forward(tokens), gauge, answer)


def gates(rng: Rng, m: Machine) -> Computed:
    """The gates of experts whose choice is given."""
    t, e = length(rng, 3), 2 * length(rng, 32)
    k = int(rng.integers(1, min(e, 8) + 1))
    scores: tuple[Score, ...] = ("softmax", "sigmoid", "logits")
    score = scores[int(rng.integers(3))]
    renormalise, scale = bool(rng.random() < 0.5), float(rng.integers(1, 3))
    router = Router(e, k, score, renormalise=renormalise, scale=scale)
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
    return Computed(
        "route", {"logits": logits}, {}, routing.gates, gauge, m.rn(found * router.scale)
    )


MODELS: dict[str, Callable[[Rng, Machine], Computed]] = {
    "dot": dot,
    "alike": alike,
    "int4": int4,
    "w4a16": w4a16,
    "activation": activation,
    "softmax": softmax,
    "rms_norm": norm,
    "rope": rope,
    "attention": attention,
    "gated_mlp": mlp,
    "route": gates,
    "moe": experts,
    "noise": whole,
}

MANY = {"noise": 100}
"""Seeds a computation, for the models whose one computation gives hundreds of results."""


# ------------------------------------------------------------------------------ the proof


@dataclass
class Found:
    """What a model's computations at one precision came to."""

    model: str
    precision: str
    computations: int = 0
    results: int = 0
    violations: int = 0
    worst: float = 0.0
    seeds: list[int] = field(default_factory=list)

    @property
    def wide(self) -> bool:
        """Whether nothing approached the bound."""
        return self.worst < LEAST_WORST and (self.model, self.precision) != EXACT

    def add(self, margin: F64, seed: int) -> None:
        """Count one computation by the margins of its results."""
        self.computations += 1
        self.results += margin.size
        worst = float(margin.max(initial=0.0))
        self.worst = max(self.worst, worst)
        if worst > 1:
            self.violations += 1
            self.seeds.append(seed)


def margins(found: Computed, declared: Precision) -> F64:
    """error / bound of each result, by the rule `gauge`."""
    golden = Golden(
        "kernel/x/y", "16", found.operation, found.parameters, found.inputs, {"y": found.exact},
        ("gauge",), found.gauge.terms, found.gauge.models, found.gauge.distance,
    )  # fmt: skip
    allowed = bound(golden, declared)
    error = np.abs(found.answer.astype(np.float32).astype(np.float64) - found.exact)
    return np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)


def prove(model: str, precision: str, seeds: range) -> Found:
    """Try a model at a precision on one computation a seed."""
    found = Found(model, precision)
    with np.errstate(all="ignore"):
        for seed in seeds[:: MANY.get(model, 1)]:
            rng = np.random.default_rng([seed, *model.encode(), *precision.encode()])
            machine = Machine.draw(rng, precision)
            computed = MODELS[model](rng, machine)
            if not np.isfinite(computed.exact).all() or not np.isfinite(computed.answer).all():
                continue  # an overflow of float16 is not a rounding
            found.add(margins(computed, machine.declared), seed)
    return found


def recorded(text: str) -> tuple[list[Found], float]:
    """The rows of docs/error-models.md, and the minutes that it took."""
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \| ([\d,]+) \| ([\d,]+) \| (\d+) \| ([\d.]+) \|$", text, re.M
    )
    minutes = re.search(r"^([\d.]+) minutes", text, re.M)
    assert minutes is not None
    found = []
    for model, precision, *counts, worst in rows:
        tried, results, violations = (int(count.replace(",", "")) for count in counts)
        found.append(Found(model, precision, tried, results, violations, float(worst)))
    return found, float(minutes[1])


def table(rows: list[Found], minutes: float) -> str:
    """docs/error-models.md."""
    lines = [
        "# Error models, tried",
        "",
        "Written by `python tools/prove_error_models.py`, which took",
        f"{minutes:.1f} minutes on {os.cpu_count()} cores. A computation is a random shape,",
        "random data (normal, heavy tails, outliers, cancelling, of one sign, subnormal; `alike`:",
        "a few values many times, perhaps after a large one), a",
        "random order of sums, with FMA or without, operands and sums of the precision or sums of",
        "float32, subnormals kept or flushed to zero. Its results are judged by `gauge` with",
        "what such a machine declares; a violation is a computation with a result beyond its bound",
        "(SPEC 16.3). The margin is error / bound; a bound that nothing brings above",
        f"{LEAST_WORST} would hide faults.",
        "",
        "int4 in float64 has margin 0: its scaled sums are exact in float64, whatever their order",
        "(SPEC 5.6). A computation whose result overflows float16 is left out.",
        "",
        "`noise` is whole models of random weights (`fixtures/random-*`), 12 tokens each, their",
        "sums, scores and norms computed so: few passes, each of 768 logits or more. Its one scale",
        "for sums and operands makes it wide where the sums are float32 and the operands are less.",
        "",
        "| model | precision | computations | results | violations | worst margin |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r.model} | {r.precision} | {r.computations:,} | {r.results:,} | {r.violations} "
        f"| {r.worst:.3f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prove; 0 where no model was violated and each was approached, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--each", type=int, default=EACH, help="computations a model (10,000)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--keep", action="store_true", help="keep the record's rows of the models not tried"
    )
    parser.add_argument("--no-table", action="store_true", help="print, and leave docs/ as it is")
    options = parser.parse_args()
    started = perf_counter()
    share = -(-options.each // len(FORMATS))
    tasks = [(model, precision) for model in options.models for precision in FORMATS]
    rows = list(_all(tasks, range(share), options.workers))
    minutes = (perf_counter() - started) / 60
    if options.keep:
        earlier, before = recorded(TABLE.read_text())
        rows = [row for row in earlier if row.model not in options.models] + rows
        rows.sort(key=lambda row: list(MODELS).index(row.model))
        minutes += before
    text = table(rows, minutes)
    if not options.no_table:
        TABLE.write_text(text)
    print(text)
    for row in rows:
        if row.violations:
            print(f"VIOLATED {row.model} {row.precision}: seeds {row.seeds[:8]}", file=sys.stderr)
        if row.wide:
            print(f"TOO WIDE {row.model} {row.precision}: {row.worst:.4f}", file=sys.stderr)
    return int(any(row.violations or row.wide for row in rows))


def _all(tasks: list[tuple[str, str]], seeds: range, workers: int) -> Iterator[Found]:
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting = [pool.submit(prove, *task, seeds) for task in tasks]
        for done in track(waiting, "proving", console=Console(stderr=True)):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main())
