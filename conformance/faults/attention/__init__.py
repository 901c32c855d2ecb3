"""Mistakes of attention (SPEC 8), each module those of one part of it."""

from __future__ import annotations

from conformance.faults.attention import (
    decoding,
    precision,
    scores,
    sinks,
    softmax,
    unseen,
    visibility,
)

MODULES = (visibility, scores, sinks, softmax, unseen, precision, decoding)
