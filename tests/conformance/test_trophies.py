"""What docs/trophies.md names exists: cases, patterns, faults, files, and what the table claims.

That its command lines parse and its links lead somewhere is in tests/test_documents.py.
"""

from __future__ import annotations

import ast
import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from conformance.cases.server import CASES
from conformance.cli import main
from conformance.faults import faults
from conformance.golden import read_all

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "trophies.md").read_text()
ENGINES = sorted((ROOT / "examples" / "engines").glob("*.py"))
LEVELS = "elementary|kernel|cache|model|generation|server"
NAMED = re.compile(rf"`((?:{LEVELS})/[^`]+)`")
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
MADE = {"negated.py", "openvino_default.py", "resave.py"}
"""Files that the page has or makes."""


def lines() -> list[list[str]]:
    """The words of every command line of the page."""
    text = "\n".join(BLOCK.findall(TEXT)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines()]


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The ids of all cases."""
    of_goldens = {
        f"{golden.id}:{rule}" for golden in read_all(ROOT / "goldens") for rule in golden.rules
    }
    return of_goldens | {case.id for case in CASES}


def test_every_case_exists(known: set[str]) -> None:
    named = NAMED.findall(TEXT)
    assert len(named) > 15
    assert not [name for name in named if name not in known]


def test_every_pattern_selects_a_case(known: set[str]) -> None:
    given = [words[words.index("--case") + 1] for words in lines() if "--case" in words]
    assert len(given) > 8
    whole = known | {name.rpartition(":")[0] for name in known}
    assert not [one for one in given if not any(fnmatchcase(name, one) for name in whole)]


def test_every_fault_exists() -> None:
    named = re.findall(r"faults? (?:is )?\[?`([a-z-]+)`", TEXT) + re.findall(
        r"reference with `([a-z-]+)`", " ".join(TEXT.split())
    )
    assert len(named) >= 7
    assert set(named) <= {fault.name for fault in faults()}


def test_every_file_exists() -> None:
    words = {word for line in lines() for word in line}
    files = {word for word in words if word.startswith(("examples/", "fixtures/", "tools/"))}
    assert len(files) > 8
    assert not [file for file in files if not (ROOT / file).exists()]
    scripts = {word for word in words if word.endswith(".py") and word not in files}
    assert scripts <= MADE


def test_a_rotation_that_numpy_negates_wrongly_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = np.zeros(4, np.float32)
    np.negative(np.array([1, 0, 0, 0, 2], np.float32)[::4], out=out[::2])
    if list(out[::2]) == [-1, -2]:
        pytest.skip("this numpy negates rightly")
    file = tmp_path / "negated.py"
    file.write_text(TEXT[TEXT.index("# negated.py") :].partition("```")[0])
    assert main(["check", str(file), "--case", "kernel/rope/*"]) == 1
    assert " passed, 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.stem)
def test_an_engine_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    about = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= 100
    assert "pip install " in about
    assert f"bitforbit check examples/engines/{path.name} --case " in about
    assert f"examples/engines/{path.name}" in TEXT
