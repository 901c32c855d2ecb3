"""Elementary functions of stored tensors, as a vector unit of less than float32 computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.backends.reference import Ints
from conformance.faults.fault import bfloat16, half
from conformance.variants.variant import Bounded
from reference.arithmetic import F32, one_nan
from reference.sampling import WEIGHT_ONE


class Functions(Bounded):
    """Their argument and their result are stored; what is made of them elsewhere is float32."""

    kernels_only = True

    def rounded(self, x: F32) -> F32:
        """To the declared type."""
        raise NotImplementedError

    def by_numpy(self, function: np.ufunc, x: F32) -> F32:
        """The function of what is stored, stored."""
        with np.errstate(all="ignore"):
            return one_nan(self.rounded(function(self.rounded(x))))

    def weights(self, z: F32) -> Ints:
        """A sampler's exponentials are float32: tokens have one answer in any arithmetic (18)."""
        return np.rint(np.exp(z).astype(np.float64) * WEIGHT_ONE).astype(np.int64)

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """An angle is never less than float32 (SPEC 16.4)."""
        cos, sin = (np.float32(factor) * f(angle) for f in (np.cos, np.sin))
        return np.asarray(cos, np.float32), np.asarray(sin, np.float32)


class FunctionsBfloat16(Functions):
    """Elementary functions of bfloat16, in and out."""

    name = "functions-bfloat16"
    numerics: Mapping[str, Any] = {"operands": "bfloat16", "accumulator": "float32"}

    def rounded(self, x: F32) -> F32:
        """8 bits."""
        return bfloat16(x)


class FunctionsFloat16(Functions):
    """Elementary functions of float16, in and out."""

    name = "functions-float16"
    numerics: Mapping[str, Any] = {"operands": "float16", "accumulator": "float32"}

    def rounded(self, x: F32) -> F32:
        """11 bits."""
        return half(x)
