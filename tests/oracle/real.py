"""What the operations would give if nothing were ever rounded: mpmath at 400 bits.

Inputs are the float32 that the operation is given. Sums of products are exact fractions; only
exponentials, roots and quotients are cut, some 350 bits below anything that matters here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import mpmath

from tests.oracle.attention import visible
from tests.oracle.elementary import CUBIC, ROOT
from tests.oracle.numbers import INF, narrow

Row = Sequence[float]
Real = Any


@contextmanager
def precision() -> Iterator[None]:
    """The working precision of everything here."""
    with mpmath.workprec(400):
        yield


def mpf(x: Fraction | float) -> Real:
    """A fraction (or float) at the working precision."""
    if isinstance(x, Fraction):
        return mpmath.mpf(x.numerator) / x.denominator
    return mpmath.mpf(x)


def dot(a: Sequence[float | Fraction], b: Sequence[float | Fraction]) -> Fraction:
    """Exactly."""
    return sum((Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)), Fraction(0))


def sigmoid(x: Real) -> Real:
    return 1 / (1 + mpmath.exp(-x))


def silu(x: Real) -> Real:
    return x * sigmoid(x)


def gelu_tanh(x: Real) -> Real:
    """With the two float32 constants of SPEC 4.2."""
    inner = mpmath.mpf(ROOT) * (x + mpmath.mpf(CUBIC) * x**3)
    # 1 + tanh(u) = 2 sigmoid(2 u), which does not cancel.
    return x * sigmoid(2 * inner)


def quick_gelu(x: Real) -> Real:
    """With 1.702 as float32 (SPEC 9.1)."""
    return x * sigmoid(mpmath.mpf(narrow(1.702)) * x)


ACTIVATIONS: dict[str, Callable[[Real], Real]] = {
    "sigmoid": sigmoid,
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}


def softmax(x: Row) -> list[Real]:
    largest = mpmath.mpf(max(x))
    p = [mpmath.exp(mpmath.mpf(value) - largest) if value != -INF else mpf(0) for value in x]
    total = mpmath.fsum(p)
    return [value / total for value in p]


def linear(x: Row, w: Sequence[Row], bias: Row | None = None) -> list[Real]:
    """One token row."""
    offsets = bias or [0.0] * len(w)
    return [mpf(dot(x, row) + Fraction(b)) for row, b in zip(w, offsets, strict=True)]


def rms_norm(x: Row, weight: Row, eps: float) -> list[Real]:
    mean = mpf(dot(x, x) / len(x) + Fraction(eps))
    root = mpmath.sqrt(mean)
    return [mpf(v) * mpf(w) / root for v, w in zip(x, weight, strict=True)]


def rope(x: Row, position: int, inv_freq: Row, factor: float, interleaved: bool) -> list[Real]:
    """One head at one position; the frequencies are the float32 given."""
    out = [mpf(v) for v in x]
    half = len(inv_freq)
    for i, frequency in enumerate(inv_freq):
        angle = mpf(Fraction(position) * Fraction(frequency))
        c, s = mpf(factor) * mpmath.cos(angle), mpf(factor) * mpmath.sin(angle)
        j, k = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = mpf(x[j]), mpf(x[k])
        out[j], out[k] = a * c - b * s, b * c + a * s
    return out


def attend(
    q: Row,
    keys: Sequence[Row],
    values: Sequence[Row],
    t: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: float | None = None,
) -> list[Real]:
    """One output row; everything that it sees must be finite."""
    positions = visible(t, window)
    scores = []
    for j in positions:
        score = mpf(dot(q, keys[j]) * Fraction(scale))
        if softcap is not None:
            score = mpf(softcap) * mpmath.tanh(score / mpf(softcap))
        scores.append(score)
    has_sink = sink is not None and sink != -INF
    largest = max([*scores, mpf(sink)]) if has_sink and sink is not None else max(scores)
    p = [mpmath.exp(score - largest) for score in scores]
    total = mpmath.fsum(p)
    if has_sink and sink is not None:
        total += mpmath.exp(mpf(sink) - largest)
    return [
        mpmath.fsum(w * mpf(values[j][d]) for w, j in zip(p, positions, strict=True)) / total
        for d in range(len(values[0]))
    ]


def gated_mlp(
    x: Row, gate: Sequence[Row], up: Sequence[Row], down: Sequence[Row], activation: str
) -> list[Real]:
    act = ACTIVATIONS[activation]
    hidden = [act(g) * u for g, u in zip(linear(x, gate), linear(x, up), strict=True)]
    return [mpmath.fsum(h * mpf(w) for h, w in zip(hidden, row, strict=True)) for row in down]


def gates(
    logits: Row,
    experts: Sequence[int],
    score: str,
    renormalise: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
) -> list[Real]:
    """Gates of one token, its experts given."""
    if score == "sigmoid":
        out = [sigmoid(mpf(logits[i])) for i in experts]
    elif score == "softmax":
        every = softmax(logits)
        out = [every[i] for i in experts]
    else:
        out = softmax([logits[i] for i in experts])
    if renormalise:
        total = mpmath.fsum(out) + mpf(epsilon)
        out = [gate / total for gate in out]
    return [gate * mpf(scale) for gate in out]


def moe(
    x: Row,
    experts: Sequence[int],
    gates: Row,
    layers: Sequence[Callable[[Row], list[Real]]],
    shared: Callable[[Row], list[Real]] | None = None,
    shared_router: Row | None = None,
) -> list[Real]:
    """One token, its routing given."""
    parts = [(mpf(gate), layers[i](x)) for i, gate in zip(experts, gates, strict=True)]
    if shared is not None:
        logit = None if shared_router is None else mpf(dot(x, shared_router))
        parts.append((mpf(1) if logit is None else sigmoid(logit), shared(x)))
    return [mpmath.fsum(gate * y[d] for gate, y in parts) for d in range(len(x))]
