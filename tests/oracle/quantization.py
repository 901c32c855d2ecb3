"""int4 weights and int8 activations (SPEC 5) in Python integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from tests.oracle.aligned import dot64, finite
from tests.oracle.numbers import BINARY64, divide, multiply, narrow, power, rint, rn16, rn32, rn64

GROUP = 32
SMALLEST_SCALE = math.ldexp(1.0, -24)


class RefusedError(Exception):
    """The matrix has no int4 form."""


def groups(length: int, group: int) -> list[range]:
    """Groups of a row; `group` 0 is one group that spans it."""
    step = group or max(length, 1)
    return [range(start, min(start + step, length)) for start in range(0, length, step)]


def usable_scale(quotient: float, all_zero: bool) -> float:
    """RN16 of max|w| / 7, with the rules for zero, underflow and overflow."""
    if all_zero:
        return 1.0
    scale = rn16(Fraction(quotient))
    if math.isinf(scale):
        raise RefusedError("scale beyond float16")
    return scale or SMALLEST_SCALE


def round_half_away(x: Fraction) -> int:
    magnitude = math.floor(abs(x) + Fraction(1, 2))
    return -magnitude if x < 0 else magnitude


def codes_of(w: Sequence[float], scale: float) -> list[int]:
    return [max(-7, min(7, round_half_away(Fraction(divide(v, scale, BINARY64))))) for v in w]


def quantize_row(w: Sequence[float], group: int = GROUP) -> tuple[list[int], list[float]]:
    """Codes -7..7 and one scale a group."""
    if not finite(w):
        raise RefusedError("a weight that is not finite")
    codes: list[int] = []
    scales: list[float] = []
    for members in groups(len(w), group):
        values = [w[k] for k in members]
        largest = max(abs(v) for v in values)
        scale = usable_scale(divide(largest, 7.0, BINARY64), largest == 0)
        scales.append(scale)
        codes += codes_of(values, scale)
    return codes, scales


def search_row(w: Sequence[float]) -> tuple[list[int], float]:
    """The best of 19 scales for a whole row (SPEC 5.3)."""
    if not finite(w):
        raise RefusedError("a weight that is not finite")
    largest = max(abs(v) for v in w)
    best: tuple[float, list[int], float] | None = None
    for j in range(22, 41):
        shrunk = multiply(largest, divide(float(j), 40.0, BINARY64), BINARY64)
        scale = usable_scale(divide(shrunk, 7.0, BINARY64), largest == 0)
        codes = codes_of(w, scale)
        errors = [
            rn32(Fraction(rn64(Fraction(v) - Fraction(scale) * q)))
            for v, q in zip(w, codes, strict=True)
        ]
        cost = dot64(errors, errors)
        if best is None or cost <= best[0]:
            best = (cost, codes, scale)
    assert best is not None
    return best[1], best[2]


def pack(codes: Sequence[int]) -> list[int]:
    """Bytes of a row: even k low, odd k high, 8 where K is odd (SPEC 5.2)."""
    stored = [q + 8 for q in codes]
    if len(stored) % 2:
        stored.append(8)
    return [low + 16 * high for low, high in zip(stored[::2], stored[1::2], strict=True)]


def dequantize_row(codes: Sequence[int], scales: Sequence[float], group: int) -> list[float]:
    members = groups(len(codes), group)
    return [
        rn32(Fraction(scale) * codes[k])
        for scale, indices in zip(scales, members, strict=True)
        for k in indices
    ]


def quantize_int8(x: Sequence[float]) -> tuple[list[int], float]:
    """Codes and scale of a finite row (SPEC 5.4)."""
    scale = divide(max(abs(v) for v in x), 127.0)
    if scale == 0:
        return [0] * len(x), 0.0
    codes = []
    for v in x:
        quotient = divide(v, scale)
        codes.append(max(-127, min(127, rint(Fraction(quotient)))))
    return codes, scale


def linear_row(
    x: Sequence[float],
    codes: Sequence[Sequence[int]],
    scales: Sequence[Sequence[float]],
    group: int,
) -> list[float]:
    """One token through an int4 matrix (SPEC 5.5)."""
    if not finite(x):
        return [math.nan] * len(codes)
    xq, token_scale = quantize_int8(x)
    out = []
    for row, row_scales in zip(codes, scales, strict=True):
        total = Fraction(0)
        for scale, members in zip(row_scales, groups(len(x), group), strict=True):
            total += Fraction(scale) * sum(xq[k] * row[k] for k in members)
        assert rn64(total) == total, "the sum of a row is a float64"
        out.append(narrow(rn64(total * Fraction(token_scale))))
    return out


def scale_sum(scales: Sequence[float]) -> Fraction:
    return sum((Fraction(scale) for scale in scales), Fraction(0))


def worst_units(scales: Sequence[float]) -> Fraction:
    """A bound of every partial sum of a row, in units of 2^-24 (SPEC 5.6)."""
    return scale_sum(scales) * 32 * 127 * 7 * power(24)


def block(stored: Sequence[int], kind: str) -> tuple[list[int], Fraction]:
    """Codes and scale of one block of Q4_0 or Q8_0 (SPEC 5.7)."""
    bits, codes = stored[0] + 256 * stored[1], stored[2:]
    sign, exponent, fraction = bits >> 15, bits >> 10 & 31, bits & 1023
    assert exponent < 31, "a finite scale"
    size = Fraction(1024 + fraction, 2**25) * 2**exponent if exponent else Fraction(fraction, 2**24)
    if kind == "Q4_0":
        signed = [byte % 16 - 8 for byte in codes] + [byte // 16 - 8 for byte in codes]
    else:
        signed = [byte - 256 if byte > 127 else byte for byte in codes]
    return signed, -size if sign else size


def linear_blocks(
    x: Sequence[float], rows: Sequence[Sequence[Sequence[int]]], kind: str
) -> list[float]:
    """One token through a matrix of blocks (SPEC 5.7)."""
    if not finite(x):
        return [math.nan] * len(rows)
    xq, token_scale = quantize_int8(x)
    out = []
    for row in rows:
        total = Fraction(0)
        for index, stored in enumerate(row):
            codes, scale = block(stored, kind)
            here = xq[32 * index : 32 * index + 32]
            total += scale * sum(a * b for a, b in zip(here, codes, strict=True))
        assert rn64(total) == total, "the sum of a row is a float64"
        out.append(narrow(rn64(total * Fraction(token_scale))))
    return out


def worst_block_units(rows: Sequence[Sequence[int]], kind: str) -> Fraction:
    """A bound of every partial sum of a row of blocks, in units of 2^-24 (SPEC 5.8)."""
    largest = 8 if kind == "Q4_0" else 128
    return sum((abs(block(b, kind)[1]) for b in rows), Fraction(0)) * 32 * 127 * largest * 2**24
