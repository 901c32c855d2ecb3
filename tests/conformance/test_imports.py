"""Imports run downwards only: `conformance/__init__.py` lists the floors, and this holds them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import conformance

ROOT = Path(__file__).parents[2]
FLOORS = [re.findall(r"`(\w+)`", line) for line in str(conformance.__doc__).split("\n* ")[1:]]
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}


def imported(path: Path) -> Iterator[str]:
    """Names of modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_part_stands_on_a_floor() -> None:
    parts = {path.stem for path in (ROOT / "conformance").iterdir() if path.stem[0] not in "._"}
    assert parts == set(FLOOR)


@pytest.mark.parametrize("part", FLOOR)
def test_a_part_imports_from_its_floor_or_below(part: str) -> None:
    files = [ROOT / "conformance" / f"{part}.py", *(ROOT / "conformance" / part).rglob("*.py")]
    for path in (path for path in files if path.exists()):
        for name in imported(path):
            package, *rest = name.split(".")
            if package == "conformance" and rest and rest[0] in FLOOR:
                assert FLOOR[rest[0]] <= FLOOR[part], f"{path.relative_to(ROOT)} imports {name}"


def test_the_reference_imports_nothing_of_the_suite() -> None:
    for path in (ROOT / "reference").rglob("*.py"):
        names = {name.split(".")[0] for name in imported(path)}
        assert not names & {"conformance", "tests", "tools", "fixtures"}, path
