"""Weights made ready for use: linear layers in each mode and arithmetic (SPEC 10.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reference.arithmetic import F32, F64, Aligned, align_weights, matmul, one_nan
from reference.config import ModelConfig
from reference.errors import QuantizationError
from reference.quantization import (
    Int4Matrix,
    check_scales,
    dequantize,
    linear_dequantized,
    quantize_int4,
    quantize_int4_row,
    quantize_int8,
)
from reference.threads import ROWS, share, thread_count

Arithmetic = Literal["exact", "float32"]
Mode = Literal["float32", "int4", "int4-row"]


@dataclass(frozen=True)
class ExactLinear:
    """x @ w.T + bias with weights aligned once (SPEC 2.2, 10.1). w: (N, K), bias: (N,) or None."""

    weight: Aligned
    bias: F32 | None

    def __call__(self, x: F32) -> F32:
        """(T, K) float32 -> (T, N) float32."""
        return add(matmul(x, self.weight), self.bias)


@dataclass(frozen=True)
class PlainLinear:
    """The same in plain float32, in whatever order BLAS sums (SPEC 1.4)."""

    weight: F32
    bias: F32 | None

    def __call__(self, x: F32) -> F32:
        """(T, K) float32 -> (T, N) float32."""
        # A thread packs for BLAS only the weights of its own columns, of which a head has many.
        out = np.empty((len(x), len(self.weight)), np.float32)
        count = thread_count() if len(x) >= 2 * ROWS else 1
        step = max(1, -(-len(self.weight) // count))
        parts = [slice(first, first + step) for first in range(0, len(self.weight), step)]
        share(lambda n: np.matmul(x, self.weight[n].T, out=out[:, n]), parts)
        return add(out, self.bias)


@dataclass(frozen=True)
class ExactInt4Linear:
    """int8 activations on int4 weights (SPEC 5.5). weight: scale * q, (N, K) float64."""

    weight: F64
    bias: F32 | None

    def __call__(self, x: F32) -> F32:
        """(T, K) float32 -> (T, N) float32."""
        return add(linear_dequantized(x, self.weight), self.bias)


@dataclass(frozen=True)
class PlainInt4Linear:
    """The same with a float32 GEMM on the codes (SPEC 1.4). weight: scale * q, (N, K) float32."""

    weight: F32
    bias: F32 | None

    def __call__(self, x: F32) -> F32:
        """(T, K) float32 -> (T, N) float32."""
        codes, scale = quantize_int8(x)
        return add(codes.astype(np.float32) @ self.weight.T * scale[:, None], self.bias)


Linear = ExactLinear | PlainLinear | ExactInt4Linear | PlainInt4Linear


def add(x: F32, y: F32 | None) -> F32:
    """RN32(x + y), a bias or a residual; y None is nothing (SPEC 10.1, 10.2)."""
    if y is None:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        return one_nan(x + y)


def linear(
    w: F32, bias: F32 | None, mode: Mode, arithmetic: Arithmetic, name: str = "weight"
) -> Linear:
    """Make a linear layer of w (N, K) float32 (SPEC 10.1).

    Raises QuantizationError where w has no int4 form.
    """
    exact = arithmetic == "exact"
    if mode == "float32":
        return ExactLinear(align_weights(w), bias) if exact else PlainLinear(w, bias)
    weight = dequantize(_quantized(w, mode, name))
    if exact:
        return ExactInt4Linear(weight.astype(np.float64), bias)
    return PlainInt4Linear(weight, bias)


def _quantized(w: F32, mode: Mode, name: str) -> Int4Matrix:
    try:
        if mode == "int4-row":
            return quantize_int4_row(w, search=True)
        matrix = quantize_int4(w)
    except QuantizationError as error:
        raise QuantizationError(f"{name}: {error}") from error
    check_scales(matrix, name)
    return matrix


@dataclass(frozen=True)
class Layer:
    """One decoder layer (SPEC 10.2). Norm weights are (K,) or (D,) float32.

    qkv: q, k and v as one layer, (Hq + 2 Hkv) D outputs. gate_up: gate, then up.
    """

    input_norm: F32
    qkv: Linear
    q_norm: F32 | None
    k_norm: F32 | None
    output: Linear
    post_norm: F32
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """A model's weights (SPEC 10.2). embedding: (V, K) float32; head: (T, K) -> (T, V)."""

    embedding: F32
    layers: tuple[Layer, ...]
    final_norm: F32
    head: Linear


def prepare(
    config: ModelConfig, tensors: Mapping[str, F32], mode: Mode, arithmetic: Arithmetic
) -> Weights:
    """Make ready the tensors of a checkpoint, under their Hugging Face names (SPEC 10.1, 12)."""

    def joined(prefix: str, parts: tuple[str, ...]) -> Linear:
        names = [f"{prefix}.{part}_proj" for part in parts]
        biases = [tensors[f"{n}.bias"] for n in names if f"{n}.bias" in tensors]
        weight = np.concatenate([tensors[f"{n}.weight"] for n in names])
        bias = np.concatenate(biases) if biases else None
        name = f"{prefix}.{'/'.join(parts)}_proj.weight"
        return linear(weight, bias, mode, arithmetic, name)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        return Layer(
            tensors[f"{at}.input_layernorm.weight"],
            joined(f"{at}.self_attn", ("q", "k", "v")),
            tensors.get(f"{at}.self_attn.q_norm.weight"),
            tensors.get(f"{at}.self_attn.k_norm.weight"),
            joined(f"{at}.self_attn", ("o",)),
            tensors[f"{at}.post_attention_layernorm.weight"],
            joined(f"{at}.mlp", ("gate", "up")),
            joined(f"{at}.mlp", ("down",)),
        )

    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if config.tied else tensors["lm_head.weight"]
    return Weights(
        embedding,
        tuple(layer(i) for i in range(config.layers)),
        tensors["model.norm.weight"],
        linear(head, None, "float32", arithmetic),
    )
