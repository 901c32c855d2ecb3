"""Which rules of a golden a backend is asked for (SPEC 18).

Two contracts: `exact` asks for all, bits before all; `bounds` asks what float32, or less, can pass
in an order of its own. What is not asked is neither a pass nor a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

ASK_BITS = ("bits", "either")
"""Rules that ask for the same bits; all others bound how far they may lie."""

Contract = Literal["exact", "bounds"]

CONTRACTS: tuple[Contract, ...] = ("exact", "bounds")

BITS_FOR_ALL = frozenset(
    {"quantize_int4", "quantize_int8", "rope_constants", "philox", "sample", "verify_draft"}
    | {"store_kv", "paging", "page_hashes", "prefix_reuse"}
)
"""Operations that have one answer in any arithmetic: codes, constants, tokens, counts."""


NO_BITS = "the contract `bounds` has no bits; an accumulator `exact` or --contract exact asks them"
NO_EITHER = "`either` stands in place of bits where an exact accumulator has `fma` declared"
EITHER_INSTEAD = "`fma` is declared, and `either` stands in place of these bits"
"""Why a rule is not asked."""


class Ruled(Protocol):
    """A golden, or what its header says."""

    @property
    def operation(self) -> str:
        """What is called."""

    @property
    def rules(self) -> tuple[str, ...]:
        """By which answers are judged."""


def numerics_of(numerics: Mapping[str, Any], operation: str) -> Mapping[str, Any]:
    """What is declared of an operation: its entry in `operations`, over what is declared of all."""
    own = numerics.get("operations", {}).get(operation)
    return numerics if own is None else {**numerics, **own}


def contract_of(numerics: Mapping[str, Any]) -> Contract:
    """The contract that a declaration claims: `exact` where the accumulator is, else `bounds`."""
    return "exact" if numerics.get("accumulator") == "exact" else "bounds"


def asked(
    golden: Ruled, numerics: Mapping[str, Any], contract: Contract = "exact"
) -> tuple[str, ...]:
    """The rules of a golden that a backend is asked for.

    `either` stands in place of `bits` where an accumulator is declared to be exact and `fma` too,
    and is asked of nobody else. Under the contract that a backend claims, what it declares of an
    operation is what that operation claims.
    """
    out = left_out(golden, numerics, contract)
    return tuple(rule for rule in golden.rules if rule not in out)


def left_out(golden: Ruled, numerics: Mapping[str, Any], contract: Contract) -> dict[str, str]:
    """The rules of a golden that a backend is not asked for, each with the reason, in words."""
    own = numerics_of(numerics, golden.operation)
    if contract == contract_of(numerics):
        contract = contract_of(own)
    if contract == "bounds":
        held = bounded_rules(golden)
        return {rule: NO_BITS for rule in golden.rules if rule not in held}
    contracts = bool(own.get("fma")) and own.get("accumulator") == "exact"
    if contracts and "either" in golden.rules:
        return {"bits": EITHER_INSTEAD}
    return {"either": NO_EITHER} if "either" in golden.rules else {}


def bounded_rules(golden: Ruled) -> list[str]:
    """The rules that a backend of another order is held to: bounds, and bits where all are."""
    bits = golden.operation in BITS_FOR_ALL
    return [rule for rule in golden.rules if bits or rule not in ASK_BITS]


def mode_of(operation: str, rule: str) -> dict[str, str]:
    """Attention is exact where bits are asked, and fast where a bound is (SPEC 18)."""
    kind = "exact" if rule in ASK_BITS else "fast"
    names = {
        "attention": "mode",
        "paged_attention": "mode",
        "forward": "attention",
        "forced": "attention",
    }
    return {names[operation]: kind} if operation in names else {}
