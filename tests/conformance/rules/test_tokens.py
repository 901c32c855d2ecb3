"""Tokens after a text that is given: near ties, and experts that rounding may move (SPEC 16.7)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from conformance.golden import Golden
from conformance.rules import Verdict, judge, judge_tokens

U = 2.0**-24


def forced(margin: float, noise: float = 2.0) -> Golden:
    """The first of two rows may also be token 9, by a margin."""
    return Golden(
        "generation/forced/x",
        "16.7",
        "forced",
        {},
        {},
        {"tokens": np.array([5, 6])},
        ("bits", "tokens"),
        {
            "row": np.array([0]),
            "token": np.array([9]),
            "margin": np.array([margin], np.float32),
            "noise": np.array([noise], np.float32),
        },
        {"noise": "noise(7)"},
    )


def test_tokens_that_are_the_same_pass() -> None:
    assert judge_tokens(forced(1.0), np.array([5, 6]), U) == Verdict("pass", 0.0)


@pytest.mark.parametrize("u", [2.0**-24, 2.0**-11, 2.0**-8])
def test_another_token_passes_within_the_noise_alone(u: float) -> None:
    moved = 7 * u * 2
    answer = np.array([9, 6])
    assert judge_tokens(forced(moved * 0.999), answer, u).outcome == "pass"
    wrong = judge_tokens(forced(moved * 1.001), answer, u)
    assert wrong.outcome == "fail"
    assert "after prefix 0: token 5 expected, 9 got" in wrong.message
    assert wrong.worst == pytest.approx(1.001)


def test_the_exact_engine_rounds_to_float32_whatever_is_declared() -> None:
    near = forced(7 * 2.0**-24 * 2 * 0.9)
    assert judge_tokens(near, np.array([9, 6]), 2.0**-53).outcome == "pass"


def test_a_token_that_is_not_listed_fails_at_any_precision() -> None:
    for answer in ([8, 6], [5, 9], [-1, 6], [5, 1 << 40]):
        verdict = judge_tokens(forced(0.0), np.array(answer), 2.0**-8)
        assert (verdict.outcome, verdict.worst) == ("fail", math.inf)


def test_tokens_of_another_kind_fail() -> None:
    for answer in (np.array([5]), np.array([[5, 6]]), np.array([5.0, 6.0])):
        assert judge_tokens(forced(1.0), answer, U).outcome == "fail"


def test_the_rule_is_tokens_of_a_golden() -> None:
    golden = forced(1.0)
    assert judge("tokens", golden, {"tokens": np.array([5, 6])}, U).outcome == "pass"
    assert judge("tokens", golden, {"tokens": np.array([9, 6])}, U).outcome == "fail"


def test_tokens_of_rows_whose_routing_is_not_sure_are_not_judged() -> None:
    routed = replace(
        forced(1.0),
        gauges={**forced(1.0).gauges, "steady": np.array([1e-5, 1e-2], np.float32)},
        terms={**forced(1.0).terms, "steady": "steady(7)"},
    )
    assert judge_tokens(routed, np.array([9, 6]), 2.0**-13).outcome == "pass"
    assert judge_tokens(routed, np.array([9, 6]), U).outcome == "fail"
    assert judge_tokens(routed, np.array([5, 8]), 2.0**-13).outcome == "fail"
    assert judge_tokens(routed, np.array([5, 6]), 2.0**-8).outcome == "not judged"
