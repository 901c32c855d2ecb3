"""Whether the order in which sums of groups are added changes bits (SPEC 5.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32, F64
from reference.errors import RequestError
from reference.measure.formats import Quantized, projections
from reference.measure.machine import Spread
from reference.measure.turns import fields
from reference.model import Model
from reference.quantization import GROUP, quantize_int8
from reference.weights import Linear

SHUFFLES = 8
"""Orders of the groups that are tried, beside the ascending one."""

ROWS = 8
"""Rows of activations of which sums are formed."""

OUTPUTS = 256
"""Of a matrix that is drawn at random."""


def activations(model: Model, tokens: Sequence[int]) -> dict[tuple[str, ...], F32]:
    """What the linear layers of an exact model read, its last rows, (ROWS, K) each or fewer.

    A layer that reads nothing, as an expert that no token chose, is left out.
    """
    named = {id(layer): names for layer, names in projections(model)}
    seen: dict[tuple[str, ...], list[F32]] = {}

    def watched(layer: Linear, x: F32) -> F32:
        if id(layer) in named:
            seen.setdefault(named[id(layer)], []).append(x)
        return model.operations.linear(layer, x)

    spy = replace(model, operations=replace(model.operations, linear=watched))
    spy.forward(tokens)
    return {names: np.concatenate(rows)[-ROWS:] for names, rows in seen.items()}


def group_sums(codes: NDArray[np.int8], x: NDArray[np.int8]) -> F64:
    """Integer sums of each group, codes (N, K) and x (T, K) -> (T, N, G), exact in float64."""
    left, right = (v.astype(np.float64).reshape(len(v), -1, GROUP) for v in (x, codes))
    return np.asarray(np.einsum("tgk,ngk->tng", left, right, optimize=True))


def added_in(order: Sequence[int], terms: NDArray[Any]) -> NDArray[Any]:
    """Terms (T, N, G) one after another in an order, rounded as their type is -> (T, N)."""
    total = np.zeros(terms.shape[:2], terms.dtype)
    for group in order:
        total += terms[..., group]
    return total


@dataclass(frozen=True)
class Lane:
    """Scaled sums of a matrix's groups, in a precision, to be added up in some order.

    terms: (T, N, G), float32 or float64. after: what their sum is multiplied by, (T, N), or 1.
    """

    terms: NDArray[Any]
    after: NDArray[Any]

    def changes(self, orders: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
        """Which outputs have other bits than in ascending order, (orders, T, N)."""
        ascending = range(self.terms.shape[2])
        bits = f"u{self.terms.dtype.itemsize}"
        first, *others = (
            np.asarray(added_in(order, self.terms) * self.after).view(bits)
            for order in (ascending, *orders)
        )
        return np.stack([other != first for other in others])


LANES = ("float32", "float32_by_block", "exact", "float64_by_block")
"""Those of `lanes`, by name."""


def lanes(x: F32, codes: NDArray[np.int8], scales: NDArray[np.float16]) -> dict[str, Lane]:
    """How kernels add up a product of activations x (T, K) and a matrix, by name.

    float32: the scale of a group times its integer sum, the scales of token and row last.
    exact: the same in float64, as SPEC 5.5 has it, before its last rounding.
    float32_by_block: activations have a float32 scale for each block of 32, times that of the
    group, as llama.cpp's have. float64_by_block: the same in float64, before its last rounding.
    """
    by_row, one = scales.shape[1] == 1, np.ones((1, 1))
    xq, s = quantize_int8(x)
    sums = group_sums(codes, xq)
    bq, bs = quantize_int8(x.reshape(-1, GROUP))
    block_sums, block_scales = group_sums(codes, bq.reshape(x.shape)), bs.reshape(len(x), 1, -1)
    wide, group = scales.astype(np.float64), scales.astype(np.float32)
    token, row, inner = s[:, None], np.ones((1, 1), np.float32), group
    if by_row:  # integers are added, and scaled once
        row, inner = group.T, np.ones((1, 1), np.float32)
    return {
        "float32": Lane(inner * sums.astype(np.float32), token * row),
        "float32_by_block": Lane((inner * block_scales) * block_sums.astype(np.float32), row),
        "exact": Lane(wide * sums, one),
        "float64_by_block": Lane(wide * (block_scales.astype(np.float64) * block_sums), one),
    }


def order_figures(
    quantized: Quantized, read: Mapping[tuple[str, ...], F32], seed: int = 0
) -> dict[str, Any]:
    """Shares of outputs whose bits an order of groups changes, over all matrices.

    <lane>_changed: in one of the orders at least; with _median, _least and _most, by order.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in LANES}
    for names, x in read.items():
        for name in names:
            groups = x.shape[1] // GROUP
            orders = [rng.permutation(groups).tolist() for _ in range(SHUFFLES)]
            for lane, sums in lanes(x, *quantized.codes[name]).items():
                found[lane].append(sums.changes(orders).reshape(SHUFFLES, -1))
    told: dict[str, Any] = {"orders": SHUFFLES}
    for lane, parts in found.items():
        every = np.concatenate(parts, axis=1)
        told["outputs"] = every.shape[1]
        told[f"{lane}_changed"] = float(every.any(axis=0).mean())
        told |= fields(f"{lane}_changed", Spread.of(every.mean(axis=1).tolist()))
    return told


def drawn(width: int, seed: int = 0) -> tuple[F32, F32]:
    """Weights (OUTPUTS, width) and activations (ROWS, width) of a normal law, for `order_figures`.

    The wider a row, the more is added: models of use have rows of 2,048 to 16,384, and those that
    are small enough to be at hand have not. Raises RequestError for no multiple of 32.
    """
    if width < GROUP or width % GROUP:
        raise RequestError(f"widths: {width} is no multiple of {GROUP}")
    rng = np.random.default_rng(seed)
    weights, rows = (rng.standard_normal((n, width), np.float32) for n in (OUTPUTS, ROWS))
    return weights * np.float32(width**-0.5), rows
