"""Other ways through attention, norms, rope and activations, in float32."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import Floats
from conformance.backends.plain import PlainBackend
from conformance.backends.reference import Ints
from conformance.golden import Array
from conformance.variants.variant import Bounded, Variant
from reference.arithmetic import F32, one_nan


class Plain(Variant, PlainBackend):
    """The float32 lane of the reference: tiled attention, BLAS everywhere."""

    name = "reference-float32"


class Online(Bounded):
    """An online softmax over blocks of keys, the sum rescaled whenever the maximum rises."""

    block = 32

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """One block after the other."""
        m: F32 = np.full(len(u), sink, np.float32)
        num: Floats = np.zeros((len(u), v.shape[1]), np.float32)
        den: Floats = np.full(len(u), np.float32(sink > -np.inf))
        for first in range(0, u.shape[1], self.block):
            here = slice(first, first + self.block)
            higher = np.maximum(m, u[:, here].max(axis=1))
            safe = np.where(higher == -np.inf, np.float32(0), higher)
            rescale, p = self.exp(m - safe), self.exp(u[:, here] - safe[:, None])
            a, b = self.weighted(p, v[here])
            num, den, m = num * rescale[:, None] + a, den * rescale + b, higher
        return num, den[:, None]


class OnlineOne(Online):
    """An online softmax over single keys."""

    name, block, kernels_only = "online-softmax-1", 1, True


class OnlineSeven(Online):
    """An online softmax over blocks of 7."""

    name, block = "online-softmax-7", 7


class OnlineThirtyTwo(Online):
    """An online softmax over blocks of 32."""

    name = "online-softmax-32"


class Online128(Online):
    """An online softmax over blocks of 128."""

    name, block = "online-softmax-128", 128


class SplitKeys(Bounded):
    """Keys in parts, each with a maximum of its own, merged by their log-sum-exp."""

    parts = 2

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Outputs of the parts, weighted; the sink is one part more."""
        step = -(-u.shape[1] // self.parts)
        outs, sizes = [], []
        for first in range(0, u.shape[1], step):
            here = slice(first, first + step)
            m = self.peak(u[:, here], np.float32(-np.inf))
            num, den = self.weighted(self.shares(u[:, here], m), v[here])
            seen = den > 0
            outs.append(num / np.where(seen, den, 1)[:, None])
            sizes.append(np.where(seen, m + np.log(np.where(seen, den, 1)), -np.inf))
        sizes.append(np.full(len(u), sink))
        m = np.max(sizes, axis=0)
        m = np.where(m == -np.inf, 0, m)
        weights = [np.exp(size - m) for size in sizes]
        total = sum(w[:, None] * out for w, out in zip(weights, outs, strict=False))
        den = np.asarray(np.sum(weights, axis=0, dtype=np.float32))
        return np.asarray(total, np.float32), den[:, None]


class SplitKeysTwo(SplitKeys):
    """Flash decoding in 2 parts."""

    name = "split-keys-2"


class SplitKeysFive(SplitKeys):
    """Flash decoding in 5 parts."""

    name, parts = "split-keys-5", 5


class ScaledQueries(Bounded):
    """The scale is multiplied into the queries."""

    name = "scaled-queries"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Before the product."""
        return self.product(q * scale, k)


class BaseTwo(Bounded):
    """Exponentials of base 2, scores multiplied by log2(e)."""

    name = "base-2"

    def shares(self, u: F32, m: F32) -> F32:
        """2^((u - m) log2 e)."""
        with np.errstate(all="ignore"):
            return np.asarray(np.exp2((u - m[:, None]) * np.float32(np.log2(np.e))))


class NormalisedFirst(Bounded):
    """Weights are divided by their sum before they meet the values."""

    name = "normalised-first"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Shares that sum up to one."""
        m = self.peak(u, sink)
        p = self.shares(u, m)
        den = self.total(p) + self.sink_share(sink, m)
        with np.errstate(all="ignore"):
            shares = np.where(den[:, None] > 0, p / den[:, None], np.float32(0))
        return self.weighted(shares, v)[0], np.ones((len(u), 1), np.float32)


class SinkAsKey(Bounded):
    """A sink is one more key, with a value of zero."""

    name = "sink-as-key"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """A column more."""
        u = np.concatenate([np.full((len(u), 1), sink, np.float32), u], axis=1)
        v = np.concatenate([np.zeros((1, v.shape[1]), np.float32), v])
        return super().sums(u, v, np.float32(-np.inf))


class KeysBackwards(Bounded):
    """Keys from the last to the first."""

    name = "keys-backwards"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Turned round."""
        turned = np.ascontiguousarray(u[:, ::-1])
        return super().sums(turned, np.ascontiguousarray(v[::-1]), sink)


class SiluByTanh(Bounded):
    """sigmoid(x) as (1 + tanh(x / 2)) / 2."""

    name = "sigmoid-by-tanh"

    def silu(self, x: F32) -> F32:
        """x (1 + tanh(x / 2)) / 2."""
        return self._quiet(lambda x: np.float32(0.5) * x * (1 + np.tanh(np.float32(0.5) * x)), x)


class SoftmaxByLogSum(Bounded):
    """Softmax as exp(x - log sum exp)."""

    name = "softmax-by-log-sum"

    def softmax(self, x: F32) -> F32:
        """Without a division."""
        with np.errstate(all="ignore"):
            low = x - x.max(axis=-1, keepdims=True)
            size = np.log(np.exp(low).sum(axis=-1, keepdims=True))
            return one_nan(np.exp(low - size))


class NormByDivision(Bounded):
    """RMSNorm divides by the root."""

    name = "norm-by-division"

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """x / sqrt(ms + eps) w."""
        with np.errstate(all="ignore"):
            root = np.sqrt(self.mean_square(x) + np.float32(eps))
            y = (x / root[..., None] * weight).astype(np.float32)
        y[~np.isfinite(x).all(axis=-1)] = np.nan
        return one_nan(y)


class WeightFirst(Bounded):
    """RMSNorm multiplies by the weight first."""

    name = "norm-weight-first"

    def scaled_row(self, x: F32, r: F32, weight: F32) -> F32:
        """(x w) r."""
        y: F32 = x * weight * r[..., None]
        return y


class AnglesFloat64(Bounded):
    """Rope's angles, sines and cosines in float64."""

    name = "rope-float64-angles"

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """Rounded at the end."""
        cos, sin = (factor * function(angle.astype(np.float64)) for function in (np.cos, np.sin))
        return cos.astype(np.float32), sin.astype(np.float32)

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """Not rounded to float32."""
        return np.asarray(positions[:, None] * inv_freq.astype(np.float64))


class RopeComplex(Bounded):
    """Rope as a complex product."""

    name = "rope-complex"

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """(a + bi) e^(i angle) in complex64."""
        turned = (a + 1j * b) * (cos + 1j * sin)
        return turned.real, turned.imag


class RopeFused(Bounded):
    """Rope with a fused multiply-add."""

    name = "rope-fma"

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """The first product is not rounded."""
        wide = a.astype(np.float64) * cos - b * sin, b.astype(np.float64) * cos + a * sin
        return wide[0].astype(np.float32), wide[1].astype(np.float32)


class GateUpFused(Bounded):
    """gate and up as one matrix."""

    name = "fused-gate-up"

    def gated_mlp(self, x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        """One product for both."""
        with np.errstate(all="ignore"):
            a, u = np.split(self.product(x, np.concatenate([gate, up])), 2, axis=1)
            return self.product(one_nan(self.activate(activation, a) * u), down)


class Int4Rescaled(Bounded):
    """int4 weights are dequantized with the row's scale of the activations multiplied in."""

    name = "int4-rescaled-activations"

    def int4_sums(self, codes: F32, weights: F32) -> Floats:
        """Group after group of 32."""
        total = np.zeros((len(codes), len(weights)), np.float32)
        for first in range(0, codes.shape[1], 32):
            here = slice(first, first + 32)
            total += codes[:, here] @ weights[:, here].T
        return total


class ScaledByGroup(Bounded):
    """Codes of weight-only int4 are summed as they are, and each group's sum is scaled."""

    name = "w4a16-scaled-by-group"

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """The sum of scale * (codes less zero points)."""
        width = x.shape[1]
        ones = np.ones_like(scales)
        codes = self.dequantized(packed, ones, width, group or width, zeros)
        return self.by_group(x, codes, scales.astype(np.float32), group or width)

    def by_group(self, x: F32, codes: F32, scales: F32, group: int) -> F32:
        """Sums over each group, scaled and added."""
        total = np.zeros((len(x), len(codes)), np.float32)
        for g in range(scales.shape[1]):
            here = slice(g * group, (g + 1) * group)
            total += self.product(x[:, here], codes[:, here]) * scales[:, g]
        return one_nan(total)


class ZeroPointsApart(ScaledByGroup):
    """Zero points of weight-only int4 are multiplied by sums of activations."""

    name = "w4a16-zero-points-apart"

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """scale * (sum x c - z sum x)."""
        width = x.shape[1]
        ones, steps = np.ones_like(scales), scales.astype(np.float32)
        stored = np.zeros(scales.shape, np.uint8)
        codes = self.dequantized(packed, ones, width, group or width, stored)
        z = np.full(scales.shape, 8, np.float32) if zeros is None else zeros.astype(np.float32)
        sums = self.by_group(x, np.ones_like(codes), steps * z, group or width)
        return one_nan(self.by_group(x, codes, steps, group or width) - sums)
