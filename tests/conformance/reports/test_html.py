"""The page of a run, as text; tests/conformance/reports/test_page.py opens it."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from conformance.diagnosis import Explanation
from conformance.reports.html import number, page, percent, upto, when
from conformance.reports.record import record
from conformance.reports.track import compare
from tests.conformance.reports.runs import HOSTILE, RUN, everything, of, result


class Tags(HTMLParser):
    """Tags and attributes of a page, and whether they close."""

    VOID = frozenset({"meta", "link", "input", "br", "rect", "path", "line", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text() -> str:
    data = everything(interrupted=True)
    old = of([result("kernel/linear/a:bits"), result("kernel/linear/b:gauge", worst=0.0)])
    return page({**data, "track": compare(old, data, lambda case: True)})


def test_every_tag_closes_and_nothing_is_fetched(text: str) -> None:
    tags = Tags(text)
    assert tags.open == []
    for tag, attributes in tags.found:
        assert tag not in ("iframe", "object", "embed", "base", "form[action]", "img")
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value == "data:," or value.startswith("#"), (tag, value)
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_ids_are_unique_and_links_lead_somewhere(text: str) -> None:
    from urllib.parse import unquote

    tags = Tags(text).found
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    links = [unquote((a["href"] or "")[1:]) for tag, a in tags if tag == "a"]
    assert links
    assert set(links) <= set(ids)


def test_words_are_escaped(text: str) -> None:
    assert HOSTILE not in text
    assert text.count("<script>") == 1
    assert "&lt;/script&gt;&lt;script&gt;window.pwned" in text
    named = page(
        of([result("a/b/c:bits")], backend=HOSTILE, command=HOSTILE, numerics={"x": HOSTILE})
    )
    assert HOSTILE not in named
    assert named.count("<script>") == 1


def test_what_stands_on_it(text: str) -> None:
    for words in ("Interrupted.", "newly failing", "margin grew", "check mine.py --case"):
        assert words in text
    quiet = page(everything())
    assert "Interrupted." not in quiet
    assert "newly failing" not in quiet


def test_faults_that_cannot_be_told_apart_are_counted_together() -> None:
    line = "equals the reference with any of `a-b`, `c` and 2 more, all 3 values: they (one; two)"
    text = page(
        record(RUN, [result("a/b/c:bits", "fail", 1.0, "no")], {"a/b/c:bits": Explanation((line,))})
    )
    assert 'data-search="a-b c"' in text
    assert "<td>one; two</td>" in text


def test_a_run_without_failures_margins_or_numerics() -> None:
    text = page(of([result("a/b/c:bits", "not implemented", None)], numerics={}))
    assert "No case has one." in text
    assert "float32 is taken" in text
    assert "Diagnosis" not in text
    assert Tags(page(of([]))).open == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "∞"),
        (float("inf"), "∞"),
        (0.0, "0"),
        (0.5, "0.5"),
        (0.0012345, "0.00123"),
        (999.6, "1,000"),
        (1234.5, "1,234"),
        (3.07e-5, "3.1·10⁻⁵"),
        (4.3e12, "4.3·10¹²"),
    ],
)
def test_numbers(value: float | None, words: str) -> None:
    assert number(value) == words


def test_times() -> None:
    assert when("2026-05-04T03:02:01+02:00") == "2026-05-04 01:02 UTC"
    assert when("yesterday") == "yesterday"


def test_shares_and_ranges() -> None:
    shares = (0.0, 1e-5, 0.278, 0.9999, 1.0)
    assert [percent(s) for s in shares] == ["0 %", "< 0.1 %", "27.8 %", "> 99.9 %", "100 %"]
    assert [upto(*r) for r in ((-1, 0), (0, 1), (2, 4), (16, 256), (2**16, 2**20))] == [
        "0",
        "1",
        "3 – 4",
        "17 – 256",
        "2¹⁶ – 2²⁰",
    ]
