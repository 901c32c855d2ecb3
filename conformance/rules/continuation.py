"""Greedy texts of a backend's own, each judged as long as it is the golden's (SPEC 16.7).

Where a near tie goes the other way, so does all that follows: two texts are compared up to and with
the first token that differs, and what lies behind it is no error of either.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.golden import Array, Golden
from conformance.rules.contract import ASK_BITS

OWN_TEXT = frozenset({"generate", "turns", "speculate", "serve", "resume"})
"""Operations of a session that go on from their own tokens (SPEC 17)."""

TEXT = ("tokens", "logits")
"""Their outputs by token, (n,) and (n, V), or of R texts (R, n) and (R, n, V); all others count
what was reused or accepted, which the texts alone decide."""


def parted(golden: Golden, tokens: Array) -> list[tuple[int, int]]:
    """Which texts are not the golden's, and the first place of each where it is not.

    tokens: (n,) or (R, n) integers, as the golden's.
    """
    different = np.atleast_2d(tokens != golden.outputs["tokens"])
    return [(int(text), int(different[text].argmax())) for text in np.flatnonzero(different.any(1))]


def followed(golden: Golden, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """The answer, but the golden's own behind the place where a text parts.

    Counts are the golden's wherever a text parts, for another text is reused otherwise.
    """
    places = parted(golden, outputs["tokens"])
    if not places:
        return dict(outputs)
    found = {**golden.outputs, **{name: outputs[name].copy() for name in TEXT}}
    for name in TEXT:
        mine, own = (by_text(golden, x) for x in (found[name], golden.outputs[name]))
        for text, place in places:
            mine[text, place + 1 :] = own[text, place + 1 :]
    return found


def by_text(golden: Golden, x: Array) -> Array:
    """An array by token, of one text or R, as a view (R, n, ...)."""
    return x[None] if golden.outputs["tokens"].ndim == 1 else x


def judged_part(golden: Golden, rule: str, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """What a rule looks at: all of an answer, but of a text that parts nothing further."""
    bits = rule in ASK_BITS or golden.operation not in OWN_TEXT
    if bits or any(outputs[name].shape != golden.outputs[name].shape for name in TEXT):
        return dict(outputs)
    return followed(golden, outputs)
