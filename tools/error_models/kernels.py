"""Random computations of one step: dots, activations, softmax, norms, rope."""

from __future__ import annotations

import math

import numpy as np

from conformance.rules import gauges
from reference import elementary
from reference.arithmetic import matmul
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
from tools.error_models.data import KINDS, Computed, data, kinds, length
from tools.error_models.machine import F64, FORMATS, Machine, Rng


def dot(rng: Rng, m: Machine) -> Computed:
    """A linear layer; its bias is added to the sum, or begins it, perhaps much larger than it."""
    t, n, k = length(rng, 3), length(rng, 4), length(rng, 512)
    kind, other = kinds(rng)
    x, w = data(rng, kind, m, t, k), data(rng, other, m, n, k)
    bias = data(rng, "normal", m, n) if rng.random() < 0.5 else None
    y, answer = matmul(x, w), m.dot(x, w)
    if bias is not None:
        y = y + bias
        begins = rng.random() < 0.5
        whole = (np.insert(x, 0, 1, axis=1), np.insert(w, 0, bias, axis=1)) if begins else None
        answer = m.rn(answer + m.store(bias)) if whole is None else m.dot(*whole)
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
