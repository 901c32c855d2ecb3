"""How an answer is judged (SPEC 16).

`judging` has the rules, `contract` says who is asked for which. Bounds are computed from what a
backend declares (`declaration`, `precision`, `error_models`) and from the data: `gauges` says how
far a step may stray, `noise` how far a whole model; `alike`, `codes`, `functions` and `underflow`
see to terms that round alike, codes that flip, stored arguments and the least numbers.
`continuation` says how much of a text is judged.
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
from conformance.rules.error_models import error_model
from conformance.rules.judging import (
    OWN_DISTANCE,
    UNFUSED,
    Outcome,
    Verdict,
    bound,
    bounded,
    judge,
    judge_tokens,
    same_bits,
)
from conformance.rules.precision import UNIT, Precision, unit_roundoff

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
