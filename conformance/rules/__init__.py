"""How an answer is judged (SPEC 16).

`judging` has the rules. The bounds that they use are computed from the data: `gauges` says how far
a step may stray, `noise` how far a whole model, `underflow` what the least numbers take off, and
`contraction` which other bits a compiler that may contract can give.
"""

from conformance.rules.judging import (
    ASK_BITS,
    UNFUSED,
    UNIT,
    Outcome,
    Precision,
    Verdict,
    asked,
    bound,
    bounded,
    error_model,
    judge,
    judge_tokens,
    same_bits,
    unit_roundoff,
)

__all__ = [
    "ASK_BITS",
    "UNFUSED",
    "UNIT",
    "Outcome",
    "Precision",
    "Verdict",
    "asked",
    "bound",
    "bounded",
    "error_model",
    "judge",
    "judge_tokens",
    "same_bits",
    "unit_roundoff",
]
