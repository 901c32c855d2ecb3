"""Exact attention, one query row and one head at a time (SPEC 8.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from tests.oracle import elementary
from tests.oracle.aligned import dot, finite, weighted_sum
from tests.oracle.numbers import (
    BINARY64,
    INF,
    NAN,
    add,
    divide,
    multiply,
    narrow,
    rn32,
    rn64,
    square_root,
    subtract,
)

Row = Sequence[float]


def default_scale(head_dim: int) -> float:
    """RN32 of the float64 quotient 1 / sqrt(D)."""
    return narrow(divide(1.0, square_root(float(head_dim)), BINARY64))


def visible(t: int, window: int | None) -> range:
    """The positions j with t - W < j <= t (SPEC 8.1)."""
    return range(0 if window is None else max(0, t - window + 1), t + 1)


def attend(
    q: Row,
    keys: Sequence[Row],
    values: Sequence[Row],
    t: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: float | None = None,
) -> list[float]:
    """One output row: the query at position t over one key-value head."""
    undefined = [NAN] * len(q)
    positions = visible(t, window)
    if len(positions) == 0:
        return [0.0] * len(q)
    if not finite(q) or (sink is not None and (math.isnan(sink) or sink == INF)):
        return undefined
    if sink == -INF:
        sink = None
    scores: dict[int, float] = {}
    for j in positions:
        if not (finite(keys[j]) and finite(values[j])):
            return undefined
        score = multiply(dot(q, keys[j]), scale)
        if not math.isfinite(score):
            return undefined
        if softcap is not None:
            score = multiply(softcap, elementary.tanh(divide(score, softcap)))
        scores[j] = score
    largest = max(scores.values())
    if sink is not None:
        largest = max(largest, sink)
    weights = {j: elementary.exp(subtract(u, largest)) for j, u in scores.items()}
    num, den = weighted_sum(weights, {j: values[j] for j in positions})
    if sink is not None:
        den = add(den, elementary.exp(subtract(sink, largest)), BINARY64)
    return [rn32(Fraction(rn64(Fraction(n) / Fraction(den)))) for n in num]


def attention(
    q: Sequence[Sequence[Row]],
    k: Sequence[Sequence[Row]],
    v: Sequence[Sequence[Row]],
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Sequence[float] | None = None,
) -> list[list[list[float]]]:
    """q[T][Hq][D] over k, v[S][Hkv][D]: the rows are the last T of S positions."""
    rows, length = len(q), len(k)
    heads, kv_heads = len(q[0]), len(k[0])
    scale = default_scale(len(q[0][0])) if scale is None else narrow(scale)
    softcap = None if softcap is None else narrow(softcap)
    out = []
    for i in range(rows):
        row = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            row.append(
                attend(
                    q[i][h],
                    [token[g] for token in k],
                    [token[g] for token in v],
                    length - rows + i,
                    scale,
                    window,
                    softcap,
                    None if sinks is None else sinks[h],
                )
            )
        out.append(row)
    return out
