"""MLX's own operations on the CPU, as a backend of kernels.

    pip install 'mlx[cpu]'
    bitforbit check examples/engines/mlx.py --case 'kernel/*:gauge'

`mx.fast` has the norm, the rotation and attention. Its rotation counts positions from an offset, so
that a row is a batch of its own; it has no factor. Its attention has sinks, a mask, and no softcap.
Of the quantized matrices it has that of four bits: w = scale * code + bias, where the bias is -z
scales, in groups of 32, 64 or 128, and activations in float32: SPEC 5.9. For SPEC 5.5 it is given
the int8 codes of SPEC 5.4.
"""

# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from conformance.operations import NotImplementedByBackendError

mx.set_default_device(mx.cpu)

ACTIVATIONS = {"silu": nn.silu, "gelu_tanh": nn.gelu_approx}


def out(y: Any) -> Any:
    """An array of numpy, whose NaN is the one of SPEC 1.3."""
    array = np.array(y)
    array[np.isnan(array)] = np.nan
    return array


class Backend:
    """Float32 on the CPU."""

    numerics = {"accumulator": "float32"}  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        """The elementary functions."""
        if name not in ("exp", "log", "sin", "cos", "tanh", "sigmoid", *ACTIVATIONS):
            raise AttributeError(name)
        function = ACTIVATIONS.get(name) or getattr(mx, name)
        return lambda x: out(function(mx.array(x)))

    def softmax(self, x: Any) -> Any:
        return out(mx.softmax(mx.array(x), axis=-1))

    def linear(self, x: Any, w: Any, bias: Any = None) -> Any:
        y = mx.array(x) @ mx.array(w).T
        return out(y if bias is None else y + mx.array(bias))

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return out(mx.fast.rms_norm(mx.array(x), mx.array(weight), eps))

    def rope(
        self, x: Any, positions: Any, inv_freq: Any, factor: float = 1.0, interleaved: bool = False
    ) -> Any:
        if factor != 1:
            raise NotImplementedByBackendError("a factor of rope in MLX")
        about = {"traditional": interleaved, "base": None, "scale": 1.0}
        periods = mx.array(1 / inv_freq)  # `freqs` are what positions are divided by.
        offsets = mx.array(positions.astype(np.int32))
        y = mx.fast.rope(
            mx.array(x)[:, :, None], 2 * len(inv_freq), offset=offsets, freqs=periods, **about
        )
        return out(y[:, :, 0])

    def attention(self, q: Any, k: Any, v: Any, scale: Any = None, **more: Any) -> Any:
        if more.get("softcap") is not None:
            raise NotImplementedByBackendError("a softcap in MLX's attention")
        window, sinks = more.get("window"), more.get("sinks")
        t, j = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))
        mask = "causal" if window is None else mx.array((j <= t) & (j > t - window))
        y = mx.fast.scaled_dot_product_attention(
            *(mx.array(x).transpose(1, 0, 2)[None] for x in (q, k, v)),
            scale=q.shape[2] ** -0.5 if scale is None else scale,
            mask=mask,
            sinks=None if sinks is None else mx.array(sinks),
        )
        return out(y[0].transpose(1, 0, 2))

    def gated_mlp(self, x: Any, gate: Any, up: Any, down: Any, activation: str = "silu") -> Any:
        a, x = ACTIVATIONS[activation], mx.array(x)
        return out((a(x @ mx.array(gate).T) * (x @ mx.array(up).T)) @ mx.array(down).T)

    def linear_int4(self, x: Any, packed: Any, scales: Any, group: int) -> Any:
        if not group or x.shape[1] % 32:
            raise NotImplementedByBackendError("a scale a row, or a ragged group, in MLX")
        scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        codes = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0))
        steps = mx.array(scales.astype(np.float32))
        y = mx.quantized_matmul(
            mx.array(codes), mx.array(packed.view(np.uint32)), steps, -8 * steps, group_size=32
        )
        return out(y) * scale

    def linear_w4a16(self, x: Any, packed: Any, scales: Any, group: int, zeros: Any = None) -> Any:
        if not group or x.shape[1] % group:
            raise NotImplementedByBackendError("a scale a row, or a ragged group, in MLX")
        steps, z = mx.array(scales.astype(np.float32)), mx.array(np.float32(8))
        if zeros is not None:
            z = mx.array(zeros.astype(np.float32))
        codes = mx.array(packed.view(np.uint32))
        return out(mx.quantized_matmul(mx.array(x), codes, steps, -z * steps, group_size=group))
