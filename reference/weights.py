"""A model's weights, prepared for use: linear layers by weight mode and arithmetic (SPEC 10.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32, F64, Aligned, align, align_weights, matmul, one_nan
from reference.blocks import BlockMatrix, check_blocks, dequantize_blocks
from reference.config import ModelConfig, SparseConfig
from reference.errors import QuantizationError
from reference.experts import Router
from reference.families import EMBEDDING, HEAD, NORMS, Sparse
from reference.memory import Memory, OnDemand, StoredRows, StoredTensors, row_slices
from reference.quantization import (
    Int4Matrix,
    check_scales,
    dequantize,
    linear_dequantized,
    quantize_int4,
    quantize_int4_row,
    quantize_int8,
)
from reference.reuse import result_memory
from reference.threads import ROWS, share, thread_count

Arithmetic = Literal["exact", "float32"]
Mode = Literal["float32", "int4", "int4-row", "native"]
MODES: tuple[Mode, ...] = get_args(Mode)

WIDE = 1 << 22
"""Weights from which on BLAS takes longer to pack them for a few rows than to multiply them."""

MAKING: Mapping[Arithmetic, tuple[int, int]] = {"exact": (8, 16), "float32": (4, 12)}
"""Bytes of a weight once its layer is made, and more bytes while it is made: its mapped page, the
widened values, and the arrays of `align`. Tests hold them against what processes really take."""

QUANTIZING = 44
"""The latter for a weight that is quantized, or that was stored quantized, on the way."""


@dataclass(frozen=True)
class ExactLinear:
    """RN32(x @ w.T + bias) with w (N, K) aligned once (SPEC 2.2, 10.1). bias: (N,) or None."""

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
        if len(x) == 1 or (len(x) < 2 * ROWS and self.weight.size < WIDE):
            return add(x @ self.weight.T, self.bias)
        # Each thread has BLAS pack the weights of its own columns alone: a head has many of them.
        out = result_memory((len(x), len(self.weight)))
        step = max(1, -(-len(self.weight) // thread_count()))
        parts = [slice(first, first + step) for first in range(0, len(self.weight), step)]
        share(lambda n: np.matmul(x, self.weight[n].T, out=out[:, n]), parts)
        return add(out, self.bias)


@dataclass(frozen=True)
class ExactInt4Linear:
    """int8 activations times weights scale * q, (N, K) float64 (SPEC 5.5, 5.7)."""

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


@dataclass(frozen=True)
class Beside:
    """Linear layers of the same rows, their outputs one after the other (SPEC 10.1)."""

    parts: tuple[Linear, ...]

    def __call__(self, x: F32) -> F32:
        """(T, K) float32 -> (T, N) float32, N the sum of the parts'."""
        return np.concatenate([part(x) for part in self.parts], axis=1)


@dataclass(frozen=True)
class SlicedLinear:
    """A linear layer without bias in slices of its outputs, each made when needed (SPEC 12.3).

    rows: the slices of [0, N). pieces: the linear layer of each.
    """

    pieces: Sequence[Linear]
    rows: Sequence[slice]

    def __call__(self, x: F32) -> F32:
        """(T, K) float32 -> (T, N) float32."""
        out = np.empty((len(x), self.rows[-1].stop), np.float32)
        for index, here in enumerate(self.rows):
            out[:, here] = self.pieces[index](x)
        return out


Linear = ExactLinear | PlainLinear | ExactInt4Linear | PlainInt4Linear | Beside | SlicedLinear


def add(x: F32, y: F32 | None) -> F32:
    """RN32(x + y), for a bias or a residual; x itself where y is None (SPEC 10.1, 10.2)."""
    if y is None:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        return one_nan(x + y)


