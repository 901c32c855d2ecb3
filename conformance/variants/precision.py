"""Other precisions, as they are declared (SPEC 16.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.backends.composed import ComposedBackend, ComposedSession, Floats
from conformance.backends.reference import Ints
from conformance.faults.fault import bfloat16, half
from conformance.faults.linear import tf32
from conformance.golden import Array
from conformance.variants.orders import guarded
from conformance.variants.variant import Bounded, Exact
from reference.arithmetic import F32, to_float32


class Float64(Bounded):
    """All sums, norms and exponentials in float64, rounded at the end of each step."""

    name = "float64"
    numerics: Mapping[str, Any] = {"operands": "float64", "accumulator": "float64", "kv": "float32"}

    exp = staticmethod(ComposedBackend.exp)
    tanh = staticmethod(ComposedBackend.tanh)
    sin = staticmethod(ComposedBackend.sin)
    cos = staticmethod(ComposedBackend.cos)
    silu = staticmethod(ComposedBackend.silu)
    sigmoid = staticmethod(ComposedBackend.sigmoid)
    gelu_tanh = staticmethod(ComposedBackend.gelu_tanh)

    def product(self, x: F32, w: F32) -> F32:
        """A dgemm."""
        with np.errstate(all="ignore"):
            y = to_float32(x.astype(np.float64) @ w.T.astype(np.float64))
        return guarded(y, x, w)

    def total(self, p: F32) -> Floats:
        """A float64 sum."""
        return np.asarray(p.sum(axis=-1, dtype=np.float64))

    def mean_square(self, x: F32) -> Floats:
        """A float64 mean."""
        return np.asarray(np.square(x, dtype=np.float64).mean(axis=-1))

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """A dgemm, not rounded."""
        return p.astype(np.float64) @ v.astype(np.float64), self.total(p)


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
        return guarded(y, x, w)


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


class PositionsFloat64(Float64):
    """float64, and angles of rope not rounded."""

    name = "float64-angles"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """As float64."""
        return np.asarray(positions[:, None] * inv_freq.astype(np.float64))

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """Rounded at the end."""
        return (factor * np.cos(angle)).astype(np.float32), (factor * np.sin(angle)).astype(
            np.float32
        )


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
