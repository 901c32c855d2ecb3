"""What is declared of single operations decides what they are asked, and how far (SPEC 17, 18)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.backends.plain import PlainBackend
from conformance.backends.reference import ReferenceBackend
from conformance.errors import BackendError
from conformance.paths import data_folder
from conformance.reports.record import is_fair
from conformance.rules import asked, contract_of, demand_declaration, numerics_of
from conformance.rules.contract import (
    EITHER_INSTEAD,
    NO_BITS,
    NO_EITHER,
    Contract,
    bounded_rules,
    left_out,
    mode_of,
)
from conformance.runner import Case, not_asked, run
from conformance.selection import Selection
from reference.arithmetic import F32

GOLDENS = data_folder("goldens")
WIDE = {"accumulator": "float32", "operands": "bfloat16", "kv": "bfloat16"}
NORMS = {**WIDE, "operations": {"rms_norm": {"operands": "float32"}}}
EXACT = {"accumulator": "exact", "operands": "float32"}


def case(operation: str) -> Case:
    rules = ("bits", "gauge")
    return Case(f"kernel/{operation}/x:bits", "2", operation, "bits", rules)


def bfloat16(x: F32) -> F32:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


class Mixed(PlainBackend):
    """Products of bfloat16, and norms whose weight is rounded to it too."""

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        return super().linear(bfloat16(x), bfloat16(w), bias)

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        return super().rms_norm(x, bfloat16(weight), eps)


def failed(backend: Any, numerics: Mapping[str, Any], *patterns: str) -> set[str]:
    """The operations that fail a case under the contract that they claim."""
    backend.numerics = numerics
    selection = Selection(patterns=patterns, contract=contract_of(numerics))
    results = list(run(backend, GOLDENS, selection))
    assert results
    return {r.id.split("/")[1] for r in results if r.outcome == "fail"}


FEW = ("kernel/linear/k33_t5:*", "kernel/rms_norm/k192:*")


def test_each_operation_has_the_bounds_that_it_declares() -> None:
    assert failed(Mixed(), WIDE, *FEW) == set()
    assert failed(Mixed(), NORMS, *FEW) == {"rms_norm"}
    assert failed(Mixed(), {**WIDE, "operands": "float32"}, *FEW) == {"linear", "rms_norm"}


def test_an_operation_may_claim_bits_or_give_them_up() -> None:
    claims = {"accumulator": "float32", "operations": {"linear": EXACT}}
    assert asked(case("linear"), claims, "bounds") == ("bits", "gauge")
    assert asked(case("rms_norm"), claims, "bounds") == ("gauge",)
    assert failed(PlainBackend(), claims, *FEW) == {"linear"}
    assert failed(ReferenceBackend(), claims, *FEW) == set()
    rounds = {**EXACT, "operations": {"linear": {"accumulator": "float32"}}}
    assert asked(case("linear"), rounds, "exact") == ("gauge",)
    assert asked(case("rms_norm"), rounds, "exact") == ("bits", "gauge")
    assert failed(PlainBackend(), rounds, *FEW) == {"rms_norm"}


def test_a_contract_that_is_asked_for_holds_for_all() -> None:
    claims = {"accumulator": "float32", "operations": {"linear": EXACT}}
    assert asked(case("rms_norm"), claims, "exact") == ("bits", "gauge")
    rounds = {**EXACT, "operations": {"linear": {"accumulator": "float32"}}}
    assert asked(case("rms_norm"), rounds, "bounds") == ("gauge",)


def test_what_an_operation_gives_up_is_counted() -> None:
    rounds = {**EXACT, "operations": {"linear": {"accumulator": "float32"}}}
    selection = Selection(patterns=FEW, contract="exact")
    assert not_asked(GOLDENS, selection, rounds) == ["kernel/linear/k33_t5:bits"]
    assert not_asked(GOLDENS, selection, EXACT) == []


FORMS = Case("kernel/rope/x:bits", "7.4", "rope", "bits", ("bits", "either", "gauge"))


@pytest.mark.parametrize(
    ("numerics", "contract", "out"),
    [
        (EXACT, "exact", {"either": NO_EITHER}),
        ({**EXACT, "fma": False}, "exact", {"either": NO_EITHER}),
        ({**EXACT, "fma": True}, "exact", {"bits": EITHER_INSTEAD}),
        ({"accumulator": "float32", "fma": True}, "exact", {"either": NO_EITHER}),
        ({"accumulator": "float32", "fma": True}, "bounds", {"bits": NO_BITS, "either": NO_BITS}),
    ],
)
def test_other_forms_are_asked_of_exact_sums_with_contraction_alone(
    numerics: Mapping[str, Any], contract: Contract, out: Mapping[str, str]
) -> None:
    assert left_out(FORMS, numerics, contract) == out
    without = left_out(case("rope"), numerics, contract)
    assert without == ({"bits": NO_BITS} if contract == "bounds" else {})


def test_bits_are_asked_of_all_where_one_answer_is_right_in_any_arithmetic() -> None:
    for operation in ("quantize_int4", "quantize_int8", "philox", "paging", "prefix_reuse"):
        assert bounded_rules(case(operation)) == ["bits", "gauge"]
    assert bounded_rules(case("linear")) == ["gauge"]
    assert bounded_rules(FORMS) == ["gauge"]


@pytest.mark.parametrize(
    ("rule", "mode"), [("bits", "exact"), ("either", "exact"), ("gauge", "fast")]
)
def test_attention_is_exact_where_bits_are_asked(rule: str, mode: str) -> None:
    assert mode_of("attention", rule) == mode_of("paged_attention", rule) == {"mode": mode}
    assert mode_of("forward", rule) == mode_of("forced", rule) == {"attention": mode}
    assert mode_of("generate", rule) == mode_of("linear", rule) == {}


def test_what_an_entry_leaves_out_is_the_backends() -> None:
    own = numerics_of(NORMS, "rms_norm")
    assert (own["accumulator"], own["operands"], own["kv"]) == ("float32", "float32", "bfloat16")
    assert numerics_of(NORMS, "linear") is NORMS


def test_a_failure_of_bits_is_fair_where_the_operation_does_not_claim_them() -> None:
    outputs = [{"unit": "bound", "margins": {"worst": 0.5}}]
    one = {"id": "kernel/linear/x:bits", "rule": "bits", "outputs": outputs}
    for own, fair in ((EXACT, False), ({"accumulator": "float32"}, True)):
        numerics = {"accumulator": "float32", "operations": {"linear": own}}
        assert is_fair({"backend": {"numerics": numerics}}, one) is fair


@pytest.mark.parametrize(
    ("operations", "part"),
    [
        ([], "dictionary of dictionaries"),
        ({"linear": "float32"}, "dictionary of dictionaries"),
        ({"linear": {"acumulator": "float32"}}, r"did you mean accumulator\? \(of linear\)"),
        ({"linear": {"operands": "float8"}}, r"operands 'float8' is none of .* \(of linear\)"),
        ({"linear": {"fma": 1}}, r"fma 1 must be true or false \(of linear\)"),
        ({"linear": {"operations": {}}}, r"'operations' is none of .* \(of linear\)"),
    ],
)
def test_what_is_no_declaration_is_refused(operations: Any, part: str) -> None:
    demand_declaration(NORMS)
    with pytest.raises(BackendError, match=part):
        demand_declaration({"accumulator": "float32", "operations": operations})


@pytest.mark.parametrize(
    ("numerics", "says"),
    [
        ({"acumulator": "exact"}, r"'acumulator' is none of .*, operations; did you mean accumul"),
        ({"rounding": "up"}, r"'rounding' is none of operands, .*, operations$"),
        ({"flush_to_zero": "yes"}, r"flush_to_zero 'yes' must be true or false$"),
    ],
)
def test_what_is_declared_of_all_is_read_too(numerics: Mapping[str, Any], says: str) -> None:
    with pytest.raises(BackendError, match=says):
        demand_declaration(numerics)
