"""A text of a backend's own is judged as long as it is the golden's (SPEC 16.7)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.golden import Golden
from conformance.rules import judge
from conformance.rules.continuation import judged_part, reusable

U = 2.0**-24
UNIT = 2.0**-8
"""The roundoff at which a logit of noise 1 may stray by 7 / 256."""

LOGITS = np.array([[0, 1, 0.9, 0], [2, 0, 0, 1.98], [0, 0, 3, 0], [1, 0, 0, 0]], np.float32)
TOKENS = np.array([1, 0, 2, 0])
GOLDEN = Golden(
    "generation/generate/x", "14", "generate", {"max_new_tokens": 4}, {"prompt": np.array([3])},
    {"tokens": TOKENS, "logits": LOGITS}, ("bits", "gauge", "tokens"),
    {"noise": np.ones((4, 4), np.float32)}, {"noise": "noise(7)"},
)  # fmt: skip
REACH = 7 * UNIT


def answer(tokens: Any = TOKENS, logits: Any = LOGITS) -> dict[str, NDArray[Any]]:
    return {"tokens": np.array(tokens), "logits": np.array(logits, np.float32)}


def test_the_goldens_own_text_passes() -> None:
    for rule in GOLDEN.rules:
        assert judge(rule, GOLDEN, answer(), U).outcome == "pass"


def test_a_near_tie_may_go_the_other_way_and_what_follows_is_not_judged() -> None:
    """1.98 lies 0.02 below 2, and each of both may move by 0.027."""
    other = LOGITS.copy()
    other[1] = [1.99, 0, 0, 1.995]
    other[2:] = 77
    given = answer([1, 3, 3, 3], other)
    assert judge("gauge", GOLDEN, given, UNIT).outcome == "pass"
    verdict = judge("tokens", GOLDEN, given, UNIT)
    assert verdict.outcome == "pass"
    assert verdict.worst == pytest.approx(0.02 / (2 * REACH), rel=1e-3)
    assert "what follows is not judged" in verdict.message
    assert judge("tokens", GOLDEN, given, UNIT / 8).outcome == "fail"


def test_the_first_and_the_last_token_may_be_near_ties_too() -> None:
    for got in (0, 3):
        logits = LOGITS.copy()
        logits[0, got] = 0.98
        near = replace(GOLDEN, outputs={**GOLDEN.outputs, "logits": logits})
        assert judge("tokens", near, answer([got, 0, 2, 0]), UNIT).outcome == "pass"


def test_the_row_that_parts_is_judged() -> None:
    other = LOGITS.copy()
    other[1] = [1.9, 0, 0, 1.98]
    assert judge("gauge", GOLDEN, answer([1, 3, 2, 0], other), UNIT).outcome == "fail"
    other[1] = LOGITS[1]
    other[0, 3] = 0.1
    assert judge("gauge", GOLDEN, answer([1, 3, 2, 0], other), UNIT).outcome == "fail"


@pytest.mark.parametrize("tokens", [[2, 0, 2, 0], [1, 0, 3, 0], [1, 0, 2, 1]])
def test_a_token_that_rounding_does_not_explain_fails(tokens: list[int]) -> None:
    verdict = judge("tokens", GOLDEN, answer(tokens), UNIT)
    assert verdict.outcome == "fail"
    at = np.flatnonzero(np.array(tokens) != TOKENS)[0]
    assert verdict.message.startswith(f"token {at}: ")


@pytest.mark.parametrize("got", [4, -1])
def test_a_token_that_is_none_fails(got: int) -> None:
    verdict = judge("tokens", GOLDEN, answer([got, 0, 2, 0]), UNIT)
    assert (verdict.outcome, verdict.worst) == ("fail", math.inf)


@pytest.mark.parametrize("rule", ["gauge", "tokens"])
def test_where_other_experts_may_compute_every_token_there_is_no_verdict(rule: str) -> None:
    """And where they may compute the token that differs, or one before it, it is no mistake."""
    steady = np.repeat(np.array([[1], [1], [UNIT], [UNIT]], np.float32), 4, axis=1)
    golden = replace(
        GOLDEN,
        gauges={**GOLDEN.gauges, "steady": steady},
        terms={**GOLDEN.terms, "steady": "steady(7)"},
    )
    assert judge(rule, golden, answer(), UNIT).outcome == "pass"
    assert judge(rule, golden, answer(), 2.0**-2).outcome == "not judged"
    given = answer([1, 0, 3, 0], np.where([[0], [0], [1], [1]], 77, LOGITS))
    assert judge(rule, golden, given, UNIT).outcome == "pass"
    assert judge(rule, golden, given, UNIT / 16).outcome == "fail"
    given = answer([2, 0, 2, 0], np.where([[1], [0], [0], [0]], 77, LOGITS))
    assert judge(rule, golden, given, UNIT).outcome == "fail"


def test_only_the_first_difference_counts() -> None:
    """After it the texts have nothing in common, so that a wild token is no error."""
    given = answer([1, 3, 0, 2])
    assert judge("tokens", GOLDEN, given, UNIT).outcome == "pass"
    assert judge("gauge", GOLDEN, given, UNIT).outcome == "pass"
    assert given["tokens"].tolist() == [1, 3, 0, 2], "the answer was written to"


def test_another_length_or_type_fails() -> None:
    for rule in ("gauge", "tokens"):
        assert judge(rule, GOLDEN, answer(TOKENS[:3], LOGITS[:3]), UNIT).outcome == "fail"
        assert judge(rule, GOLDEN, answer(TOKENS.astype(np.float64)), UNIT).outcome == "fail"


def test_rows_whose_experts_may_change_decide_nothing() -> None:
    steady = np.full((4, 4), 1e-5, np.float32)
    routed = replace(
        GOLDEN,
        gauges={**GOLDEN.gauges, "steady": steady},
        terms={**GOLDEN.terms, "steady": "steady(7)"},
    )
    wild = answer([2, 0, 2, 0])
    assert judge("tokens", routed, wild, UNIT).outcome == "not judged"
    assert judge("tokens", routed, wild, U).outcome == "fail"


def turns() -> Golden:
    """Two texts whose prompts have 36 tokens in common, of which the golden finds 32."""
    first, second = np.arange(40), np.append(np.arange(36), [9, 9, 9, 9])
    inputs = {"tokens": np.append(first, second), "lengths": np.array([40, 40])}
    outputs = {
        "tokens": np.stack([TOKENS, TOKENS]),
        "logits": np.stack([LOGITS, LOGITS]),
        "cache_n": np.array([0, 32]),
        "prompt_n": np.array([40, 8]),
    }
    noise = np.ones((2, 4, 4), np.float32)
    return replace(
        GOLDEN, operation="turns", inputs=inputs, outputs=outputs, gauges={"noise": noise}
    )


def test_what_was_chosen_last_is_not_computed_and_the_last_token_is_always_computed() -> None:
    """Of 20 tokens and 1, 0, 2, 0 all but the last 0, and of the same prompt again all but one."""
    golden = turns()
    whole = np.concatenate([np.arange(20), TOKENS])
    inputs = {
        "tokens": np.concatenate([np.arange(20), whole, [5], whole, [5]]),
        "lengths": np.array([20, 25, 25]),
    }
    outputs = {**golden.outputs, "tokens": np.stack([TOKENS] * 3)}
    assert reusable(replace(golden, inputs=inputs, outputs=outputs)).tolist() == [0, 23, 24]


def test_each_text_is_judged_up_to_where_it_parts() -> None:
    golden = turns()
    tokens, logits = golden.outputs["tokens"].copy(), golden.outputs["logits"].copy()
    tokens[1], logits[1, 2:] = [1, 3, 3, 3], 77
    given = {**golden.outputs, "tokens": tokens, "logits": logits}
    assert judge("gauge", golden, given, UNIT).outcome == "pass"
    verdict = judge("tokens", golden, given, UNIT)
    assert (verdict.outcome, verdict.message.split(":")[0]) == ("pass", "text 1, token 1")
    logits[0, 3] = 77
    assert judge("gauge", golden, given, UNIT).outcome == "fail"
    tokens[0, 0] = 3
    assert judge("tokens", golden, given, UNIT).message.startswith("token 0: 1 expected, 3 got")


@pytest.mark.parametrize(
    ("cache_n", "prompt_n", "outcome"),
    [
        ([0, 32], [40, 8], "pass"),
        ([0, 16], [40, 24], "pass"),
        ([0, 0], [40, 40], "pass"),
        ([0, 36], [40, 4], "pass"),
        ([0, 37], [40, 3], "fail"),
        ([1, 32], [39, 8], "fail"),
        ([0, -1], [40, 41], "fail"),
        ([0, 16], [40, 8], "fail"),
        ([0, 32, 0], [40, 8], "fail"),
    ],
)
def test_less_or_what_was_not_trimmed_may_be_reused_and_all_of_a_prompt_is_counted(
    cache_n: list[int], prompt_n: list[int], outcome: str
) -> None:
    golden = turns()
    given = {**golden.outputs, "cache_n": np.array(cache_n), "prompt_n": np.array(prompt_n)}
    assert judge("gauge", golden, given, UNIT).outcome == "pass"
    verdict = judge("tokens", golden, given, UNIT)
    assert verdict.outcome == outcome
    assert ("cache_n" in verdict.message) == (outcome == "fail")
    assert judged_part(golden, "tokens", given)["cache_n"] is golden.outputs["cache_n"]
    tokens = golden.outputs["tokens"].copy()
    tokens[0, 1] = 3
    assert judge("tokens", golden, {**given, "tokens": tokens}, UNIT).outcome == "pass"


def test_a_prompt_that_is_not_counted_whole_is_named() -> None:
    golden = turns()
    given = {**golden.outputs, "cache_n": np.array([0, 16])}
    assert judge("tokens", golden, given, UNIT).message == (
        "cache_n + prompt_n of request 1: its prompt has 40 tokens, 24 are counted"
    )


@pytest.mark.parametrize(
    ("saved", "reused", "outcome"),
    [
        (300, 300, "pass"),
        (300, 288, "pass"),
        (300, 256, "pass"),
        (300, 255, "fail"),
        (300, 0, "fail"),
        (300, 301, "fail"),
        (255, 0, "pass"),
        (512, 511, "fail"),
    ],
)
def test_what_a_file_holds_is_used_in_whole_pages_at_least(
    saved: int, reused: int, outcome: str
) -> None:
    outputs = {**GOLDEN.outputs, "cache_n": np.array([saved])}
    golden = replace(GOLDEN, operation="resume", outputs=outputs)
    given = {**outputs, "cache_n": np.array([reused])}
    verdict = judge("tokens", golden, given, UNIT)
    assert verdict.outcome == outcome
    assert ("cache_n" in verdict.message) == (outcome == "fail")


ENDING = replace(GOLDEN, operation="complete")
LONGER = [1, 0, 2, 0, 3, 3], np.concatenate([LOGITS, LOGITS[:2] + np.float32(9)])


@pytest.mark.parametrize("rule", ["gauge", "tokens", "bits"])
def test_a_text_that_does_not_part_ends_where_the_golden_does(rule: str) -> None:
    assert judge(rule, ENDING, answer(), UNIT).outcome == "pass"
    for given in (answer(*LONGER), answer(TOKENS[:3], LOGITS[:3]), answer(TOKENS[:0], LOGITS[:0])):
        given["tokens"] = given["tokens"].astype(np.int64)
        verdict = judge(rule, ENDING, given, UNIT)
        assert verdict.outcome == "fail"
        assert f"got int64 ({len(given['tokens'])},)" in verdict.message


@pytest.mark.parametrize("tokens", [[1, 3], [1, 3, 3, 3], [1, 3, 3, 3, 3, 3, 3]])
def test_a_text_that_parts_may_end_elsewhere(tokens: list[int]) -> None:
    """Up to and with the token that differs it is judged as any other."""
    rows = np.resize(LOGITS, (len(tokens), 4))
    rows[2:] = 77
    for rule in ("gauge", "tokens"):
        assert judge(rule, ENDING, answer(tokens, rows), UNIT).outcome == "pass"
        part = judged_part(ENDING, rule, answer(tokens, rows))
        assert part["tokens"].tolist() == [1, 3, 2, 0]
        assert np.array_equal(part["logits"], LOGITS)
    rows[1, 1] = 1
    assert judge("gauge", ENDING, answer(tokens, rows), UNIT).outcome == "fail"
    wild = answer([2, *tokens[1:]], np.resize(LOGITS, (len(tokens), 4)))
    assert judge("tokens", ENDING, wild, UNIT).outcome == "fail"
    generated = answer(tokens, rows) if len(tokens) != 4 else answer(tokens[:2], rows[:2])
    assert judge("tokens", GOLDEN, generated, UNIT).outcome == "fail"


def test_a_text_that_parts_with_rows_of_another_kind_fails() -> None:
    given = answer([1, 3], LOGITS[:2])
    for logits in (LOGITS[:3], LOGITS[:2, :3], LOGITS[:2].astype(np.float64)):
        assert judge("tokens", ENDING, {**given, "logits": logits}, UNIT).outcome == "fail"


@pytest.mark.parametrize(
    ("accepted", "outcome"),
    [
        ([0, 1], "pass"),
        ([0, 0, 0], "pass"),
        ([2], "pass"),
        ([1, 2], "pass"),
        ([0, 0], "fail"),
        ([2, 0], "fail"),
        ([3], "fail"),
        ([-1, 2, 1], "fail"),
        ([], "fail"),
        ([[0, 1]], "fail"),
    ],
)
def test_other_drafts_may_be_accepted_as_long_as_the_tokens_can_come_of_them(
    accepted: list[int], outcome: str
) -> None:
    """Three tokens come behind the first one."""
    outputs = {**GOLDEN.outputs, "accepted": np.array([0, 1])}
    golden = replace(GOLDEN, operation="speculate", parameters={"draft_tokens": 2}, outputs=outputs)
    given = {**outputs, "accepted": np.array(accepted, np.int64)}
    verdict = judge("tokens", golden, given, UNIT)
    assert verdict.outcome == outcome
    assert ("accepted" in verdict.message) == (outcome == "fail")


def test_what_a_report_shows_is_what_was_judged() -> None:
    other = LOGITS + np.float32(1)
    given = answer([1, 3, 9, 9], other)
    part = judged_part(GOLDEN, "gauge", given)
    assert part["tokens"].tolist() == [1, 3, 2, 0]
    assert np.array_equal(part["logits"], np.concatenate([other[:2], LOGITS[2:]]))
    for rule, whole in (("bits", given), ("gauge", answer(TOKENS, other)),
                        ("gauge", answer([1], other[:1]))):  # fmt: skip
        kept = judged_part(GOLDEN, rule, whole)
        assert all(kept[name] is whole[name] for name in whole)
    forward = replace(GOLDEN, operation="forward")
    assert judged_part(forward, "gauge", given)["logits"] is given["logits"]
