"""The action really runs, and what docs/ci.md says of it and of the plugin exists.

That its command lines parse and its links lead somewhere is in tests/test_documents.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "ci.md").read_text()
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
INPUT = re.compile(r"\$\{\{ inputs\.([a-z]+) \}\}")


def step(name: str, folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the action as a runner would, with its inputs or their defaults."""
    found = next(one for one in ACTION["runs"]["steps"] if one["name"] == name)
    defaults = {key: about["default"] for key, about in ACTION["inputs"].items()}
    inputs = {**defaults, **given}
    environment = {
        key: INPUT.sub(lambda match: inputs[match[1]], str(value))
        for key, value in found["env"].items()
    }
    files = {key: str(folder / key) for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    machine = {**os.environ, "BITFORBIT_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", found["run"]],
        env={**machine, **files, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_the_action_checks_and_reports(tmp_path: Path) -> None:
    done = step(
        "Check the backend",
        tmp_path,
        backend="numpy",
        level="elementary kernel",
        case="*/softmax/k3*:bits",
        reports="all reports",
    )
    assert done.returncode == 0, done.stderr
    assert " passed, 0 failed" in done.stdout
    folder = tmp_path / "all reports"
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["badge.svg", "junit.xml", "report.json", "report.txt"]
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == "reports=all reports\n"
    assert " passed, 0 failed" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()


def test_the_summary_says_why_nothing_ran_and_what_is_warned_of(tmp_path: Path) -> None:
    case = "kernel/rms_norm/k33"
    step("Check the backend", tmp_path, backend="gone.py", case=case)
    (tmp_path / "known.txt").write_text("kernel/none/*\n")
    step("Check the backend", tmp_path, backend="numpy", case=case, expect="known.txt")
    told = (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert "bitforbit: gone.py: no such file" in told
    assert "bitforbit: known.txt:1: no case matches 'kernel/none/*'" in told


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"backend": "numpy-float32", "case": "kernel/rms_norm/k33", "contract": "exact"}, 1),
        ({"backend": "numpy-float32", "case": "kernel/rms_norm/k33"}, 0),
        ({"backend": "numpy-float32", "case": "kernel/rms_norm/k33\nkernel/none"}, 2),
        ({"backend": "numpy", "case": "kernel/rms_norm/k33", "expect": "gone.txt"}, 2),
        ({"backend": "numpy", "case": "kernel/rms_norm/k33", "goldens": "gone"}, 2),
        ({"backend": "numpy", "case": "kernel/rms_norm/k33", "track": "gone.json"}, 2),
        ({"backend": "gone.py"}, 2),
        ({"process": "false", "timeout": "5"}, 2),
        ({"backend": "$(touch hacked)"}, 2),
    ],
)
def test_the_action_fails_as_the_command_does(
    given: dict[str, str], code: int, tmp_path: Path
) -> None:
    assert step("Check the backend", tmp_path, **given).returncode == code
    assert not (tmp_path / "hacked").exists()


def test_the_action_passes_everything_through(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("kernel/rms_norm/k33:bits  # another order\n")
    given = {
        "backend": "numpy-float32",
        "contract": "exact",
        "case": "kernel/rms_norm/k33\nkernel/philox/*\n",
        "expect": "known.txt",
    }
    done = step("Check the backend", tmp_path, **given, html="true")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "bitforbit-reports"
    told = json.loads((folder / "report.json").read_text())
    assert {case["id"].split("/")[1] for case in told["cases"]} == {"rms_norm", "philox"}
    assert told["summary"]["expected"] == 1
    assert (folder / "report.html").exists()
    old = str(folder / "report.json")
    done = step("Check the backend", tmp_path, **given, track=old, reports="again")
    assert "nothing changed" in done.stdout
    assert not (tmp_path / "again" / "report.html").exists()


@pytest.mark.parametrize(
    ("given", "extras"),
    [
        ({}, ""),
        ({"extras": "torch gguf"}, "[torch,gguf]"),
        ({"extras": "torch", "html": "true"}, "[torch,html]"),
        ({"html": "true"}, "[html]"),
    ],
)
def test_the_action_installs_the_extras(
    given: dict[str, str], extras: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" > installed\n')
    python.chmod(0o755)
    monkeypatch.setenv("GITHUB_ENV", str(tmp_path / "environment"))
    done = step("Install bitforbit", tmp_path, python=str(python), **given)
    assert done.returncode == 0, done.stderr
    installed = (tmp_path / "installed").read_text().strip()
    assert installed == "-m pip install --quiet ${{ github.action_path }}" + extras


def test_no_input_is_pasted_into_a_script() -> None:
    for one in ACTION["runs"]["steps"]:
        assert "${{" not in one["run"]
        assert one["shell"] == "bash"


def test_every_input_is_used_and_documented() -> None:
    used = set(INPUT.findall((ROOT / "action.yml").read_text()))
    assert used == set(ACTION["inputs"])
    table = TEXT[TEXT.index("| input |") :].split("\n\n")[0]
    assert set(re.findall(r"`([a-z]+)`", table)) >= used


def test_the_options_of_the_page_exist() -> None:
    plugin = (ROOT / "conformance/pytest_plugin/hooks.py").read_text()
    for option in re.findall(r"--bitforbit-[a-z]+", TEXT):
        assert f'"{option}"' in plugin, option
    declared = set(re.findall(r'"(--bitforbit-[a-z]+)"', plugin))
    assert declared == set(re.findall(r"--bitforbit-[a-z]+", TEXT))


def test_the_snippets_are_yaml() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        assert isinstance(yaml.safe_load(block), dict)