def linear(
    w: F32,
    bias: F32 | None,
    mode: Mode,
    arithmetic: Arithmetic,
    name: str = "weight",
    once: bool = False,
) -> Linear:
    """Make a linear layer of w (N, K) float32, which has no native form (SPEC 10.1).

    once: the layer serves few calls, so that its weights are not laid out for many; no bit depends
    on it. Raises QuantizationError where w has no int4 form.
    """
    if mode in ("int4", "int4-row"):
        return _on_codes(dequantize(_quantized(w, mode, name)), bias, arithmetic)
    if arithmetic == "exact":
        return ExactLinear(align(w) if once else align_weights(w), bias)
    return PlainLinear(w, bias)


def native_linear(m: BlockMatrix, bias: F32 | None, arithmetic: Arithmetic, name: str) -> Linear:
    """Make a linear layer of a matrix of blocks (SPEC 5.7, 10.1).

    Raises QuantizationError where its sums would not be exact.
    """
    check_blocks(m, name)
    return _on_codes(dequantize_blocks(m), bias, arithmetic)


def _on_codes(weight: F32, bias: F32 | None, arithmetic: Arithmetic) -> Linear:
    """The layer of int8 activations for weights scale * q, (N, K) float32 (SPEC 5.5)."""
    if arithmetic == "exact":
        return ExactInt4Linear(weight.astype(np.float64), bias)
    return PlainInt4Linear(weight, bias)


def _quantized(w: F32, mode: Mode, name: str) -> Int4Matrix:
    """w (N, K) in int4, by group or by row. Raises QuantizationError, naming the tensor."""
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
    """The experts of a layer, and what routes tokens to them (SPEC 9.2, 9.3).

    logits: the router's, (T, K) -> (T, E). shared_gate: (T, K) -> (T, 1).
    """

    logits: Linear
    router: Router
    experts: tuple[GatedMLP, ...]
    shared: GatedMLP | None
    shared_gate: Linear | None


@dataclass(frozen=True)
class Norms:
    """Norm weights of a layer, (K,) float32, None where the family has no norm there (SPEC 10.2).

    They are norms 1 to 4: before attention and after it, before the feed-forward layer and after
    it, each of the latter before the residual is added.
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
    """A model's weights (SPEC 10.2). embedding: (V, K) float32. head: (T, K) -> (T, V)."""

    embedding: F32 | StoredRows
    layers: Sequence[Layer]
    final_norm: F32
    head: Linear

    def head_of(self, index: int, rows: slice) -> Linear:
        """The head's outputs `rows`, which are slice `index` of `row_slices`, as a linear layer."""
        if isinstance(self.head, SlicedLinear):
            return self.head.pieces[index]
        if isinstance(self.head, ExactLinear):
            weight = self.head.weight
            return ExactLinear(Aligned(weight.values[:, rows], weight.finite[rows]), None)
        assert isinstance(self.head, PlainLinear)  # a head is never quantized
        return PlainLinear(self.head.weight[rows], None)


def prepare(
    config: ModelConfig,
    tensors: Mapping[str, F32],
    mode: Mode,
    arithmetic: Arithmetic,
    blocks: Mapping[str, BlockMatrix] = MappingProxyType({}),
    memory: Memory | None = None,
) -> Weights:
    """Prepare the tensors of a checkpoint, which have their Hugging Face names (SPEC 10.1, 12.1).

    blocks: the matrices that have a native form (SPEC 5.7). memory: if there is one, layers and
    head are made when they are needed, from StoredTensors (SPEC 12.3). Raises QuantizationError.
    """
    make = _Preparation(config, tensors, mode, arithmetic, blocks, memory is not None)
    embedding, head = EMBEDDING, EMBEDDING if config.tied else HEAD
    if memory is None or not isinstance(tensors, StoredTensors):
        return Weights(
            tensors[embedding],
            tuple(make.layer(index) for index in range(config.layers)),
            make.norm("model.norm"),
            linear(tensors[head], None, "float32", arithmetic),
        )
    rows = row_slices(config.vocab_size, config.hidden_size)

    def piece(index: int) -> Linear:
        return linear(tensors.rows(head, rows[index]), None, "float32", arithmetic, once=True)

    layers = OnDemand(config.layers, make.layer, memory)
    return Weights(
        StoredRows(tensors, embedding),
        layers,
        make.norm("model.norm"),
        SlicedLinear(OnDemand(len(rows), piece, memory), rows),
    )


