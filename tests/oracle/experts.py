"""Mixture of experts, one token at a time (SPEC 9.2, 9.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from tests.oracle import elementary
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
    subtract,
)

Row = Sequence[float]
Layer = Callable[[Row], list[float]]


def _ranked(scores: dict[int, float]) -> list[int]:
    """Keys by score, the largest first, of equal ones the lowest."""
    return sorted(scores, key=lambda i: (-scores[i], i))


def _lead(scores: dict[int, float], count: int) -> float:
    """By how much the last of the chosen beats the best of the others."""
    ranked = [scores[i] for i in _ranked(scores)]
    if count == len(ranked):
        return INF
    last, following = ranked[count - 1], ranked[count]
    return 0.0 if last == following else subtract(last, following)


def route(
    logits: Row,
    top_k: int,
    score: str,
    selection_bias: Row | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 1,
    renormalise: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
) -> tuple[list[int], list[float], float]:
    """Experts in rank order, their gates, and the margin."""
    if any(math.isnan(x) or x == INF for x in logits) or all(x == -INF for x in logits):
        return list(range(top_k)), [NAN] * top_k, NAN
    if score == "softmax":
        scores = elementary.softmax(logits)
    elif score == "sigmoid":
        scores = [elementary.sigmoid(x) for x in logits]
    else:
        scores = list(logits)
    bias = selection_bias or [-0.0] * len(logits)
    selection = {
        i: -INF if x == -INF else add(s, b)
        for i, (x, s, b) in enumerate(zip(logits, scores, bias, strict=True))
    }
    size = len(logits) // groups
    best: dict[int, float] = {}
    for group in range(groups):
        members = sorted((selection[group * size + i] for i in range(size)), reverse=True)
        best[group] = members[0] if group_best == 1 else add(members[0], members[1])
    kept = _ranked(best)[:kept_groups]
    candidates = {i: s for i, s in selection.items() if i // size in kept}
    experts = _ranked(candidates)[:top_k]
    margin = min(_lead(best, kept_groups), _lead(candidates, top_k))
    gates = [scores[i] for i in experts]
    if score == "logits":
        gates = elementary.softmax(gates)
    if renormalise:
        total = 0.0
        for gate in gates:
            total = add(total, gate, BINARY64)
        total = add(total, epsilon, BINARY64)
        gates = [_quotient(gate, total) for gate in gates]
    return experts, [multiply(gate, narrow(scale)) for gate in gates], margin


def _quotient(gate: float, total: float) -> float:
    """A float64 division, then float32."""
    if total == 0 or not math.isfinite(total):
        return divide(gate, total)
    return rn32(Fraction(rn64(Fraction(gate) / Fraction(total))))


def moe(
    x: Row,
    experts: Sequence[int],
    gates: Row,
    layers: Sequence[Layer],
    shared: Layer | None = None,
    shared_gate: Layer | None = None,
) -> list[float]:
    """What a token's experts make of it, in rank order, and the shared one last."""
    total = [0.0] * len(x)
    for expert, gate in zip(experts, gates, strict=True):
        y = layers[expert](x)
        total = [add(t, multiply(gate, v)) for t, v in zip(total, y, strict=True)]
    if shared is None:
        return total
    y = shared(x)
    if shared_gate is not None:
        weight = elementary.sigmoid(shared_gate(x)[0])
        y = [multiply(weight, v) for v in y]
    return [add(t, v) for t, v in zip(total, y, strict=True)]
