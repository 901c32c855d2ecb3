"""What `bitforbit fuzz` finds and whom it accuses: writes docs/fuzz-table.md (SPEC 20).

    python tools/measure_fuzz.py                          1,000 draws of each operation
    python tools/measure_fuzz.py -n 100 --no-table --op attention

Every known fault of a kernel operation is put over the exact lane and over float32 in another
order, as `bitforbit calibrate` does, and counted is after how many draws of its operations it
fails. Every legitimate variant is given every draw, and none may fail.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from threadpoolctl import threadpool_limits

from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.calibration.trials import runs
from conformance.faults import AnyFault, SessionFault, applied, area, areas, fault, faults
from conformance.fuzzing.case import OPERATIONS, Case
from conformance.fuzzing.draw import Asked
from conformance.golden import Golden
from conformance.operations import Sessions
from conformance.rules import numerics_of, unit_roundoff
from conformance.runner import attempt
from conformance.variants import variants

TABLE = Path(__file__).parents[1] / "docs" / "fuzz-table.md"
SHARE = 25
"""Draws of one operation that a worker makes at a time."""

STEPS = (1, 10, 100, 1000)
"""Draws after which the table counts faults."""


@dataclass
class Found:
    """What some draws of one operation gave.

    caught: the first draw that fails, by the fault's name; accused: by the variant's, a case and
    what was said of it. judged: answers of variants that were judged; worst: the largest margin.
    """

    operation: str
    caught: dict[str, int] = field(default_factory=dict)
    accused: dict[str, tuple[str, str]] = field(default_factory=dict)
    judged: int = 0
    worst: tuple[float, str, str] = (0.0, "", "")


class Goldens:
    """The golden of a draw, made once for all that can be asked the same."""

    def __init__(self, case: Case) -> None:
        self._case, self._made = case, dict[tuple[Asked, bool, bool], Golden]()

    def of(self, numerics: Mapping[str, Any]) -> Golden:
        """For a backend that declares this."""
        exact, fma = numerics.get("accumulator") == "exact", bool(numerics.get("fma"))
        key = Asked.of(numerics), exact, exact and fma
        if key not in self._made:
            self._made[key] = self._case.draw(key[0]).golden(numerics)
        return self._made[key]


def failed(backend: Any, golden: Golden) -> Iterator[tuple[str, str, float]]:
    """Rule, message and margin of each verdict; the message is empty where it passes."""
    u = unit_roundoff(numerics_of(backend.numerics, golden.operation))
    for rule in golden.rules:
        verdict, _ = attempt(backend, Sessions(backend), golden, rule, u)
        if verdict.outcome in ("pass", "fail"):
            message = (verdict.message or "failed") if verdict.outcome == "fail" else ""
            yield rule, message, verdict.worst or 0.0


def measured(job: tuple[str, int, int, int]) -> Found:
    """Draws first to last of an operation and seed, by every fault and variant."""
    operation, seed, first, last = job

    def own(backend: Any) -> Mapping[str, Any]:
        return numerics_of(backend.numerics, operation)

    np.seterr(all="ignore")
    found, catalogue = Found(operation), suspects(operation)
    tried = {
        name: [applied(fault(name), base) for base in (ComposedBackend, OwnOrderBackend)]
        for name in catalogue
    }
    legitimate = [variant() for variant in variants() if runs(variant, operation)]
    with threadpool_limits(limits=1, user_api="blas"):
        for index in range(first, last):
            goldens = Goldens(Case(operation, seed, index))
            for name in [name for name in catalogue if name not in found.caught]:
                if any(
                    message
                    for backend in tried[name]
                    for _, message, _ in failed(backend, goldens.of(own(backend)))
                ):
                    found.caught[name] = index
            for backend in legitimate:
                for rule, message, margin in failed(backend, goldens.of(own(backend))):
                    found.judged += 1
                    about = f"{operation}/{seed}/{index}:{rule}"
                    if message:
                        found.accused.setdefault(backend.name, (about, message))
                    elif margin > found.worst[0] and rule not in ("bits", "either"):
                        found.worst = margin, backend.name, about
    return found


def suspects(operation: str) -> list[str]:
    """Known faults of an operation that need no model."""
    return [
        f.name for f in faults() if operation in f.operations and not issubclass(f, SessionFault)
    ]


def drawable(known: AnyFault, operations: Collection[str]) -> bool:
    """Whether a fault is one of these operations, without a model."""
    return not issubclass(known, SessionFault) and bool(set(known.operations) & set(operations))


def counted(results: Sequence[Found]) -> dict[str, int]:
    """Draws until each fault is found, over all its operations in turn; from 1."""
    caught: dict[str, int] = {}
    for found in results:
        for name, index in found.caught.items():
            caught[name] = min(caught.get(name, index + 1), index + 1)
    return caught


def table(results: Sequence[Found], count: int, seed: int) -> str:
    """The page."""
    operations = {found.operation for found in results}
    caught, known = counted(results), [f for f in faults() if drawable(f, operations)]
    steps = [step for step in STEPS if step <= count]
    judged = sum(found.judged for found in results)
    lines = [
        "# What fuzzing finds",
        "",
        f"Made by `python tools/measure_fuzz.py -n {count} --seed {seed}`: {count:,} draws of",
        f"each of {len(operations)} operations. Faults of the",
        "catalogue that need no whole model, by the draws after which one fails, and legitimate",
        f"variants, of which none may: {judged:,} of their answers were judged.",
        "",
        "| area | faults | " + " | ".join(f"within {step:,}" for step in steps) + " | not found |",
        "|---|---:|" + "---:|" * (len(steps) + 1),
    ]
    for name in (*areas(), "all"):
        own = [f.name for f in known if name in ("all", area(f))]
        if own:
            within = [sum(caught.get(n, count + 1) <= step for n in own) for step in steps]
            missed = sum(n not in caught for n in own)
            cells = " | ".join(map(str, (len(own), *within, missed)))
            lines.append(f"| {name} | {cells} |")
    lines += [
        "",
        "Not found: "
        + (", ".join(f"`{f.name}`" for f in known if f.name not in caught) or "none")
        + ".",
    ]
    accused = sorted({name for found in results for name in found.accused})
    lines += ["", "Accused: " + (", ".join(f"`{name}`" for name in accused) or "none") + "."]
    lines += ["", "The largest margins of legitimate variants, in shares of their bound:", ""]
    lines += ["| operation | margin | variant |", "|---|---:|---|"]
    best: dict[str, Found] = {}
    for found in results:
        if found.operation not in best or found.worst > best[found.operation].worst:
            best[found.operation] = found
    lines += [
        f"| {name} | {found.worst[0]:.2f} | {found.worst[1]} |"
        for name, found in best.items()
        if found.worst[0]
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, and write the table."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("-n", type=int, default=1000, help="draws of each operation (1,000)")
    parser.add_argument("--seed", type=int, default=1, help="(1)")
    parser.add_argument("--op", action="append", choices=list(OPERATIONS), help="only this one")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="one a core")
    parser.add_argument("--no-table", action="store_true", help="show it, do not write it")
    options = parser.parse_args()
    jobs = [
        (operation, options.seed, first, min(first + SHARE, options.n))
        for first in range(0, options.n, SHARE)
        for operation in options.op or OPERATIONS
    ]
    console, started, results = Console(stderr=True), perf_counter(), []
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for found in track(pool.map(measured, jobs), "measuring", len(jobs), console=console):
            results.append(found)
            for name, (case, message) in found.accused.items():
                console.print(f"ACCUSED {name} {case}: {message}", markup=False, highlight=False)
    page = table(results, options.n, options.seed)
    print(page)
    console.print(f"{perf_counter() - started:.0f} s")
    if not options.no_table:
        TABLE.write_text(page)
    return 1 if any(found.accused for found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
