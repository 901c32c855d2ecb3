"""A greedy text of a backend's own, judged as long as it is the golden's (SPEC 16.7).

Where a near tie goes the other way, so does all that follows: two texts are compared up to and with
the first token that differs, and what lies behind it is no error of either.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.golden import Array, Golden
from conformance.rules.contract import ASK_BITS


def parted(golden: Golden, tokens: Array) -> int | None:
    """The first row at which a text, (n,) integers, is not the golden's; None where it is whole."""
    different = np.flatnonzero(tokens != golden.outputs["tokens"])
    return int(different[0]) if different.size else None


def followed(golden: Golden, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """The answer up to and with the row that parts, and the golden's own rows behind it."""
    row = parted(golden, outputs["tokens"])
    if row is None:
        return dict(outputs)
    both = ((name, outputs[name], own) for name, own in golden.outputs.items())
    return {name: np.concatenate([got[: row + 1], own[row + 1 :]]) for name, got, own in both}


def judged_part(golden: Golden, rule: str, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """What a rule looks at: all of an answer, but of a text that parts nothing further."""
    bits = rule in ASK_BITS or golden.operation != "generate"
    if bits or any(outputs[n].shape != own.shape for n, own in golden.outputs.items()):
        return dict(outputs)
    return followed(golden, outputs)
