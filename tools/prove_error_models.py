"""Try the error models of SPEC 16 on random legitimate computations; writes docs/error-models.md.

    python tools/prove_error_models.py                     all models, 10,000 computations each
    python tools/prove_error_models.py --models dot --each 500 --no-table

A computation is one draw of a shape, of data, of a precision and of a machine: an order of sums,
FMA or not, operands and sums of one precision or of two, subnormals kept or flushed. Machines are
emulated in float64, each result rounded to the precision that the machine declares. A model that
one of them violates is wrong, and one that none of them approaches is too wide.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.progress import track

from conformance.golden import Golden
from conformance.rules import Precision, bound
from tools.error_models import FORMATS, MANY, MODELS, Computed, Machine
from tools.error_models.machine import F64

TABLE = Path(__file__).parents[1] / "docs" / "error-models.md"
EACH = 10_000
"""Computations of each model, shared out over the precisions."""

LEAST_WORST = 0.02
"""A bound that no legitimate computation comes nearer to hides faults."""

EXACT = ("int4", "float64")
"""No order changes these sums, and float64 holds them (SPEC 5.6): their margin is 0."""


@dataclass
class Found:
    """What a model's computations at one precision came to."""

    model: str
    precision: str
    computations: int = 0
    results: int = 0
    violations: int = 0
    worst: float = 0.0
    seeds: list[int] = field(default_factory=list)

    @property
    def wide(self) -> bool:
        """Whether nothing approached the bound."""
        return self.worst < LEAST_WORST and (self.model, self.precision) != EXACT

    def add(self, margin: F64, seed: int) -> None:
        """Count one computation by the margins of its results."""
        self.computations += 1
        self.results += margin.size
        worst = float(margin.max(initial=0.0))
        self.worst = max(self.worst, worst)
        if worst > 1:
            self.violations += 1
            self.seeds.append(seed)


def margins(found: Computed, declared: Precision) -> F64:
    """error / bound of each result, by the rule `gauge`."""
    outputs = {"y": found.exact, **found.beside}
    golden = Golden(
        "kernel/x/y", "16", found.operation, found.parameters, found.inputs, outputs, ("gauge",),
        found.gauge.terms, found.gauge.models, found.gauge.distance,
    )  # fmt: skip
    allowed = bound(golden, declared)
    error = np.abs(found.answer.astype(np.float32).astype(np.float64) - found.exact)
    return np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)


def prove(model: str, precision: str, seeds: range) -> Found:
    """Try a model at a precision on one computation a seed."""
    found = Found(model, precision)
    with np.errstate(all="ignore"):
        for seed in seeds[:: MANY.get(model, 1)]:
            rng = np.random.default_rng([seed, *model.encode(), *precision.encode()])
            machine = Machine.draw(rng, precision)
            computed = MODELS[model](rng, machine)
            if not np.isfinite(computed.exact).all() or not np.isfinite(computed.answer).all():
                continue  # an overflow of float16 is not a rounding
            found.add(margins(computed, machine.declared), seed)
    return found


def recorded(text: str) -> tuple[list[Found], float]:
    """The rows of docs/error-models.md, and the minutes that it took."""
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \| ([\d,]+) \| ([\d,]+) \| (\d+) \| ([\d.]+) \|$", text, re.M
    )
    minutes = re.search(r"^([\d.]+) minutes", text, re.M)
    assert minutes is not None
    found = []
    for model, precision, *counts, worst in rows:
        tried, results, violations = (int(count.replace(",", "")) for count in counts)
        found.append(Found(model, precision, tried, results, violations, float(worst)))
    return found, float(minutes[1])


def table(rows: list[Found], minutes: float) -> str:
    """docs/error-models.md."""
    lines = [
        "# Error models, tried",
        "",
        "Written by `python tools/prove_error_models.py`, which took",
        f"{minutes:.1f} minutes on {os.cpu_count()} cores. A computation is a random shape,",
        "random data (normal, heavy tails, outliers, cancelling, of one sign, subnormal; `alike`:",
        "a few values many times, perhaps after a large one), a",
        "random order of sums, with FMA or without, operands and sums of the precision or sums of",
        "float32, subnormals kept or flushed to zero. Its results are judged by `gauge` with",
        "what such a machine declares; a violation is a computation with a result beyond its bound",
        "(SPEC 16.3). The margin is error / bound; a bound that nothing brings above",
        f"{LEAST_WORST} would hide faults.",
        "",
        "int4 in float64 has margin 0: its scaled sums are exact in float64, whatever their order",
        "(SPEC 5.6). A computation whose result overflows float16 is left out.",
        "",
        "`noise` is whole models of random weights (`fixtures/random-*`), 12 tokens each, their",
        "sums, scores and norms computed so: few passes, each of 768 logits or more. Its one scale",
        "for sums and operands makes it wide where the sums are float32 and the operands are less.",
        "",
        "| model | precision | computations | results | violations | worst margin |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r.model} | {r.precision} | {r.computations:,} | {r.results:,} | {r.violations} "
        f"| {r.worst:.3f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prove; 0 where no model was violated and each was approached, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--each", type=int, default=EACH, help="computations a model (10,000)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--keep", action="store_true", help="keep the record's rows of the models not tried"
    )
    parser.add_argument("--no-table", action="store_true", help="print, and leave docs/ as it is")
    options = parser.parse_args()
    started = perf_counter()
    share = -(-options.each // len(FORMATS))
    tasks = [(model, precision) for model in options.models for precision in FORMATS]
    rows = list(_all(tasks, range(share), options.workers))
    minutes = (perf_counter() - started) / 60
    if options.keep:
        earlier, before = recorded(TABLE.read_text())
        rows = [row for row in earlier if row.model not in options.models] + rows
        rows.sort(key=lambda row: list(MODELS).index(row.model))
        minutes += before
    text = table(rows, minutes)
    if not options.no_table:
        TABLE.write_text(text)
    print(text)
    for row in rows:
        if row.violations:
            print(f"VIOLATED {row.model} {row.precision}: seeds {row.seeds[:8]}", file=sys.stderr)
        if row.wide:
            print(f"TOO WIDE {row.model} {row.precision}: {row.worst:.4f}", file=sys.stderr)
    return int(any(row.violations or row.wide for row in rows))


def _all(tasks: list[tuple[str, str]], seeds: range, workers: int) -> Iterator[Found]:
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting = [pool.submit(prove, *task, seeds) for task in tasks]
        for done in track(waiting, "proving", console=Console(stderr=True)):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main())
