"""What every refusal of input must be."""

from __future__ import annotations

from typing import Any

import pytest


def told(caught: pytest.ExceptionInfo[Any], *starts: str) -> str:
    """The text of an error: one line that begins with where it is, and has a remedy."""
    text = str(caught.value)
    assert text.startswith(starts)
    assert text.isprintable()
    assert "; " in text, "there is no remedy"
    return text
