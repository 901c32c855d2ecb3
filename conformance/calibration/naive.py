"""The gates that engine authors use instead, which are given the same answers (SPEC 20)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from conformance.golden import Array, Golden
from conformance.operations import Outputs
from conformance.rules.continuation import OWN_TEXT, judged_part

TOKENS = 64
"""Tokens that the last gate compares."""


def close(expected: Array, answer: Array, atol: float) -> bool:
    """`allclose` with rtol 1e-2, NaN equal to NaN."""
    with np.errstate(all="ignore"):
        return np.allclose(answer, expected, rtol=1e-2, atol=atol, equal_nan=True)


def _finite(expected: Array, answer: Array) -> tuple[Array, Array] | None:
    """Both as float64, zero where neither is finite; None where one is and the other is not."""
    good = np.isfinite(expected)
    if (good != np.isfinite(answer)).any():
        return None
    a, b = (np.where(good, x, 0).astype(np.float64).ravel() for x in (expected, answer))
    return a, b


def nmse(expected: Array, answer: Array) -> bool:
    """Squared error at most 5e-4 of the squared values, over the whole output."""
    both = _finite(expected, answer)
    if both is None:
        return False
    error, size = float(((both[0] - both[1]) ** 2).sum()), float((both[0] ** 2).sum())
    return error <= 5e-4 * size


def cosine(expected: Array, answer: Array) -> bool:
    """Cosine of the whole outputs at least 0.999."""
    both = _finite(expected, answer)
    if both is None:
        return False
    norms = float(np.linalg.norm(both[0]) * np.linalg.norm(both[1]))
    return bool(both[0] @ both[1] >= 0.999 * norms) if norms else not (both[0] - both[1]).any()


GATES: Mapping[str, Callable[[Array, Array], bool]] = {
    "rtol 1e-2 (atol 1e-8)": partial(close, atol=1e-8),
    "rtol 1e-2, atol 1e-2": partial(close, atol=1e-2),
    "NMSE 5e-4": nmse,
    "cosine 0.999": cosine,
}
TOKEN_GATE = f"{TOKENS} tokens equal"


def rejected(golden: Golden, outputs: Outputs | None) -> set[str]:
    """The gates that reject an answer; integers must be equal for all of them.

    A golden that may itself be far from the real value is not put to them: they would be blamed for
    the exact contract's own alignment. Of texts that an engine goes on with they see the logits, up
    to where one parts (SPEC 16.7).
    """
    if golden.distance is not None:
        largest = np.max(np.abs(next(iter(golden.outputs.values()))), initial=0)
        if np.max(golden.distance, initial=0) > 5e-3 * largest:
            return set()
    own_text = golden.operation in OWN_TEXT
    if own_text and outputs is not None:
        outputs = judged_part(golden, "gauge", outputs)
    out: set[str] = set()
    for name in ("logits",) if own_text else golden.outputs:
        expected = golden.outputs[name]
        answer = None if outputs is None else outputs[name]
        if answer is None or answer.shape != expected.shape:
            return set(GATES)
        if expected.dtype.kind != "f":
            out |= set(GATES) if (answer != expected).any() else set()
            continue
        out |= {gate for gate, passes in GATES.items() if not passes(expected, answer)}
    return out
