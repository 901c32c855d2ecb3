"""What computes: formats, an order of sums, FMA or not, emulated in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.rules import Precision, unit_roundoff

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Rng = np.random.Generator


@dataclass(frozen=True)
class Format:
    """A binary format. bits: of the significand; least: exponent of the least normal number."""

    name: str
    bits: int
    least: int = -126

    def rounded(self, given: Any, flushes: bool = False) -> F64:
        """To nearest even, gradual underflow or none; no overflow. Of the shape of `given`."""
        x: F64 = np.asarray(given, np.float64)
        if self.name == "float64":
            return x
        _, exponent = np.frexp(x)
        unit = np.maximum(exponent, self.least + 1) - self.bits
        y: F64 = np.ldexp(np.rint(np.ldexp(x, -unit)), unit)
        return np.where(np.abs(y) < 2.0**self.least, 0.0, y) if flushes else y


FORMATS = {
    f.name: f
    for f in (
        Format("float64", 53, -1022),
        Format("float32", 24),
        Format("tf32", 11),
        Format("bfloat16", 8),
        Format("float16", 11, -14),
    )
}
ORDERS = ("sequential", "pairwise", "lanes", "tiles")


@dataclass
class Machine:
    """What computes: formats, an order, and chance for what a library may do either way."""

    rng: Rng
    operands: Format
    sums: Format
    order: str
    width: int
    fma: bool
    permuted: bool
    flushes: bool

    @classmethod
    def draw(cls, rng: Rng, precision: str) -> Machine:
        """A machine of a declared precision: throughout, or for operands with float32 sums."""
        operands = sums = FORMATS[precision]
        if operands.bits < 24 and rng.random() < 0.5:
            sums = FORMATS["float32"]
        order = str(rng.choice(ORDERS))
        width = int(rng.choice((2, 4, 8, 16, 32)))
        fma, permuted, flushes = (bool(rng.random() < p) for p in (0.5, 0.5, 0.25))
        return cls(rng, operands, sums, order, width, fma, permuted, flushes)

    @property
    def declared(self) -> Precision:
        """As `numerics` would say it."""
        return unit_roundoff(
            {
                "operands": self.operands.name,
                "accumulator": self.sums.name,
                "flush_to_zero": self.flushes,
            }
        )

    def store(self, x: Any) -> F64:
        """To an operand."""
        return self.operands.rounded(np.asarray(x, np.float64), self.flushes)

    def rn(self, x: Any) -> F64:
        """The result of one operation."""
        return self.sums.rounded(np.asarray(x, np.float64), self.flushes)

    def function(self, f: Callable[[F64], F64], x: F64) -> F64:
        """A library's function: a good one, which errs by one unit more than it must."""
        y = f(x)
        unit = float(np.ldexp(1.0, -self.sums.bits))
        return self.rn(y * (1 + self.rng.uniform(-unit, unit, y.shape)))

    def total(self, terms: F64, exact: bool = False) -> F64:
        """The sum over the last axis, (..., K) to (...). exact: FMA adds the terms unrounded."""
        if exact and self.order == "pairwise":
            terms = self.rn(terms)
        if self.permuted:
            terms = terms[..., self.rng.permutation(terms.shape[-1])]
        if self.order == "pairwise":
            return self._halved(terms)
        if self.order == "sequential":
            return self._folded(terms)
        width = min(self.width, terms.shape[-1])
        filled = np.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, -terms.shape[-1] % width)])
        if self.order == "lanes":
            lanes = filled.reshape(*filled.shape[:-1], -1, width).swapaxes(-1, -2)
            return self._halved(self._folded(lanes))
        return self._folded(self._folded(filled.reshape(*filled.shape[:-1], -1, width)))

    def _folded(self, terms: F64) -> F64:
        acc = self.rn(terms[..., 0])
        for k in range(1, terms.shape[-1]):
            acc = self.rn(acc + terms[..., k])
        return acc

    def _halved(self, terms: F64) -> F64:
        while terms.shape[-1] > 1:
            if terms.shape[-1] % 2:
                terms = np.concatenate([terms, np.zeros((*terms.shape[:-1], 1))], axis=-1)
            terms = self.rn(terms[..., 0::2] + terms[..., 1::2])
        return self.rn(terms[..., 0])

    def dot(self, x: F32 | F64, w: F32 | F64) -> F64:
        """x (T, K) times w (N, K), of rounded operands: (T, N)."""
        terms = self.store(x)[:, None] * self.store(w)
        return self.total(terms if self.fma else self.rn(terms), self.fma)

    def divide(self, a: F64, b: F64) -> F64:
        """A quotient, or a product with the reciprocal."""
        if self.permuted:
            return self.rn(a / b)
        return self.rn(a * self.rn(1 / b))
