"""Python processes of their own, under other environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines_of(*arguments: str, **environment: str) -> list[str]:
    """What `python ARGUMENTS` prints at the root of the repository; it must end well."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
