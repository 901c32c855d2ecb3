"""The record of a run: the JSON report, which every other report is made from (docs/report.md)."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import numpy as np

from conformance.diagnosis import FAIR, Explanation
from conformance.golden import SPEC_VERSION
from conformance.results import Result, summary
from conformance.rules import ASK_BITS, BITS_FOR_ALL, Contract, contract_of, numerics_of

FORMAT = "bitforbit-report-1"

Record = dict[str, Any]
"""What `schema.json` describes."""

FAILED = ("fail", "cannot evaluate")
"""Outcomes that make a run fail."""


def machine() -> str:
    """This machine in a line: processor family, numpy and its BLAS."""
    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    return f"{platform.machine()}, numpy {np.__version__}, {blas['name']} {blas['version']}"


@dataclass(frozen=True)
class Run:
    """What was judged, and when.

    backend: its name. command: all words behind `bitforbit`; again: those that repeat a case of the
    run, once `--case` and its id are added. numerics: what the backend declares. started: with a
    time zone. contract, not_asked: what was asked, and the cases that the exact contract asks for
    beside it. interrupted: whether cases may be missing.
    """

    backend: str
    command: str
    again: str
    numerics: Mapping[str, Any]
    started: datetime
    seconds: float
    contract: Contract = "exact"
    not_asked: Sequence[str] = ()
    interrupted: bool = False


def record(
    run: Run,
    results: Sequence[Result],
    explanations: Mapping[str, Explanation] | None = None,
    outputs: Mapping[str, list[dict[str, Any]]] | None = None,
    expected: Mapping[str, str] | None = None,
) -> Record:
    """The record of a run.

    explanations: by case id, from `conformance.diagnosis`. outputs: by case id, from
    `conformance.diagnosis.differences`. expected: by case id, why a failure was.
    """
    explanations, outputs, expected = explanations or {}, outputs or {}, expected or {}

    def case(result: Result) -> dict[str, Any]:
        fields = asdict(result)
        fields["message"] = legible(result.message)
        if result.worst is not None and not math.isfinite(result.worst):
            fields |= {"worst": None, "infinite": True}
        if result.id in expected:
            fields["expected"] = legible(expected[result.id])
        if result.id in explanations:
            fields["diagnosis"] = list(explanations[result.id].lines())
        if result.id in outputs:
            fields["outputs"] = outputs[result.id]
        return fields

    return {
        "format": FORMAT,
        "spec": SPEC_VERSION,
        "bitforbit": version("bitforbit"),
        "backend": {"name": legible(run.backend), "numerics": _plain(run.numerics)},
        "command": legible(run.command),
        "again": legible(run.again),
        "contract": run.contract,
        "machine": machine(),
        "started": run.started.astimezone(UTC).isoformat(timespec="seconds"),
        "seconds": round(run.seconds, 3),
        "interrupted": run.interrupted,
        "summary": {
            **summary([r for r in results if r.id not in expected]),
            "expected": len(expected),
            "not_asked": len(run.not_asked),
        },
        "cases": [case(r) for r in results],
    }


def legible(text: str) -> str:
    """One line in which whatever does not print is escaped: a backend's words are anyone's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: Any) -> Any:
    """A declaration as JSON; what JSON does not have becomes its text."""
    if isinstance(value, Mapping):
        return {legible(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return legible(str(value))


_NUMBERS = re.compile(r"\[\n\s*((?:[-+.\deE]+|null)(?:,\n\s*(?:[-+.\deE]+|null))*)\n\s*\]")


def as_text(data: Record) -> str:
    """A record as JSON to be read: indented, an array of numbers to a line."""
    text = json.dumps(data, indent=1, allow_nan=False)
    return _NUMBERS.sub(lambda m: "[" + re.sub(r",\n\s*", ", ", m[1]) + "]", text) + "\n"


def schema() -> dict[str, Any]:
    """The JSON schema of a record."""
    text = files("conformance.reports").joinpath("schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def failures(data: Record) -> list[dict[str, Any]]:
    """The cases that failed or could not be evaluated, unless they were expected to."""
    return [case for case in data["cases"] if has_failed(case)]


def has_failed(case: Mapping[str, Any]) -> bool:
    """Whether a case makes its run fail."""
    return case["outcome"] in FAILED and "expected" not in case


def is_fair(data: Record, case: Mapping[str, Any]) -> bool:
    """Whether a failure of bits, which the backend does not claim, lies within float32's bound."""
    own = numerics_of(data["backend"]["numerics"], case["id"].split("/")[1])
    if case["rule"] not in ASK_BITS or contract_of(own) == "exact":
        return False
    outputs = case.get("outputs", ())
    near = all(o.get("margins", {}).get("worst") is not None for o in outputs) and all(
        o["unit"] != "1" and o["margins"]["worst"] <= 1 for o in outputs
    )
    bounded = near and any(o["unit"] == "bound" for o in outputs)
    return FAIR in case.get("diagnosis", ()) or bounded


def by_weight(data: Record) -> list[dict[str, Any]]:
    """The failures, those first that no other order of sums explains.

    Bounds come before bits, bits that have one answer in any arithmetic before others, cases of a
    golden before those of a backend against itself.
    """

    def weight(case: Mapping[str, Any]) -> tuple[bool, bool, bool]:
        operation = case["id"].split("/")[1]
        bits = case["rule"] in ASK_BITS and operation not in BITS_FOR_ALL
        return is_fair(data, case), bits and case["level"] == "invariance", bits

    return sorted(failures(data), key=weight)


def worst_of(case: Mapping[str, Any]) -> float | None:
    """A case's margin, which JSON cannot hold where it is infinite; None where there is none."""
    worst: float | None = math.inf if case.get("infinite") else case["worst"]
    return worst


def headline(data: Record) -> str:
    """The closing line: how many cases had which outcome."""
    counts = data["summary"]
    words = [f"{counts['passed']} passed", f"{counts['failed']} failed"]
    rarer = {
        "not_implemented": "not implemented",
        "not_judged": "not judged",
        "cannot_evaluate": "cannot evaluate",
        "expected": "failed as expected",
        "not_asked": "not asked",
    }
    told = [f"{counts[k]} {name}" for k, name in rarer.items() if counts.get(k)]
    return ", ".join(words + told)
