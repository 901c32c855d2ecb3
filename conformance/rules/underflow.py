"""What a computation may lose to underflow, by the number of its roundings (SPEC 16.4).

A rounding of a result below the least normal number errs by an absolute amount, eta, whatever the
size of the result: half the least subnormal, or the least normal number where subnormals are
flushed to zero. No unit roundoff accounts for that. Here stands how many eta an output may lose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from conformance.golden import Array, Golden
from reference.arithmetic import F64
from reference.blocks import BlockType, dequantize_blocks, read_blocks


def losses(golden: Golden) -> F64 | float:
    """How many eta each element of the bounded output may lose; 0 where that is not known."""
    operation = golden.operation
    if operation not in _LOSSES:
        return 0.0
    arrays = {name: _size(array) for name, array in golden.inputs.items()}
    sizes = {name: _size(array) for name, array in golden.outputs.items()}
    return _LOSSES[operation](arrays, golden.parameters, sizes)


Sizes = Mapping[str, F64]
Loss = Callable[[Sizes, Mapping[str, Any], Sizes], F64 | float]


def _size(x: Array) -> F64:
    wide = np.abs(x.astype(np.float64))
    finite: F64 = np.where(np.isfinite(wide), wide, 0.0)
    return finite


def _product(x: F64, w: F64) -> F64:
    """x (T, K) times w (N, K): each operand, each product and each sum of K may lose one."""
    return np.asarray(x.sum(axis=1)[:, None] + w.sum(axis=1) + 2 * x.shape[1] + 1)


def _linear(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    return _product(inputs["x"], inputs["w"]) + 1


def _linear_int4(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """The row's scale may be lost with 127 codes a weight, a weight or an activation with both."""
    x, scales = inputs["x"], inputs["scales"]
    return _on_codes(x, 8 * scales.sum(axis=1) * (parameters["group"] or x.shape[1]))


def _on_codes(x: F64, weights: F64) -> F64:
    """x (T, K) in int8 codes on weights whose magnitudes sum up to at most `weights` (N,)."""
    scale = 1 + x.max(axis=1, initial=0.0) / 127
    both = scale[:, None] * (2 * x.shape[1] + 2)
    return np.asarray(128 * weights + x.sum(axis=1)[:, None] + both)


def _linear_blocks(kind: BlockType, inputs: Sizes, _: Mapping[str, Any], outputs: Sizes) -> F64:
    """The same on the blocks of GGUF files."""
    blocks = read_blocks(inputs["blocks"].astype(np.uint8), kind)
    sums = np.abs(dequantize_blocks(blocks)).sum(axis=1, dtype=np.float64)
    return _on_codes(inputs["x"], sums)


