"""Two runs compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.reports.record import Record, as_text
from conformance.reports.track import TRACKED, compare, read
from conformance.rules import Outcome
from reference.errors import RequestError
from tests.conformance.reports.runs import everything, of, result


def changes(before: Record, now: Record, only: str = "") -> dict[str, Any]:
    told = compare(before, now, lambda case: case.startswith(only))
    return {key: told[key] for key in TRACKED if told[key]}


PASS = of([result("a/b/c:gauge", worst=0.1), result("a/b/d:bits"), result("x/y/z:bits")])


def test_a_run_against_itself() -> None:
    assert changes(everything(), everything()) == {}


def test_what_fails_and_what_passes() -> None:
    outcomes: tuple[Outcome, ...] = ("fail", "cannot evaluate")
    for outcome in outcomes:
        bad = of([result("a/b/c:gauge", outcome, 3.0), *_rest()])
        assert changes(PASS, bad) == {"newly_failing": ["a/b/c:gauge"]}
        assert changes(bad, PASS) == {"newly_passing": ["a/b/c:gauge"]}
        assert changes(bad, bad) == {}
    absent = of([result("a/b/c:gauge", "not implemented", None), *_rest()])
    assert changes(PASS, absent) == {"newly_missing": ["a/b/c:gauge"]}
    assert changes(absent, PASS) == {"newly_passing": ["a/b/c:gauge"]}
    assert changes(absent, bad) == {"newly_failing": ["a/b/c:gauge"]}


def _rest() -> list[Any]:
    return [result("a/b/d:bits"), result("x/y/z:bits")]


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [(0.1, 0.2, False), (0.1, 0.21, True), (0.0, 0.01, True), (0.0, 0.0, False), (0.5, 0.1, False)],
)
def test_margins_that_more_than_double(before: float, now: float, told: bool) -> None:
    old, new = (of([result("a/b/c:gauge", worst=w), *_rest()]) for w in (before, now))
    grown = [{"id": "a/b/c:gauge", "before": before, "now": now}]
    assert changes(old, new) == ({"grown": grown} if told else {})


def test_a_share_of_bits_is_no_margin() -> None:
    old, new = (of([result("a/b/c:bits", "fail", w)]) for w in (0.1, 0.9))
    assert changes(old, new) == {}


def test_what_is_gone_and_what_is_new() -> None:
    less = of([result("a/b/c:gauge", worst=0.1)])
    assert changes(PASS, less) == {"gone": ["a/b/d:bits", "x/y/z:bits"]}
    assert changes(PASS, less, only="a/") == {"gone": ["a/b/d:bits"]}
    assert changes(less, PASS) == {"added": ["a/b/d:bits", "x/y/z:bits"]}
    cut = of([result("a/b/c:gauge", worst=0.1)], interrupted=True)
    assert changes(PASS, cut) == {}
    assert changes(cut, PASS) == {}


def test_a_written_record_is_read(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(as_text(everything()), encoding="utf-8")
    assert read(str(file)) == everything()


CHANGES: list[dict[str, Any]] = [
    {"cases": 3},
    {"cases": [{}]},
    {"cases": [{"id": 3, "outcome": "pass", "worst": None}]},
    {"cases": [{"id": "a", "outcome": [], "worst": None}]},
    {"cases": [{"id": "a", "outcome": "pass", "worst": "x"}]},
    {"cases": [{"id": "a", "outcome": "pass", "worst": 10**400}]},
    {"backend": None},
    {"backend": {"name": "x", "numerics": []}},
    {"summary": None},
    {"summary": {}},
    {"started": 3},
]

BROKEN = [
    "",
    "[]",
    "{}",
    "[" * 100_000,
    '{"format": "bitforbit-report-0"}',
    *(json.dumps({**PASS, **change}) for change in CHANGES),
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_record_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(text)
    with pytest.raises(RequestError, match="is no report of an earlier run") as refused:
        read(str(file))
    assert "\n" not in str(refused.value)


def test_bytes_that_are_no_text_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_bytes(b"\xff\xfe\x00")
    for target in (str(file), str(tmp_path)):
        with pytest.raises(RequestError, match=r"--track: .* is no report of an earlier run"):
            read(target)
    with pytest.raises(RequestError, match=r"none: no such file; a run with --json writes it$"):
        read(str(tmp_path / "none"))


def test_words_of_an_earlier_run_print(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    old = {**PASS, "machine": "a\x1b[31mb"}
    file.write_text(json.dumps(old))
    assert compare(read(str(file)), PASS, lambda case: True)["before"]["machine"] == "a\\x1b[31mb"
