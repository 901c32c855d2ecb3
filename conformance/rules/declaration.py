"""What a backend may declare of its numerics (SPEC 17)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from conformance.errors import BackendError
from conformance.rules.contract import numerics_of
from conformance.rules.precision import unit_roundoff

KEYS = ("operands", "accumulator", "fma", "flush_to_zero", "kv")
"""All that is read; anything else would be a promise that no bound keeps."""

OPERATIONS = "operations"
"""The key of what is declared of single operations, by name, beside those."""


def demand_declaration(numerics: Mapping[str, Any]) -> None:
    """Raise BackendError where a declaration is not one of SPEC 17: a key, a type or a flag."""
    _demand(numerics, (*KEYS, OPERATIONS))
    single = numerics.get(OPERATIONS, {})
    if not isinstance(single, Mapping) or not all(isinstance(v, Mapping) for v in single.values()):
        raise BackendError(
            f"numerics: {OPERATIONS} must be a dictionary of dictionaries, such as "
            '{"rms_norm": {"accumulator": "float32"}}'
        )
    for name, own in single.items():
        try:
            _demand(own, KEYS)
            _demand(numerics_of(numerics, name), (*KEYS, OPERATIONS))
        except BackendError as error:
            raise BackendError(f"{error} (of {name})") from error


def _demand(numerics: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in numerics:
        if key not in keys:
            near = get_close_matches(str(key), keys, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise BackendError(f"numerics: {key!r} is none of {', '.join(keys)}{meant}")
    for key in ("fma", "flush_to_zero"):
        if not isinstance(numerics.get(key, False), bool):
            raise BackendError(f"numerics: {key} {numerics[key]!r} must be true or false")
    unit_roundoff(numerics)
