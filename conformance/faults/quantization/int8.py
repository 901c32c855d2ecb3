"""Mistakes of int8 activations (SPEC 5.4)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.fault import Fault, bfloat16
from conformance.golden import Array
from reference.arithmetic import F32, largest


class Activations(Fault):
    """A mistake in int8 activations."""

    operations = ("quantize_int8", "linear_int4", "linear_q4_0", "linear_q8_0")


class ZeroRowNan(Fault):
    """A row of zeros is divided by its scale of zero and gives NaN."""

    name = "int8-zero-row-is-nan"
    reports = ("huggingface/kernels-community/issues/681",)
    severity = "broken"
    operations = ("linear_int4",)

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """0 / 0."""
        y = super().linear_int4(x, packed, scales, group)
        y[~x.any(axis=1)] = np.nan
        return y


class Int8SignedPeak(Activations):
    """A row's scale comes from its largest element, not from its largest magnitude."""

    name = "int8-signed-peak"
    reports = ("ModelTC/LightLLM/pull/943",)
    severity = "broken"

    def int8_scale(self, x: F32) -> F32:
        """Negative elements do not count."""
        return super().int8_scale(np.maximum(x, np.float32(0)))


class NotQuantized(Fault):
    """Activations stay floats where the layer quantizes them to int8."""

    name = "int8-activations-not-quantized"
    reports = ()
    severity = "wrong"
    operations = ("linear_int4", "linear_q4_0", "linear_q8_0")

    def on_codes(self, x: F32, weights: F32) -> F32:
        """A float layer on dequantized weights."""
        return self.product(x, weights)


class ScaleBy128(Activations):
    """A row's scale is max|x| / 128, so that its largest element does not fit."""

    name = "int8-scale-by-128"
    reports = ()
    severity = "subtle"

    def int8_scale(self, x: F32) -> F32:
        """Of the asymmetric range."""
        return largest(np.ascontiguousarray(x)) / np.float32(128)


class PerTensor(Activations):
    """One scale serves all rows of a call, so that a row depends on its neighbours."""

    name = "int8-scale-per-tensor"
    reports = ("pytorch/executorch/issues/22431",)
    severity = "wrong"

    def int8_scale(self, x: F32) -> F32:
        """The largest of all that are finite."""
        scale = super().int8_scale(x)
        return np.full_like(scale, np.max(scale, where=np.isfinite(scale), initial=0))


class Int8CodesCut(Activations):
    """Codes are cut off towards zero instead of rounded."""

    name = "int8-codes-cut"
    reports = ("ROCm/aiter/pull/4637", "microsoft/onnxruntime/pull/32452")
    severity = "wrong"

    def int8_codes(self, ratio: F32) -> F32:
        """trunc."""
        return np.clip(np.trunc(ratio), -127, 127)


class Int8HalvesAway(Activations):
    """Halves are rounded away from zero instead of to even."""

    name = "int8-halves-away"
    reports = ("tenstorrent/tt-metal/issues/56525",)
    severity = "subtle"

    def int8_codes(self, ratio: F32) -> F32:
        """Half up in magnitude."""
        return np.clip(np.trunc(ratio + np.copysign(np.float32(0.5), ratio)), -127, 127)


class Int8Wraps(Activations):
    """Codes beyond 127 wrap round instead of saturating."""

    name = "int8-codes-wrap"
    reports = ("ROCm/aiter/pull/4637",)
    severity = "wrong"

    def int8_codes(self, ratio: F32) -> F32:
        """The low eight bits."""
        return np.rint(ratio).astype(np.int64).astype(np.int8).astype(np.float32)


class Reciprocal(Activations):
    """Rows are multiplied by 1 / scale, which overflows where the scale is subnormal."""

    name = "int8-reciprocal-overflows"
    reports = ("ggml-org/llama.cpp/issues/25221",)
    severity = "wrong"

    def quantize_int8(self, x: F32) -> tuple[Array, Array]:
        """x (1 / s), clamped."""
        _, scale = super().quantize_int8(x)
        with np.errstate(all="ignore"):
            ratio: F32 = x * (np.float32(1) / scale.astype(np.float32))[:, None]
        usable = np.isfinite(scale) & (scale > 0)
        codes = np.where(usable[:, None] & ~np.isnan(ratio), self.int8_codes(ratio), 0)
        return codes.astype(np.int8), scale


class ScaleBfloat16(Activations):
    """A row's scale is held in bfloat16."""

    name = "int8-scale-bfloat16"
    reports = ("ikawrakow/ik_llama.cpp/pull/292",)
    severity = "subtle"

    def int8_scale(self, x: F32) -> F32:
        """Rounded."""
        return bfloat16(super().int8_scale(x))


class OtherCodes(Fault):
    """A mistake in codes alone, of rows that are finite and whose scale is not tiny."""

    operations: ClassVar[tuple[str, ...]] = ("quantize_int8",)

    def coded(self, x: F32, scale: F32) -> Floats:
        """The codes of x (T, K) by scales (T, 1)."""
        raise NotImplementedError

    def quantize_int8(self, x: F32) -> tuple[Array, Array]:
        """Other codes; scales as they are."""
        codes, scale = super().quantize_int8(x)
        usable = np.isfinite(x).all(axis=-1) & (scale > 2.0**-120)
        rows = np.where(usable[:, None], x, np.float32(0))
        wrong = self.coded(rows, np.where(usable, scale, np.float32(1))[:, None])
        return np.where(usable[:, None], wrong.astype(np.int8), codes), scale


class Int8Reciprocal(OtherCodes):
    """Activations are multiplied by the scale's reciprocal, and halves fall the other way."""

    name = "int8-codes-by-reciprocal"
    reports = ("hw-native-sys/pypto-lib/pull/866",)
    severity = "subtle"

    def coded(self, x: F32, scale: F32) -> Floats:
        """Where the reciprocal does not overflow."""
        return self.int8_codes(x * (np.float32(1) / scale))


class Int8Float64(OtherCodes):
    """Activations are divided by their peak in float64, and halves fall the other way."""

    name = "int8-codes-in-float64"
    reports = ()
    severity = "subtle"

    def coded(self, x: F32, scale: F32) -> Floats:
        """By max|x| / 127, which is not rounded."""
        wide = x.astype(np.float64)
        peak = np.abs(wide).max(axis=1, keepdims=True, initial=0) / 127
        return np.rint(wide / np.where(peak > 0, peak, 1))
