"""How far a whole model strays at a precision: the exact engine, disturbed at random (SPEC 16.5).

Every step of the forward pass is moved, up or down at random, by the root mean square that its own
rounding errors may have at unit roundoff u. What that does to a logit, as a root mean square over
several runs, is the standard deviation of the noise that a legitimate computation at that precision
makes, to first order: the sizes are those of the undisturbed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from conformance.generator import seed_of, words
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32, align, matmul, to_float32
from reference.attention import Scores
from reference.experts import SCORES, Routing, Shared, gates_of, moe, route
from reference.feedforward import Function
from reference.model import EXACT, Model, Operations, Routed, Rows
from reference.weights import Beside, ExactInt4Linear, ExactLinear, Experts, Linear

RUNS = 64
"""Disturbed runs. The error of one logit over its own root mean square of n runs has Student's law
with n degrees of freedom: beyond 7 with probability 2 * 10^-9 for 64, 3 * 10^-6 for 16."""

STRAY = 7
"""Root mean squares that a legitimate computation may stray (SPEC 16.5)."""

MODEL = f"noise({STRAY})"
"""The error model of a whole model's logits."""

STEADY = f"steady({STRAY})"
"""That of what rounding must not reach: the choice of experts (SPEC 16.5)."""

CODED = 2.0**-16
"""The roundoff at which a model is disturbed whose activations become int8 codes: at less, too,
codes flip, and one that does flips some in all layers behind it (SPEC 16.5)."""

MODEL_OF_CODES = f"noise_of_codes({STRAY})"
"""The error model of such a model's logits."""

STEADY_OF_CODES = f"steady_of_codes({STRAY})"
"""And that of its experts' choice."""

COARSEST = 2.0**-8
"""Unit roundoff of the coarsest precision that can be declared, bfloat16 (SPEC 16.3)."""

LARGE = 1e30
"""Stands for a gap that no rounding closes."""

UNIT = 2.0**-20
"""The roundoff at which the model is disturbed: coarse enough to stand clear of float32's grid."""

F64 = NDArray[np.float64]
Ints = NDArray[np.int64]


def root_mean_square(term: str) -> float:
    """The root mean square of a step's error in units of its gauge, at roundoff UNIT (SPEC 16.5).

    One rounding of v errs uniformly within u |v|. In a sum of K products, in any order, the sums so
    far are at most k / K of the gauge on average, so their roundings add up to K / 9 in square.
    """
    name, count = term.rstrip(")").split("(")
    return UNIT * math.sqrt(int(count) / 9 + 1 if name == "dot" else int(count) / 3)


Move = Callable[[F32, Callable[[], F64 | F32]], F32]
"""From a step's result and what its size would be, to the result that is passed on."""


def recording(sizes: list[F64]) -> Move:
    """Pass results on as they are, and note the size of each step's disturbance."""

    def move(y: F32, size: Callable[[], F64 | F32]) -> F32:
        sizes.append(np.asarray(size(), np.float64))
        return y

    return move


def disturbing(sizes: list[F64], name: str, unit: float = UNIT) -> Move:
    """Move every step's result by its noted size, up or down at random, element by element.

    Up where the first bit of the element's word is set: as a float64, that is a minus sign.
    unit: the roundoff to disturb at, a power of two.
    """
    left, times = iter(enumerate(sizes)), unit / UNIT

    def move(y: F32, size: Callable[[], F64 | F32]) -> F32:
        step, noted = next(left)
        signs = words(seed_of(f"{name}/{step}"), y.size).reshape(y.shape).view(np.float64)
        by = np.copysign(noted, signs)
        by *= times
        return to_float32(np.subtract(y, by, out=by))

    return move


def moved(move: Move) -> Operations:
    """The exact operations, the result of each going through `move`."""

    def rms_norm(x: F32, weight: F32, eps: float) -> F32:
        y = EXACT.rms_norm(x, weight, eps)
        each = root_mean_square("ops(4)") + root_mean_square(f"dot({x.shape[-1]})") / 2
        return move(y, lambda: each * np.abs(y))

    def linear(layer: Linear, x: F32) -> F32:
        model = root_mean_square(f"dot({x.shape[-1]})")
        return move(layer(x), lambda: model * _products(layer, x))

    def attend(q: F32, parts: Sequence[Rows], scores: Scores) -> F32:
        y = EXACT.attend(q, parts, scores)
        (layer,) = (part.layer for part in parts)

        def size() -> F64:
            seen = layer.plain().read(0, layer.length)[:2]
            k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in seen)
            cap = None if scores.softcap is None else float(scores.softcap)
            options = (float(scores.scale), scores.window, cap, scores.sinks)
            gauge = gauges.attention(q, k, v, y, *options)
            sizes = [root_mean_square(gauge.models[t]) * g for t, g in gauge.terms.items()]
            return np.asarray(sum(sizes))

        return move(y, size)

    def add(x: F32, y: F32) -> F32:
        total = EXACT.add(x, y)
        return move(total, lambda: root_mean_square("ops(1)") * np.abs(total))

    def activation(function: Function) -> Function:
        return lambda x: move(function(x), lambda: root_mean_square("ops(9)") * np.abs(x))

    activations = {name: activation(function) for name, function in EXACT.activations.items()}
    return Operations(
        rms_norm, linear, attend, activations, add, by_rows=lambda work, *rows: work(*rows)
    )


