"""Imports run downwards only, and what judges the reference takes nothing from it.

`conformance/__init__.py` lists the floors.
"""

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


APART = {
    "tests/oracle": {
        "conformance.golden": {"Golden", "read_all"},
        "conformance.paths": {"model_folder"},  # by `serving`, as the two below
        "reference.model": {"Model", "load_model"},
        "reference.weights": {"Mode"},
    },
    "conformance/backends/torch": {
        "conformance.operations": {"NotImplementedByBackendError"},
    },
}
"""What a second implementation may import of the first, and of the suite: no arithmetic."""

OURS = ("reference", "conformance", "tests", "tools", "fixtures")


@pytest.mark.parametrize("folder", APART)
def test_a_second_implementation_shares_no_arithmetic_with_the_first(folder: str) -> None:
    own = folder.replace("/", ".")
    allowed = {f"{module}.{name}" for module, names in APART[folder].items() for name in names}
    found: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for name in imported(path):
            others = name.split(".")[0] in (
                "reference",
                "conformance",
                "tests",
                "tools",
                "fixtures",
            )
            if others and not name.startswith(f"{own}."):
                found.setdefault(name, set()).add(path.name)
    assert set(found) == allowed
    of_models = {name for name in found if name.startswith("reference.")}
    assert all(found[name] == {"serving.py"} for name in of_models)


def test_the_reference_imports_nothing_of_the_suite() -> None:
    for path in (ROOT / "reference").rglob("*.py"):
        names = {name.split(".")[0] for name in imported(path)}
        assert not names & {*OURS[1:]}, path
