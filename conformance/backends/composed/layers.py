"""Norms, rope, the gated layer and softmax in steps (SPEC 4, 6, 7, 9)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed.arithmetic import ArithmeticSteps, Floats
from conformance.backends.reference import Ints
from reference.arithmetic import F32, NAN, one_nan, to_float32


class LayerSteps(ArithmeticSteps):
    """`rms_norm`, `rope`, `gated_mlp` and `softmax` one step at a time."""

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """r of SPEC 6."""
        return to_float32(np.asarray(1 / np.sqrt(mean_square + mean_square.dtype.type(eps))))

    def scaled_row(self, x: F32, r: F32, weight: F32) -> F32:
        """RN32(RN32(x r) w) (SPEC 6)."""
        y: F32 = x * r[..., None] * weight
        return y

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """SPEC 6."""
        with np.errstate(all="ignore"):
            y = self.scaled_row(x, self.inverse_root(self.mean_square(x), eps), weight)
        y[~np.isfinite(x).all(axis=-1)] = NAN
        return one_nan(y)

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """RN32(p * inv_freq), (T, d/2) (SPEC 7.3)."""
        angle: F32 = positions.astype(np.float32)[:, None] * inv_freq
        return angle

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """Cos and sin of angles, each times the factor (SPEC 7.3)."""
        return np.float32(factor) * self.cos(angle), np.float32(factor) * self.sin(angle)

    def pairs(self, head_dim: int, half: int, interleaved: bool) -> tuple[slice, slice]:
        """Which elements of a head are the first and the second of each pair (SPEC 7.4)."""
        if interleaved:
            return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        return slice(0, half), slice(half, 2 * half)

    def rope(self, x: F32, positions: Ints, inv_freq: F32, factor: float, interleaved: bool) -> F32:
        """SPEC 7.3 and 7.4."""
        with np.errstate(all="ignore"):
            cos, sin = (t[:, None] for t in self.turns(self.angles(positions, inv_freq), factor))
            first, second = self.pairs(x.shape[-1], cos.shape[-1], interleaved)
            out = x.copy()
            out[..., first], out[..., second] = map(
                one_nan, self.rotated(x[..., first], x[..., second], cos, sin)
            )
        return out

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """Both of each pair, turned (SPEC 7.4)."""
        return a * cos - b * sin, b * cos + a * sin

    def activate(self, activation: str, x: F32) -> F32:
        """An activation by name (SPEC 4.2)."""
        return self.silu(x) if activation == "silu" else self.gelu_tanh(x)

    def gated_mlp(self, x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        """SPEC 9."""
        with np.errstate(all="ignore"):
            a = self.activate(activation, self.linear(x=x, w=gate))
            return self.linear(x=one_nan(a * self.linear(x=x, w=up)), w=down)

    def softmax(self, x: F32) -> F32:
        """SPEC 4.3."""
        with np.errstate(all="ignore"):
            p = self.exp(x - x.max(axis=-1, keepdims=True))
            return self.divide(p, self.total(p)[..., None])