@dataclass(frozen=True)
class _Preparation:
    """The tensors of a checkpoint, and what is made of them. once: each layer serves few calls."""

    config: ModelConfig
    tensors: Mapping[str, F32]
    mode: Mode
    arithmetic: Arithmetic
    blocks: Mapping[str, BlockMatrix]
    once: bool

    def norm(self, name: str) -> F32:
        """A norm's weight; `RN32(1 + w)` where w is stored without the 1 (SPEC 6)."""
        weight = self.tensors[f"{name}.weight"]
        return np.float32(1) + weight if self.config.family.norm_offset else weight

    def joined(self, prefix: str, parts: tuple[str, ...], mode: Mode | None = None) -> Linear:
        """One linear layer of the projections of the same rows, biases included."""
        names = [f"{prefix}.{part}" for part in parts]
        if (mode or self.mode) == "native":
            each = tuple(self.native(name) for name in names)
            return Beside(each) if len(each) > 1 else each[0]
        biases = [self.tensors[f"{n}.bias"] for n in names if f"{n}.bias" in self.tensors]
        weight = np.concatenate([self.tensors[f"{n}.weight"] for n in names])
        bias = np.concatenate(biases) if biases else None
        name = f"{prefix}.{'/'.join(parts)}.weight"
        return linear(weight, bias, mode or self.mode, self.arithmetic, name, self.once)

    def native(self, name: str) -> Linear:
        """A projection by its own codes, or of float32 where it has none (SPEC 10.1)."""
        weight, bias = f"{name}.weight", self.tensors.get(f"{name}.bias")
        if weight in self.blocks:
            return native_linear(self.blocks[weight], bias, self.arithmetic, weight)
        return linear(self.tensors[weight], bias, "float32", self.arithmetic, weight, self.once)

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
        """The experts of a layer; the router is never quantized (SPEC 9.3)."""
        stored, count = config.stored, config.router.experts
        prefix = f"{at}.{stored.experts}"
        if stored.stacked:
            experts = self.stacked(prefix, stored, config.width)
        else:
            ats = [f"{prefix}.{expert}" for expert in range(count)]
            experts = [self.gated(at, stored.gate_up, stored.down) for at in ats]
        shared, gate = None, None
        if stored.shared:
            shared = self.gated(f"{at}.mlp.shared_expert", ("gate_proj", "up_proj"), "down_proj")
            gate = self.joined(at, ("mlp.shared_expert_gate",), "float32")
        logits = self.joined(at, (stored.router,), "float32")
        return Experts(logits, config.router, tuple(experts), shared, gate)

    def stacked(self, prefix: str, stored: Sparse, width: int) -> list[GatedMLP]:
        """Experts of tensors (E, K, N) that hold them all, gate and up alternating (SPEC 12.1)."""
        (both,) = stored.gate_up
        turns = np.r_[0 : 2 * width : 2, 1 : 2 * width : 2]

        def all_of(name: str, rows: slice | NDArray[np.int64]) -> list[Linear]:
            pairs = zip(self.tensors[name], self.tensors[f"{name}_bias"], strict=True)
            return [
                linear(
                    np.ascontiguousarray(weight.T[rows]),
                    bias[rows],
                    self.mode,
                    self.arithmetic,
                    f"{name}.{expert}",
                    self.once,
                )
                for expert, (weight, bias) in enumerate(pairs)
            ]

        gate_up = all_of(f"{prefix}.{both}", turns)
        down = all_of(f"{prefix}.{stored.down}", slice(None))
        return [GatedMLP(*pair) for pair in zip(gate_up, down, strict=True)]
