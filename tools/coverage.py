"""Which function implements a section of SPEC.md, and which case tests it: `docs/coverage.md`.

    python tools/coverage.py            write the table
    python tools/coverage.py --check    exit with 1 where the table is out of date

Functions are those whose docstrings cite the section; cases are goldens and invariances by the
section that they name.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "SPEC.md"
TABLE = ROOT / "docs" / "coverage.md"
PACKAGES = ("reference", "conformance")

REMARKS = {
    "1.1": "how numbers and roundings are written",
    "1.2": "names of dimensions",
    "1.5": "what a position is",
    "2.3": "a proof",
    "2.7": "where a rule of 2.2 shows; its goldens are those of 2.2 and of what is made of sums",
    "5.6": "a proof",
    "5.8": "a proof",
    "13.6": "a proof",
    "19.1": "how a report says which part of an answer is wrong",
    "19.2": "how traces are compared; offering one is free to a backend",
    "19.3": "how diagnosis compares with known faults",
    "20": "how the suite is measured",
}
"""Sections that state no rule of their own, and why."""

UNTESTED = {
    "3": "orders of float32: named variants, of which no backend is asked",
    "8.3": "fast attention: the gauge rule of the goldens of 8.2 tests it",
    "8.4": "the floor: generation/generate/below_the_floor, under section 14, tests it",
    "12.1": "loading: what a backend cannot load fails every case of a model",
    "12.2": "GGUF: the engine's own, tested against the folders that files come from",
    "12.3": "layers one at a time: the engine's own, tested against loading everything",
}
"""Sections of the engine that no golden or invariance cites, and where they are tested."""

WITHIN = {"2.1": "2.2", "2.6": "2.2", "2.4": "4.3", "2.5": "8.2", "7.1": "7.2", "7.3": "7.4"}
"""Sections that a case of another one tests: a part of what it computes."""

CITATION = re.compile(r"SPEC ((?:\d+(?:\.\d+)?)(?:(?:, (?:and )?| and | to |-)\d+(?:\.\d+)?)*)")


def sections(text: str) -> dict[str, str]:
    """Titles of the numbered sections, by number, in order."""
    return dict(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? (.*)$", text, re.M))


def leaves(numbers: Iterable[str]) -> list[str]:
    """The sections without subsections."""
    numbers = list(numbers)
    parents = {number.split(".")[0] for number in numbers if "." in number}
    return [number for number in numbers if number not in parents]


def cited_in(text: str, numbers: list[str]) -> Iterator[str]:
    """`SPEC 8.2`, `SPEC 2.1, 2.5`, `SPEC 8.2 and 8.3` and ranges, `SPEC 15 to 18`."""
    for match in CITATION.finditer(re.sub(r"\s+", " ", text)):
        parts = re.split(r"(, and |, | and | to |-)", match[1])
        yield parts[0]
        for separator, before, section in zip(parts[1::2], parts[:-1:2], parts[2::2], strict=True):
            if separator in (" to ", "-"):
                first, last = numbers.index(before), numbers.index(section)
                yield from numbers[first : last + 1]
            yield section


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Every docstring of the packages, those of constants too: its place, its owner, its text.

    The owner is a dotted name: a module, a class, a function, or what the string stands below.
    """
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            module = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield from _strings(ast.parse(path.read_text()), place, module)


def _strings(node: ast.AST, place: str, owner: str) -> Iterator[tuple[str, str, str]]:
    before: ast.stmt | None = None
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else []:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            name = f"{owner}.{_assigned(before)}" if _assigned(before) else owner
            yield f"{place}:{statement.lineno}", name, str(statement.value.value)
        inner = getattr(statement, "name", None)
        if isinstance(statement, ast.stmt):
            yield from _strings(statement, place, f"{owner}.{inner}" if inner else owner)
        before = statement


def _assigned(statement: ast.stmt | None) -> str | None:
    """The name that a statement assigns, None where it does not."""
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign):
        target = statement.targets[0]
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def cases() -> list[tuple[str, str]]:
    """Every golden and invariance, and the section that it names."""
    from conformance.cases import recipes
    from conformance.cases.invariances import invariances

    made = [(recipe.id, recipe.section) for recipe in recipes()]
    return made + [(invariance.id, invariance.section) for invariance in invariances()]


def table() -> str:
    """The document."""
    titles = sections(SPEC.read_text())
    numbers = list(titles)
    owners: dict[str, list[str]] = {number: [] for number in numbers}
    for _, owner, text in docstrings():
        for section in cited_in(text, numbers):
            if owner not in owners.get(section, [owner]):
                owners[section].append(owner)
    tests: dict[str, list[str]] = {number: [] for number in numbers}
    for case, section in cases():
        tests.setdefault(section, []).append(case)
    lines = [
        "# Coverage",
        "",
        "Made by `python tools/coverage.py`: which functions say that they implement a section of",
        "SPEC.md, and how many cases test it.",
        "",
        "| section | | cases | functions |",
        "|---|---|---|---|",
    ]
    for number in leaves(numbers):
        parent = number.split(".")[0]
        where = next((n for n in (number, parent, WITHIN.get(number)) if n and tests.get(n)), None)
        remark = REMARKS.get(number) or UNTESTED.get(number)
        if where is None:
            count = remark or ""
        else:
            count = f"{len(tests[where])}" + (f" of {where}" if where != number else "")
        names = ", ".join(f"`{name}`" for name in _told(owners[number]))
        lines.append(f"| {number} | {titles[number]} | {count} | {names} |")
    total = sum(map(len, tests.values()))
    lines += ["", f"{total} goldens and invariances; each names one section.", ""]
    return "\n".join(lines)


def _told(owners: list[str]) -> list[str]:
    """Public names; those of the engine where it has any, else those of the suite."""
    public = [name for name in owners if not any(part[:1] == "_" for part in name.split("."))]
    return [name for name in public if name.startswith("reference.")] or public


def main() -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args()
    made = table()
    if options.check:
        fresh = TABLE.read_text() == made
        print(f"{TABLE.name}: {'up to date' if fresh else 'run python tools/coverage.py'}")
        return 0 if fresh else 1
    TABLE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
