"""The factors of named error models (SPEC 16.4)."""

from __future__ import annotations

import re

from conformance.errors import GoldenError
from conformance.rules.alike import roundings
from conformance.rules.precision import Precision


def error_model(term: str, u: float) -> float:
    """The factor of an error model such as `dot(64)` at unit roundoff u (SPEC 16.4).

    Raises GoldenError for an unknown one.
    """
    match = re.fullmatch(
        r"(dot|ops|stored|float32|noise|steady|noise_of_codes|steady_of_codes)"
        r"\((\d+(?:\.\d+)?)\)",
        term,
    )
    if match is None:
        names = (
            "dot(K), ops(n), stored(n), float32(n), noise(c), steady(c), noise_of_codes(c), "
            "steady_of_codes(c)"
        )
        raise GoldenError(f"error model {term!r} is none of {names}")
    at, n = u if isinstance(u, Precision) else Precision(u), float(match[2])
    if match[1] in ("noise", "steady"):  # the exact engine, too, rounds its steps to float32
        return n * max(at.coarsest, 2.0**-24)
    if match[1] in ("noise_of_codes", "steady_of_codes"):
        return n * max(at.coarsest, 2.0**-16)
    if match[1] == "ops":
        return n * max(float(at), at.operands)
    if match[1] == "float32":
        return n * min(float(at), 2.0**-24)
    if match[1] == "stored":
        return n * at.stored
    return float(at) * float(roundings(n, n)) + 3 * at.stored
