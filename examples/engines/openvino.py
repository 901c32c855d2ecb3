"""OpenVINO's own operations on the CPU, as a backend of kernels.

    pip install openvino
    bitforbit check examples/engines/openvino.py --case 'kernel/*:gauge'

A graph is compiled for each shape, with `INFERENCE_PRECISION_HINT` float32, for where the processor
has bfloat16 that is its default. Its opset has attention; the norm is written out.
"""

# ruff: noqa: D102, D103

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from conformance.operations import NotImplementedByBackendError

CORE = ov.Core()
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}


@lru_cache(maxsize=256)
def compiled(build: Callable[..., Any], shapes: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    inputs = [ops.parameter(list(shape), kind) for shape, kind in shapes]
    return CORE.compile_model(ov.Model([build(*inputs, *options)], inputs), "CPU", EXACT)


def run(build: Callable[..., Any], *arrays: Any, options: tuple[Any, ...] = ()) -> Any:
    """What a graph makes of arrays; NaN is the one of SPEC 1.3."""
    shapes = tuple((x.shape, x.dtype) for x in arrays)
    y = np.array(compiled(build, shapes, options)([np.ascontiguousarray(x) for x in arrays])[0])
    y[np.isnan(y)] = np.nan
    return y


def gelu(x: Any) -> Any:
    return ops.gelu(x, "tanh")


def softmax(x: Any) -> Any:
    return ops.softmax(x, 1)


FUNCTIONS = {name: getattr(ops, name) for name in ("exp", "log", "sin", "cos", "tanh", "sigmoid")}
FUNCTIONS |= {"silu": ops.swish, "gelu_tanh": gelu, "softmax": softmax}


def linear(x: Any, w: Any) -> Any:
    return ops.matmul(x, w, False, True)


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    squares = ops.reduce_mean(ops.power(x, np.float32(2)), [-1], True)
    scale = ops.divide(np.float32(1), ops.sqrt(ops.add(squares, np.float32(eps))))
    return ops.multiply(ops.multiply(x, scale), weight)


def gated_mlp(x: Any, gate: Any, up: Any, down: Any, activation: str) -> Any:
    return linear(ops.multiply(FUNCTIONS[activation](linear(x, gate)), linear(x, up)), down)


class Backend:
    """Float32 on the CPU."""

    numerics = {"accumulator": "float32"}  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        """The operations of one argument that the opset has."""
        if name not in FUNCTIONS:
            raise AttributeError(name)
        return lambda x: run(FUNCTIONS[name], x)

    def linear(self, x: Any, w: Any, bias: Any = None) -> Any:
        y = run(linear, x, w)
        return y if bias is None else run(ops.add, y, bias)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return run(rms_norm, x, weight, options=(float(eps),))

    def gated_mlp(self, x: Any, gate: Any, up: Any, down: Any, activation: str = "silu") -> Any:
        return run(gated_mlp, x, gate, up, down, options=(activation,))

    def attention(self, q: Any, k: Any, v: Any, scale: Any = None, **more: Any) -> Any:
        if more.get("softcap") is not None or more.get("sinks") is not None:
            raise NotImplementedByBackendError("softcap or sinks in OpenVINO's attention")
        window = more.get("window") or len(k)
        t, j = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))
        mask = np.where((j <= t) & (j > t - window), 0, -np.inf).astype(np.float32)[None, None]
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        heads = [x.transpose(1, 0, 2)[None] for x in (q, k, v)]
        scale = np.float32(q.shape[2] ** -0.5 if scale is None else scale)
        y = run(ops.scaled_dot_product_attention, *heads, mask, options=(scale,))
        return y[0].transpose(1, 0, 2)
