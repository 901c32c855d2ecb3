"""`bitforbit prefix`: what reuse saves a conversation, and what moved chunks do to its logits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from conformance.commands.common import (
    OK,
    add_json,
    json_writer,
    older_name,
    progress_bar,
    standard_output,
    text_of,
)
from conformance.commands.measure.models import add_text, tokenizer_of
from conformance.commands.measure.plot import Line, Panel, add_plot, check_plot, draw
from conformance.commands.measure.rows import Row, add_form, write
from conformance.paths import data_folder, model_folder
from conformance.tables import print_table
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.measure.prefix import Figures

DESCRIPTION = """\
Compute a conversation cold, let it go on, and edit it in the middle, at several places. An edit
keeps what comes before it. What comes after it is computed again, or moved, as the engine's option
cache_reuse has it. That is an approximation, and the last line says how far it goes.

  bitforbit prefix
  bitforbit prefix --model PATH --file conversation.txt --held 4000 --edits 4 --plot prefix.svg
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    prefix = commands.add_parser(
        "prefix", help="measure prefix and chunk reuse", description=DESCRIPTION, **style
    )
    prefix.add_argument(
        "-m", "--model", default="tiny-dense", metavar="PATH", help="a model (default tiny-dense)"
    )
    add_text(prefix)
    older_name(prefix, "--text", "text", str)
    for name, default, what in (
        ("held", 1500, "tokens of the first turn"),
        ("new", 60, "tokens that the next turn adds"),
        ("edits", 6, "places to edit, each a run of its own"),
        ("minimum", 64, "least length of a chunk that is moved"),
    ):
        prefix.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} ({default})"
        )
    add_json(prefix, "the figures")
    add_form(prefix)
    add_plot(prefix)
    prefix.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the experiment and print its figures."""
    from reference.measure.prefix import Experiment
    from reference.model import load_model

    check_plot(options.plot)
    if options.json is not None and options.output != "md":
        raise RequestError("--json: it does not go with -o; use -o json")
    write_json = json_writer(options.json)
    model = load_model(model_folder(options.model))
    path = options.file or data_folder("fixtures") / "prompts" / "2000.txt"
    text = getattr(options, "text", f"@{path}")
    tokens = tokenizer_of(model).encode(text_of(text, "--file"))
    wanted = (options.held, options.new, options.edits, options.minimum)
    experiment = Experiment(model, tokens, *wanted)
    with progress_bar() as progress:
        *_, figures = progress.track(experiment.run(), options.edits, description="edits")
    if options.plot is not None:
        draw(panels(figures), options.plot)
    if write_json is not None:
        write_json(_fields(figures))
    if options.json == "-":
        return OK
    if options.output != "md":
        about = {"model": options.model, "digest": model.digest}
        return write(options.output, {}, (), _rows(figures, about))
    _show(standard_output(), figures)
    return OK


def _show(console: Console, figures: Figures) -> None:
    """Print a line for each kind of turn, and what moved chunks changed."""
    table = Table(title="median time to the first token")
    for column in ("turn", "prompt_n", "cache_n", "milliseconds", "of cold"):
        table.add_column(column, justify="left" if column == "turn" else "right")
    cold = figures.seconds("cold")
    for name, turns in figures.turns.items():
        seconds = figures.seconds(name)
        spans = (_span([getattr(turn, key) for turn in turns]) for key in ("prompt_n", "cache_n"))
        table.add_row(name, *spans, f"{1000 * seconds:.0f}", f"{seconds / cold:.1%}")
    print_table(console, table)
    changes = figures.changes
    same = sum(change.same_top for change in changes)
    console.print(
        f"moved chunks changed a logit by up to {max(c.largest for c in changes):.3g} "
        f"(divergence {max(c.divergence for c in changes):.3g} nats at most); the likeliest token "
        f"stayed the same after {same} of {len(changes)} edits",
        highlight=False,
    )


def panels(figures: Figures) -> list[Panel]:
    """Time to the first token by kind of turn, and what moved chunks changed, by place."""
    names = list(figures.turns)
    times = [[1000 * turn.seconds for turn in figures.turns[name]] for name in names]
    waits = Line(
        "median and range",
        names,
        [*map(median, times)],
        [*map(min, times)],
        [*map(max, times)],
        "bars",
    )
    places = [change.at for change in figures.changes]
    moved = [
        Line("largest change of a logit", places, [change.largest for change in figures.changes]),
        Line("divergence, nats", places, [change.divergence for change in figures.changes]),
    ]
    return [
        Panel("time to the first token", "", "ms", [waits]),
        Panel("what moved chunks changed", "place of the edit", "against all anew", moved, "y"),
    ]


def _rows(figures: Figures, about: Row) -> Iterator[Row]:
    """A flat object for each kind of turn, times in seconds, and for what each edit changed."""
    from reference.measure.machine import this_machine
    from reference.threads import thread_count

    same = {**asdict(this_machine()), **about, "threads": thread_count()}
    for name, turns in figures.turns.items():
        seconds = [turn.seconds for turn in turns]
        yield {
            **same,
            "turn": name,
            "repetitions": len(turns),
            "prompt_n": median(turn.prompt_n for turn in turns),
            "cache_n": median(turn.cache_n for turn in turns),
            "time_to_first_token": median(seconds),
            "time_to_first_token_least": min(seconds),
            "time_to_first_token_most": max(seconds),
            "of_cold": median(seconds) / figures.seconds("cold"),
        }
    for change in figures.changes:
        yield {**same, "turn": "what moved chunks changed", "repetitions": 1, **asdict(change)}


def _span(counts: list[int]) -> str:
    """A count, or the least and the most of several."""
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _fields(figures: Figures) -> dict[str, Any]:
    """The figures as `--json` has them."""
    turns = {
        name: [
            {"prompt_n": t.prompt_n, "cache_n": t.cache_n, "time_to_first_token": t.seconds}
            for t in turns
        ]
        for name, turns in figures.turns.items()
    }
    return {"turns": turns, "changes": [asdict(change) for change in figures.changes]}
