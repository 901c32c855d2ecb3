"""Files of globs, each with a reason and a place (docs/ci.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.expectations import Line, first_of, lines_of
from reference.errors import RequestError


def test_a_line_is_a_glob_a_reason_and_a_place(tmp_path: Path) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("# known\n\n  kernel/rope/*  #  angles # in bfloat16 \nkernel/linear/a:bits\n")
    other.write_text("kernel/*#late")
    assert lines_of([str(one), str(other)]) == [
        Line("kernel/rope/*", "angles # in bfloat16", f"{one}:3"),
        Line("kernel/linear/a:bits", f"{one}:4", f"{one}:4"),
        Line("kernel/*", "late", f"{other}:1"),
    ]


def test_the_first_line_that_means_a_case_counts() -> None:
    lines = [Line("kernel/rope/*", "a", "f:1"), Line("*:bits", "b", "f:2"), Line("*", "c", "f:3")]
    cases = ("kernel/rope/half:bits", "kernel/linear/a:bits", "kernel/linear/a:gauge")
    assert [first_of(lines, case) for case in cases] == lines
    assert first_of(lines[:2], cases[2]) is None


@pytest.mark.parametrize("content", [b"kernel/a\nkernel/b two\n", b"\xff\n"])
def test_what_cannot_be_understood_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "known.txt"
    file.write_bytes(content)
    says = r"known.txt:2: 'kernel/b two' is not one glob" if content[0] < 128 else "cannot be read"
    with pytest.raises(RequestError, match=says):
        lines_of([str(file)])
