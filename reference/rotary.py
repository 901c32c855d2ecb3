"""Rotary position embedding: constants by decimal arithmetic, rotation step by step (SPEC 7)."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference import elementary
from reference.arithmetic import F32, one_nan

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeParameters:
    """What a configuration says of rope (SPEC 7.2); numbers are the float64 of its JSON text.

    `original_max_positions` is the L0 and `old` of SPEC 7.2; `interleaved` says which elements form
    a pair (SPEC 7.4). Fields that the kind does not use stay at their defaults.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_positions: int = 0
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
    interleaved: bool = False

    @property
    def by_position(self) -> bool:
        """Whether inv_freq differs between positions, so that no key can be moved (SPEC 11.5)."""
        return self.kind in ("dynamic", "longrope")


# So many digits that rounding the result to float32 rounds the real number: it could differ only
# for a constant within a relative 10^-40 of a midpoint.
_CONTEXT = Context(prec=60)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")

POSITIONS = 1 << 16
"""Positions whose constants are kept, some 640 bytes each: `dynamic` has others at each far one."""


def round_to_float32(x: Decimal) -> np.float32:
    """The float32 nearest to x (SPEC 7.1).

    Rounding x to float64 and that to float32 may miss it by one: so its neighbours are tried too.
    """
    near = np.float32(float(x))
    below, above = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    return min(
        (near, below, above), key=lambda f: (abs(Decimal(float(f)) - x), f.view(np.int32) & 1)
    )


