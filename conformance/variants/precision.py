"""Other precisions, as they are declared (SPEC 16.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conformance.backends.composed import ComposedBackend, ComposedSession, Floats
from conformance.backends.plain import spread_nan
from conformance.backends.reference import Ints
from conformance.faults.fault import bfloat16, half
from conformance.faults.linear import tf32
from conformance.golden import Array
from conformance.variants.kernels import AnglesFloat64
from conformance.variants.variant import Bounded, Exact
from reference.arithmetic import F32, to_float32


class SumsFloat64(AnglesFloat64):
    """All sums in float64, and float64 angles; each step is rounded to float32 at its end."""

    name = "float64-angles"
    numerics: Mapping[str, Any] = {"operands": "float32", "accumulator": "float64", "kv": "float32"}

    exp = staticmethod(ComposedBackend.exp)
    tanh = staticmethod(ComposedBackend.tanh)
    silu = staticmethod(ComposedBackend.silu)
    sigmoid = staticmethod(ComposedBackend.sigmoid)
    gelu_tanh = staticmethod(ComposedBackend.gelu_tanh)

    def product(self, x: F32, w: F32) -> F32:
        """A dgemm."""
        with np.errstate(all="ignore"):
            y = to_float32(x.astype(np.float64) @ w.T.astype(np.float64))
        return spread_nan(y, x, w)

    def total(self, p: F32) -> Floats:
        """A float64 sum."""
        return np.asarray(p.sum(axis=-1, dtype=np.float64))

    def mean_square(self, x: F32) -> Floats:
        """A float64 mean."""
        return np.asarray(np.square(x, dtype=np.float64).mean(axis=-1))

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """A dgemm, not rounded."""
        return p.astype(np.float64) @ v.astype(np.float64), self.total(p)


def _rounded(y: Any) -> F32:
    """float64 to float32."""
    return to_float32(np.asarray(y, np.float64))


def _of_wide(function: Callable[[Any], Any], x: Any) -> Any:
    """A function in float64; of float32, which comes from outside, rounded."""
    with np.errstate(all="ignore"):
        y = function(x.astype(np.float64))
    return y if x.dtype == np.float64 else _rounded(y)


class Float64(Bounded):
    """Everything in float64, rounded once, when an operation gives its result."""

    name = "float64"
    numerics: Mapping[str, Any] = {"operands": "float64", "accumulator": "float64", "kv": "float32"}

    def by_numpy(self, function: np.ufunc, x: Any) -> Any:
        """Not rounded between steps."""
        return _of_wide(function, x)

    def sigmoid(self, x: Any) -> Any:
        """Not rounded between steps."""
        return _of_wide(lambda x: 1 / (1 + np.exp(-x)), x)

    def silu(self, x: Any) -> Any:
        """Not rounded between steps."""
        return _of_wide(lambda x: x * (1 / (1 + np.exp(-x))), x)

    def gelu_tanh(self, x: Any) -> Any:
        """Not rounded between steps."""
        cubic, root = np.array([0x3D372713, 0x3F4C422A], np.uint32).view(np.float32).tolist()
        return _of_wide(lambda x: 0.5 * x * (1 + np.tanh(root * (x + cubic * x**3))), x)

    def product(self, x: Any, w: Any) -> Any:
        """A dgemm, not rounded."""
        with np.errstate(all="ignore"):
            return spread_nan(x.astype(np.float64) @ w.T.astype(np.float64), x, w)

    def total(self, p: Any) -> Floats:
        """A float64 sum."""
        return np.asarray(p.sum(axis=-1, dtype=np.float64))

    def weighted(self, p: Any, v: F32) -> tuple[Floats, Floats]:
        """A dgemm, not rounded."""
        return p @ v.astype(np.float64), self.total(p)

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """Rounded behind the bias."""
        return _rounded(super().linear(x, w, bias))

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """On dequantized weights, which are float32 to the bit."""
        return _rounded(super().linear_w4a16(x, packed, scales, group, zeros))

    def softmax(self, x: F32) -> F32:
        """Rounded behind the division."""
        wide: Any = x.astype(np.float64)
        return super().softmax(wide)

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Rounded behind the weight."""
        wide = x.astype(np.float64)
        with np.errstate(all="ignore"):
            root = np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + eps)
            y = wide / root * weight
        y[~np.isfinite(x).all(axis=-1)] = np.nan
        return to_float32(y)

    def rope(self, x: F32, positions: Ints, inv_freq: F32, factor: float, interleaved: bool) -> F32:
        """Angles too; rounded behind the sum."""
        wide: Any = x.astype(np.float64)
        return _rounded(super().rope(wide, positions, inv_freq, factor, interleaved))

    def angles(self, positions: Ints, inv_freq: F32) -> Any:
        """Not rounded."""
        return positions[:, None] * inv_freq.astype(np.float64)

    def turns(self, angle: Any, factor: float) -> tuple[Any, Any]:
        """Not rounded."""
        return factor * self.cos(angle), factor * self.sin(angle)

    def gated_mlp(self, x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        """Rounded behind the last product."""
        with np.errstate(all="ignore"):
            a = self.activate(activation, self.product(x, gate))
            return to_float32(self.product(a * self.product(x, up), down))


class Operands(Bounded):
    """Operands of every product rounded, float32 sums."""

    def rounded(self, x: F32) -> F32:
        """To the declared precision."""
        raise NotImplementedError

    def product(self, x: F32, w: F32) -> F32:
        """Of rounded operands."""
        return super().product(self.rounded(x), self.rounded(w))

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """A scale is rounded first, and the weight that it makes again."""
        steps = self.rounded(scales.astype(np.float32))
        return super().dequantized(packed, steps, width, group, zeros)

    def int4_sums(self, codes: F32, weights: F32) -> Floats:
        """Codes are small integers: exact in any of these."""
        return Bounded.product(self, codes, weights)


class Tf32(Operands):
    """Operands in tf32."""

    name = "tf32"
    numerics: Mapping[str, Any] = {"operands": "tf32", "accumulator": "float32", "kv": "float32"}

    def rounded(self, x: F32) -> F32:
        """11 bits."""
        return tf32(x)


class Bfloat16(Operands):
    """Operands and stored results in bfloat16."""

    name = "bfloat16"
    numerics: Mapping[str, Any] = {
        "operands": "bfloat16",
        "accumulator": "float32",
        "kv": "bfloat16",
    }

    def rounded(self, x: F32) -> F32:
        """8 bits; what is subnormal is scaled first."""
        power = np.where(np.abs(x) < 2.0**-100, np.float32(2.0**60), np.float32(1))
        return (bfloat16(x * power) / power).astype(np.float32)

    def product(self, x: F32, w: F32) -> F32:
        """Rounded when stored."""
        return self.rounded(super().product(x, w))


class Bfloat16Sums(Bfloat16):
    """bfloat16 operands, every partial sum over 32 terms rounded to bfloat16."""

    name = "bfloat16-sums"
    numerics: Mapping[str, Any] = {
        "operands": "bfloat16",
        "accumulator": "bfloat16",
        "kv": "bfloat16",
    }

    def product(self, x: F32, w: F32) -> F32:
        """Tiles of 32."""
        with np.errstate(all="ignore"):
            y = np.zeros((len(x), len(w)), np.float32)
            for first in range(0, x.shape[1], 32):
                here = slice(first, first + 32)
                y = self.rounded(y + self.rounded(x[:, here]) @ self.rounded(w[:, here]).T)
        return spread_nan(y, x, w)


class Float16(Operands):
    """Operands in float16, each row scaled by a power of two so that nothing leaves its range."""

    name = "float16-scaled"
    numerics: Mapping[str, Any] = {"operands": "float16", "accumulator": "float32", "kv": "float16"}

    def rounded(self, x: F32) -> F32:
        """11 bits; the largest of a row below 2."""
        with np.errstate(all="ignore"):
            size = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=1, keepdims=True, initial=0)
            power = np.frexp(size)[1]
            return np.ldexp(half(np.ldexp(x, -power)), power)


