"""What engines do: biases that begin sums, padding, lazy rescaling, integer dots, short ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.backends.composed import Floats
from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.plain import spread_nan
from conformance.backends.reference import Ints
from conformance.faults.fault import bfloat16, half
from conformance.golden import Array
from conformance.variants.variant import Bounded
from reference.arithmetic import F32, one_nan
from reference.experts import Router


class BiasFirst(Bounded):
    """The bias is where the sum begins, and terms are added one by one."""

    name, kernels_only = "bias-first", True
    block = 1

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """acc = bias; then a GEMM a block, beta 1."""
        y: F32 = np.zeros((len(x), len(w)), np.float32)
        y += np.float32(0) if bias is None else bias
        with np.errstate(all="ignore"):
            for first in range(0, x.shape[1], self.block):
                here = slice(first, first + self.block)
                y += x[:, here] @ w[:, here].T
        return spread_nan(y, x, w)


class BiasFirstBlocks(BiasFirst):
    """The bias is where the sum begins, and blocks of 32 terms are added to it."""

    name, block = "bias-first-blocks", 32


class DoubleFloat(Bounded):
    """Accumulators of two float32, the second holding what the first rounded off."""

    name, kernels_only = "double-float", True

    def product(self, x: F32, w: F32) -> F32:
        """Knuth's sum at every term."""
        high: F32 = np.zeros((len(x), len(w)), np.float32)
        low = np.zeros_like(high)
        with np.errstate(all="ignore"):
            for k in range(x.shape[1]):
                term = x[:, k : k + 1] * w[:, k]
                total = high + term
                back = total - high
                low += (high - (total - back)) + (term - back)
                high = total
            y = high + low
        return spread_nan(np.where(np.isfinite(y), y, high), x, w)


class UnequalParts(Bounded):
    """A dot in up to seven unequal parts, whose sums are added three by three."""

    name = "split-k-unequal"

    def product(self, x: F32, w: F32) -> F32:
        """Ends at 3, 24, 31, 72, 129 and 200."""
        ends = [end for end in (3, 24, 31, 72, 129, 200) if end < x.shape[1]]
        ranges = zip([0, *ends], [*ends, x.shape[1]], strict=True)
        with np.errstate(all="ignore"):
            parts = [x[:, a:b] @ w[:, a:b].T for a, b in ranges]
            while len(parts) > 1:
                threes = (parts[i : i + 3] for i in range(0, len(parts), 3))
                parts = [sum(three[1:], three[0]) for three in threes]
        return spread_nan(parts[0], x, w)


class PaddedRows(Bounded):
    """Rows are padded with zeros to a multiple of eight."""

    name = "padded-rows"

    def product(self, x: F32, w: F32) -> F32:
        """And the padding is dropped."""
        return super().product(np.pad(x, [(0, -len(x) % 8), (0, 0)]), w)[: len(x)]


class PaddedKeys(Bounded):
    """Keys are padded to a multiple of 64, with scores of minus infinity and values of zero."""

    name = "padded-keys"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """They weigh nothing."""
        more = -len(v) % 64
        u = np.pad(u, [(0, 0), (0, more)], constant_values=-np.inf)
        return super().sums(u, np.pad(v, [(0, more), (0, 0)]), sink)


