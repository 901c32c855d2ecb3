"""`bitforbit schedule`: what a long prompt does to others."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conformance.commands.common import FAILED, OK, progress_bar
from reference.errors import RequestError

DESCRIPTION = """\
Measure what one long prompt does to users who are in the middle of their answers: without it, with
it computed in one pass, and with it computed in chunks.

  bitforbit schedule
  bitforbit schedule --model PATH --long 4000 --users 4 --chunk 256 --plot schedule.svg
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    schedule = commands.add_parser(
        "schedule", help="measure chunked prefill", description=DESCRIPTION, **style
    )
    schedule.add_argument(
        "--model", default="tiny-dense", metavar="PATH", help="a model folder (default tiny-dense)"
    )
    schedule.add_argument("--long", type=int, default=4000, metavar="TOKENS", help="default 4000")
    schedule.add_argument("--users", type=int, default=4, metavar="N", help="default 4")
    schedule.add_argument("--chunk", type=int, default=256, metavar="TOKENS", help="default 256")
    schedule.add_argument("--trace", action="store_true", help="print every pass")
    schedule.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw who ran when, as .png or .svg"
    )
    schedule.add_argument("--json", action="store_true", help="print the figures as JSON")
    schedule.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the experiment and print its figures."""
    from conformance.paths import model_folder
    from reference.measure.schedule import Experiment, computed, draw
    from reference.model import load_model

    if options.plot is not None and (
        options.plot.suffix not in (".png", ".svg") or not options.plot.parent.is_dir()
    ):
        raise RequestError(f"--plot: {options.plot} is no .png or .svg in a folder that exists")
    if options.plot is not None and find_spec("matplotlib") is None:
        raise RequestError("--plot: drawing needs matplotlib; install bitforbit[plot]")
    model = load_model(model_folder(options.model))
    experiment = Experiment(model, options.long, options.users, options.chunk)
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("tokens", total=experiment.work)
        arms = list(experiment.arms(lambda done: progress.advance(task, computed(done))))
    if options.plot is not None:
        draw(arms, options.plot)
    if options.json:
        print(json.dumps([arm.figures() for arm in arms], indent=1))
        return OK
    table = Table(title="milliseconds; all from when the long prompt came")
    for column in ("long prompt", "tokens a pass", "between tokens: p50", "p99", "longest"):
        table.add_column(column, justify="left" if column == "long prompt" else "right")
    for column in ("its first token after", "all tokens a second"):
        table.add_column(column, justify="right")
    for arm in arms:
        gaps = (arm.users.p50, arm.users.p99, arm.users.longest)
        first = "" if arm.long is None else f"{1000 * arm.long.timings.time_to_first_token:.0f}"
        table.add_row(
            arm.name,
            str(arm.budget),
            *(f"{1000 * gap:.1f}" for gap in gaps),
            first,
            f"{arm.throughput:.0f}",
        )
        if options.trace:
            print(f"{arm.name}:", *arm.trace.lines(), sep="\n")
    Console().print(table)
    same = all(arm.tokens == arms[0].tokens for arm in arms)
    print(f"users got {'the same tokens in all arms' if same else 'DIFFERENT TOKENS'}")
    return OK if same else FAILED
