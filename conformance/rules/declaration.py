"""What a backend may declare of its numerics (SPEC 17)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from conformance.errors import BackendError
from conformance.rules.judging import unit_roundoff

KEYS = ("operands", "accumulator", "fma", "flush_to_zero", "kv")
"""All that is read; anything else would be a promise that no bound keeps."""


def demand_declaration(numerics: Mapping[str, Any]) -> None:
    """Raise BackendError where a declaration is not one of SPEC 17: a key, a type or a flag."""
    for key in numerics:
        if key not in KEYS:
            near = get_close_matches(str(key), KEYS, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise BackendError(f"numerics: {key!r} is none of {', '.join(KEYS)}{meant}")
    for key in ("fma", "flush_to_zero"):
        if not isinstance(numerics.get(key, False), bool):
            raise BackendError(f"numerics: {key} {numerics[key]!r} must be true or false")
    unit_roundoff(numerics)
