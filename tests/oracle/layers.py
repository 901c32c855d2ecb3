"""RMSNorm, rotary embedding and feed-forward (SPEC 6, 7, 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import mpmath

from tests.oracle import elementary
from tests.oracle.aligned import dot, dot64, finite
from tests.oracle.numbers import (
    BINARY64,
    NAN,
    add,
    divide,
    multiply,
    narrow,
    rn32,
    settle,
    square_root,
    subtract,
)


def rms_norm(x: Sequence[float], weight: Sequence[float], eps: float) -> list[float]:
    if not finite(x):
        return [NAN] * len(x)
    mean = divide(dot64(x, x), float(len(x)), BINARY64)
    r = narrow(divide(1.0, square_root(add(mean, eps, BINARY64)), BINARY64))
    return [multiply(multiply(value, r), w) for value, w in zip(x, weight, strict=True)]


@dataclass(frozen=True)
class Rope:
    """The numbers of SPEC 7.2."""

    kind: str
    theta: float
    d: int
    factor: float = 1.0
    old: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def _yarn_range(rope: Rope) -> tuple[mpmath.mpf, mpmath.mpf]:
    def c(beta: float) -> mpmath.mpf:
        turns = mpmath.mpf(rope.old) / (2 * mpmath.pi * mpmath.mpf(beta))
        return rope.d * mpmath.log(turns) / (2 * mpmath.log(mpmath.mpf(rope.theta)))

    low, high = c(rope.beta_fast), c(rope.beta_slow)
    if rope.truncate:
        low, high = mpmath.floor(low), mpmath.ceil(high)
    low, high = max(low, mpmath.mpf(0)), min(high, mpmath.mpf(rope.d - 1))
    if low == high:
        high += mpmath.mpf(1) / 1000
    return low, high


def _inv_freq(rope: Rope, i: int, position: int) -> mpmath.mpf:
    """inv_freq(i) at the working precision of mpmath."""
    mpf = mpmath.mpf
    theta, factor = mpf(rope.theta), mpf(rope.factor)
    if rope.kind == "dynamic" and i > 0:
        n = max(position + 1, rope.old)
        base = factor * n / rope.old - (factor - 1)
        theta *= base ** (mpf(rope.d) / (rope.d - 2))
    f = theta ** (mpf(-2 * i) / rope.d)
    if rope.kind == "linear":
        return f / factor
    if rope.kind == "llama3":
        wavelength = 2 * mpmath.pi / f
        low, high = mpf(rope.low_freq_factor), mpf(rope.high_freq_factor)
        if wavelength > rope.old / low:
            return f / factor
        if wavelength < rope.old / high:
            return f
        s = (rope.old / wavelength - low) / (high - low)
        return (1 - s) * f / factor + s * f
    if rope.kind == "longrope":
        return f / mpf((rope.long_factor if position >= rope.old else rope.short_factor)[i])
    if rope.kind == "yarn":
        first, last = _yarn_range(rope)
        ramp = min(max((i - first) / (last - first), mpf(0)), mpf(1))
        e = 1 - ramp
        return f / factor * (1 - e) + f * e
    return f


def _attention_factor(rope: Rope) -> mpmath.mpf:
    mpf = mpmath.mpf
    if rope.kind not in ("yarn", "longrope"):
        return mpf(1)
    if rope.attention_factor is not None:
        return mpf(rope.attention_factor)
    if rope.kind == "longrope":
        if rope.factor <= 1:
            return mpf(1)
        return mpmath.sqrt(1 + mpmath.log(mpf(rope.factor)) / mpmath.log(mpf(rope.old)))

    def g(x: float) -> mpmath.mpf:
        if rope.factor <= 1:
            return mpf(1)
        return mpf(x) * mpmath.log(mpf(rope.factor)) / 10 + 1

    if rope.mscale and rope.mscale_all_dim:
        return g(rope.mscale) / g(rope.mscale_all_dim)
    return g(1.0)


def _settled(value: Callable[[], mpmath.mpf]) -> float:
    """A formula evaluated with enough bits to be rounded correctly to float32."""

    def approximate(bits: int) -> Fraction:
        with mpmath.workprec(bits + 80):
            return elementary.fraction_of(value())

    return settle(approximate)


def rope_constants(rope: Rope, position: int) -> tuple[list[float], float]:
    """inv_freq and the factor of cos and sin, each rounded once (SPEC 7.1)."""
    frequencies = [
        _settled(lambda i=i: _inv_freq(rope, i, position))  # type: ignore[misc]
        for i in range(rope.d // 2)
    ]
    return frequencies, _settled(lambda: _attention_factor(rope))


def cos_sin(rope: Rope, position: int) -> tuple[list[float], list[float]]:
    frequencies, a = rope_constants(rope, position)
    angles = [rn32(Fraction(position) * Fraction(f)) for f in frequencies]
    return (
        [multiply(a, elementary.cos(angle)) for angle in angles],
        [multiply(a, elementary.sin(angle)) for angle in angles],
    )


def rotate(
    x: Sequence[float], cos: Sequence[float], sin: Sequence[float], interleaved: bool
) -> list[float]:
    """One head at one position."""
    out = list(x)
    half = len(cos)
    for i, (c, s) in enumerate(zip(cos, sin, strict=True)):
        j, k = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        out[j] = subtract(multiply(x[j], c), multiply(x[k], s))
        out[k] = add(multiply(x[k], c), multiply(x[j], s))
    return out


Linear = Callable[[Sequence[float]], list[float]]


def linear(weight: Sequence[Sequence[float]], bias: Sequence[float] | None = None) -> Linear:
    """The float32 mode of SPEC 10.1 as a function of one token row."""

    def apply(x: Sequence[float]) -> list[float]:
        y = [dot(x, row) for row in weight]
        if bias is None:
            return y
        return [add(value, b) for value, b in zip(y, bias, strict=True)]

    return apply


def quick_gelu(x: float) -> float:
    return multiply(x, elementary.sigmoid(multiply(rn32(Fraction(1702, 1000)), x)))


ACTIVATIONS = {
    "silu": elementary.silu,
    "gelu_tanh": elementary.gelu_tanh,
    "quick_gelu": quick_gelu,
}


def gated_mlp(
    x: Sequence[float],
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: str,
    limit: float | None = None,
) -> list[float]:
    act = ACTIVATIONS[activation]
    gates, ups = gate(x), up(x)
    if limit is not None:
        gates = [limit if g > limit else g for g in gates]
        ups = [add(limit if u > limit else -limit if u < -limit else u, 1.0) for u in ups]
    hidden = [multiply(act(g), u) for g, u in zip(gates, ups, strict=True)]
    return down(hidden)