def _products(layer: Linear, x: F32) -> F32:
    """Sum |x_k| |w_k| for a linear layer of the exact lane, (T, N)."""
    if isinstance(layer, ExactLinear):
        weight = replace(layer.weight, values=np.abs(layer.weight.values))
        return matmul(align(np.abs(x)), weight)
    if isinstance(layer, ExactInt4Linear):
        return matmul(np.abs(x), np.abs(layer.weight).astype(np.float32))
    if isinstance(layer, Beside):
        return np.concatenate([_products(part, x) for part in layer.parts], axis=1)
    raise TypeError(f"{type(layer).__name__} is no layer of the exact lane")


@dataclass(frozen=True)
class SameExperts(Model):
    """A model that routes every token as it did in its first pass (SPEC 16.5).

    Rounding moves the gates, and what the experts compute. Where it could move the choice, the
    result would be another one: `chosen` and `seen` tell where.

    move: what the experts' sum goes through. chosen: experts by layer, (T, k). seen: by layer, what
    the choice was made of in the latest pass, (T, E) float64.
    """

    move: Move = field(default=lambda y, size: y)
    chosen: dict[int, Ints] = field(default_factory=dict)
    seen: dict[int, F64] = field(default_factory=dict)

    def _experts(self, index: int, layer: Experts, x: F32, routed: Routed | None) -> F32:
        """As the model's own; the experts compute one after the other, each in its turn."""
        do, router = self.operations, layer.router
        logits = do.linear(layer.logits, x)
        chosen = self.chosen.setdefault(index, route(logits, router).experts)
        scores = SCORES[router.score](logits)
        bias = np.float32(0) if router.selection_bias is None else router.selection_bias
        self.seen[index] = scores.astype(np.float64) + bias
        gates = gates_of(np.take_along_axis(scores, chosen, axis=1), router)
        outputs = np.empty((*chosen.shape, x.shape[1]), np.float32)
        for expert in np.unique(chosen):
            at = np.nonzero(chosen == expert)
            outputs[at] = self._mlp(layer.experts[expert], x[at[0]])
        shared = None
        if layer.shared is not None:
            gate = None if layer.shared_gate is None else partial(do.linear, layer.shared_gate)
            shared = Shared(partial(self._mlp, layer.shared), gate)
        found = [partial(_found, outputs, chosen, e) for e in range(router.experts)]
        y = moe(x, Routing(chosen, gates, np.zeros(len(x), np.float32)), found, shared)
        terms = np.abs(outputs.astype(np.float64) * gates[..., None]).sum(axis=1)
        model = root_mean_square(f"dot({router.top_k + 1})")
        return self.move(y, lambda: model * (2 * terms + np.abs(y)))


def _found(outputs: F32, chosen: Ints, expert: int, rows: F32) -> F32:
    """What an expert was found to make of its tokens."""
    return outputs[np.nonzero(chosen == expert)]


def unit_of(weights: str) -> float:
    """The roundoff at which a model of that mode is disturbed (SPEC 16.5)."""
    return UNIT if weights == "float32" else CODED


def models_of(weights: str) -> dict[str, str]:
    """The error models of the two gauges of its logits."""
    if weights == "float32":
        return {"noise": MODEL, "steady": STEADY}
    return {"noise": MODEL_OF_CODES, "steady": STEADY_OF_CODES}


def gauge_of_logits(model: Model, weights: str, name: str, tokens: Ints, last: int) -> Gauge:
    """The gauges of the last rows' logits, (last, V) each (SPEC 16.5).

    weights: the mode that `model` has. name: of the stream of disturbances. tokens: (T,).
    """
    unit, models = unit_of(weights), models_of(weights)
    if model.config.sparse is None:
        terms = {"noise": spread(model, name, tokens, last, unit)}
    else:
        both = spread_of_experts(model, name, tokens, unit)
        terms = {key: part[-last:].copy() for key, part in zip(models, both, strict=True)}
    return Gauge(terms, {key: models[key] for key in terms})


def spread(model: Model, name: str, tokens: Ints, last: int, unit: float = UNIT) -> F32:
    """The noise of each of the last rows' logits, divided by u, (last, V) float32 (SPEC 16.5).

    An element's own root mean square, or its row's where that is larger.
    """
    _, changes = disturbed(model, name, tokens, last, unit)
    return per_roundoff(sum(change**2 for change in changes), unit)