@lru_cache(maxsize=POSITIONS)
def rope_constants(rope: RopeParameters, position: int = 0) -> tuple[F32, np.float32]:
    """inv_freq (d/2,) float32 and the factor on cos and sin (SPEC 7.2).

    position: matters to `dynamic` and `longrope` alone. All positions below the original length
    have the same constants; beyond it, each has its own with `dynamic`, and all have the same with
    `longrope`.
    """
    with localcontext(_CONTEXT):
        theta, d = Decimal(rope.theta), rope.rotary_dim
        if rope.kind == "dynamic":
            length = max(position + 1, rope.original_max_positions)
            ratio = Decimal(length) / rope.original_max_positions
            stretch = Decimal(rope.factor) * ratio - (Decimal(rope.factor) - 1)
            theta *= stretch ** (Decimal(d) / (d - 2))
        plain = [theta ** (Decimal(-2 * i) / d) for i in range(d // 2)]
        frequencies = [_scaled(rope, f, i, position) for i, f in enumerate(plain)]
        inv_freq = np.array([round_to_float32(f) for f in frequencies])
    inv_freq.flags.writeable = False
    return inv_freq, _attention_factor(rope)


def _scaled(rope: RopeParameters, f: Decimal, i: int, position: int) -> Decimal:
    """inv_freq(i) from f(i), by kind: one row of the table of SPEC 7.2."""
    if rope.kind == "longrope":
        near = position < rope.original_max_positions
        return f / Decimal((rope.short_factor if near else rope.long_factor)[i])
    if rope.kind == "linear":
        return f / Decimal(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, f)
    if rope.kind == "yarn":
        low, high = _yarn_range(rope)
        e = 1 - min(max((i - low) / (high - low), Decimal(0)), Decimal(1))
        return f / Decimal(rope.factor) * (1 - e) + f * e
    return f


def _llama3(rope: RopeParameters, f: Decimal) -> Decimal:
    """Stretch long wavelengths, keep short ones, and blend those between (SPEC 7.2).

    turns is `old / w`, how often a pair turns within the original length.
    """
    turns = rope.original_max_positions * f / (2 * _PI)
    low, high = Decimal(rope.low_freq_factor), Decimal(rope.high_freq_factor)
    if turns < low:
        return f / Decimal(rope.factor)
    if turns > high:
        return f
    s = (turns - low) / (high - low)
    return (1 - s) * f / Decimal(rope.factor) + s * f


def _yarn_range(rope: RopeParameters) -> tuple[Decimal, Decimal]:
    """`low` and `high`: the pairs between which yarn blends from unscaled to scaled (SPEC 7.2)."""
    d, theta = rope.rotary_dim, Decimal(rope.theta)

    def pair(beta: float) -> Decimal:
        turns = rope.original_max_positions / (2 * _PI * Decimal(beta))
        return d * turns.ln() / (2 * theta.ln())

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = low.to_integral_value(ROUND_FLOOR), high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(d - 1))
    return low, high + Decimal("0.001") if low == high else high


def _attention_factor(rope: RopeParameters) -> np.float32:
    """The factor of yarn and longrope on cos and sin; 1 for every other kind (SPEC 7.2)."""
    if rope.kind not in ("yarn", "longrope"):
        return np.float32(1)
    if rope.attention_factor is not None:
        return round_to_float32(Decimal(rope.attention_factor))
    if rope.kind == "longrope":
        if rope.factor <= 1:
            return np.float32(1)
        share = Decimal(rope.factor).ln() / Decimal(rope.original_max_positions).ln()
        return round_to_float32((1 + share).sqrt())

    def g(scale: float) -> Decimal:
        return (
            Decimal(1) if rope.factor <= 1 else Decimal(scale) * Decimal(rope.factor).ln() / 10 + 1
        )

    if rope.mscale and rope.mscale_all_dim:
        return round_to_float32(g(rope.mscale) / g(rope.mscale_all_dim))
    return round_to_float32(g(1))


def cos_sin(rope: RopeParameters, positions: NDArray[np.int64]) -> tuple[F32, F32]:
    """cos and sin of every angle, (T,) positions -> two of (T, d/2) float32 (SPEC 7.3)."""
    inv_freq, factor = rope_constants(rope)
    angle: F32 = positions.astype(np.float32)[:, None] * inv_freq
    beyond = positions >= rope.original_max_positions
    if rope.kind == "longrope" and beyond.any():
        far, _ = rope_constants(rope, rope.original_max_positions)
        angle[beyond] = positions[beyond].astype(np.float32)[:, None] * far
    if rope.kind == "dynamic":
        for row in np.flatnonzero(beyond):
            angle[row] = np.float32(positions[row]) * rope_constants(rope, int(positions[row]))[0]
    return turn(angle, factor)


def turn(angle: F32, factor: np.float32) -> tuple[F32, F32]:
    """cos and sin of angles (T, d/2) float32, times the factor of 7.2, (T, d/2) each (SPEC 7.3)."""
    return factor * elementary.cos(angle), factor * elementary.sin(angle)


def rotate(x: F32, cos: F32, sin: F32, interleaved: bool = False) -> F32:
    """Rotate the first d elements of every head, (T, H, D) float32 -> the same shape (SPEC 7.4).

    cos, sin: (T, d/2) float32. interleaved: whether a pair is (2i, 2i + 1), else (i, i + d/2). A
    rotation is x times cos, plus x with the elements of each pair exchanged times sin, whose sign
    is reversed for the first element: so it is three operations on whole rows.
    """
    half = cos.shape[1]
    d = 2 * half
    first = slice(0, d, 2) if interleaved else slice(0, half)
    second = slice(1, d, 2) if interleaved else slice(half, d)
    exchanged = np.empty((*x.shape[:-1], d), np.float32)
    exchanged[..., first], exchanged[..., second] = x[..., second], x[..., first]
    out = np.empty_like(x)
    out[..., d:] = x[..., d:]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        np.multiply(x[..., :d], _of_pairs(cos, cos, interleaved), out=out[..., :d])
        exchanged *= _of_pairs(-sin, sin, interleaved)
        out[..., :d] += exchanged
    one_nan(out[..., :d])
    return out


def _of_pairs(first: F32, second: F32, interleaved: bool) -> F32:
    """Factors of the first and second elements of pairs, (T, d/2) each, in place: (T, 1, d)."""
    both = np.stack([first, second], axis=2) if interleaved else np.concatenate([first, second], 1)
    return both.reshape(len(first), 1, -1)
