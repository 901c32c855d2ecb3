"""Running a backend through the cases (SPEC 18)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from conformance import rules
from conformance.backends import Opening
from conformance.cases.checks import Caller, Invariance
from conformance.cases.invariances import invariances
from conformance.crew import Crew, share_out
from conformance.golden import (
    Golden,
    Heading,
    id_of,
    read_all,
    read_headings,
    read_manifest,
    read_own,
)
from conformance.operations import Outputs, Sessions, call
from conformance.results import Answers, Result, guarded, result_of
from conformance.rules import Outcome, Verdict, mode_of
from conformance.selection import Selection


def run(
    backend: Any, folder: Path, selection: Selection, answers: Answers | None = None
) -> Iterator[Result]:
    """Judge a backend by every selected case, goldens first, one result a case.

    answers: where to keep what the backend answered. What it raises fails its case alone. Raises
    GoldenError for a corrupt golden.
    """
    sessions = Sessions(backend)
    for golden in read_all(folder, _selected_goldens(folder, selection)):
        u = rules.unit_roundoff(rules.numerics_of(backend.numerics, golden.operation))
        for rule in rules.asked(golden, backend.numerics, selection.contract):
            case_id = f"{golden.id}:{rule}"
            if selection.takes(case_id):
                verdict, outputs = attempt(backend, sessions, golden, rule, u)
                if answers is not None and outputs is not None:
                    answers[golden.id, rule] = outputs
                yield result_of(case_id, golden.section, rule, verdict)
    caller = Caller(backend, sessions)
    for invariance in _invariances_of(folder, selection):
        if not rules.asked(invariance, backend.numerics, selection.contract):
            continue
        verdict = guarded(partial(invariance.check, caller))
        yield result_of(f"{invariance.id}:bits", invariance.section, "bits", verdict)


@dataclass(frozen=True, eq=False)
class Judged:
    """What one golden or invariance gave; two machines agree when their outcomes do."""

    results: list[Result]
    answers: Answers

    def __eq__(self, other: object) -> bool:
        """Compare outcomes: rounding of its own may move the margins of a backend."""
        return isinstance(other, Judged) and self._outcomes() == other._outcomes()

    def _outcomes(self) -> list[tuple[str, Outcome]]:
        return [(result.id, result.outcome) for result in self.results]


def run_shared(
    crew: Crew, opening: Opening, folder: Path, selection: Selection, answers: Answers
) -> Iterator[Result]:
    """Judge a backend as `run` does, in the same order, each worker with a backend of its own."""
    goldens = _selected_goldens(folder, selection)
    order = [i for i in map(id_of, read_manifest(folder)) if i in goldens]
    order += [invariance.id for invariance in _invariances_of(folder, selection)]
    work = partial(_judged, opening, folder, selection)
    done: dict[str, Judged] = {}
    left = iter(order)
    wanted = next(left, None)
    for name, judged in share_out(crew, work, order):
        done[name] = judged
        while wanted in done:
            ready = done.pop(wanted)
            answers.update(ready.answers)
            yield from ready.results
            wanted = next(left, None)


def _judged(opening: Opening, folder: Path, selection: Selection, name: str) -> Judged:
    """What a worker finds for one golden or invariance."""
    answers: Answers = {}
    alone = replace(selection, only=name)
    return Judged(list(run(_backend(opening), folder, alone, answers)), answers)


@cache
def _backend(opening: Opening) -> Any:
    """This process's backend, opened once."""
    return opening.open()


def count(folder: Path, selection: Selection) -> int:
    """How many goldens and invariances a run goes through."""
    return len(_selected_goldens(folder, selection)) + len(_invariances_of(folder, selection))


def _invariances_of(folder: Path, selection: Selection) -> list[Invariance]:
    """The invariances selected; goldens of one's own have none."""
    return [] if read_own(folder) is not None else selected_invariances(selection)


def _selected_goldens(folder: Path, selection: Selection) -> set[str]:
    ids = map(id_of, read_manifest(folder))
    return set(filter(selection.takes_golden, ids))


@dataclass(frozen=True)
class Case:
    """What there is to know of a case without running it; `rules` are those of its golden."""

    id: str
    section: str
    operation: str
    rule: str
    rules: tuple[str, ...]

    @property
    def level(self) -> str:
        """The first part of the id."""
        return self.id.split("/")[0]


def cases(folder: Path, selection: Selection | None = None) -> Iterator[Case]:
    """Every case that a selection takes, of either contract, in the order of a run.

    folder: of the goldens; those of one's own have no invariances. Raises GoldenError.
    """
    selection = selection or Selection()
    every: list[Heading | Invariance] = [
        *read_headings(folder),
        *_invariances_of(folder, selection),
    ]
    for one in every:
        for rule in one.rules:
            case = Case(f"{one.id}:{rule}", one.section, one.operation, rule, one.rules)
            if selection.takes(case.id):
                yield case


def not_asked(folder: Path, selection: Selection, numerics: Mapping[str, Any]) -> list[str]:
    """The ids of selected cases that the exact contract asks for and the selection's does not."""
    of_all = {key: value for key, value in numerics.items() if key != "operations"}
    if selection.contract == "exact" and of_all == numerics:
        return []
    return [
        case.id
        for case in cases(folder, selection)
        if case.rule in rules.asked(case, of_all)
        and case.rule not in rules.asked(case, numerics, selection.contract)
    ]


def selected_invariances(selection: Selection) -> list[Invariance]:
    """The invariances that a selection takes."""
    return [i for i in invariances() if selection.takes(f"{i.id}:bits")]


def attempt(
    backend: Any, sessions: Sessions, golden: Golden, rule: str, u: float
) -> tuple[Verdict, Outputs | None]:
    """A case's verdict, and what the backend answered if it answered."""
    answered: list[Outputs] = []

    def case() -> Verdict:
        answered.append(_answer(backend, sessions, golden, rule))
        return rules.judge(rule, golden, answered[0], u)

    verdict = guarded(case)
    return verdict, answered[0] if answered else None


def _answer(backend: Any, sessions: Sessions, golden: Golden, rule: str) -> Outputs:
    """Call the backend on copies, so that it cannot spoil the golden."""
    inputs = {name: array.copy() for name, array in golden.inputs.items()}
    arguments = {**golden.parameters, **inputs, **mode_of(golden.operation, rule)}
    return call(backend, sessions, golden.operation, arguments)
