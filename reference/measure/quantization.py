"""The fork of four-bit weights, measured: group scales, or sums that have no order (SPEC 5.6).

One scale a row leaves integers to be added, which have no order, and costs accuracy; one scale a
group of 32 is the accurate one, and its scaled float32 sums depend on their order. The third way
adds the scaled sums in float64, where nothing rounds, because a float16 scale is a multiple of
2^-24. Here are all three on the weights of a trained model: what the weights lose, what the text
loses, and whether sums of real activations change when their groups are added in another order.

Each format is a matrix of blocks with a scale each (SPEC 5.7), that of a row repeated: so one and
the same engine and kernel, int8 activations on integer codes, runs them all (SPEC 5.5). Activations
are int8 in all of them, and not in the base; Q8_0 shows what that alone costs, or nearly so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32, F64
from reference.blocks import BlockMatrix, BlockType, dequantize_blocks
from reference.errors import QuantizationError, RequestError
from reference.loading.huggingface import Checkpoint
from reference.measure.machine import Spread
from reference.measure.perplexity import Evaluation, Scores, divergence
from reference.measure.turns import fields
from reference.model import Model, build_model
from reference.quantization import (
    GROUP,
    Int4Matrix,
    quantize_int4,
    quantize_int4_row,
    quantize_int8,
    unpack,
)
from reference.weights import Experts, GatedMLP, Linear

SHUFFLES = 8
"""Orders of the groups that are tried, beside the ascending one."""

ROWS = 8
"""Rows of activations of which sums are formed."""

OUTPUTS = 256
"""Of a matrix that is drawn at random."""

STRETCH = 64
"""Positions of a block of the bootstrap, at most; none spans two windows."""

RESAMPLES = 2000
"""Of the bootstrap."""

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

BASE = "float32"
"""What the others are compared with: weights as stored, exact arithmetic."""

# ----------------------------------------------------------------------------------------- matrices


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


# -------------------------------------------------------------------------------------------- order


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


# --------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Interval:
    """A figure, and the middle 95 % of what resamples give."""

    value: float
    low: float
    high: float

    def exp(self) -> Interval:
        """Its exponential."""
        return Interval(*(float(np.exp(x)) for x in (self.value, self.low, self.high)))


class Bootstrap:
    """Means over positions with their intervals, by resampling blocks of them.

    Positions near each other are alike, so blocks of `STRETCH` are drawn, with replacement, and the
    same ones for every figure: differences are paired (Kuensch 1989, without overlap).
    """

    def __init__(self, counts: Sequence[int], seed: int = 0) -> None:
        """Counts: positions of each window, in order."""
        starts, at = list[int](), 0
        for count in counts:
            starts.extend(range(at, at + count, STRETCH))
            at += count
        self._starts = starts
        self._lengths = np.diff([*starts, at]).astype(np.float64)
        draws = np.random.default_rng(seed).multinomial(
            len(starts), np.full(len(starts), 1 / len(starts)), RESAMPLES
        )
        self._draws = draws.astype(np.float64)

    def mean(self, values: NDArray[Any]) -> Interval:
        """The mean of (positions,) values."""
        sums = np.add.reduceat(values.astype(np.float64), self._starts)
        means = (self._draws @ sums) / (self._draws @ self._lengths)
        low, high = np.quantile(means, (0.025, 0.975))
        return Interval(float(sums.sum() / self._lengths.sum()), float(low), float(high))


def interval_fields(name: str, found: Interval | None) -> dict[str, float | None]:
    """An interval as keys of a row, None each where there is none."""
    if found is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


@dataclass(frozen=True)
class Text:
    """What one format made of the windows: (positions,) each, and the tokens a second of each."""

    surprise: F64
    nats: F64
    same: NDArray[np.bool_]
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Experiment:
    """Formats of one model on one text. tokens: (n,) of it. context: tokens of a window.

    positions: that count, at least; whole windows are computed. Raises RequestError where the text
    has fewer, QuantizationError where a matrix has no such form.
    """

    checkpoint: Checkpoint
    tokens: NDArray[np.int64]
    formats: tuple[str, ...]
    positions: int
    context: int = 512
    bos: int | None = None

    @cached_property
    def base(self) -> Model:
        """The model as it is stored."""
        return build_model(self.checkpoint, "float32", "exact")

    @cached_property
    def quantized(self) -> dict[str, Quantized]:
        """Its matrices by format."""
        names = [name for _, joined in projections(self.base) for name in joined]
        return {kind: Quantized.of(self.checkpoint.tensors, names, kind) for kind in self.formats}

    def model(self, kind: str) -> Model:
        """The model in a format, with int8 activations (SPEC 5.5)."""
        blocks = self.quantized[kind].blocks
        return build_model(replace(self.checkpoint, blocks=blocks), "native", "exact")

    @cached_property
    def evaluations(self) -> dict[str, Evaluation]:
        """Of the base and of each format, on the same windows."""
        models = {BASE: self.base, **{kind: self.model(kind) for kind in self.formats}}
        whole = Evaluation(self.base, self.tokens, self.context, bos=self.bos)
        each = whole.windows[0].counted
        chunks = -(-self.positions // each)
        if chunks > len(whole.windows):
            raise RequestError(
                f"positions: {self.positions} are wanted, and the text has {whole.counted} in "
                f"windows of {self.context}; give a longer text, or ask for fewer"
            )
        return {kind: replace(whole, model=m, chunks=chunks) for kind, m in models.items()}

    def run(self) -> Iterator[dict[str, Scores]]:
        """The scores of window after window, by format, the base's first."""
        for found in zip(*(each.run() for each in self.evaluations.values()), strict=True):
            yield dict(zip(self.evaluations, found, strict=True))

    def read(self) -> dict[tuple[str, ...], F32]:
        """Real activations, for `order_figures`."""
        return activations(self.base, self.tokens[: min(64, self.context)].tolist())