def spread_of_experts(model: Model, name: str, tokens: Ints, unit: float = UNIT) -> tuple[F32, F32]:
    """The same of every row of a model with experts, and up to which u its routing is sure.

    Two arrays (T, V) float32. The second is the least ratio, over all choices up to a row, of how
    far a chosen expert lies above another one to what rounding moves the two against each other.
    """
    first, runs = _runs(model, name, tokens, unit)
    squares = np.zeros_like(first.logits)
    gaps = {index: _gaps(first, index) for index in first.seen}
    moved_by = {index: np.zeros_like(gap) for index, gap in gaps.items()}
    for run in runs:
        squares += (run.logits - first.logits) ** 2
        for index, gap in gaps.items():
            moved_by[index] += (_gaps(run, index) - gap) ** 2
    sure = np.full(len(tokens), np.inf)
    for index, gap in gaps.items():
        noise = np.sqrt(moved_by[index] / RUNS) / unit
        ratio = np.divide(gap, noise, out=np.full(gap.shape, np.inf), where=noise > 0)
        sure = np.minimum(sure, ratio.min(axis=(1, 2)))
    row = np.minimum.accumulate(sure).clip(0, np.finfo(np.float32).max)
    steady: F32 = np.repeat(row.astype(np.float32)[:, None], squares.shape[1], axis=1)
    return per_roundoff(squares, unit), steady


@dataclass(frozen=True)
class Run:
    """One pass: logits (T, V), and by layer with experts the chosen ones and what was seen."""

    logits: F64
    chosen: dict[int, Ints]
    seen: dict[int, F64]


def _gaps(run: Run, index: int) -> F64:
    """How far each chosen expert lies above each other one, LARGE above a chosen, (T, k, E)."""
    seen, chosen = run.seen[index], run.chosen[index]
    gap: F64 = np.take_along_axis(seen, chosen, axis=1)[:, :, None] - seen[:, None, :]
    np.put_along_axis(gap, np.repeat(chosen[:, None, :], chosen.shape[1], axis=1), LARGE, axis=2)
    return gap


@dataclass(frozen=True)
class Choices:
    """What may come first at each of the last rows of a text (SPEC 16.7).

    tokens: the exact lane's, (last,) int64. row, token: the others that bfloat16 can bring to the
    first place, (n,) int64 each; margin: how far below the first they are, noise: what rounding
    moves the two against each other, divided by u, (n,) float32 each.
    """

    tokens: Ints
    row: Ints
    token: Ints
    margin: F32
    noise: F32

    def gauges(self) -> dict[str, F32 | Ints]:
        """All but the tokens, by name."""
        return {name: getattr(self, name) for name in ("row", "token", "margin", "noise")}


def choices(model: Model, name: str, tokens: Ints, last: int, unit: float = UNIT) -> Choices:
    """Every token that a legitimate computation may put first, at each of the last rows.

    name: of the stream of disturbances. tokens: (T,) int64.
    """
    return choices_of(*disturbed(model, name, tokens, last, unit), unit)


def choices_of(logits: F64, changes: Iterable[F64], unit: float = UNIT) -> Choices:
    """The same from what `disturbed` gave, logits (last, V) and changes of that shape."""
    first = logits.argmax(axis=1)
    at = first[:, None]
    moved = sum((c - np.take_along_axis(c, at, axis=1)) ** 2 for c in changes)
    noise = per_roundoff(moved, unit)
    margin = np.take_along_axis(logits, at, axis=1) - logits
    row, token = np.nonzero(margin <= STRAY * COARSEST * noise.astype(np.float64))
    others = token != first[row]
    row, token = row[others], token[others]
    found: F32 = margin[row, token].astype(np.float32)
    return Choices(first, row, token, found, noise[row, token])


def disturbed(
    model: Model, name: str, tokens: Ints, last: int, unit: float = UNIT
) -> tuple[F64, Iterator[F64]]:
    """The exact logits of the last rows, and how far each of RUNS disturbed runs lies from them.

    (last, V) float64 each. name: of the stream of disturbances. tokens: (T,).
    """
    first, runs = _runs(model, name, tokens, unit)
    exact = first.logits[-last:]
    return exact, (run.logits[-last:] - exact for run in runs)


def per_roundoff(squares: F64 | int, unit: float = UNIT) -> F32:
    """Root mean squares from sums of squares of RUNS runs, divided by u, (T, V) float32.

    An element's own, or its row's where that is larger.
    """
    found = np.asarray(squares, np.float64)
    own = np.sqrt(found / RUNS)
    row = np.sqrt(np.add.accumulate(found, axis=1)[:, -1:] / (RUNS * found.shape[1]))
    noise: F32 = (np.maximum(own, row) / unit).astype(np.float32)
    return noise


def _runs(model: Model, name: str, tokens: Ints, unit: float = UNIT) -> tuple[Run, Iterator[Run]]:
    """The undisturbed run, and the disturbed ones."""
    sizes: list[F64] = []
    chosen: dict[int, Ints] = {}

    def run(move: Move) -> Run:
        about = {f.name: getattr(model, f.name) for f in fields(model)}
        same = SameExperts(**{**about, "operations": moved(move)}, move=move, chosen=chosen)
        return Run(same.forward(tokens).astype(np.float64), chosen, same.seen)

    first = run(recording(sizes))
    return first, (run(disturbing(sizes, f"{name}/{i}", unit)) for i in range(RUNS))
