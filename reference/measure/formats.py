"""Ways to store the weights of a model in four and eight bits (SPEC 5.2, 5.3, 5.7).

Each is a matrix of blocks with a scale each, that of a row repeated, so that one and the same
kernel runs them all (SPEC 5.5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.blocks import BlockMatrix, BlockType, dequantize_blocks
from reference.errors import QuantizationError, RequestError
from reference.measure.machine import Spread
from reference.model import Model
from reference.quantization import (
    GROUP,
    Int4Matrix,
    quantize_int4,
    quantize_int4_row,
    unpack,
)
from reference.weights import Experts, GatedMLP, Linear

Codes = tuple[NDArray[np.int8], NDArray[np.float16]]
"""Codes (N, K), and scales (N, G), one a group or one a row."""


def _int4(m: Int4Matrix) -> Codes:
    return unpack(m), m.scales


def quantize_q4_0(w: F32) -> Codes:
    """Q4_0 as llama.cpp makes it: the largest magnitude of 32 weights becomes the code -8.

    So the scale has its sign, reversed, and codes reach 7 on its other side (SPEC 5.7).
    """
    blocks = w.reshape(len(w), -1, GROUP)
    at = np.abs(blocks).argmax(axis=2)[..., None]
    scale = np.take_along_axis(blocks, at, axis=2)[..., 0] / np.float32(-8)
    codes = np.trunc(blocks * _reciprocal(scale)[..., None] + np.float32(8.5))
    return np.clip(codes - 8, -8, 7).astype(np.int8).reshape(w.shape), scale.astype(np.float16)


def quantize_q8_0(w: F32) -> Codes:
    """Q8_0 as llama.cpp makes it: largest magnitude over 127, halves away from zero (SPEC 5.7)."""
    blocks = w.reshape(len(w), -1, GROUP)
    scale = np.abs(blocks).max(axis=2) / np.float32(127)
    ratio = blocks * _reciprocal(scale)[..., None]
    codes = np.copysign(np.floor(np.abs(ratio) + np.float32(0.5)), ratio)
    return codes.astype(np.int8).reshape(w.shape), scale.astype(np.float16)


def _reciprocal(scale: F32) -> F32:
    """1 / scale in float32, 0 of 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


@dataclass(frozen=True)
class Format:
    """A way to store weights. bits: of a code. limit: whose sums of scales are allowed (SPEC 5.8).

    quantize: (N, K) float32, K a multiple of 32, to its codes.
    """

    bits: int
    limit: BlockType
    quantize: Callable[[F32], Codes]


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "int4": Format(4, "Q4_0", lambda w: _int4(quantize_int4(w))),
        "int4-row-max": Format(4, "Q4_0", lambda w: _int4(quantize_int4_row(w))),
        "int4-row": Format(4, "Q4_0", lambda w: _int4(quantize_int4_row(w, search=True))),
        "q4_0": Format(4, "Q4_0", quantize_q4_0),
        "q8_0": Format(8, "Q8_0", quantize_q8_0),
    }
)
"""By group; by row, of the largest magnitude, and searched (SPEC 5.3); and two of GGUF files."""


def projections(model: Model) -> Iterator[tuple[Linear, tuple[str, ...]]]:
    """The linear layers that are quantized, and the tensors that each one joins (SPEC 10.1).

    Raises RequestError where experts are stored as one tensor.
    """
    family = model.config.family

    def gated(
        mlp: GatedMLP, at: str, gate_up: tuple[str, ...], down: str
    ) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        yield mlp.gate_up, tuple(f"{at}.{part}.weight" for part in gate_up)
        yield mlp.down, (f"{at}.{down}.weight",)

    for index, layer in enumerate(model.weights.layers):
        at, sparse = f"model.layers.{index}", model.config.sparse_of(index)
        yield layer.qkv, tuple(f"{at}.self_attn.{part}.weight" for part in family.qkv)
        yield layer.output, (f"{at}.self_attn.o_proj.weight",)
        if not isinstance(layer.mlp, Experts) or sparse is None:
            assert isinstance(layer.mlp, GatedMLP)
            yield from gated(layer.mlp, f"{at}.mlp", family.gate_up, "down_proj")
            continue
        stored = sparse.stored
        if stored.stacked:
            raise RequestError(
                f"model: {at} stores its experts as one tensor, which have no blocks here; give "
                "another model"
            )
        for number, expert in enumerate(layer.mlp.experts):
            within = f"{at}.{stored.experts}.{number}"
            yield from gated(expert, within, stored.gate_up, stored.down)
        if layer.mlp.shared is not None:
            parts = ("gate_proj", "up_proj")
            yield from gated(layer.mlp.shared, f"{at}.mlp.shared_expert", parts, "down_proj")


@dataclass(frozen=True)
class Quantized:
    """The matrices of a model in one format, by the names of their tensors."""

    codes: Mapping[str, Codes]
    format: Format

    @classmethod
    def of(cls, tensors: Mapping[str, F32], names: Sequence[str], kind: str) -> Quantized:
        """Quantize. Raises RequestError for an unknown format and a width that has no blocks."""
        if kind not in FORMATS:
            raise RequestError(f"formats: {kind!r} is none of {', '.join(FORMATS)}")
        found: dict[str, Codes] = {}
        for name in names:
            w = tensors[name]
            if w.shape[1] % GROUP:
                raise RequestError(
                    f"model: {name} is {w.shape[1]} wide, which is no multiple of {GROUP}; give "
                    "another model"
                )
            try:
                found[name] = FORMATS[kind].quantize(w)
            except QuantizationError as error:
                raise QuantizationError(f"{name}: {error}") from error
        return cls(found, FORMATS[kind])

    @cached_property
    def blocks(self) -> dict[str, BlockMatrix]:
        """As blocks of 32 with a scale each, the same weights (SPEC 5.7)."""
        found = {}
        for name, (codes, scales) in self.codes.items():
            each = np.broadcast_to(scales, (len(codes), codes.shape[1] // GROUP))
            found[name] = BlockMatrix(self.format.limit, codes, each)
        return found

    def errors(self, tensors: Mapping[str, F32]) -> tuple[float, Spread]:
        """Relative error `|w' - w| / |w|`, by roots of squares, of all weights, of a matrix."""
        squares = []
        for name, m in self.blocks.items():
            w = tensors[name].astype(np.float64)
            squares.append((((dequantize_blocks(m) - w) ** 2).sum(), (w**2).sum()))
        wrong, whole = np.array(squares).T
        each = np.sqrt(wrong / np.where(whole > 0, whole, 1))
        return float(np.sqrt(wrong.sum() / whole.sum())), Spread.of(each.tolist())

    def costs(self) -> dict[str, float]:
        """Bits of a weight, scale included, and what a product of it takes, by counting.

        integer_operations: a multiplication and an addition of integers. scale_operations: of
        floating point, for a weight: each group's sum is scaled and added, a row's scaled alone.
        They are as many in float32 as in float64, where they have no order.
        """
        weights = sum(codes.size for codes, _ in self.codes.values())
        scales = sum(s.size for _, s in self.codes.values())
        by_row = sum(s.size for _, s in self.codes.values() if s.shape[1] == 1)
        return {
            "bits": self.format.bits + 16 * scales / weights,
            "integer_operations": 2.0,
            "scale_operations": (2 * (scales - by_row) + by_row) / weights,
        }
