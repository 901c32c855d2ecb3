"""`bitforbit schedule`: what a long prompt does to others."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from conformance.commands.common import (
    FAILED,
    OK,
    add_json,
    count,
    json_writer,
    numbers,
    progress_bar,
    standard_output,
)
from conformance.commands.measure.models import threads_of
from conformance.commands.measure.plot import (
    Line,
    Panel,
    add_plot,
    check_plot,
    series,
    write_and_draw,
)
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched, write
from conformance.paths import model_folder
from conformance.tables import print_table
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.measure.schedule import Arm
    from reference.model import Model

DESCRIPTION = """\
Measure what one long prompt does to users who are in the middle of their answers: without it, with
it computed in one pass, and with it computed in chunks.

  bitforbit schedule
  bitforbit schedule --model PATH --long 4000 --users 4 --chunk 256 --plot schedule.svg

Or, with --batch, what users who decode together get: tokens a second of all of them and of each, by
how many they are, beside the roofline of this machine. "flat from" is the batch from which the
total no longer grows: as the roofline has it, where decoding is bound by compute, and as measured,
where 90 % of the largest total is reached ("not yet" where the last batch is the first to do so).
All batches take turns, so that the rows come together, after the last turn.

  bitforbit schedule --batch 1,2,4,8,16,32,64 -o csv --plot batches.svg

Exit code: 0 users got the same tokens in all arms, 1 they did not, 2 could not run.
"""

ABOUT = ("cpu", "cores", "blas", "numpy", "system", "model", "hardware")
COLUMNS: Columns = {
    "digest": lambda row: row["digest"][:12],
    **{name: partial(shown, name=name) for name in ("threads", "test", "batch")},
    **{name: partial(shown, name=name) for name in ("cache_n", "prompt_n")},
    "runs": partial(shown, name="repetitions"),
    "t/s of all": partial(span, name="total", form=".1f"),
    "t/s of each": partial(span, name="single", form=".1f"),
    "all, to the first batch": lambda row: (
        "first" if row["role"] == "first" else f"{row['role']} {span(row, 'gain')}".strip()
    ),
    "t/s of all at most": lambda row: f"{row['ceiling_total']:.4g}",
    "bound": partial(shown, name="ceiling_bound"),
    "flat from, predicted": lambda row: str(row["flat_predicted"] or "never"),
    "flat from, measured": lambda row: str(row["flat_measured"] or "not yet"),
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    schedule = commands.add_parser(
        "schedule", help="measure chunked prefill", description=DESCRIPTION, **style
    )
    schedule.add_argument(
        "-m", "--model", default="tiny-dense", metavar="PATH", help="a model (default tiny-dense)"
    )
    schedule.add_argument("--long", type=int, default=4000, metavar="TOKENS", help="default 4000")
    schedule.add_argument("--users", type=int, default=4, metavar="N", help="default 4")
    schedule.add_argument("--chunk", type=int, default=256, metavar="TOKENS", help="default 256")
    schedule.add_argument("--trace", action="store_true", help="print every pass")
    add_json(schedule, "the figures")
    schedule.add_argument(
        "-b", "--batch", type=numbers, metavar="N,..", help="users who decode together"
    )
    for name, default, what in (
        ("d", 64, "tokens of each one's prompt"),
        ("n", 16, "passes that are measured"),
        ("r", 3, "repetitions"),
    ):
        schedule.add_argument(
            f"-{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"with --batch: {what} ({default})",
        )
    schedule.add_argument("-t", "--threads", type=count, metavar="N", help="threads (all)")
    add_form(schedule)
    add_plot(schedule)
    schedule.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the experiment and print its figures."""
    from reference.measure.schedule import Experiment, computed, draw
    from reference.model import load_model
    from reference.threads import limited_to

    check_plot(options.plot)
    own = options.json is not None or options.trace
    if own and (options.batch is not None or options.output != "md"):
        raise RequestError("--json, --trace: they go with neither --batch nor -o; use -o json")
    write_json = json_writer(options.json)
    model = load_model(model_folder(options.model))
    if options.batch is not None:
        return _batches(options, model)
    experiment = Experiment(model, options.long, options.users, options.chunk)
    threads = threads_of(options)
    arms: list[Arm] = []

    def run_arms() -> Iterator[Arm]:
        with progress_bar() as progress, limited_to(threads):
            task = progress.add_task("tokens", total=experiment.work)
            for arm in experiment.arms(lambda done: progress.advance(task, computed(done))):
                arms.append(arm)
                yield arm

    if options.output == "md":
        code = OK
        deque(run_arms(), maxlen=0)  # to the end; the arms are kept
    else:
        about = {"model": options.model, "digest": model.digest, "threads": threads}
        code = write(options.output, {}, (), (_flat(arm, about) for arm in run_arms()))
    if options.plot is not None and arms:
        draw(arms, options.plot)
    if write_json is not None:
        write_json([arm.figures() for arm in arms])
    same = all(arm.tokens == arms[0].tokens for arm in arms)
    if options.output == "md" and options.json != "-":
        if options.trace:
            for arm in arms:
                print(f"{arm.name}:", *arm.trace.lines(), sep="\n")
        _show(standard_output(), arms)
        print(f"users got {'the same tokens in all arms' if same else 'DIFFERENT TOKENS'}")
    return code if same else FAILED


