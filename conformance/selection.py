"""Which cases are meant: levels, and globs of their ids (SPEC 18)."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from conformance.rules import Contract

RULES = ("bits", "gauge", "ulp(4)", "tokens", "either", "bias(1)", "bias(32)")
"""The rules of goldens, so that a pattern can choose without reading the files."""

LEVELS = ("elementary", "kernel", "cache", "model", "generation", "invariance")


@dataclass(frozen=True)
class Selection:
    """Which cases to run: all levels and all ids by default.

    patterns: a case is taken where one of them matches. only: one golden or invariance. contract:
    which of their rules are asked for (SPEC 18).
    """

    levels: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("*",)
    only: str | None = None
    contract: Contract = "exact"

    def takes(self, case_id: str) -> bool:
        """Whether a case is selected; a pattern may leave out the rule."""
        level = case_id.split("/")[0]
        names = (case_id, case_id.rsplit(":", 1)[0])
        if self.only is not None and self.only not in names:
            return False
        return (not self.levels or level in self.levels) and any(
            fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.patterns
        )

    def takes_golden(self, golden: str) -> bool:
        """Whether a golden is selected by some rule that it may have."""
        return any(self.takes(f"{golden}:{rule}") for rule in RULES)


EVERYTHING = Selection()
