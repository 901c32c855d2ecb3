"""Subtly wrong servers fail: a proxy alters what goes through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.cases.server import Book
from conformance.rules import UNIT
from reference.engine import Engine
from tests.conformance.cases.server.judging import Json, judge
from tests.conformance.cases.server.stand_ins import Proxy, listening, one_more
from tests.reference.serve.servers import running


def other_token(body: Json, told: Json) -> Json:
    told["tokens"][3:4] = [999]
    return told


def shifted_logprob(body: Json, told: Json) -> Json:
    for entry in told.get("completion_probabilities", [])[4:5]:
        entry["top_logprobs"][1]["logprob"] += 0.002
    return told


def without_the_second(body: Json, told: Json) -> Json:
    for entry in told.get("completion_probabilities", []):
        del entry["top_logprobs"][1]
    return told


def wrong_count(body: Json, told: Json) -> Json:
    told["timings"]["cache_n"] += 1
    return told


def other_text(body: Json, told: Json) -> Json:
    return {**told, "content": told["content"].replace(" ", "  ", 1)}


def stop_after_one_more(body: Json, told: Json) -> Json:
    return {**told, "content": told["content"] + body["stop"][0]} if "stop" in body else told


def no_prompt_of_its_own(body: Json) -> Json:
    """A second turn that continues the first one's last token again: a stale position."""
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) > 40:
        return {**body, "prompt": [*prompt[:-12], *prompt[-13:-1]]}
    return body


def without_second_event(lines: list[bytes]) -> list[bytes]:
    return lines[:1] + lines[2:]


SEEDS = iter(range(10**6, 10**7))


@pytest.mark.parametrize(
    ("tricks", "failing"),
    [
        ({"answer": other_token}, {"greedy/*", "reuse/*:tokens", "company/*"}),
        ({"answer": shifted_logprob}, {"logprobs/*", "reuse/*:noise"}),
        ({"answer": without_the_second}, {"logprobs/*", "reuse/*:noise"}),
        ({"answer": wrong_count}, {"reuse/count"}),
        ({"answer": other_text}, {"greedy/*", "stream/whole"}),
        ({"request": one_more}, {"length/limit"}),
        ({"answer": stop_after_one_more}, {"stop/within"}),
        ({"request": lambda body: {**body, "stop": []}}, {"stop/within"}),
        ({"request": lambda body: {**body, "seed": next(SEEDS)}}, {"seed/same"}),
        ({"request": lambda body: {**body, "seed": 7}}, {"seed/others"}),
        ({"request": lambda body: {**body, "temperature": 0}}, {"seed/others"}),
        ({"request": no_prompt_of_its_own}, {"reuse/*:tokens", "reuse/*:noise"}),
        ({"lines": without_second_event}, {"stream/whole"}),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_subtle_fault_is_seen(
    ours: str, book: Book, tricks: dict[str, Any], failing: set[str]
) -> None:
    with listening(Proxy(ours, **tricks)) as url:
        for part in failing:
            found = judge(url, book, f"server/{part}")
            assert found
            assert {r.outcome for r in found.values()} == {"fail"}, part


def test_a_prompt_that_is_trimmed_is_counted(ours: str, book: Book) -> None:
    def trimmed(body: Json) -> Json:
        prompt = body["prompt"]
        return {**body, "prompt": prompt.strip() if isinstance(prompt, str) else prompt}

    with listening(Proxy(ours, trimmed)) as url:
        found = judge(url, book, "server/prompt/*")
    (result,) = found.values()
    assert result.outcome == "fail"
    assert "prompt tokens of '  two" in result.message


def test_a_model_that_is_slightly_another_fails(book: Book) -> None:
    """Its epsilon is 1e-5 instead of 1e-6."""
    config = replace(book.model.config, rms_norm_eps=1e-5)
    with running(Engine(replace(book.model, config=config)), None) as server:
        found = judge(server.url, book, "server/logprobs/*")
    assert {r.outcome for r in found.values()} == {"fail"}


def test_the_declared_precision_sets_the_bound(ours: str, book: Book) -> None:
    with listening(Proxy(ours, answer=shifted_logprob)) as url:
        for precision in UNIT:
            found = judge(url, book, "server/logprobs/short*", precision=precision)
            coarse = UNIT[precision] >= 2.0**-11
            assert {r.outcome for r in found.values()} == {"pass" if coarse else "fail"}


def test_ids_are_found_by_text_and_by_bytes(ours: str, book: Book) -> None:
    def nameless(body: Json, told: Json) -> Json:
        for entry in told.get("completion_probabilities", []):
            for one in (entry, *entry["top_logprobs"]):
                del one["id"]
        return {**told, "tokens": []}

    def textless(body: Json, told: Json) -> Json:
        for entry in nameless(body, told).get("completion_probabilities", []):
            for one in (entry, *entry["top_logprobs"]):
                del one["bytes"]
        return told | {"tokens": []}

    def neither(body: Json, told: Json) -> Json:
        return {k: v for k, v in told.items() if k not in ("tokens", "completion_probabilities")}

    for trick, expected in (
        (nameless, "pass"),
        (textless, "pass"),
        (neither, "not implemented"),
    ):
        with listening(Proxy(ours, answer=trick)) as url:
            found = judge(url, book, "server/[gl][ro][eg][ep]*/short*")
        assert {r.outcome for r in found.values()} == {expected}, trick
        assert len(found) == 2
