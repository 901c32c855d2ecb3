"""SPEC.md itself: its examples run, and its sections are implemented, tested and cited."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.cases import recipes
from conformance.cases.invariances import invariances

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SPEC.md").read_text()

SECTIONS = re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", TEXT, re.M)
PARENTS = {s.split(".")[0] for s in SECTIONS if "." in s}
LEAVES = [s for s in SECTIONS if s not in PARENTS]

REMARKS = {
    "1.1": "how numbers and roundings are written",
    "1.2": "names of dimensions",
    "1.5": "what a position is",
    "2.3": "a proof",
    "5.6": "a proof",
    "5.8": "a proof",
    "13.6": "a proof",
    "19": "how diagnosis compares",
    "20": "how the suite is measured",
}
"""Sections that state no rule of their own, and why."""

UNTESTED = {
    "3": "orders of float32: named variants, of which no backend is asked",
    "8.3": "fast attention: the gauge rule of the goldens of 8.2 tests it",
    "8.4": "the floor: generation/generate/below_the_floor, under section 14, tests it",
    "12.1": "loading: what a backend cannot load fails every case of a model",
    "12.2": "GGUF: the engine's own, tested against the folders that files come from",
}
"""Sections of the engine that no golden or invariance cites, and where they are tested."""


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

CITATION = re.compile(r"SPEC ((?:\d+(?:\.\d+)?)(?:(?:, (?:and )?| and | to |-)\d+(?:\.\d+)?)*)")


def cited_in(text: str) -> Iterator[str]:
    """`SPEC 8.2`, `SPEC 2.1, 2.5`, `SPEC 8.2 and 8.3` and ranges, `SPEC 15 to 18`."""
    for match in CITATION.finditer(re.sub(r"\s+", " ", text)):
        parts = re.split(r"(, and |, | and | to |-)", match[1])
        yield parts[0]
        for separator, before, section in zip(parts[1::2], parts[:-1:2], parts[2::2], strict=True):
            if separator in (" to ", "-"):
                first, last = SECTIONS.index(before), SECTIONS.index(section)
                yield from SECTIONS[first : last + 1]
            yield section


def test_how_citations_are_read() -> None:
    assert list(cited_in("(SPEC 8.2).")) == ["8.2"]
    assert list(cited_in("(SPEC 2.1, 2.5); SPEC 4.1 and 4.2")) == ["2.1", "2.5", "4.1", "4.2"]
    assert list(cited_in("SPEC 8.1 to 8.3")) == ["8.1", "8.1", "8.2", "8.3", "8.3"]
    assert list(cited_in("SPEC 13.1,\n    step 3")) == ["13.1"]
    assert list(cited_in("SPEC.md, SPEC, spec 3")) == []


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of both packages, those of constants too, with its place."""
    for package in ("reference", "conformance"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                body = getattr(node, "body", None)
                for statement in body if isinstance(body, list) else []:
                    if isinstance(statement, ast.Expr) and isinstance(
                        statement.value, ast.Constant
                    ):
                        place = f"{path.relative_to(ROOT)}:{statement.lineno}"
                        yield place, str(statement.value.value)


def citations() -> list[tuple[str, str]]:
    return [(place, section) for place, text in docstrings() for section in cited_in(text)]


def cases() -> list[tuple[str, str]]:
    made = [(r.id, r.section) for r in recipes()]
    return made + [(i.id, i.section) for i in invariances()]


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
    for section in UNTESTED:
        assert section not in {cited for _, cited in cases()}, f"{section} is tested; strike it off"


@pytest.mark.parametrize("section", [s for s in LEAVES if s not in REMARKS])
def test_a_docstring_cites_every_normative_section(section: str) -> None:
    assert covers({cited for _, cited in citations()}, section)


ENGINE = [s for s in LEAVES if 2 <= int(s.split(".")[0]) <= 14 and s not in REMARKS]


@pytest.mark.parametrize("section", [s for s in ENGINE if s not in UNTESTED])
def test_a_case_cites_every_section_of_the_engine(section: str) -> None:
    cited = {cited for _, cited in cases()}
    related = {"2.1": "2.2", "2.6": "2.2", "2.4": "4.3", "2.5": "8.2", "7.1": "7.2", "7.3": "7.4"}
    assert covers(cited, section) or related.get(section) in cited


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
    import importlib

    names = re.findall(r"`((?:reference|conformance)\.[a-z_0-9.A-Z]+)", TEXT)
    assert len(names) > 20
    for name in names:
        parts = name.split(".")
        module = importlib.import_module(".".join(parts[:2]))
        thing: object = module
        for part in parts[2:]:
            thing = getattr(thing, part)
