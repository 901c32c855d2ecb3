"""`bitforbit calibrate`: measure the suite itself."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

from rich.console import Console

from conformance.commands.common import (
    FAILED,
    OK,
    add_json,
    json_writer,
    progress_bar,
    standard_output,
)
from conformance.commands.workers import add_workers
from conformance.paths import data_folder
from reference.errors import RequestError

DESCRIPTION = """\
Try every known fault and every legitimate variant on the suite.

Each fault must fail a case, on the exact lane or over float32 in another order, and each variant
must pass all. Beside it stands what rtol 1e-2, NMSE 5e-4, cosine 0.999 and equal text would have
said of the same answers, and how often diagnosis names the right fault. Exit code: 0 all as it
must be, 1 a fault is missed or a variant accused.

  bitforbit calibrate
  bitforbit calibrate --area attention --json calibration.json
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    calibrate = commands.add_parser(
        "calibrate",
        help="measure the suite itself",
        description=DESCRIPTION,
        **style,
    )
    calibrate.add_argument("--area", metavar="AREA", help="only the faults of this area")
    add_workers(calibrate, default="one a core", cluster=False)
    add_json(calibrate, "the report")
    calibrate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the suite, and report."""
    from conformance.calibration.trials import Calibration, FaultRow, as_json, measure
    from conformance.faults import areas, faults
    from conformance.reports import terminal
    from conformance.variants import variants

    if options.area is not None and options.area not in areas():
        raise RequestError(f"--area: {options.area!r} is none of {', '.join(areas())}")
    write = json_writer(options.json)
    to_stdout = options.json == "-"
    started, done = perf_counter(), None
    total = len(faults()) + len(variants())
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("calibrating", total=total if options.area is None else None)
        for row in measure(data_folder("goldens"), options.area, options.workers):
            if isinstance(row, Calibration):
                done = row
                break
            name = row.fault.name if isinstance(row, FaultRow) else row.variant.name
            progress.update(task, advance=1, description=name)
    if done is None:
        raise RequestError("calibrate: nothing was measured")
    if not to_stdout:
        terminal.show_calibration(standard_output(), done, perf_counter() - started)
    if write is not None:
        write(as_json(done))
    return FAILED if done.missed() or done.accused() else OK
