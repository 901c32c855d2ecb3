"""Linear layers in steps: float32, int4, int8 activations and GGUF blocks (SPEC 2, 5, 10.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backends.composed.arithmetic import ArithmeticSteps, Floats
from conformance.golden import Array
from reference.arithmetic import F32, F64, NAN, largest, one_nan, to_float32
from reference.quantization import Int4Matrix, dequantize
from reference.weights import add


class LinearSteps(ArithmeticSteps):
    """`linear*` and `quantize_*` one step at a time."""

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """SPEC 10.1."""
        return add(self.product(x, w), bias)

    def group_scales(self, w: F32, group: int) -> NDArray[np.float16]:
        """The float16 scale of each group of each row, (N, G) (SPEC 5.1)."""
        peaks = [largest(np.ascontiguousarray(w[:, i : i + group])) for i in _starts(w, group)]
        peak = np.stack(peaks, axis=1).astype(np.float64)
        scales = self.ideal_scale(peak).astype(np.float16)
        scales[(peak > 0) & (scales == 0)] = np.float16(2.0**-24)
        scales[peak == 0] = np.float16(1)
        return scales

    def ideal_scale(self, peak: F64) -> F64:
        """A group's scale before it is rounded to float16 (SPEC 5.1)."""
        return peak / 7

    def codes(self, w: F32, scales: F64) -> F64:
        """q of every weight, given the scale of every weight, (N, K) (SPEC 5.1)."""
        ratio: F64 = w / scales
        return np.copysign(np.minimum(np.floor(np.abs(ratio) + 0.5), 7), ratio)

    def pack(self, codes: F64) -> NDArray[np.uint8]:
        """Two codes a byte, even k in the low nibble (SPEC 5.2)."""
        nibbles = (codes + 8).astype(np.uint8)
        if nibbles.shape[1] % 2:
            nibbles = np.pad(nibbles, [(0, 0), (0, 1)], constant_values=8)
        return nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)

    def quantize_int4(self, w: F32, group: int) -> tuple[Array, Array]:
        """SPEC 5.1 and, with group 0, 5.3."""
        group = group or w.shape[1]
        scales = self.group_scales(w, group)
        return self.pack(self.codes(w, spread(scales, w.shape[1], group))), scales

    def int8_scale(self, x: F32) -> F32:
        """One scale a row, RN32(max|x| / 127), (T,) (SPEC 5.4)."""
        return largest(np.ascontiguousarray(x)) / np.float32(127)

    def int8_codes(self, ratio: F32) -> F32:
        """From x / s to codes (SPEC 5.4)."""
        return np.clip(np.rint(ratio), -127, 127)

    def quantize_int8(self, x: F32) -> tuple[Array, Array]:
        """SPEC 5.4."""
        finite = np.isfinite(x).all(axis=-1)
        with np.errstate(all="ignore"):
            scale = np.where(finite, self.int8_scale(x), NAN).astype(np.float32)
            usable = finite & (scale > 0)
            divisor = np.where(usable, scale, np.float32(1))[:, None]
            ratio: F32 = (np.where(usable[:, None], x, np.float32(0)) / divisor).astype(np.float32)
            return self.int8_codes(ratio).astype(np.int8), scale

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """scale * q of every weight, (N, K) (SPEC 5.1, 5.2)."""
        return dequantize(Int4Matrix(packed, scales, width, group))

    def int4_sums(self, codes: F32, weights: F32) -> Floats:
        """Codes (T, K) times dequantized weights (N, K), exact (SPEC 5.5)."""
        return codes.astype(np.float64) @ weights.T.astype(np.float64) + 0.0

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """SPEC 5.5."""
        return self.on_codes(x, self.int4_weights(packed, scales, x.shape[1], group or x.shape[1]))

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """SPEC 5.9."""
        return self.product(
            x, self.dequantized(packed, scales, x.shape[1], group or x.shape[1], zeros)
        )

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """scale * (code - zero) of every weight, (N, K) (SPEC 5.9)."""
        weights = self.int4_weights(packed, scales, width, group)
        if zeros is None:
            return weights
        moved = scales.astype(np.float64) * (8 - zeros.astype(np.float64))
        return to_float32(weights + spread(moved, width, group))

    def on_codes(self, x: F32, weights: F32) -> F32:
        """int8 codes of x (T, K) on dequantized weights (N, K) (SPEC 5.5)."""
        codes, scale = self.quantize_int8(x)
        sums = self.int4_sums(codes.astype(np.float32), weights)
        with np.errstate(all="ignore"):
            return one_nan(to_float32(np.asarray(sums * scale[:, None].astype(sums.dtype))))

    def block_scales(self, blocks: Array) -> F32:
        """The scale of each block of rows (N, G, bytes), (N, G) (SPEC 5.7)."""
        return np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)

    def q4_0_codes(self, blocks: Array) -> F32:
        """The codes of blocks (N, G, 18), (N, G, 32) (SPEC 5.7)."""
        nibbles = np.concatenate([blocks[:, :, 2:] & 15, blocks[:, :, 2:] >> 4], axis=2)
        return nibbles.astype(np.float32) - np.float32(8)

    def q8_0_codes(self, blocks: Array) -> F32:
        """The codes of blocks (N, G, 34), (N, G, 32) (SPEC 5.7)."""
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).astype(np.float32)

    def linear_q4_0(self, x: F32, blocks: Array) -> F32:
        """SPEC 5.7."""
        return self.on_blocks(x, self.q4_0_codes(blocks), self.block_scales(blocks))

    def linear_q8_0(self, x: F32, blocks: Array) -> F32:
        """SPEC 5.7."""
        return self.on_blocks(x, self.q8_0_codes(blocks), self.block_scales(blocks))

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """x (T, K) on codes (N, G, 32) with their scales (N, G) (SPEC 5.7)."""
        return self.on_codes(x, (codes * scales[:, :, None]).reshape(len(codes), -1))


def spread(scales: NDArray[np.floating[Any]], width: int, group: int) -> F64:
    """The scale of every weight, (N, G) -> (N, K)."""
    return np.repeat(scales.astype(np.float64), group, axis=1)[:, :width]


def _starts(w: F32, group: int) -> range:
    return range(0, w.shape[1], group)