def reduced(scores: Mapping[str, Scores]) -> dict[str, Text]:
    """What is kept of a window: logits are large."""
    base, found = scores[BASE], {}
    for kind, each in scores.items():
        apart = divergence(base.logits, each)
        rate = (each.window.stop - each.window.start - 1) / each.seconds
        found[kind] = Text(each.surprise, apart.nats, apart.same_top, (rate,))
    return found


def joined(parts: Sequence[Mapping[str, Text]]) -> dict[str, Text]:
    """Windows one after another."""

    def of(kind: str) -> Text:
        each = [part[kind] for part in parts]
        surprise, nats, same = (
            np.concatenate([getattr(text, name) for text in each])
            for name in ("surprise", "nats", "same")
        )
        return Text(surprise, nats, same, tuple(rate for text in each for rate in text.rates))

    return {kind: of(kind) for kind in parts[0]}


def text_figures(parts: Sequence[Mapping[str, Text]]) -> dict[str, dict[str, Any]]:
    """Figures of each format over the windows that were computed, with intervals of 95 %.

    perplexity; ratio: to the base's; to_int4: to that of `int4`; kl: KL(base || format) in nats;
    same_top: share of positions whose likeliest token is the base's.
    """
    bootstrap = Bootstrap([len(part[BASE].surprise) for part in parts])
    whole, told = joined(parts), {}
    group = whole.get("int4")
    for kind, text in whole.items():
        beside = None if group is None else bootstrap.mean(text.surprise - group.surprise).exp()
        told[kind] = {
            "positions": len(text.surprise),
            "repetitions": len(parts),
            **interval_fields("perplexity", bootstrap.mean(text.surprise).exp()),
            **interval_fields("ratio", bootstrap.mean(text.surprise - whole[BASE].surprise).exp()),
            **interval_fields("to_int4", beside),
            **interval_fields("kl", bootstrap.mean(text.nats)),
            **interval_fields("same_top", bootstrap.mean(text.same)),
            **fields("rate", Spread.of(text.rates)),
        }
    return told
