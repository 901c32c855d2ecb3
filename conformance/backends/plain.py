"""Plain float32 numpy: what an ordinary engine computes, and what the bounds are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.backends import paging as pages
from conformance.backends.reference import Ints, ReferenceBackend, int4_matrix
from conformance.golden import Array
from reference import attention, feedforward, normalization, quantization
from reference.arithmetic import F32, one_nan
from reference.blocks import dequantize_blocks, read_blocks
from reference.experts import Router
from reference.feedforward import Function
from reference.weights import Arithmetic, add


def spread_nan(y: F32, x: F32, w: F32) -> F32:
    """Products y (T, N) of x (T, K) and w (N, K): NaN where a row is not finite (SPEC 2.6)."""
    y[~np.isfinite(x).all(axis=1)] = np.nan
    y[:, ~np.isfinite(w).all(axis=1)] = np.nan
    return one_nan(y)


class PlainBackend(ReferenceBackend):
    """The operations of SPEC 17 in float32, in whatever order numpy and BLAS sum (SPEC 1.4)."""

    name = "numpy-float32"
    numerics: Mapping[str, Any] = {"operands": "float32", "accumulator": "float32", "kv": "float32"}
    arithmetic: Arithmetic = "float32"
    activations = feedforward.ACTIVATIONS_FLOAT32

    @staticmethod
    def _quiet(function: Any, x: F32) -> F32:
        with np.errstate(all="ignore"):
            return one_nan(np.asarray(function(x)))

    def by_numpy(self, function: np.ufunc, x: F32) -> F32:
        """A function of SPEC 4.1 as numpy has it."""
        return self._quiet(function, x)

    def exp(self, x: F32) -> F32:
        """Numpy's float32 exp."""
        return self.by_numpy(np.exp, x)

    def log(self, x: F32) -> F32:
        """Numpy's float32 log."""
        return self.by_numpy(np.log, x)

    def sin(self, x: F32) -> F32:
        """Numpy's float32 sin."""
        return self.by_numpy(np.sin, x)

    def cos(self, x: F32) -> F32:
        """Numpy's float32 cos."""
        return self.by_numpy(np.cos, x)

    def tanh(self, x: F32) -> F32:
        """Numpy's float32 tanh."""
        return self.by_numpy(np.tanh, x)

    def sigmoid(self, x: F32) -> F32:
        """1 / (1 + exp(-x))."""
        return self._quiet(lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)), x)

    def silu(self, x: F32) -> F32:
        """X / (1 + exp(-x))."""
        return self._quiet(feedforward.silu_float32, x)

    def gelu_tanh(self, x: F32) -> F32:
        """The tanh formula in float32."""
        return self._quiet(feedforward.gelu_tanh_float32, x)

    def softmax(self, x: F32) -> F32:
        """exp(x - max) over its float32 sum."""
        with np.errstate(all="ignore"):
            p = np.exp(x - x.max(axis=-1, keepdims=True))
            return one_nan(p / p.sum(axis=-1, keepdims=True))

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Mean of squares in float32."""
        with np.errstate(all="ignore"):
            y = normalization.rms_norm_float32(x, weight, eps)
            y[~np.isfinite(x).all(axis=-1)] = np.nan
            return one_nan(y)

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """A float32 GEMM."""
        with np.errstate(all="ignore"):
            y = add(x @ w.T, bias)
        return spread_nan(y, x, w)

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """A float32 GEMM on the codes."""
        return self.on_codes(x, quantization.dequantize(int4_matrix(x, packed, scales, group)))

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """A float32 GEMM on the dequantized weights."""
        matrix = int4_matrix(x, packed, scales, group)
        return self.linear(x=x, w=quantization.dequantize(matrix, zeros))

    def linear_q4_0(self, x: F32, blocks: Array) -> F32:
        """The same on blocks."""
        return self.on_codes(x, dequantize_blocks(read_blocks(blocks, "Q4_0")))

    def linear_q8_0(self, x: F32, blocks: Array) -> F32:
        """The same on blocks."""
        return self.on_codes(x, dequantize_blocks(read_blocks(blocks, "Q8_0")))

    def on_codes(self, x: F32, weights: F32) -> F32:
        """int8 codes of x (T, K) on scale * q, (N, K)."""
        codes, scale = quantization.quantize_int8(x)
        return one_nan(codes.astype(np.float32) @ weights.T * scale[:, None])

    def attention(self, q: F32, k: F32, v: F32, mode: str, **options: Any) -> F32:
        """Tiled float32 attention, whatever the mode."""
        return attention.attention_fast(q, k, v, **options)

    def paged_attention(self, *others: Any, **options: Any) -> F32:
        """The same over pages."""
        return pages.paged_attention(*others, **{**options, "mode": "fast"})

    def _routing(self, logits: F32, router: Router) -> tuple[Ints, F32]:
        """Scores and gates in float32; experts of other groups masked, as it is usually written."""
        functions: dict[str, Function] = {"softmax": self.softmax, "sigmoid": self.sigmoid}
        scores = functions.get(router.score, np.copy)(logits)
        bias = router.selection_bias
        selection = scores + (np.float32(0) if bias is None else bias)
        by_group = np.sort(selection.reshape(len(logits), router.groups, -1), axis=2)
        of_groups = by_group[..., -router.group_best :].sum(axis=2)
        dropped = np.argsort(-of_groups, axis=1, kind="stable")[:, router.kept_groups :]
        masked = selection.reshape(by_group.shape)
        np.put_along_axis(masked, dropped[..., None], -np.inf, axis=1)
        experts = np.argsort(-selection, axis=1, kind="stable")[:, : router.top_k]
        gates = np.take_along_axis(scores, experts, axis=1)
        if router.score == "logits":
            gates = self.softmax(gates)
        with np.errstate(all="ignore"):
            if router.renormalise:
                gates = gates / (gates.sum(axis=1, keepdims=True) + np.float32(router.epsilon))
            return experts, one_nan(gates * np.float32(router.scale))
