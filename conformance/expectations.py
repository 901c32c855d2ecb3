"""Files of globs: the cases that are known to fail, or are left out, and why (docs/ci.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.selection import Selection
from reference.errors import RequestError, reason


@dataclass(frozen=True)
class Line:
    """A glob, why it is there, and where: `<file>:<line>`."""

    glob: str
    reason: str
    place: str

    def takes(self, case_id: str) -> bool:
        """Whether a case is meant; a glob may leave out the rule."""
        return Selection(patterns=(self.glob,)).takes(case_id)


def lines_of(paths: Sequence[str]) -> list[Line]:
    """What files of globs say: one a line, a reason behind a #.

    Raises RequestError for a file that cannot be read or understood.
    """
    found = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}: cannot be read ({reason(error)})") from error
        for number, line in enumerate(text.splitlines(), 1):
            glob, _, why = (part.strip() for part in line.partition("#"))
            place = f"{path}:{number}"
            if len(glob.split()) > 1:
                raise RequestError(f"{place}: {glob!r} is not one glob; a reason follows a #")
            if glob:
                found.append(Line(glob, why or place, place))
    return found


def first_of(lines: Sequence[Line], case_id: str) -> Line | None:
    """The line that a case is meant by; None where there is none."""
    return next((line for line in lines if line.takes(case_id)), None)
