"""Commands of the suite, run in this process or in one of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import cli

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "fixtures" / "tiny-draft")
RIGHT = """
from conformance.backends.reference import ReferenceBackend
class Backend(ReferenceBackend):
    pass
"""
EMPTY = 'class Backend:\n    numerics = {"accumulator": "float32"}\n'
SMALL = ("--case", "kernel/linear/k33_t*")
Files = Callable[[str], str]


class Run:
    """A command's exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(list(arguments))
        except SystemExit as left:  # argparse
            code = left.code if isinstance(left.code, int) else 1
        out, err = self.capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    def refused(self, *arguments: str) -> str:
        """The one line of a command that could not run."""
        code, out, err = self(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("bitforbit: ")
        assert err.count("\n") == 1
        return err

    def json(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """The exit code and the report of `check`."""
        code, out, _ = self("check", *arguments, "--json", "-")
        told: dict[str, Any] = json.loads(out)
        return code, told


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "conformance.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        **options,
    )