def _linear_w4a16(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """A lost scale counts 15 times, as a code at most does; a lost sum, perhaps, with its scale."""
    x, scales = inputs["x"], inputs["scales"]
    width = x.shape[1]
    weights = 15 * scales.sum(axis=1) * (parameters["group"] or width)
    sums = (2 * width + 2) * (1 + scales.max(axis=1, initial=0.0))
    return np.asarray(16 * x.sum(axis=1)[:, None] + weights + sums)


def _elementwise(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    return 8 * (1 + inputs["x"])


def _softmax(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """The largest exponential is 1, so that no sum is small."""
    return np.asarray(4 + 2.0 * inputs["x"].shape[-1] * outputs["y"])


def _rms_norm(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """Lost squares change the root by half their share; a lost element counts times r and w."""
    x, width = inputs["x"], inputs["x"].shape[-1]
    whole = (x**2).sum(axis=-1, keepdims=True) + width * parameters["eps"]
    whole = np.maximum(whole, np.finfo(np.float64).tiny)
    root = np.sqrt(width / whole)
    share = (2.0 * width + 2 * x.sum(axis=-1, keepdims=True) + 2 * width) / whole
    return np.asarray(outputs["y"] * share + (inputs["weight"] + x + 2) * (root + 1))


def _rope(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """An element, a cosine, an angle (it is multiplied by the position), a product, a sum."""
    reach = inputs["x"].max(axis=-1, keepdims=True, initial=0.0)
    positions = inputs["positions"][:, None, None]
    about = 4 * (1 + parameters.get("factor", 1.0)) * (1 + reach) * (2 + positions)
    return np.asarray(about * np.ones_like(inputs["x"]))


def _attention(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """What a score loses moves every share by as much; a lost share counts times its value."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    scale = parameters.get("scale") or q.shape[2] ** -0.5
    largest = k.sum(axis=2).max(initial=0.0)
    score = abs(scale) * (q.sum(axis=2)[:, :, None] + largest + 2.0 * q.shape[2] + 1) + 4
    group = q.shape[1] // k.shape[1]
    value = np.repeat(v.max(axis=0), group, axis=0)
    lost = (2 * score + 4.0 * len(k)) * (value + outputs["y"])
    return np.asarray(lost + 2.0 * len(k) + np.repeat(v.sum(axis=0), group, axis=0) + 2)


def _paged_attention(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """That of attention over the positions in order."""
    table, length = inputs["block_table"].astype(np.int64), parameters["length"]
    k, v = (inputs[f"{n}_pages"][table] for n in ("k", "v"))
    whole = {n: x.reshape(-1, *x.shape[2:])[:length] for n, x in (("k", k), ("v", v))}
    return _attention({"q": inputs["q"], **whole}, parameters, outputs)


def _gated_mlp(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """The two first products, carried through the activation and the last one."""
    x, down = inputs["x"], inputs["down"]
    g, u = x @ inputs["gate"].T, x @ inputs["up"].T
    lost_g, lost_u = _product(x, inputs["gate"]), _product(x, inputs["up"])
    inner = 2 * (1 + lost_g + g) * (1 + u) + (1 + g) * (1 + lost_u)
    return np.asarray(inner @ down.T + _product(g * u, down))


def _moe(inputs: Sizes, parameters: Mapping[str, Any], outputs: Sizes) -> F64:
    """What each expert loses, by its gate; a gate that is lost counts times what it weighs."""
    x, experts = inputs["x"], inputs["experts"]
    total = np.full(outputs["y"].shape, 2.0 * (experts.shape[1] + 1))
    for expert in np.unique(experts).astype(int).tolist():
        tokens, ranks = np.nonzero(experts == expert)
        layer = {name: inputs[name][expert] for name in ("gate", "up", "down")}
        lost, size = _expert(x[tokens], layer, parameters)
        total[tokens] += (inputs["gates"][tokens, ranks, None] + 1) * (lost + 1) + size
    if "shared_gate" in inputs:
        layer = {name: inputs[f"shared_{name}"] for name in ("gate", "up", "down")}
        lost, size = _expert(x, layer, parameters)
        total += 2 * (lost + 1)
        if "shared_router" in inputs:
            total += size * (_product(x, inputs["shared_router"]) + 8)
    return total


def _expert(x: F64, layer: Sizes, parameters: Mapping[str, Any]) -> tuple[F64, F64]:
    """What a gated layer loses, and how large its result may be."""
    lost = _gated_mlp({"x": x, **layer}, parameters, {})
    return np.asarray(lost), np.asarray(
        ((x @ layer["gate"].T) * (x @ layer["up"].T)) @ layer["down"].T
    )


_LOSSES: Mapping[str, Loss] = {
    **dict.fromkeys(("sigmoid", "silu", "gelu_tanh"), _elementwise),
    "softmax": _softmax,
    "linear": _linear,
    "linear_int4": _linear_int4,
    "linear_w4a16": _linear_w4a16,
    "linear_q4_0": partial(_linear_blocks, "Q4_0"),
    "linear_q8_0": partial(_linear_blocks, "Q8_0"),
    "rms_norm": _rms_norm,
    "rope": _rope,
    "attention": _attention,
    "paged_attention": _paged_attention,
    "gated_mlp": _gated_mlp,
    "moe": _moe,
}
"""Routing has none: its goldens lie far from underflow."""
