"""A greedy text of a backend's own, judged as long as it is the golden's (SPEC 16.7).

Where a near tie goes the other way, so does all that follows: two texts are compared up to and with
the first token that differs, and what lies behind it is no error of either.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.golden import Array, Golden


def parted(golden: Golden, tokens: Array) -> int | None:
    """The first row at which a text is not the golden's; None where it is to the end."""
    different = np.flatnonzero(tokens != golden.outputs["tokens"])
    return int(different[0]) if different.size else None


def followed(golden: Golden, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """The answer with the golden's own tokens, and its own logits behind the row that parts."""
    tokens, logits = golden.outputs["tokens"], outputs["logits"]
    row = parted(golden, outputs["tokens"])
    if row is not None:
        logits = np.concatenate([logits[: row + 1], golden.outputs["logits"][row + 1 :]])
    return {"tokens": tokens, "logits": logits}
