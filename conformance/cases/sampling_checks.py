"""A token is drawn by the exponential that the backend itself has (SPEC 13.1)."""

from __future__ import annotations

import numpy as np

from conformance.cases.checks import Caller
from conformance.cases.recipe import array32
from conformance.cases.sampling import PLAIN
from conformance.rules import Verdict
from reference.sampling import WEIGHT_ONE, philox

SEED, REQUEST = 1, 3

HAIRS = {
    9: float.fromhex("-0x1.0c8fe0p-2"),
    33: float.fromhex("-0x1.ef8f5ap-2"),
    117: float.fromhex("-0x1.2ad696p-1"),
    203: float.fromhex("-0x1.0cf420p-2"),
    340: float.fromhex("-0x1.8b0324p-1"),
}
"""Positions, and the logit of a token beside one of logit 0. The word of each position lies between
the token's share by the float32 exponential of 4.1 and by the real one, half a unit of float32 away
at most: what tells them apart also tells one float32 exponential from another, so that a golden
would accuse those of which float32 allows several."""


def _exponential(do: Caller) -> Verdict:
    """Weights are made of `exp`, rounded to float32, and not of a wider one."""
    words = philox(SEED, REQUEST, np.array(list(HAIRS), np.int64))
    shares = do("exp", x=array32(list(HAIRS.values())))["y"]
    weights = np.rint(shares.astype(np.float64) * WEIGHT_ONE)
    for (position, logit), word, weight in zip(HAIRS.items(), words, weights, strict=True):
        own, at = int(weight), {"seed": SEED, "request": REQUEST, "position": position}
        nothing = np.zeros(0, np.int64)
        answer = do("sample", logits=array32([logit, 0]), previous=nothing, **PLAIN, **at)
        expected = int((int(word) * (own + int(WEIGHT_ONE)) >> 64) >= own)
        drawn = answer["y"].tolist()
        if drawn != [expected]:
            return Verdict(
                "fail",
                None,
                f"position {position}: {drawn} is drawn of the logits {float(logit).hex()} and 0, "
                f"and by the backend's own exp it would be [{expected}]",
            )
    return Verdict("pass", 0.0)


CHECKS = {"sample/exponential": ("13.1", _exponential)}
"""Section and check by name."""
