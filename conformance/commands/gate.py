"""`bitforbit gate`: what "the first 64 tokens are equal" is worth, measured."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

from rich.console import Console

from conformance.commands.common import (
    FAILED,
    OK,
    add_json,
    count,
    json_writer,
    progress_bar,
    standard_output,
)
from conformance.commands.workers import add_workers

DESCRIPTION = """\
Measure the naive gate "the first 64 greedy tokens are equal" beside the rules of this suite.

Legitimate variants and faulty models continue prompts of held-out text. Of each gate you see how
often it rejects a variant, which is a false alarm, with its 95 % interval, and which faults it
sees: on some prompt, and on one prompt alone. Exit code: 0 where the suite's own rules raise no
false alarm, 1 where one does.

  bitforbit gate
  bitforbit gate --prompts 40 --json gate.json
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    gate = commands.add_parser(
        "gate", help='measure the gate "64 tokens are equal"', description=DESCRIPTION, **style
    )
    gate.add_argument("--prompts", type=count, default=8, metavar="N", help="prompts (8)")
    add_workers(gate, default="one a core", cluster=False)
    add_json(gate, "the report")
    gate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and report."""
    from conformance.calibration.gate import VARIANTS, Row, as_json, measure, model_faults, summary

    write = json_writer(options.json)
    started = perf_counter()
    total = options.prompts + len(VARIANTS) + len(model_faults())
    rows: list[Row] = []
    with progress_bar() as progress:
        bar = progress.add_task("measuring noise", total=total)
        for done in measure(options.prompts, options.workers):
            progress.update(bar, advance=1)
            if isinstance(done, Row):
                rows.append(done)
                progress.update(bar, description=done.name)
    if options.json != "-":
        _show(standard_output(), rows, perf_counter() - started)
    if write is not None:
        write(as_json(rows))
    found = summary(rows)
    return FAILED if any(found[rule]["false_alarms"] for rule in ("tokens", "noise")) else OK


def _show(console: Console, rows: list[Any], seconds: float) -> None:
    from rich.table import Table

    from conformance.calibration.gate import GATES, summary
    from conformance.tables import print_table

    table = Table(title="prompts on which a gate rejects", title_justify="left")
    for column in ("", *GATES, "of"):
        table.add_column(column, justify="left" if not column else "right")
    for fault in (False, True):
        for row in (r for r in rows if r.fault == fault):
            table.add_row(row.name, *(str(len(getattr(row, g))) for g in GATES), str(row.runs))
        table.add_section()
    print_table(console, table)
    for gate, found in summary(rows).items():
        low, high = found["interval"]
        console.print(
            f"{gate}: {found['false_alarms']} false alarms in {found['runs']} runs, "
            f"{found['rate']:.1%} ({low:.1%} to {high:.1%}); {found['seen']} of "
            f"{found['faults']} faults seen, {found['seen_by_one']:.0%} by one prompt"
        )
    console.print(f"in {seconds:.0f} s")