class MixedLanes(Exact):
    """The exact products, with norms and softmax of float32."""

    name, exact = "mixed-lanes", False
    numerics: Mapping[str, Any] = {"operands": "float32", "accumulator": "float32", "kv": "float32"}

    def total(self, p: F32) -> Floats:
        """A float32 sum."""
        return np.asarray(p.sum(axis=-1))

    def mean_square(self, x: F32) -> Floats:
        """A float32 mean."""
        return np.asarray(np.square(x).mean(axis=-1))


class KvBfloat16(Bounded):
    """float32, the cache in bfloat16."""

    name = "kv-bfloat16"
    numerics: Mapping[str, Any] = {
        "operands": "float32",
        "accumulator": "float32",
        "kv": "bfloat16",
    }

    class session(ComposedSession):  # noqa: N801
        """Keys and values rounded when they are kept."""

        def remember(self, index: int, k: F32, v: F32) -> None:
            """8 bits."""
            super().remember(index, bfloat16(k), bfloat16(v))


class KvFloat16(Bounded):
    """float32, the cache in float16."""

    name = "kv-float16"
    numerics: Mapping[str, Any] = {"operands": "float32", "accumulator": "float32", "kv": "float16"}

    class session(ComposedSession):  # noqa: N801
        """Keys and values rounded when they are kept."""

        def remember(self, index: int, k: F32, v: F32) -> None:
            """11 bits."""
            super().remember(index, half(k), half(v))
