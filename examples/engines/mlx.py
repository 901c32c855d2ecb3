"""MLX's own operations on the CPU, as a backend of kernels.

    pip install 'mlx[cpu]'
    bitforbit check examples/engines/mlx.py --case 'kernel/*:gauge'

Its rotation counts from an offset, so that a row is a batch of its own. A quantized matrix is
scale * code + bias, here -z scales (SPEC 5.9); for SPEC 5.5 it is given the int8 codes of 5.4.
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


def _quantized(x: Any, packed: Any, scales: Any, zeros: Any, group: int) -> Any:
    if not group or x.shape[1] % group:
        raise NotImplementedByBackendError("a scale a row, or a ragged group, in MLX")
    steps, z = scales.astype(np.float32), np.float32(zeros)
    arrays = (mx.array(v) for v in (x, packed.view(np.uint32), steps, -z * steps))
    return mx.quantized_matmul(*arrays, group_size=group)


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
        about["freqs"] = mx.array(1 / inv_freq)  # what positions are divided by
        about["offset"] = mx.array(positions.astype(np.int32))
        y = mx.fast.rope(mx.array(x)[:, :, None], 2 * len(inv_freq), **about)
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
        x, gate, up, down = map(mx.array, (x, gate, up, down))
        return out((ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)) @ down.T)

    def linear_int4(self, x: Any, packed: Any, scales: Any, group: int) -> Any:
        scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        codes = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0))
        return out(_quantized(codes, packed, scales, 8, group)) * scale

    def linear_w4a16(self, x: Any, packed: Any, scales: Any, group: int, zeros: Any = None) -> Any:
        return out(_quantized(x, packed, scales, 8 if zeros is None else zeros, group))
