"""Choices of one drawn case: each has a name, a word of its own, and simpler ones beside it.

A choice depends on the case's name and its own alone. So one of them can be changed and all others
kept, which is how a failing case is made small, and how its command line repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from conformance.generator import integers, normal, seed_of, words
from reference.arithmetic import F32

Value = bool | int | float | str | None
T = TypeVar("T", bound=Value)

EDGES = (
    *(1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    *(511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097),
)
"""Sizes on both sides of what kernels are cut into."""

BOUNDED = (
    *("normal", "whole-numbers", "one-sign", "zeros", "one-hot", "heavy-tails"),
    *("outlier-channels", "cancelling", "tiny", "subnormal"),
)
"""Kinds of data on which float32 and less are held to a bound."""

EXTREME = ("huge", "not-finite")
"""Kinds whose sums may overflow, or that IEEE-754 treats as SPEC 1.3 does not: bits alone."""

FLOAT16 = 16.0
"""The largest number for a backend that declares float16, so that no sum leaves its range."""


@dataclass(frozen=True)
class Asked:
    """What of a backend decides what it can be asked.

    exact: it claims the bits of the contract. narrow: it has float16 somewhere.
    """

    exact: bool = True
    narrow: bool = False

    @classmethod
    def of(cls, numerics: Mapping[str, Any]) -> Asked:
        """By its declaration (SPEC 17)."""
        declared = {numerics.get("accumulator", "float32"), numerics.get("operands")}
        return cls(
            "exact" in declared and numerics["accumulator"] == "exact", "float16" in declared
        )


@dataclass(frozen=True)
class Choice:
    """One that was made. simpler: what could be in its place, the simplest first."""

    name: str
    value: Value
    simpler: tuple[Value, ...]


@dataclass
class Draw:
    """One case being drawn. given: values by name that are taken in place of drawn ones.

    made: every choice, in order. forced: the given values that differ from what was drawn.
    extreme: whether some data are of an extreme kind.
    """

    name: str
    asked: Asked
    given: Mapping[str, Value] = field(default_factory=dict)
    made: list[Choice] = field(default_factory=list)
    forced: dict[str, Value] = field(default_factory=dict)
    extreme: bool = False

    def pick(self, name: str, options: Sequence[T]) -> T:
        """One of some options, each as likely; the simplest comes first."""
        drawn = options[self._word(name) % len(options)]
        value = self._given(name, drawn, lambda v: any(_same(v, option) for option in options))
        before = options[: [_same(value, option) for option in options].index(True)]
        self._note(name, value, tuple(dict.fromkeys(before)))
        return value

    def flag(self, name: str) -> bool:
        """Whether, one time in two."""
        return self.pick(name, (False, True))

    def size(self, name: str, most: int, least: int = 1) -> int:
        """A size up to `most`: an edge as often as any other, and each octave as often."""
        most = max(least, most)
        edges = [edge for edge in EDGES if least <= edge <= most]
        word, octave = self._word(name), 1 << 1 + self._word(f"{name}/octave") % most.bit_length()
        drawn = max(least, min(most, word % octave))
        if edges and self._word(f"{name}/edge") % 2:
            drawn = edges[word % len(edges)]
        value = self._given(name, drawn, lambda v: type(v) is int and least <= v <= most)
        self._note(name, value, _smaller(value, least))
        return value

    def data(self, name: str, *shape: int, kinds: Sequence[str] = BOUNDED) -> F32:
        """float32 of the given shape, of a kind that the backend can be asked for."""
        extreme = EXTREME if self.asked.exact and "normal" in kinds else ()
        kind = self.pick(name, (*kinds, *extreme))
        self.extreme |= kind in EXTREME
        x = data(f"{self.name}/{name}", kind, *shape)
        return within(x, FLOAT16) if self.asked.narrow else x

    def value(self, name: str) -> Value:
        """What was chosen under a name."""
        return next(choice.value for choice in self.made if choice.name == name)

    def normal(self, name: str, *shape: int) -> F32:
        """Nearly normal, float32 of the given shape (SPEC 15.3)."""
        return normal(f"{self.name}/{name}", *shape)

    def integers(self, name: str, below: int, *shape: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Integers in 0..below-1, int64 of the given shape (SPEC 15.3)."""
        return integers(f"{self.name}/{name}", below, *shape)

    def permutation(self, name: str, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The numbers 0 to count - 1 in some order, (count,) int64."""
        return np.argsort(self.integers(name, 1 << 62, count), kind="stable")

    def _word(self, name: str) -> int:
        return int(words(seed_of(f"{self.name}/{name}?"), 1)[0])

    def _given(self, name: str, drawn: T, allowed: Callable[[Value], bool]) -> T:
        """The value that was given for a choice, where it may be; else the drawn one."""
        value = self.given.get(name, drawn)
        if not allowed(value):
            return drawn
        if not _same(value, drawn):
            self.forced[name] = value
        return value  # type: ignore[return-value]

    def _note(self, name: str, value: Value, simpler: tuple[Value, ...]) -> None:
        self.made.append(Choice(name, value, simpler))


def _same(a: Value, b: Value) -> bool:
    """Equal, and of the same type: 1, 1.0 and True are three."""
    return type(a) is type(b) and a == b


def _smaller(value: int, least: int) -> tuple[int, ...]:
    """Sizes to try in place of one: the least, edges, half of it, one less."""
    tried = {least, value // 2, value - 1, *(edge for edge in EDGES if edge < value)}
    return tuple(sorted(size for size in tried if least <= size < value))


# ------------------------------------------------------------------------------ kinds of data


def data(name: str, kind: str, *shape: int) -> F32:
    """float32 of the given shape and of a kind, whose structure runs along the last axis."""
    x = normal(name, *shape)
    return _KINDS[kind](name, x) if x.size else x


def _whole(name: str, x: F32) -> F32:
    """-2 to 2: ties, and sums that cancel to zero."""
    return (integers(f"{name}/whole", 5, *x.shape) - 2).astype(np.float32)


def _zeros(name: str, x: F32) -> F32:
    """Zeros of both signs."""
    return np.copysign(np.float32(0), x)


def _one_hot(name: str, x: F32) -> F32:
    """One element a row, which shows each term alone."""
    where = integers(f"{name}/hot", x.shape[-1], *x.shape[:-1])
    return np.asarray(np.arange(x.shape[-1]) == where[..., None], np.float32)


def to_power(x: F32, power: int | np.ndarray[Any, np.dtype[np.int64]]) -> F32:
    """x 2^power, float32 of the shape of x, with which that of `power` broadcasts."""
    return np.asarray(np.ldexp(x, power), np.float32)


def within(x: F32, limit: float) -> F32:
    """x over the power of two that brings its largest element to `limit`, where it is larger."""
    largest = float(np.abs(x).max(initial=0))
    return x if largest <= limit else to_power(x, -math.ceil(math.log2(largest / limit)))


def _heavy(name: str, x: F32) -> F32:
    """Over 24 binades, so that alignment cuts."""
    return to_power(x, integers(f"{name}/binade", 24, *x.shape) - 20)


def _outliers(name: str, x: F32) -> F32:
    """One channel in twenty, and one at least, a thousand times the rest."""
    width = x.shape[-1]
    loud = integers(f"{name}/loud", width, max(1, width // 20))
    x[..., loud] *= np.float32(1000)
    return x


def _cancelling(name: str, x: F32) -> F32:
    """The second half nearly the first's negative."""
    half = x.shape[-1] // 2
    x[..., half : 2 * half] = -x[..., :half] * np.float32(1 + 2**-12)
    return x


def _not_finite(name: str, x: F32) -> F32:
    """A few NaN and infinities."""
    flat, count = x.reshape(-1), max(1, x.size // 50)
    where = integers(f"{name}/where", x.size, count)
    special = np.array([np.nan, np.inf, -np.inf], np.float32)
    flat[where] = special[integers(f"{name}/special", 3, count)]
    return flat.reshape(x.shape)


_KINDS: Mapping[str, Callable[[str, F32], F32]] = {
    "normal": lambda name, x: x,
    "whole-numbers": _whole,
    "one-sign": lambda name, x: np.abs(x),
    "zeros": _zeros,
    "one-hot": _one_hot,
    "heavy-tails": _heavy,
    "outlier-channels": _outliers,
    "cancelling": _cancelling,
    "tiny": lambda name, x: to_power(x, -70),
    "subnormal": lambda name, x: to_power(x, -140),
    "huge": lambda name, x: to_power(x, 70),
    "not-finite": _not_finite,
}
