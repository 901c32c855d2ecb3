"""How an answer is judged (SPEC 16).

`judging` has the rules, `contract` says who is asked for which. The bounds that they use are
computed from the data: `gauges` says how far a step may stray, `noise` how far a whole model, and
`underflow` what the least numbers take off.
"""

from conformance.rules.contract import (
    ASK_BITS,
    BITS_FOR_ALL,
    CONTRACTS,
    Contract,
    asked,
    bounded_rules,
    contract_of,
    mode_of,
    numerics_of,
)
from conformance.rules.declaration import demand_declaration
from conformance.rules.judging import (
    OWN_DISTANCE,
    UNFUSED,
    UNIT,
    Outcome,
    Precision,
    Verdict,
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
    "BITS_FOR_ALL",
    "CONTRACTS",
    "OWN_DISTANCE",
    "UNFUSED",
    "UNIT",
    "Contract",
    "Outcome",
    "Precision",
    "Verdict",
    "asked",
    "bound",
    "bounded",
    "bounded_rules",
    "contract_of",
    "demand_declaration",
    "error_model",
    "judge",
    "judge_tokens",
    "mode_of",
    "numerics_of",
    "same_bits",
    "unit_roundoff",
]