def _show(console: Console, arms: Sequence[Arm]) -> None:
    """Print a line for each arm."""
    table = Table(title="milliseconds; all from when the long prompt came")
    table.add_column("long prompt")
    for column in (
        *("tokens a pass", "between tokens: p50", "p99", "longest"),
        *("its first token after", "all tokens a second"),
    ):
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
    print_table(console, table)


def _flat(arm: Arm, about: Row) -> Row:
    """An arm as one flat object, times in seconds. cache_n, prompt_n: of the long prompt."""
    from reference.measure.machine import this_machine

    gaps, long = arm.users, arm.long
    return {
        **asdict(this_machine()),
        **about,
        "arm": arm.name,
        "max_batched_tokens": arm.budget,
        "cache_n": None if long is None else long.cache_n,
        "prompt_n": None if long is None else long.prompt_n,
        "repetitions": 1,
        "between_tokens_median": gaps.p50,
        "between_tokens_p99": gaps.p99,
        "between_tokens_most": gaps.longest,
        "time_to_first_token": None if long is None else long.timings.time_to_first_token,
        "tokens_a_second": arm.throughput,
    }


def _batches(options: argparse.Namespace, model: Model) -> int:
    """Measure batches of users, and print a row for each."""
    from reference.measure.batching import Batching
    from reference.measure.ceiling import PASSES, measured_here
    from reference.measure.machine import this_machine

    threads = threads_of(options)
    batching = Batching(model, options.batch, threads, options.d, options.n, options.r)

    def rows() -> Iterator[Row]:
        with watched("the machine", 3 * (PASSES + 1)) as advance:
            hardware = measured_here(threads, on_run=advance)
        with watched("runs", batching.runs) as advance:
            for row in batching.rows(this_machine(), hardware, advance):
                yield {**row, "model": options.model}

    return write_and_draw(options.output, options.plot, COLUMNS, ABOUT, rows(), panels)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """All and each, by how many they are, and from where on the total is flat."""
    mine = [row for row in rows if row["role"] != "do nothing"]
    told = (("predicted", "flat_predicted"), ("measured", "flat_measured"))
    most = max(row["batch"] for row in mine)
    marks = {
        f"flat from here, {name}" + ("" if n <= most else f" ({n}, beyond what was measured)"): n
        for name, key in told
        if (n := mine[0][key]) is not None and n <= 64 * most
    }
    ceiling = Line("at most", [row["batch"] for row in mine], [r["ceiling_total"] for r in mine])
    lines = [series("all", mine, "batch", "total"), series("each", mine, "batch", "single")]
    return [Panel("decoding together", "users", "tokens/s", [*lines, ceiling], "xy", marks)]
