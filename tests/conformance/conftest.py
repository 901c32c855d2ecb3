"""What tests of every command are run with."""

from __future__ import annotations

import pytest

from tests.conformance.command_line import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)
