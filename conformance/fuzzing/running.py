"""Judging a backend by drawn cases, as `check` judges it by stored ones (SPEC 18, 20)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from conformance.diagnosis import U32, Heard, Inquiry, wrong_part
from conformance.diagnosis.differences import under_rule, worst_line
from conformance.diagnosis.explanation import suspects
from conformance.fuzzing.case import OPERATIONS, Case, Made
from conformance.fuzzing.draw import Asked
from conformance.fuzzing.shrinking import shrunk
from conformance.golden import Golden
from conformance.operations import Outputs, Sessions
from conformance.rules import (
    ASK_BITS,
    OWN_DISTANCE,
    Precision,
    Verdict,
    numerics_of,
    unit_roundoff,
)
from conformance.runner import attempt

EVIDENCE = 6
"""Earlier answers that diagnosis hears beside a failing one."""


@dataclass(frozen=True)
class Judged:
    """One drawn case under one rule."""

    made: Made
    golden: Golden
    rule: str
    verdict: Verdict
    outputs: Outputs | None

    @property
    def id(self) -> str:
        """As a case of `check` is named."""
        return f"{self.golden.id}:{self.rule}"


@dataclass(frozen=True)
class Failure:
    """A failing case, and what there is to say of it.

    drawn: as it came. least: the smallest case found that fails alike, or the same. where: which
    part of the least one's answer is wrong. nearest: known faults that explain it, a line each.
    """

    drawn: Judged
    least: Judged
    where: str = ""
    nearest: tuple[str, ...] = ()


@dataclass
class Tally:
    """What became of one operation's cases.

    offered: whether the backend has such a method. absent: cases that it answers as not
    implemented. unjudged: cases of no rule that it is held to. worst: the largest margin of a
    bound, where that is a backend's to use up. repeats: failing cases beyond the first of each
    rule.
    """

    operation: str
    offered: bool = True
    passed: int = 0
    failed: int = 0
    absent: int = 0
    unjudged: int = 0
    worst: float | None = None
    failures: list[Failure] = field(default_factory=list)
    repeats: list[Judged] = field(default_factory=list)
    heard: deque[Heard] = field(default_factory=lambda: deque(maxlen=EVIDENCE))


class Fuzzer:
    """A backend, and what it made of the cases so far.

    shrink: whether the first failing case of an operation and rule is made small.
    """

    def __init__(self, backend: Any, operations: Sequence[str] = (), shrink: bool = True) -> None:
        self.backend, self.shrink = backend, shrink
        self.numerics: Mapping[str, Any] = backend.numerics
        self.tallies = {name: Tally(name) for name in operations or OPERATIONS}
        self._sessions = Sessions(backend)
        for name, tally in self.tallies.items():
            tally.offered = callable(getattr(backend, name, None))

    def run(self, seed: int, count: int | None, seconds: float | None) -> Iterator[str]:
        """Judge case after case, all operations in turn; yields the operation of each.

        count: cases an operation; None is no limit. seconds: when to stop, between two cases.
        """
        end = None if seconds is None else monotonic() + seconds
        index = 0
        while count is None or index < count:
            left = [name for name, tally in self.tallies.items() if tally.offered]
            if not left:
                return
            for name in left:
                if end is not None and monotonic() >= end:
                    return
                self.take(Case(name, seed, index))
                yield name
            index += 1

    def take(self, case: Case) -> None:
        """Judge one case by every rule that the backend is asked for."""
        tally = self.tallies[case.operation]
        judged = self._judge(case)
        failed, passed, absent = (
            [j for j in judged if j.verdict.outcome == outcome]
            for outcome in ("fail", "pass", "not implemented")
        )
        for each in passed:
            own = each.rule == "bits" or OWN_DISTANCE in each.verdict.message
            if not own and each.verdict.worst is not None:
                tally.worst = max(tally.worst or 0.0, each.verdict.worst)
        tally.failed += bool(failed)
        tally.passed += bool(passed and not failed)
        tally.absent += bool(absent and not (passed or failed))
        tally.unjudged += not (passed or failed or absent)
        known = {failure.drawn.rule for failure in tally.failures}
        for each in failed:
            if each.rule in known:
                tally.repeats.append(each)
            else:
                tally.failures.append(self._examined(each, tally))
        tally.heard.extend(Heard(j.golden, j.outputs) for j in judged[:1] if j.outputs is not None)

    def _judge(self, case: Case) -> list[Judged]:
        made = case.draw(self.asked_of(case.operation))
        golden = made.golden(self.numerics)
        return [Judged(made, golden, rule, *self._attempt(golden, rule)) for rule in golden.rules]

    def _attempt(self, golden: Golden, rule: str) -> tuple[Verdict, Outputs | None]:
        return attempt(self.backend, self._sessions, golden, rule, self._unit_of(golden.operation))

    def asked_of(self, operation: str) -> Asked:
        """What decides what an operation can be asked."""
        return Asked.of(numerics_of(self.numerics, operation))

    def _unit_of(self, operation: str) -> Precision:
        return unit_roundoff(numerics_of(self.numerics, operation))

    def _examined(self, drawn: Judged, tally: Tally) -> Failure:
        """Make a failure small, and look for a fault that explains it."""
        least = drawn
        if self.shrink:
            asked = self.asked_of(tally.operation)
            made = shrunk(drawn.made, lambda made: self._fails(made, drawn.rule), asked)
            again = self._under(made, drawn.rule)
            least = again if again.verdict.outcome == "fail" else drawn
        return self._explained(drawn, least, tally)

    def _under(self, made: Made, rule: str) -> Judged:
        golden = made.golden(self.numerics)
        return Judged(made, golden, rule, *self._attempt(golden, rule))

    def _fails(self, made: Made, rule: str) -> bool:
        judged = self._under(made, rule)
        return rule in judged.golden.rules and judged.verdict.outcome == "fail"

    def _explained(self, drawn: Judged, least: Judged, tally: Tally) -> Failure:
        """Known faults by the case as drawn, which tells them apart, or else by the least."""
        bits = drawn.rule in ASK_BITS
        u = U32 if bits else self._unit_of(tally.operation)
        where = ""
        if least.outputs is not None:
            found = under_rule(least.golden, least.rule, least.outputs, self.numerics)
            parts = [
                wrong_part(least.golden, least.outputs, u, bits),
                worst_line(found, least.verdict.message),
            ]
            where = "; ".join(filter(None, parts))
        both = [drawn] if least is drawn else [drawn, least]
        failed = [Heard(j.golden, j.outputs) for j in both if j.outputs is not None]
        inquiry = Inquiry([*failed, *tally.heard], suspects(tally.operation), u)
        named = (inquiry.told(heard) for heard in failed)
        nearest = next((found for found in named if found), [])
        return Failure(drawn, least, where, tuple(nearest))
