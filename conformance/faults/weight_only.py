"""Mistakes of weight-only int4: float activations on int4 codes (SPEC 5.9)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed.linear import spread
from conformance.faults.fault import Fault, bfloat16, half
from conformance.golden import Array
from reference.arithmetic import F32, to_float32

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each nibble of a 32-bit word holds, the lowest first, in AWQ's files."""


class WeightOnly(Fault):
    """A mistake in the operation `linear_w4a16`."""

    operations = ("linear_w4a16",)


class ZeroPoint(WeightOnly):
    """A mistake in the zero points."""

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """From other zero points, where there are any."""
        changed = None if zeros is None else self.changed(zeros)
        return super().dequantized(packed, scales, width, group, changed)

    def changed(self, zeros: Array) -> Array | None:
        """What is made of the zero points."""
        return zeros


class StoredLessOne(ZeroPoint):
    """Zero points are taken for what GPTQ's first format stores, which is one less."""

    name = "w4a16-zero-point-plus-one"
    reports = ("vllm-project/vllm/pull/26092",)
    severity = "broken"

    def changed(self, zeros: Array) -> Array:
        """z + 1."""
        return zeros + np.uint8(1)


class ZeroWraps(ZeroPoint):
    """A zero point of 0 comes back as 16, having been stored less one in four bits."""

    name = "w4a16-zero-point-wraps"
    reports = ("ModelCloud/GPTQModel/issues/2350",)
    severity = "broken"

    def changed(self, zeros: Array) -> Array:
        """((z - 1) & 15) + 1."""
        return ((zeros - np.uint8(1)) & np.uint8(15)) + np.uint8(1)


class ZerosIgnored(ZeroPoint):
    """All weights are taken for symmetric, with 8 for zero."""

    name = "w4a16-zeros-ignored"
    reports = ()
    severity = "broken"

    def changed(self, zeros: Array) -> None:
        """None at all."""


class ZerosSwapped(ZeroPoint):
    """The zero points of two neighbouring outputs, which share a byte, are exchanged."""

    name = "w4a16-zeros-swapped"
    reports = ("pie-project/pie/pull/491",)
    severity = "broken"

    def changed(self, zeros: Array) -> Array:
        """1, 0, 3, 2, ...; a last one without a neighbour keeps its own."""
        even = len(zeros) - len(zeros) % 2
        order = np.arange(len(zeros))
        order[:even] ^= 1
        return np.ascontiguousarray(zeros[order])


class ZeroByDefault(WeightOnly):
    """Where no zero points are given 0 is taken instead of 8."""

    name = "w4a16-zero-point-zero-by-default"
    reports = ("ROCm/hip-ep/pull/134",)
    severity = "broken"

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """scale * code."""
        zeros = np.zeros(scales.shape, np.uint8) if zeros is None else zeros
        return super().dequantized(packed, scales, width, group, zeros)


class DifferenceUnsigned(WeightOnly):
    """The zero point is subtracted in eight unsigned bits, where what is below zero wraps round."""

    name = "w4a16-difference-unsigned"
    reports = ("tile-ai/tilelang/issues/2947",)
    severity = "broken"

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """scale * (code - zero + 256), where the zero point is given and larger."""
        weights = super().dequantized(packed, scales, width, group, zeros)
        if zeros is None:
            return weights
        scale = spread(scales, width, group)
        return to_float32(weights + 256 * scale * (weights * np.sign(scale) < 0))


class ZeroNotScaled(WeightOnly):
    """The zero point is subtracted after the scale instead of before it."""

    name = "w4a16-zero-point-not-scaled"
    reports = ()
    severity = "broken"

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """scale * (code - 8) + 8 - zero."""
        weights = super().dequantized(packed, scales, width, group, None)
        if zeros is None:
            return weights
        each = np.repeat(zeros.astype(np.float32), group, axis=1)[:, :width]
        return weights + (np.float32(8) - each)


class OutputsPermuted(WeightOnly):
    """The outputs of each whole eight stand in the order in which AWQ packs them."""

    name = "w4a16-outputs-in-awq-order"
    reports = ("amd/Quark/pull/30",)
    severity = "broken"

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """Output AWQ_ORDER[i] at i."""
        y = super().linear_w4a16(x, packed, scales, group, zeros)
        whole = y.shape[1] - y.shape[1] % 8
        eights = y[:, :whole].reshape(len(y), -1, 8)
        y[:, :whole] = eights[:, :, AWQ_ORDER].reshape(len(y), -1)
        return y


class WeightsHalf(WeightOnly):
    """Weights are dequantized to float16, undeclared."""

    name = "w4a16-weights-half"
    reports = ()
    severity = "subtle"

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """Rounded; what is beyond float16 is its largest number."""
        weights = super().dequantized(packed, scales, width, group, zeros)
        return half(np.clip(weights, -65504, 65504))


class WeightsBfloat16(WeightOnly):
    """Weights are dequantized to bfloat16, undeclared."""

    name = "w4a16-weights-bfloat16"
    reports = ()
    severity = "subtle"

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """Rounded."""
        return bfloat16(super().dequantized(packed, scales, width, group, zeros))


class ActivationsQuantized(WeightOnly):
    """Activations are quantized to int8, as the layer of SPEC 5.5 does."""

    name = "w4a16-activations-int8"
    reports = ()
    severity = "wrong"

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """W4A8."""
        width = x.shape[1]
        return self.on_codes(x, self.dequantized(packed, scales, width, group or width, zeros))


class GroupOf128(WeightOnly):
    """Scales and zero points are taken as if groups held 128 weights."""

    name = "w4a16-group-of-128"
    reports = ("mit-han-lab/llm-awq/issues/21",)
    severity = "broken"

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """Those of group g // (128 / group), where groups are shorter."""
        used = np.arange(scales.shape[1]) * min(group, 128) // 128
        scales = np.ascontiguousarray(scales[:, used])
        zeros = None if zeros is None else np.ascontiguousarray(zeros[:, used])
        return super().dequantized(packed, scales, width, group, zeros)


class ScalesByGroup(WeightOnly):
    """Scales are laid out output by output and read as if group by group."""

    name = "w4a16-scales-transposed"
    reports = ()
    severity = "broken"

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """The bytes of (N, G), read as (G, N)."""
        read = np.ascontiguousarray(scales.reshape(scales.shape[::-1]).T)
        return super().dequantized(packed, read, width, group, zeros)


class RowsOf64(WeightOnly):
    """Rows from the 65th on are never written by the weight-only kernel."""

    name = "w4a16-rows-beyond-64"
    reports = ("huggingface/optimum-quanto/pull/315",)
    severity = "broken"

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """Zero."""
        y = super().linear_w4a16(x, packed, scales, group, zeros).copy()
        y[64:] = 0
        return y
