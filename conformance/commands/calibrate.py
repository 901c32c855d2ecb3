"""`bitforbit calibrate`: measure the suite itself."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import TYPE_CHECKING, Any

from conformance.commands.common import (
    FAILED,
    OK,
    add_json,
    json_writer,
    progress_bar,
    standard_output,
)
from conformance.commands.judging import nearest
from conformance.commands.workers import add_workers
from conformance.paths import data_folder
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.calibration.part import Part

DESCRIPTION = """\
Try every known fault and every legitimate variant on the suite.

Each fault must fail a case, on the exact lane or over float32 in another order, and each variant
must pass all. Beside it stands what rtol 1e-2, NMSE 5e-4, cosine 0.999 and equal text would have
said of the same answers, and how often diagnosis names the right fault. Exit code: 0 all as it
must be, 1 a fault is missed or a variant accused.

  bitforbit calibrate
  bitforbit calibrate --area attention --json calibration.json

A part takes seconds or minutes; its report says that it is one, and claims nothing of the rest.
With --fault or --area no variant is tried but those of --variant, and with it alone no fault:

  bitforbit calibrate --fault rope-pairs-interleaved --fault 'norm-*'
  bitforbit calibrate --variant tf32
  bitforbit calibrate --list --variant '*bfloat16*'
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
    for kind in ("fault", "variant"):
        calibrate.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="GLOB",
            help=f"only {kind}s whose name matches; may be repeated, and one match is enough",
        )
    calibrate.add_argument(
        "--list", action="store_true", help="list what would be tried, and try nothing"
    )
    add_workers(calibrate, default="one a core", cluster=False)
    add_json(calibrate, "the report")
    calibrate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the suite, and report."""
    from conformance.calibration.findings import Calibration, FaultRow, as_json
    from conformance.calibration.trials import measure
    from conformance.reports import terminal

    part = _part(options)
    if options.list:
        return _list(part)
    write = json_writer(options.json)
    to_stdout = options.json == "-"
    started, done = perf_counter(), None
    total = len(part.chosen_faults()) + len(part.chosen_variants())
    with progress_bar() as progress:
        task = progress.add_task("calibrating", total=total)
        for row in measure(data_folder("goldens"), part, options.workers):
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


def _part(options: argparse.Namespace) -> Part:
    """What of the catalogues is asked for. Raises RequestError for a name that is not there."""
    from conformance.calibration.part import Part
    from conformance.faults import areas

    if options.area is not None and options.area not in areas():
        raise RequestError(f"--area: {options.area!r} is none of {', '.join(areas())}")
    part = Part(options.area, tuple(options.fault), tuple(options.variant))
    for kind, glob, names in part.strangers():
        there = f" in the area {part.area}" if kind == "fault" and part.area else ""
        near = nearest(glob, names) or "; `bitforbit calibrate --list` names all"
        raise RequestError(f"--{kind}: no {kind}{there} matches {glob!r}{near}")
    return part


def _list(part: Part) -> int:
    """Print a line for each fault and variant of a part."""
    from conformance.faults import description

    chosen = {"fault": part.chosen_faults(), "variant": part.chosen_variants()}
    width = max(len(one.name) for some in chosen.values() for one in some)
    for kind, some in chosen.items():
        for one in some:
            print(f"{kind:7}  {one.name:{width}}  {description(one)}")
    return OK
