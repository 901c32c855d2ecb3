"""The order of block sums: inputs for which no order but the contract's gives the bits (SPEC 2.2).

Where a sum may cancel, pairs of blocks are each other's opposite and so large that whatever is
added between the two is rounded. What is left at the end is those roundings, which depend on what
was added before what. Where all terms are positive, one block is so large that a small block's sum
is barely more, or less, than half a unit of float64's last place: each is rounded up to a unit, or
away, if it is added by itself. The total is placed where these few units move the result to the
next float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases.contraction import moe_forms
from conformance.cases.recipe import BOTH, EXACT, Recipe, array32
from conformance.generator import integers, normal, seed_of, uniform, words
from conformance.golden import Array
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import BLOCK, F32, F64, sum64
from reference.elementary import exp, log, sigmoid
from reference.normalization import rms_norm

MODEL = "random-order"

Pairs = NDArray[np.int64]
"""Blocks that cancel each other, (pairs, 2)."""

OF_FOUR: Pairs = np.array([[0, 2]])
"""The pairs of four blocks."""

# Sums that cancel.


def _pairs(name: str, blocks: int, start: int = 0) -> Pairs:
    """The blocks from `start` on, but one or two of them, in pairs drawn at random."""
    drawn = start + np.argsort(words(seed_of(name), blocks - start), kind="stable")
    return drawn[: (blocks - start - 1) // 2 * 2].reshape(-1, 2).astype(np.int64)


def _of_block(block: int) -> slice:
    return slice(block * BLOCK, (block + 1) * BLOCK)


def alike(x: F32, pairs: Pairs, axis: int = -1) -> F32:
    """The same terms in both blocks of a pair, along an axis of x; changes x, and returns it."""
    moved = np.moveaxis(x, axis, -1)
    for first, second in pairs:
        moved[..., _of_block(second)] = moved[..., _of_block(first)]
    return x


def opposite(w: F32, pairs: Pairs, name: str, heights: range, axis: int = -1) -> F32:
    """Opposite terms in the two blocks of a pair, 2^height times the others; changes w.

    Heights are drawn for each pair and each index of the first of the other axes.
    """
    moved = np.moveaxis(w, axis, -1)
    drawn = heights.start + integers(name, len(heights), len(pairs), len(moved))
    for (first, second), height in zip(pairs, drawn, strict=True):
        factor = np.ldexp(np.float32(1), height).reshape(-1, *[1] * (moved.ndim - 1))
        moved[..., _of_block(first)] *= factor
        moved[..., _of_block(second)] = -moved[..., _of_block(first)]
    return w


HIGH, LOWER = range(36, 57), range(32, 45)
"""Heights at which some 2^-12 to 2^9 of a sum of 32 normals is rounded off, and 2^-16 to 2^-3."""


def _linear(name: str, rows: int, columns: int, width: int, note: str) -> Recipe:
    at = f"kernel/linear/{name}"
    pairs = _pairs(f"{at}/pairs", width // BLOCK)
    x = alike(normal(f"{at}/x", rows, width), pairs)
    w = opposite(normal(f"{at}/w", columns, width), pairs, f"{at}/heights", HIGH)
    return Recipe(at, "2.2", {}, {"x": x, "w": w}, note=note)


def _steps() -> Recipe:
    """Block sums that can be added by hand, in all permutations."""
    orders = sorted({*permutations([2.0**60, 1, -(2.0**60), 1])})
    orders += permutations([2.0**60, 2.0**7, 3 * 2.0**7, -(2.0**60)])
    w = np.repeat(array32(orders), BLOCK, axis=1)
    x = np.full((6, w.shape[1]), 2.0**-5, np.float32)
    x[:3] = 0
    x[0, ::BLOCK], x[1, BLOCK - 1 :: BLOCK], x[2, 7::BLOCK] = 1, 1, -2
    x[4] *= np.resize(array32([1, 3, -2, 2]), w.shape[1])
    x[5] *= -4
    note = "block sums 2^60, 1, -2^60, 1, and with ties, in every order: add them by hand"
    return Recipe("kernel/linear/order_steps", "2.2", {}, {"x": x, "w": w}, note=note)


def _of_linear() -> Iterator[Recipe]:
    """Few rows and many, for backends take other ways through them."""
    yield _steps()
    note = "blocks that cancel: what is left is how the sums between were rounded"
    for rows in (1, 4, 5, 34):
        yield _linear(f"order_t{rows}", rows, 17, 256, note)
    at = "kernel/linear_w4a16/order"
    pairs = _pairs(f"{at}/pairs", 10)
    packed, scales = EXACT.quantize_int4(alike(normal(f"{at}/w", 17, 320), pairs), 32)
    x = opposite(normal(f"{at}/x", 5, 320), pairs, f"{at}/heights", HIGH)
    inputs = {"x": x, "packed": packed, "scales": scales}
    yield Recipe(at, "5.9", {"group": 32}, inputs, note=note)
    yield _linear("order_ragged", 7, 19, 387, f"{note}; 3 terms in the last block")
    yield _linear("order_wide", 2, 3, 4096, f"{note}; 128 blocks")


def _gated(at: str, width: int, inner: int) -> dict[str, F32]:
    """Gate, up and down of a layer, whose wider side has four blocks."""
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    made = {
        name: normal(f"{at}/{name}", *shape) * np.float32(0.25) for name, shape in shapes.items()
    }
    for name, w in made.items():
        if w.shape[1] > w.shape[0]:
            opposite(w, OF_FOUR, f"{at}/heights/{name}", LOWER)
        elif width < inner:
            alike(w, OF_FOUR, 0)
    return made


def _fed(at: str, rows: int, width: int) -> F32:
    """Rows that fit `_gated`."""
    x = normal(f"{at}/x", rows, width)
    return alike(x, OF_FOUR) if width == 4 * BLOCK else x


def _of_layers() -> Iterator[Recipe]:
    """Gate and up, or down, of a dense layer and of experts."""
    for name, width, inner in (("order_inputs", 128, 32), ("order_output", 32, 128)):
        at = f"kernel/gated_mlp/{name}"
        inputs = {"x": _fed(at, 5, width), **_gated(at, width, inner)}
        yield Recipe(at, "9.1", {"activation": "silu"}, inputs, note="blocks that cancel")
    for name, rows, width, inner in (("order_inputs", 5, 128, 16), ("order_output", 1, 16, 128)):
        at = f"kernel/moe/{name}"
        routing: dict[str, Array] = {
            "experts": np.array([[0, 1], [1, 0]] * rows, np.int64)[:rows],
            "gates": np.abs(normal(f"{at}/gates", rows, 2)),
        }
        experts = {n: np.stack([w, -w]) for n, w in _gated(at, width, inner).items()}
        inputs = {"x": _fed(at, rows, width), **routing, **experts}
        yield Recipe(
            at,
            "9.3",
            {"activation": "silu"},
            inputs,
            ("bits", "either"),
            note="blocks that cancel",
            forms=moe_forms,
        )


def _attended(at: str, rows: int, keys: int, heads: int, width: int) -> dict[str, Array]:
    """Pairs of blocks with the same keys and opposite values, in each head another pairing."""
    q, k, v = (
        normal(f"{at}/{name}", count, heads, width)
        for name, count in (("q", rows), ("k", keys), ("v", keys))
    )
    for head in range(heads):
        pairs = _pairs(f"{at}/pairs/{head}", (keys - rows) // BLOCK, 1)
        alike(k[:, head], pairs, 0)
        # One height for a whole row of values, which has one exponent (SPEC 2.5).
        moved = np.ascontiguousarray(v[:, head].T)[None]
        v[:, head] = opposite(moved, pairs, f"{at}/heights/{head}", HIGH)[0].T
    return {"q": q, "k": k, "v": v}


def _attention(
    name: str, inputs: Mapping[str, Array], note: str, scale: float, **options: Any
) -> Recipe:
    parameters = {"scale": scale, "window": None, "softcap": None, **options}
    return Recipe(f"kernel/attention/{name}", "8.2", parameters, inputs, note=note)


def _paged(size: int, inputs: Mapping[str, Array], scale: float) -> Recipe:
    """The same on pages that lie in no order, what is not the sequence's being NaN."""
    length, pages = len(inputs["k"]), -(-len(inputs["k"]) // size)
    at = f"cache/paged_attention/order_pages_of_{size}"
    table = np.argsort(words(seed_of(f"{at}/table"), pages + 2), kind="stable")[:pages]
    stored = {}
    for name in ("k", "v"):
        stored[name] = np.full((pages + 2, size, *inputs[name].shape[1:]), np.nan, np.float32)
        for index, page in enumerate(table):
            part = inputs[name][index * size : (index + 1) * size]
            stored[name][page, : len(part)] = part
    arrays = {
        "q": inputs["q"],
        "k_pages": stored["k"],
        "v_pages": stored["v"],
        "block_table": table.astype(np.int64),
    }
    parameters = {"length": length, "scale": scale, "window": None, "softcap": None}
    note = "block sums that cancel, over pages: neither pages nor their order decide"
    return Recipe(at, "11.1", parameters, arrays, note=note)


def _of_attention() -> Iterator[Recipe]:
    """Scores and weighted values that cancel."""
    scale, note = float(np.float32(8**-0.5)), "blocks of values that cancel"
    inputs = _attended("kernel/attention/order_values", 6, 201, 3, 8)
    last = {**inputs, "q": inputs["q"][-1:]}
    yield _attention("order_values", inputs, note, scale)
    yield _attention("order_values_decode", last, f"{note}, one row", scale)
    cut = "the window cuts the first block, and blocks are those of absolute positions"
    yield _attention("order_values_window", inputs, f"{note}; {cut}", scale, window=180)
    for size in (16, 64):
        yield _paged(size, inputs, scale)
    at, width = "kernel/attention/order_scores", 150
    pairs = _pairs(f"{at}/pairs", width // BLOCK)
    wide = {
        "q": alike(normal(f"{at}/q", 5, 2, width), pairs),
        "k": opposite(normal(f"{at}/k", 40, 1, width), pairs, f"{at}/heights", LOWER),
        "v": normal(f"{at}/v", 40, 1, width),
    }
    note = "products of queries and keys that cancel"
    yield _attention("order_scores", wide, note, float(np.float32(width**-0.5)))


# Sums of positive terms.

Brink = Callable[[float], np.float32]
"""From a total to the result that it decides."""

UP, AWAY, LESS = 0.502, 0.498, 0.3
"""What a small block adds, in units of the total's last place: rounded up to one, or away."""

NORM_BLOCKS, SMALL = 24, 20
"""Blocks of a row of a norm, one of them large; small blocks of a row of scores."""

NORM_ROWS = (
    *((0, UP, 21), (1, UP, 21), (3, UP, 21), (0, AWAY, 3), (1, AWAY, 3), (2, AWAY, 3)),
    *((0, UP, 15), (0, UP, 18), (0, UP, 12), (0, LESS, 7), (NORM_BLOCKS - 1, UP, 18)),
)
SCORE_ROWS = (
    *((0, UP, 18), (0, AWAY, 3)),
    *((0, UP, 13), (0, UP, 11), (0, LESS, 6), (SMALL, UP, 15)),
)
"""By row: small blocks before the large one, what each adds, and the brink, in units above the
large block. The contract crosses it where all small sums are rounded up by themselves. Those of the
first lines tell every other order, which comes to about half as many units or to none; the others
tell these orders apart: two halves, a tree, one sum, the last block first.
"""


def _brink(result: Brink, start: int, unit: float, reach: int) -> int:
    """The least number n of units above `start` at which the result is another than of n - 1."""
    low, high, before = start, start + reach, result(start * unit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if result(middle * unit) == before else (low, middle)
    return high


def _total(rows: F64) -> F64:
    """Sums of rows in an order that is the same on every machine, (R, K) -> (R, 1)."""
    return rows.cumsum(axis=1)[:, -1:]


def _squares(total: int, fixed: F64) -> F64:
    """32 integers below 2^24 whose squares sum up to `total`, the first of them given."""
    found = [int(a) for a in fixed]
    rest = total - sum(a * a for a in found)
    for left in (3, 2, 1):
        found.append(math.isqrt(rest // left))
        rest -= found[-1] ** 2
    while rest:  # each leaves about the root of what it was given
        found.append(math.isqrt(rest))
        rest -= found[-1] ** 2
    return np.array(found + [0] * (BLOCK - len(found)), np.float64)


def _norm_row(name: str, before: int, share: float, brink: int, eps: float) -> F32:
    """A row of `NORM_ROWS`, and three zeros."""
    small, width = NORM_BLOCKS - 1, NORM_BLOCKS * BLOCK + 3
    weight = 2.0 ** int(integers(f"{name}/size", 7, 1)[0] - 20)  # of the large block's last place

    def result(total: float) -> np.float32:
        return np.float32(1 / np.sqrt(np.float64(total) * weight**2 / width + eps))

    fixed = np.rint(np.ldexp(0.87 + 0.08 * uniform(f"{name}/large", 20).astype(np.float64), 24))
    start = round(1.15 * float((fixed**2).sum()))  # with three more of their size
    large = _brink(result, start, 1.0, 1 << 32) - brink
    rows = (1 + 0.1 * uniform(f"{name}/small", small, BLOCK)).astype(np.float64)
    rows *= np.sqrt(share / _total(rows**2))
    rows = np.insert(rows, before, _squares(large, fixed), axis=0)
    signs = np.where(uniform(f"{name}/signs", *rows.shape) < 0, -1, 1)
    return np.append((rows * signs * weight).ravel(), np.zeros(3)).astype(np.float32)


def _of_norms() -> Iterator[Recipe]:
    """Sums of squares at a brink, and eps in float64."""
    note = "one block's sum of squares is 2^53 times as large as another's"
    for name, about in (("order", NORM_ROWS), ("order_decode", NORM_ROWS[1:2])):
        at = f"kernel/rms_norm/{name}"
        rows = [_norm_row(f"{at}/{row}", *of_row, 1e-6) for row, of_row in enumerate(about)]
        yield _norm(at, np.stack(rows), 1e-6, note, ("bits",))
    for eps in (1e-5, 1e-6):
        at = f"kernel/rms_norm/eps_float64_{eps:.0e}".replace("e-0", "e-")
        x = normal(f"{at}/x", 4000, 40) * np.float32(math.sqrt(eps))
        ones = np.ones(x.shape[1], np.float32)
        shows = (rms_norm(x, ones, eps) != rms_norm(x, ones, float(np.float32(eps)))).any(axis=1)
        yield _norm(at, x[shows][:6], eps, "rows on which eps rounded to float32 tells", BOTH)


def _norm(at: str, x: F32, eps: float, note: str, rules: tuple[str, ...]) -> Recipe:
    inputs = {"x": x, "weight": normal(f"{at}/weight", x.shape[1])}
    gauge = _gauge_of_norm if "gauge" in rules else None
    return Recipe(at, "6", {"eps": eps}, inputs, rules, gauge, note)


def _gauge_of_norm(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    return gauges.rms_norm(arguments["x"], outputs["y"])


NOTHING = np.float32(-200)
"""A score whose exponential is 0."""


def _score(function: Callable[[F32], F32], share: float) -> np.float32:
    """A score of which an exponential, or a sigmoid, makes hardly less than a small `share`."""
    if share <= 0:
        return NOTHING
    x = log(array32([share]))
    while float(function(x)[0]) > share:
        x = np.nextafter(x, np.float32(-np.inf))
    return np.float32(x[0])


def _score_row(
    name: str, before: int, share: float, brink: int, tail: int, zeros: int, sink: float = 0
) -> F32:
    """A row of `SCORE_ROWS`, and a tail of scores that count nothing.

    The large block has `zeros` scores of 0, the largest. Two more blocks, of one score each, fill
    up its sum. sink: is added last; units are those of the sum with it.
    """
    rows = np.full((3 + SMALL, BLOCK), NOTHING)
    rows[0, :zeros] = 0
    rows[0, zeros:] = -1 - 8 * np.abs(uniform(f"{name}/large", BLOCK - zeros))
    start = float(sum64(exp(rows[0])))
    unit = float(np.spacing(start + sink))

    def result(den: float) -> np.float32:
        return np.float32(1 / np.float64(den))

    at = _brink(result, round((start + sink) / unit), unit, round(2.0**-17 / unit))
    rest = (at - brink) * unit - sink - start
    for row in (1, 2):
        rows[row, 0] = _score(exp, rest)
        rest -= float(exp(rows[row, :1])[0])
    sizes = (1 + 0.1 * uniform(f"{name}/small", SMALL, BLOCK)).astype(np.float64)
    sizes *= share * float(np.spacing(start)) / _total(sizes)
    rows[3:] = log(sizes.astype(np.float32))
    if before:
        rows = rows[::-1]
    return np.append(rows.ravel(), np.full(tail, NOTHING))


def _of_softmax() -> Iterator[Recipe]:
    """Sums of exponentials at a brink: of softmax itself, of a router, and of attention."""
    at = "elementary/softmax/order"
    rows = np.stack([_score_row(f"{at}/{i}", *row, 5, 20) for i, row in enumerate(SCORE_ROWS)])
    note = "blocks of exponentials that add about half a unit of the sum's last place each"
    yield Recipe(at, "4.3", {}, {"x": rows}, note=note)
    parameters = {"top_k": 8, "score": "softmax"}
    yield Recipe("kernel/route/order", "9.2", parameters, {"logits": rows}, note=note)
    queries, width = 5, 4
    for name, rows_of, zeros, sink in (
        ("order_denominator", SCORE_ROWS[:2], 20, 0),
        ("order_sink_last", ((0, UP, 3),) * 2, 15, 1),
    ):
        at = f"kernel/attention/{name}"
        scores = np.stack(
            [
                _score_row(f"{at}/{head}", *row, queries + 3, zeros, sink)
                for head, row in enumerate(rows_of)
            ],
            axis=1,
        )
        q = np.zeros((queries, len(rows_of), width), np.float32)
        k, v = np.zeros((2, *scores.shape, width), np.float32)
        q[..., 0], k[..., 0] = 1, scores
        v[2] = array32([1, -2, 4, -8])  # the others are zero, so that the numerator has one block
        inputs: dict[str, Array] = {"q": q, "k": k, "v": v}
        if sink:  # and an ordinary head beside it, which shows what else may be wrong
            inputs["sinks"] = np.zeros(len(rows_of), np.float32)
            k[:, 1, 0], v[:, 1] = 4 * normal(f"{at}/k", len(k)), normal(f"{at}/v", len(v), width)
        of_sink = "; with the sink first, its last place is of twice the size" if sink else ""
        yield _attention(name, inputs, note + of_sink, 1.0)


def _gates_row(name: str, share: float, brink: int) -> F32:
    """Logits of 12 experts: sigmoids of a half, of two that fill up, and of 5 small ones."""
    unit = float(np.spacing(0.5))

    def result(total: float) -> np.float32:
        return np.float32(0.5 / np.float64(total))

    at = _brink(result, round(0.5 / unit), unit, round(2.0**-20 / unit))
    row = np.full(12, NOTHING)
    row[3], rest = 0, (at - brink) * unit - 0.5
    for expert in (8, 1):
        row[expert] = _score(sigmoid, rest)
        rest -= float(sigmoid(row[expert : expert + 1])[0])
    sizes = share * unit * (1 + 0.002 * uniform(f"{name}/small", 5))
    row[[0, 2, 5, 9, 11]] = log(sizes.astype(np.float32))
    return row


def _of_gates() -> Recipe:
    """Gates are renormalised by their sum in rank order."""
    at = "kernel/route/order_gates"
    rows = [_gates_row(f"{at}/{i}", *row) for i, row in enumerate([(UP, 4), (AWAY, 1)] * 2)]
    parameters = {"top_k": 8, "score": "sigmoid", "renormalise": True}
    note = "five gates of half a unit of their sum's last place, which are added last"
    return Recipe(at, "9.2", parameters, {"logits": np.stack(rows)}, note=note)


def _of_models() -> Iterator[Recipe]:
    """Logits of a model whose projections have blocks that cancel."""
    at = "model/forward/order"
    yield Recipe(
        at,
        "10.2",
        {"model": MODEL, "weights": "float32"},
        {"tokens": integers(f"{at}/tokens", 48, 12)},
        note=f"{MODEL}: features 64 to 95 repeat the first 32, and weights cancel them",
    )


def recipes() -> Iterator[Recipe]:
    """Every golden of this kind."""
    yield from _of_linear()
    yield from _of_layers()
    yield from _of_attention()
    yield from _of_norms()
    yield from _of_softmax()
    yield _of_gates()
    yield from _of_models()
