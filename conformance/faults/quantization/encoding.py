"""Mistakes in making int4 weights (SPEC 5.1, 5.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conformance.faults.fault import Fault
from reference.arithmetic import F32, F64, Bools


class Encoder(Fault):
    """A mistake in making int4 codes."""

    operations = ("quantize_int4",)


class ZeroScales(Encoder):
    """A mistake by which the scales of some groups become 0, and their codes with them."""

    def lost(self, peak: F64) -> Bools:
        """The groups whose scale is 0, by max|w|, (N, G)."""
        raise NotImplementedError

    def group_scales(self, w: F32, group: int) -> NDArray[np.float16]:
        """Zero where they are lost."""
        scales = super().group_scales(w, group)
        starts = range(0, w.shape[1], group)
        peak = np.stack([np.abs(w[:, i : i + group]).max(axis=1) for i in starts], axis=1)
        scales[self.lost(peak.astype(np.float64))] = 0
        return scales

    def codes(self, w: F32, scales: F64) -> F64:
        """0 where the scale is."""
        return np.where(scales == 0, 0, super().codes(w, np.where(scales == 0, 1, scales)))


class ZeroGroup(ZeroScales):
    """The scale of a group of zeros is 0 instead of 1."""

    name = "int4-zero-group-scale"
    reports = ("ggml-org/llama.cpp/pull/3010",)
    severity = "wrong"

    def lost(self, peak: F64) -> Bools:
        """Where all is zero."""
        return np.asarray(peak == 0)


class TinyScaleFlushed(ZeroScales):
    """A scale too small for float16 becomes 0 instead of the least float16."""

    name = "int4-tiny-scale-flushed"
    reports = ("ggml-org/llama.cpp/issues/25221",)
    severity = "wrong"

    def lost(self, peak: F64) -> Bools:
        """No exception for tiny scales."""
        return (peak > 0) & (self.ideal_scale(peak) < 2.0**-25)


class SignedPeak(Encoder):
    """A group's scale comes from its largest weight, not from its largest magnitude."""

    name = "int4-signed-peak"
    reports = ("ModelTC/LightLLM/pull/943",)
    severity = "broken"

    def group_scales(self, w: F32, group: int) -> NDArray[np.float16]:
        """Negative weights do not count."""
        return super().group_scales(np.maximum(w, np.float32(0)), group)


class ScaleByEight(Encoder):
    """Scales are max|w| / 8, so that the largest weight does not fit."""

    name = "int4-scale-by-eight"
    reports = ("1bit-MONSTER/1bit-MONSTER/pull/572",)
    severity = "subtle"

    def ideal_scale(self, peak: F64) -> F64:
        """Of the asymmetric range."""
        return peak / 8


class HalvesToEven(Encoder):
    """Halves are rounded to even instead of away from zero."""

    name = "int4-halves-to-even"
    reports = ("tenstorrent/tt-metal/issues/56525", "hw-native-sys/pypto-lib/pull/279")
    severity = "subtle"

    def codes(self, w: F32, scales: F64) -> F64:
        """rint."""
        return np.clip(np.rint(w / scales), -7, 7)


class CodesCut(Encoder):
    """Codes are cut off towards zero instead of rounded."""

    name = "int4-codes-cut"
    reports = ("sgl-project/sglang-jax/pull/1598",)
    severity = "wrong"

    def codes(self, w: F32, scales: F64) -> F64:
        """trunc."""
        return np.clip(np.trunc(w / scales), -7, 7)


class Int4Reciprocal(Encoder):
    """Weights are multiplied by the scale's reciprocal, and halves fall to the other side."""

    name = "int4-codes-by-reciprocal"
    reports = ()
    severity = "subtle"

    def codes(self, w: F32, scales: F64) -> F64:
        """The product, times the scale again, so that dividing gives it."""
        product = w * (np.float32(1) / scales.astype(np.float32))
        return super().codes((product.astype(np.float64) * scales).astype(np.float64), scales)


class Int4Eight(Encoder):
    """Codes go down to -8, which shows where a scale was rounded to a much smaller one."""

    name = "int4-codes-down-to-minus-8"
    reports = ()
    severity = "subtle"

    def codes(self, w: F32, scales: F64) -> F64:
        """-8 to 7."""
        ratio = w.astype(np.float64) / scales
        largest = np.where(ratio < 0, 8, 7)
        codes: F64 = np.copysign(np.minimum(np.floor(np.abs(ratio) + 0.5), largest), ratio)
        return codes
