"""JSON read strictly: no repeated keys, no NaN, an object at the top (SPEC 12.1)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from reference.config import show
from reference.errors import BitforbitError

MAX_BYTES = 100_000_000
"""Bytes of a file at most: far beyond any configuration or tokenizer."""

MAX_DEPTH = 32
"""Objects and lists within each other at most, so that nothing which walks them recurses deeply."""


def parse_object(text: bytes, where: str, error: type[BitforbitError]) -> dict[str, Any]:
    """Parse the UTF-8 text of a JSON object; raise `error`, naming `where`, for anything else."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
        _check_depth(value)
    except (ValueError, RecursionError) as reason:
        raise error(
            f"{where}: this is not valid JSON: {_one_line(reason)}; write it again"
        ) from None
    if not isinstance(value, dict):
        raise error(f"{where}: this is {show(value)}, not a JSON object; write it again")
    return value


def read_object(path: Path, error: type[BitforbitError]) -> dict[str, Any]:
    """Read a JSON object from a file of at most MAX_BYTES; raise `error` where that fails."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise error(f"{path}: {size} bytes are more than {MAX_BYTES}; check the file")
        text = path.read_bytes()
    except (OSError, ValueError) as reason:
        raise error(f"{path}: it cannot be read: {_one_line(reason)}; check the path") from None
    return parse_object(text, str(path), error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object of these pairs, unless a key occurs twice."""
    value: dict[str, Any] = {}
    for key, member in pairs:
        if key in value:
            raise ValueError(f"the key {show(key)} occurs twice")
        value[key] = member
    return value


def _check_depth(value: Any) -> None:
    """Raise ValueError for a value that is nested too deeply; look at it level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [member for container in level for member in _members(container)]
    if level:
        raise ValueError("it is nested too deeply")


def _members(value: Any) -> Iterable[Any]:
    """What an object or a list holds; nothing for other values."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _one_line(reason: Exception) -> str:
    """Text of an error of the system or of a library, on one line."""
    if isinstance(reason, RecursionError):
        return "it is nested too deeply"
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return " ".join(text.split())[:200]
