"""Weights made ready for use: linear layers in each mode and arithmetic (SPEC 10.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32, F64, Aligned, align_weights, matmul, one_nan
from reference.config import ModelConfig, SparseConfig
from reference.errors import QuantizationError
from reference.experts import Router
from reference.families import NORMS, Sparse
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
class GatedMLP:
    """The projections of a gated layer (SPEC 9.1). gate_up: gate, then up."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, and who routes to them (SPEC 9.2, 9.3).

    logits: (T, K) to (T, E). shared_gate: (T, K) to (T, 1).
    """

    logits: Linear
    router: Router
    experts: tuple[GatedMLP, ...]
    shared: GatedMLP | None
    shared_gate: Linear | None


@dataclass(frozen=True)
class Norms:
    """Norm weights of a layer, (K,) float32, None where the family has no norm there (SPEC 10.2).

    They stand before attention and the feed-forward layer, and after each, before its residual.
    """

    before_attention: F32 | None
    after_attention: F32 | None
    before_mlp: F32 | None
    after_mlp: F32 | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer (SPEC 10.2).

    qkv: q, k and v as one layer, (Hq + 2 Hkv) D outputs. q_norm, k_norm: (D,), or (Hq D,) and
    (Hkv D,) float32. sinks: (Hq,) float32.
    """

    norms: Norms
    qkv: Linear
    q_norm: F32 | None
    k_norm: F32 | None
    sinks: F32 | None
    output: Linear
    mlp: GatedMLP | Experts


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
    make = _Preparation(config, tensors, mode, arithmetic)
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if config.tied else tensors["lm_head.weight"]
    return Weights(
        embedding,
        tuple(make.layer(index) for index in range(config.layers)),
        make.norm("model.norm"),
        linear(head, None, "float32", arithmetic),
    )


@dataclass(frozen=True)
class _Preparation:
    """The tensors of a checkpoint, and what is to be made of them."""

    config: ModelConfig
    tensors: Mapping[str, F32]
    mode: Mode
    arithmetic: Arithmetic

    def norm(self, name: str) -> F32:
        """A norm's weight; `RN32(1 + w)` where w is stored without the 1 (SPEC 6)."""
        weight = self.tensors[f"{name}.weight"]
        return np.float32(1) + weight if self.config.family.norm_offset else weight

    def joined(self, prefix: str, parts: tuple[str, ...], mode: Mode | None = None) -> Linear:
        """One linear layer of projections that read the same rows."""
        names = [f"{prefix}.{part}" for part in parts]
        biases = [self.tensors[f"{n}.bias"] for n in names if f"{n}.bias" in self.tensors]
        weight = np.concatenate([self.tensors[f"{n}.weight"] for n in names])
        bias = np.concatenate(biases) if biases else None
        name = f"{prefix}.{'/'.join(parts)}.weight"
        return linear(weight, bias, mode or self.mode, self.arithmetic, name)

    def layer(self, index: int) -> Layer:
        """Layer `index`."""
        at, config, family = f"model.layers.{index}", self.config, self.config.family
        qk, sparse = config.qk_norm is not None, config.sparse_of(index)
        return Layer(
            Norms(*(self.norm(f"{at}.{n}") if n else None for n in NORMS[family.norms])),
            self.joined(f"{at}.self_attn", family.qkv),
            self.norm(f"{at}.self_attn.q_norm") if qk else None,
            self.norm(f"{at}.self_attn.k_norm") if qk else None,
            self.tensors[f"{at}.self_attn.sinks"] if family.sinks else None,
            self.joined(f"{at}.self_attn", ("o_proj",)),
            self.gated(f"{at}.mlp", family.gate_up, "down_proj")
            if sparse is None
            else self.experts(at, sparse),
        )

    def gated(self, prefix: str, gate_up: tuple[str, ...], down: str) -> GatedMLP:
        """A gated layer."""
        return GatedMLP(self.joined(prefix, gate_up), self.joined(prefix, (down,)))

    def experts(self, at: str, config: SparseConfig) -> Experts:
        """The experts of a layer; who routes to them is never quantized (SPEC 9.3)."""
        stored, count = config.stored, config.router.experts
        prefix = f"{at}.{stored.experts}"
        if stored.stacked:
            experts = self.stacked(prefix, stored)
        else:
            ats = [f"{prefix}.{expert}" for expert in range(count)]
            experts = [self.gated(at, stored.gate_up, stored.down) for at in ats]
        shared, gate = None, None
        if stored.shared:
            shared = self.gated(f"{at}.mlp.shared_expert", ("gate_proj", "up_proj"), "down_proj")
            gate = self.joined(at, ("mlp.shared_expert_gate",), "float32")
        logits = self.joined(at, (stored.router,), "float32")
        return Experts(logits, config.router, tuple(experts), shared, gate)

    def stacked(self, prefix: str, stored: Sparse) -> list[GatedMLP]:
        """Experts of tensors (E, K, N) that hold them all, gate and up taking turns (SPEC 12)."""
        (both,) = stored.gate_up
        names = (f"{prefix}.{both}", f"{prefix}.{stored.down}")
        width = self.tensors[names[0]].shape[2]
        order = np.r_[0:width:2, 1:width:2]

        def one(name: str, expert: int, rows: slice | NDArray[np.int64]) -> Linear:
            weight = np.ascontiguousarray(self.tensors[name][expert].T[rows])
            bias = self.tensors[f"{name}_bias"][expert][rows]
            return linear(weight, bias, self.mode, self.arithmetic, f"{name}.{expert}")

        return [
            GatedMLP(one(names[0], expert, order), one(names[1], expert, slice(None)))
            for expert in range(len(self.tensors[names[0]]))
        ]