class LazyRescale(Bounded):
    """An online softmax that rescales only where the maximum rises by more than 8."""

    name = "online-softmax-lazy"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Weights of up to e^8 in between."""
        m: F32 = np.full(len(u), sink, np.float32)
        num: Floats = np.zeros((len(u), v.shape[1]), np.float32)
        den: Floats = np.full(len(u), np.float32(sink > -np.inf))
        for first in range(0, u.shape[1], 32):
            here = slice(first, first + 32)
            top = np.maximum(m, u[:, here].max(axis=1))
            kept = np.where((top - m > 8) | (m == -np.inf), top, m)
            safe = np.where(kept == -np.inf, np.float32(0), kept)
            rescale = np.where(m == -np.inf, np.float32(0), self.exp(m - safe))
            a, b = self.weighted(self.exp(u[:, here] - safe[:, None]), v[here])
            num, den, m = num * rescale[:, None] + a, den * rescale + b, kept
        return num, den[:, None]


class KeysOf24(Bounded):
    """Values are summed over 24 keys at a time, and the sums in a tree."""

    name = "keys-of-24-pairwise"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Numerator and denominator alike."""
        sides = np.append(v, np.ones((len(v), 1), np.float32), axis=1)
        with np.errstate(all="ignore"):
            parts = [p[:, i : i + 24] @ sides[i : i + 24] for i in range(0, max(len(v), 1), 24)]
            while len(parts) > 1:
                pairs = (parts[i : i + 2] for i in range(0, len(parts), 2))
                parts = [sum(pair[1:], pair[0]) for pair in pairs]
        return parts[0][:, :-1], parts[0][:, -1]


class ExpPolynomial(Bounded):
    """exp by a reduced argument and a polynomial of degree 7 in float32."""

    name = "exp-polynomial"

    def exp(self, x: F32) -> F32:
        """Cody and Waite's two parts of ln 2; coefficients of Cephes' expf."""
        with np.errstate(all="ignore"):
            k = np.rint(np.clip(x, -150, 130) * np.float32(1.4426950408889634))
            r = x - k * np.float32(0.693359375) - k * np.float32(-2.12194440e-4)
            p: F32 = np.full_like(x, 1.9875691500e-4)
            for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.5):
                p = p * r + np.float32(c)
            y = np.ldexp(p * r * r + r + np.float32(1), np.nan_to_num(k).astype(np.int32))
        ends = np.where(x > np.float32(88.72284), np.float32(np.inf), y)
        return one_nan(np.where(x < -104, np.float32(0), ends))


class GeluBySigmoid(Bounded):
    """gelu_tanh is x / (1 + exp(-2 u)), which is the same function."""

    name = "gelu-by-sigmoid"

    def gelu_tanh(self, x: F32) -> F32:
        """u of SPEC 4.2."""
        with np.errstate(all="ignore"):
            u = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)
            y = x / (np.float32(1) + np.exp(-u))
        return one_nan(np.where(x == -np.inf, np.float32(np.nan), y))


class NormByPeak(Bounded):
    """A row with elements above 1 is divided by the largest before it is squared."""

    name = "norm-by-peak"

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """No square overflows, nor does eps over that of the largest."""
        with np.errstate(all="ignore"):
            peak = np.abs(x).max(axis=-1, keepdims=True, initial=1)
            z = x / peak
            mean = (z * z).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])
            y = z / np.sqrt(mean + np.float32(eps) / peak / peak) * weight
        y[~np.isfinite(x).all(axis=-1)] = np.nan
        return one_nan(y)


class RopeReduced(Bounded):
    """Sine and cosine of angles reduced in float32 by three parts of pi / 2."""

    name = "rope-reduced-in-three-parts"

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """By quarters of a turn."""
        n = np.rint(angle * np.float32(2 / np.pi))
        r = angle - n * np.float32(1.5703125) - n * np.float32(4.837512969970703125e-4)
        r = r - n * np.float32(7.549789948768648e-8)
        sin, cos, quarter = np.sin(r), np.cos(r), n.astype(np.int64) & 3
        turned = [np.choose(quarter + i & 3, [sin, cos, -sin, -cos]) for i in (1, 0)]
        return np.float32(factor) * turned[0], np.float32(factor) * turned[1]


