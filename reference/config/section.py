"""One JSON object whose keys are read one by one, so that none is overlooked (SPEC 10.3)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from reference.errors import ConfigError

Name = TypeVar("Name", bound=str)

MAX_SIZE = 2**31 - 1
"""The largest integer that a key may hold where nothing smaller is said."""

MIN_FLOAT32, MAX_FLOAT32 = 2.0**-126, 2.0**127
"""The range of numbers that must not round to 0, a subnormal or infinity as a float32."""

MAX_FLOAT64 = sys.float_info.max
"""JSON's integers may be larger, and Python reads a larger fraction as infinity."""


class Section:
    """A JSON object whose keys are read one by one; those never read are refused at the end.

    where: the file, for messages. prefix: stands before keys in messages, as in
    `rope_scaling.factor`. All methods but `has` and `peek` raise ConfigError for what is not as
    they want it.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._raw = raw
        self._where = where
        self._prefix = prefix
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._raw.get(key) is not None

    def require(self, key: str) -> None:
        """Refuse an object without this key; it may be null."""
        if key not in self._raw:
            self._missing(key)

    def value(self, key: str) -> Any:
        """Value of a key that must be there, of whatever type."""
        self._read.add(key)
        if not self.has(key):
            self._missing(key)
        return self._raw[key]

    def peek(self, key: str) -> Any:
        """Value of a key, or None, without counting it as read."""
        return self._raw.get(key)

    def integer(self, key: str, most: int = MAX_SIZE, least: int = 1) -> int:
        """Value of a key that must be an integer in least..most."""
        value = self.value(key)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"give an integer from {least} to {most}")
        return value

    def number(self, key: str, above: float = 0.0) -> float:
        """Value of a key that must be a finite number greater than `above`, as a float64."""
        value = self.value(key)
        if not _is_number(value, above):
            self.refuse(key, f"give a finite number greater than {above:g}")
        return float(value)

    def float32(self, key: str) -> float:
        """Value of a key that must be positive and finite as a float32 too."""
        value = self.number(key)
        if not MIN_FLOAT32 <= value <= MAX_FLOAT32:
            self.refuse(key, f"give a number from {MIN_FLOAT32:g} to {MAX_FLOAT32:g}")
        return value

    def number_or_zero(self, key: str) -> float:
        """Value of a key that must be 0 or a finite positive number, as a float64."""
        value = self.value(key)
        return 0.0 if type(value) in (int, float) and value == 0 else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Value of a key that must be true or false; absent or null is `default`."""
        self._read.add(key)
        value = self._raw.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(key, "give true or false")
        return value

    def choice(self, key: str, among: Iterable[Name]) -> Name:
        """Value of a key that must be one of a few names."""
        names, value = list(among), self.value(key)
        if value not in names:
            self.refuse(key, f"supported are {', '.join(names)}")
        return names[names.index(value)]

    def numbers(self, key: str, count: int, above: float = 0.0) -> tuple[float, ...]:
        """Value of a key that must be a list of `count` finite numbers above that, as float64."""
        values = self.value(key)
        if not isinstance(values, list) or len(values) != count:
            self.refuse(key, f"give a list of {count} numbers")
        if not all(_is_number(value, above) for value in values):
            self.refuse(key, f"every number must be finite and greater than {above:g}")
        return tuple(map(float, values))

    def names(self, key: str, count: int, among: tuple[Name, ...]) -> tuple[Name, ...]:
        """Value of a key that must be a list of `count` names, one a layer."""
        names = self.value(key)
        if not isinstance(names, list) or len(names) != count:
            self.refuse(key, f"give a list of {count} names, one a layer")
        for name in names:
            if name not in among:
                self.refuse(key, f"supported are {' and '.join(among)}")
        return tuple(among[among.index(name)] for name in names)

    def mapping(self, key: str) -> dict[str, Any]:
        """Value of a key that must be a JSON object; absent or null is an empty one."""
        self._read.add(key)
        value = self._raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(key, "give a JSON object or null")
        return dict(value)

    def refuse(self, key: str, remedy: str) -> NoReturn:
        """Raise ConfigError for the value of this key."""
        plain = key.isidentifier() and len(key) <= 80
        name = self._prefix + (key if plain else show(key))
        raise ConfigError(f"{self._where}: {name} is {show(self._raw.get(key))}; {remedy}")

    def contradicts(self, key: str, value: object, other: str, remedy: str) -> NoReturn:
        """Raise ConfigError for a value that does not agree with another place of the file."""
        name = f"{self._where}: {self._prefix}{key}"
        raise ConfigError(f"{name} is {show(value)}, which contradicts {other}; {remedy}")

    def part(self, raw: Mapping[str, Any], prefix: str = "") -> Section:
        """Section of the same file for an object within it."""
        return Section(raw, self._where, prefix)

    def refuse_the_rest(
        self, harmless: frozenset[str], fixed: Mapping[str, object] | None = None
    ) -> None:
        """Refuse the first key that was not read and is not harmless, null or private (`_...`).

        fixed: keys that are accepted with a single value, which is given.
        """
        fixed = fixed or {}
        for key, value in self._raw.items():
            if key in self._read or key in harmless or value is None or key.startswith("_"):
                continue
            if key not in fixed:
                self.refuse(key, "this key is not supported; remove it if it changes no result")
            if type(value) is not type(fixed[key]) or value != fixed[key]:
                self.refuse(key, f"only {json.dumps(fixed[key])} is supported")

    def _missing(self, key: str) -> NoReturn:
        raise ConfigError(
            f"{self._where}: {self._prefix}{key} is missing; add it, its value is never assumed"
        )


def _is_number(value: object, above: float) -> bool:
    """Whether this is a number greater than `above` that a float64 can hold; a bool is none."""
    if type(value) is int or type(value) is float:
        return above < value <= MAX_FLOAT64
    return False


def show(value: object) -> str:
    """Text of a value for a message: one line of ASCII, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
