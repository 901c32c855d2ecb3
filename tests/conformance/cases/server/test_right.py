"""Right servers pass, and what a protocol cannot show is said."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler

import pytest

from conformance.cases.server import CASES, Book
from tests.conformance.cases.server.judging import CANNOT, Json, judge, outcomes
from tests.conformance.cases.server.stand_ins import Proxy, listening, reply


@pytest.mark.parametrize("api", ["llama", "openai"])
def test_our_own_server_passes(ours: str, book: Book, api: str) -> None:
    found = outcomes(judge(ours, book, api=api))
    cannot = CANNOT[api]
    assert found == {"pass": {case.id for case in CASES} - cannot, "not implemented": cannot}


def test_its_logprobs_are_the_exact_ones(ours: str, book: Book) -> None:
    found = judge(ours, book, "*:noise")
    assert len(found) == 3
    assert all(r.worst is not None and r.worst < 1e-3 for r in found.values())


def test_what_cannot_be_shown_is_said(ours: str, book: Book) -> None:
    found = judge(ours, book, "server/[lt]o*/*")
    assert found["server/logits/any:bits"].message.startswith("the backend has no logits to show")


def test_what_has_no_tokenize_is_not_failed(ours: str, book: Book) -> None:
    through = Proxy(ours)

    def without(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/tokenize":
            reply(handler, b"{}", status=404)
        else:
            through(handler)

    with listening(without) as url:
        (found,) = judge(url, book, "server/tokenize/*").values()
    assert (found.outcome, found.message) == ("not implemented", "the backend has no /tokenize")


@pytest.mark.parametrize("tokens", [[], [1, 2], None, "abc", [1.5]])
def test_wrong_ids_of_a_text_fail(ours: str, book: Book, tokens: object) -> None:
    def wrong(sent: Json, told: Json) -> Json:
        return {"tokens": tokens} if sent.get("content") else told

    with listening(Proxy(ours, answer=wrong)) as url:
        (found,) = judge(url, book, "server/tokenize/*").values()
    assert found.outcome == "fail"
