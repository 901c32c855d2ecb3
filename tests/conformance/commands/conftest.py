"""A backend in a file, and a small folder of goldens."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import cases, paths
from conformance.cases.recipe import Recipe
from conformance.making import goldens as making
from tests.conformance.command_line import Files


@pytest.fixture
def file(tmp_path: Path) -> Files:
    """Writes the source of a backend; its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def goldens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two goldens in place of the suite's."""
    wanted = ("kernel/linear/k1_t1", "kernel/linear/k33_t5")
    chosen = [recipe for recipe in cases.recipes() if recipe.id in wanted]

    def recipes() -> list[Recipe]:
        return chosen

    monkeypatch.setattr(making, "recipes", recipes)
    monkeypatch.setattr(cases, "recipes", recipes)
    folder = tmp_path / "goldens"
    list(making.make(folder))
    (tmp_path / "fixtures").symlink_to(paths.data_folder("fixtures"))
    monkeypatch.setattr(paths, "_HERE", tmp_path / "conformance")
    return folder