class Int4Groups(Bounded):
    """int4 by dots of integers a group, each times both its scales in float32."""

    name = "int4-integer-groups"

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """int32 within a group."""
        width = x.shape[1]
        size = group or width
        codes, scale = self.quantize_int8(x)
        nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
        q = nibbles[:, :width].astype(np.int32) - 8
        y: F32 = np.zeros((len(x), len(packed)), np.float32)
        with np.errstate(all="ignore"):
            for i in range(0, width, size):
                dots = codes[:, i : i + size].astype(np.int32) @ q[:, i : i + size].T
                both = scales[:, i // size].astype(np.float32) * scale[:, None]
                y += dots.astype(np.float32) * both
        return one_nan(y)


class IntegerBlocks(Bounded):
    """Q4_0 and Q8_0 by dots of integers a block, the row's own scale coming last."""

    name = "blocks-integer"

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """int32 within a block."""
        xq, scale = self.quantize_int8(x)
        y: F32 = np.zeros((len(x), len(codes)), np.float32)
        with np.errstate(all="ignore"):
            for b in range(codes.shape[1]):
                q = codes[:, b].astype(np.int32)
                y += (xq[:, 32 * b : 32 * b + 32].astype(np.int32) @ q.T) * scales[:, b]
            return one_nan(y * scale[:, None])


class GateWithin(Bounded, ExpertsBackend):
    """Gates multiply an expert's inner values; outputs are added in order of experts."""

    name, kernels_only = "experts-gate-within", True

    def moe(self, x: F32, experts: Ints, gates: F32, gate: F32, up: F32, down: F32,
            activation: str, shared_gate: F32 | None = None, shared_up: F32 | None = None,
            shared_down: F32 | None = None, shared_router: F32 | None = None) -> F32:  # fmt: skip
        """down(g h) for g down(h)."""
        y = np.zeros_like(x)
        with np.errstate(all="ignore"):
            for expert in np.unique(experts).tolist():
                tokens, ranks = np.nonzero(experts == expert)
                a = self.activate(activation, self.product(x[tokens], gate[expert]))
                inner = a * self.product(x[tokens], up[expert]) * gates[tokens, ranks, None]
                np.add.at(y, tokens, self.product(inner, down[expert]))
            if shared_gate is not None and shared_up is not None and shared_down is not None:
                shared = self.gated_mlp(x, shared_gate, shared_up, shared_down, activation)
                if shared_router is not None:
                    shared = self.shared_weighed(shared, self.product(x, shared_router))
                y += shared
        return one_nan(y)


class SoftmaxOfChosen(Bounded, ExpertsBackend):
    """A softmax that is renormalised over the chosen is that of their logits alone."""

    name, kernels_only = "route-softmax-of-chosen", True

    def weighed(self, scores: F32, logits: F32, experts: Ints, router: Router) -> F32:
        """The same numbers."""
        if router.score != "softmax" or not router.renormalise:
            return super().weighed(scores, logits, experts, router)
        return self.softmax(np.take_along_axis(logits, experts, axis=1))

    def renormalised(self, gates: F32, router: Router) -> F32:
        """They are already."""
        return gates if router.score == "softmax" else super().renormalised(gates, router)


class WeightsBfloat16(Bounded):
    """Weights in bfloat16, activations and sums in float32; attention in float32, as declared."""

    name, kernels_only = "weights-bfloat16", True
    numerics: Mapping[str, Any] = {
        "operands": "float32", "accumulator": "float32", "kv": "float32",
        "operations": {
            name: {"operands": "bfloat16"} for name in ("linear", "linear_w4a16", "gated_mlp")
        },
    }  # fmt: skip

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """Rounded when loaded."""
        return super().linear(x, bfloat16(w), bias)

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """Rounded when dequantized."""
        return bfloat16(super().dequantized(packed, scales, width, group, zeros))


class WeightOnlyFloat16(Bounded):
    """Weight-only int4 with weights and activations in float16 and sums in float32."""

    name, kernels_only = "w4a16-float16", True
    numerics: Mapping[str, Any] = {
        "operands": "float16", "accumulator": "float32", "kv": "float16",
    }  # fmt: skip

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """Marlin's way."""
        return super().linear_w4a16(half(x), packed, scales, group, zeros)

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """Rounded when dequantized."""
        return half(super().dequantized(packed, scales, width, group, zeros))
