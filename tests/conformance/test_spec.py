"""SPEC.md itself: its examples run, and its sections are implemented, tested and cited."""

from __future__ import annotations

import doctest
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

from tools.coverage import (
    REMARKS,
    TABLE,
    UNTESTED,
    WITHIN,
    cases,
    cited_in,
    docstrings,
    leaves,
    sections,
    table,
)

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SPEC.md").read_text()

SECTIONS = list(sections(TEXT))
LEAVES = leaves(SECTIONS)


def covers(cited: set[str], section: str) -> bool:
    """Whether a section is cited, by itself or by its parent: `SPEC 7` covers 7.1 to 7.4."""
    return section in cited or section.split(".")[0] in cited


# The examples.


def examples() -> list[doctest.DocTest]:
    """Each ```python block of SPEC.md, in order; the blank line at its end ends the output."""
    parser = doctest.DocTestParser()
    found = []
    for block in re.finditer(r"^```python\n(.*?)^```$", TEXT, re.M | re.S):
        line = TEXT[: block.start(1)].count("\n")
        assert block[1].endswith("\n\n"), f"SPEC.md:{line}: a block must end with a blank line"
        found.append(parser.get_doctest(block[1], {}, f"SPEC.md:{line + 1}", "SPEC.md", line))
    return found


def test_the_examples_run() -> None:
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner()
    complaints: list[str] = []
    tests = examples()
    for test in tests:
        test.globs = names
        runner.run(test, out=complaints.append, clear_globs=False)
    assert complaints == []
    assert len(tests) >= 2
    assert runner.summarize(verbose=False).attempted >= 5
    assert "```py\n" not in TEXT


# Who cites what.


def cited(text: str) -> list[str]:
    return list(cited_in(text, SECTIONS))


def test_how_citations_are_read() -> None:
    assert cited("(SPEC 8.2).") == ["8.2"]
    assert cited("(SPEC 2.1, 2.5); SPEC 4.1 and 4.2") == ["2.1", "2.5", "4.1", "4.2"]
    assert cited("SPEC 8.1 to 8.3") == ["8.1", "8.1", "8.2", "8.3", "8.3"]
    assert cited("SPEC 13.1,\n    step 3") == ["13.1"]
    assert cited("SPEC.md, SPEC, spec 3") == []


@cache
def citations() -> list[tuple[str, str]]:
    return [(place, section) for place, _, text in docstrings() for section in cited(text)]


def test_the_numbers_of_sections_ascend() -> None:
    order = [tuple(map(int, s.split("."))) for s in SECTIONS]
    assert order == sorted(set(order))
    tops = [int(s) for s in SECTIONS if "." not in s]
    assert tops == list(range(1, 21))


def test_the_lists_above_are_up_to_date() -> None:
    for listed in (REMARKS, UNTESTED):
        assert set(listed) <= set(LEAVES)
    proofs = {s for s, title in re.findall(r"^### (\S+) (.*)$", TEXT, re.M) if "(proof)" in title}
    assert proofs <= set(REMARKS)
    tested = {section for _, section in cases()}
    for section in UNTESTED:
        assert section not in tested, f"{section} is tested; strike it off"


@pytest.mark.parametrize("section", [s for s in LEAVES if s not in REMARKS])
def test_a_docstring_cites_every_normative_section(section: str) -> None:
    assert covers({number for _, number in citations()}, section)


ENGINE = [s for s in LEAVES if 2 <= int(s.split(".")[0]) <= 14 and s not in REMARKS]


@cache
def of_cases() -> set[str]:
    return {number for _, number in cases()}


@pytest.mark.parametrize("section", [s for s in ENGINE if s not in UNTESTED])
def test_a_case_cites_every_section_of_the_engine(section: str) -> None:
    assert covers(of_cases(), section) or WITHIN.get(section) in of_cases()


def test_nothing_cites_what_is_not_there() -> None:
    unknown = [where for where in [*citations(), *cases()] if where[1] not in SECTIONS]
    assert unknown == []


def test_references_within_the_specification_exist() -> None:
    """`(16.3)`, `section 16`, `by 2.3`: those that look like references."""
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S)
    found = re.findall(
        r"\((\d+(?:\.\d+)?)(?:\)|[,;](?!\)))|section (\d+(?:\.\d+)?)|\bby (\d+\.\d+)\b", prose
    )
    numbers = {a or b or c for a, b, c in found}
    assert len(numbers) > 8
    assert {n for n in numbers if n not in SECTIONS and float(n) >= 2} == set()


def test_what_is_said_to_implement_a_section_exists() -> None:
    """`Implemented by `reference.arithmetic.dot`, `dot64` ...`: the dotted names."""
    names = re.findall(r"`((?:reference|conformance)\.[a-z_0-9.A-Z]+)", TEXT)
    assert len(names) > 20
    for name in names:
        pkgutil.resolve_name(name)


def test_the_table_of_coverage_is_up_to_date() -> None:
    assert TABLE.read_text() == table(), "run python tools/coverage.py"
