"""A small run with something of everything, for the tests of reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from conformance.diagnosis import Explanation
from conformance.diagnosis.differences import differences
from conformance.golden import Golden
from conformance.reports.record import Record, Run, record
from conformance.results import Result
from conformance.rules import Outcome

HOSTILE = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'> & \"q\""
FAULT = "equals the reference with `rope-pairs-interleaved`, all 4,096 values (pairs are adjacent)"

RUN = Run(
    "mine.py",
    "check mine.py --html report.html",
    "check mine.py",
    {"accumulator": "float32", "fma": True},
    datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC),
    1.25,
)


def result(
    case: str, outcome: Outcome = "pass", worst: float | None = 0.0, message: str = ""
) -> Result:
    """A result; its level and rule are in its id."""
    name, rule = case.rsplit(":", 1)
    return Result(case, name.split("/")[0], "2.2", rule, outcome, worst, message)


def golden(y: Any, **more: Any) -> Golden:
    """A golden of one output."""
    return Golden("kernel/linear/a", "2.2", "linear", {}, {}, {"y": y}, ("bits",), **more)


def answered(shape: tuple[int, ...] = (5, 4, 96)) -> list[dict[str, Any]]:
    """What is wrong with an answer whose row 3 is 1 percent off, and one element of it NaN."""
    y = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    wrong = y.copy()
    wrong[3] *= np.float32(1.01)
    wrong[(3, *[0] * (len(shape) - 1))] = np.nan
    return differences(golden(y), {"y": wrong}, 2.0**-24)


def everything(interrupted: bool = False) -> Record:
    """A record with each outcome, a hostile message, and charts."""
    results = [
        result("kernel/linear/a:bits", "fail", 0.5, "y: 1 of 2 elements differ"),
        result("kernel/linear/a:gauge", worst=0.25),
        result("kernel/linear/b:gauge", worst=0.5),
        result("kernel/rope/half:gauge", "fail", 42.5, "at [0]: far"),
        result("kernel/rope/whole:bits", "not implemented", None, "the backend has no rope"),
        result("elementary/exp/all:ulp(4)", "fail", None, f"the backend raised E: {HOSTILE}"),
        result("kernel/linear/c:gauge", "not judged", None, "an operand is beyond 65504"),
        result("elementary/log/all:ulp(4)", "cannot evaluate", None, "the golden is empty"),
        *[result(f"cache/paging/s{i}:bits") for i in range(20)],
    ]
    explanations = {"kernel/rope/half:gauge": Explanation((FAULT,))}
    outputs = {"kernel/rope/half:gauge": answered(), "kernel/linear/a:bits": answered((4, 3))}
    return record(replace(RUN, interrupted=interrupted), results, explanations, outputs)


def of(results: list[Result], **about: Any) -> Record:
    """The record of some results."""
    return record(replace(RUN, **about), results)


def outcomes(data: Record) -> Mapping[str, str]:
    """Outcome by case id."""
    return {case["id"]: case["outcome"] for case in data["cases"]}
