"""`bitforbit router`: how often rounding changes which experts compute a token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.commands.common import FAILED, OK, count
from conformance.commands.measure.models import add_text, text_named, threads_of, tokenizer_of
from conformance.commands.measure.plot import Line, Panel, add_plot, write_and_draw
from conformance.commands.measure.rows import Columns, Row, add_form, shown, watched
from conformance.paths import model_folder

if TYPE_CHECKING:
    from reference.experts import Routing
    from reference.measure.router import Arm, Tracing

DESCRIPTION = """\
Route a text exactly, and again with fast attention, in float32 arithmetic, and with int4 and
int4-row weights: which of the router's decisions, one for each token and layer, name other experts?

  bitforbit router --model PATH -f text.txt

First comes an arm that changes nothing but the chunks in which the text is fed; it must not flip a
single decision. Then columns of margins, how near a decision was to another one, in units of the
router's score: flips, of the decisions whose margin lay there. Then the largest margin of one that
flipped, and by how much the margins of the others moved at most. "load" is the smallest and the
largest share of a layer's calls that one expert has.
Exit code: 0 all was measured, 1 the arm that changes nothing has flips, 2 could not run.
"""

ABOUT = ("cpu", "cores", "blas", "numpy", "system", "model", "text", "context", "tokens", "experts")


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "router", help="count the decisions of routers that flip", description=DESCRIPTION, **style
    )
    parser.add_argument(
        "-m", "--model", default="tiny-moe", metavar="PATH", help="default tiny-moe"
    )
    add_text(parser)
    parser.add_argument(
        "--tokens", type=count, default=2048, metavar="N", help="of the text, at most (2048)"
    )
    parser.add_argument(
        "-c", "--context", type=count, default=2048, metavar="N", help="of a window (2048)"
    )
    parser.add_argument("-t", "--threads", type=count, metavar="N", help="(all)")
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Route in every way, and print a row for each layer, and one for all of them."""
    import numpy as np

    from reference.measure.router import NOTHING, Tracing
    from reference.model import load_model

    folder = model_folder(options.model)
    model = load_model(folder)
    text, name = text_named(options)
    tokens = tokenizer_of(model).encode(text)[: options.tokens]
    context = min(options.context, max(2, len(tokens)))
    base = Tracing(model, np.array(tokens, np.int64), context)
    about = {"model": folder.resolve().name, "digest": model.digest, "text": name}
    wrong: list[str] = []

    def rows() -> Iterator[Row]:
        for row in _rows(options, folder, base, about):
            if row["arm"] == NOTHING.name and row["layer"] == "all" and row["flips"]:
                wrong.append(f"{NOTHING.name}: {row['flips']} of {row['decisions']} flipped")
            yield row

    code = write_and_draw(options.output, options.plot, _columns(), ABOUT, rows(), panels)
    for line in wrong:
        print(f"bitforbit: {line}; what should change nothing did", file=sys.stderr)
    return FAILED if wrong and code == OK else code


def panels(rows: Sequence[Row]) -> list[Panel]:
    """The share of decisions that flip, by margin and by layer, a line for each arm."""
    from reference.measure.router import EDGES

    edges = [f"< {EDGES[0]:g}", *(f">= {low:g}" for low in EDGES)]
    whole = [row for row in rows if row["layer"] == "all"]
    by_margin = [Line(row["arm"], edges, [_share(*pair) for pair in _bins(row)]) for row in whole]
    by_layer = [
        Line(
            name,
            [row["layer"] for row in rows if row["arm"] == name and row["layer"] != "all"],
            [row["share"] for row in rows if row["arm"] == name and row["layer"] != "all"],
        )
        for name in dict.fromkeys(row["arm"] for row in rows)
    ]
    return [
        Panel("flips by margin", "margin of the decision", "share of decisions", by_margin),
        Panel("flips by layer", "layer", "share of decisions", by_layer),
    ]


def _bins(row: Row) -> Iterator[tuple[int, int]]:
    return zip(row["bin_flips"], row["bin_decisions"], strict=True)


def _share(flips: int, decisions: int) -> float:
    return flips / decisions if decisions else 0.0


def _columns() -> Columns:
    from reference.measure.router import EDGES

    def of_bin(row: Row, index: int) -> str:
        return f"{row['bin_flips'][index]} of {row['bin_decisions'][index]}"

    between = [f"{low:g} to {high:g}" for low, high in pairwise(EDGES)]
    names = [f"below {EDGES[0]:g}", *between, f"{EDGES[-1]:g} or more"]
    return {
        **{name: partial(shown, name=name) for name in ("arm", "layer", "decisions", "flips")},
        "flips, %": lambda row: f"{row['share']:.3%}".rstrip("%"),
        "calls, %": lambda row: f"{row['calls']:.3%}".rstrip("%"),
        **{name: partial(of_bin, index=index) for index, name in enumerate(names)},
        "largest margin": partial(_size, name="largest"),
        "largest move": partial(_size, name="moved"),
        "load, %": lambda row: (
            f"{min(row['load']):.1%} to {max(row['load']):.1%}".replace("%", "")
            if row["load"]
            else "-"
        ),
    }


def _size(row: Row, name: str) -> str:
    return "-" if row[name] is None else f"{row[name]:.2g}"


def _rows(
    options: argparse.Namespace, folder: Path, base: Tracing, about: dict[str, Any]
) -> Iterator[Row]:
    """The rows of arm after arm."""
    from reference.measure.machine import this_machine
    from reference.measure.router import ARMS, flips, joined, load
    from reference.threads import limited_to

    threads = threads_of(options)
    same = {
        **asdict(this_machine()),
        **about,
        "threads": threads,
        "context": base.context,
        "tokens": len(base.tokens),
        "experts": base.experts,
    }
    with limited_to(threads), watched("windows", len(base.windows) * (1 + len(ARMS))) as advance:
        wanted = _decisions(base, advance)
        for arm in ARMS:
            found = _decisions(_other(folder, base, arm), advance)
            for layer in wanted:
                yield {
                    **same,
                    "arm": arm.name,
                    "layer": layer,
                    **flips(wanted[layer], found[layer]),
                    "load": load(found[layer], base.experts),
                }
            whole = (joined(list(routed.values())) for routed in (wanted, found))
            yield {**same, "arm": arm.name, "layer": "all", **flips(*whole), "load": None}


def _other(folder: Path, base: Tracing, arm: Arm) -> Tracing:
    """The tracing of an arm: of the model that is loaded where it will do, else of one like it."""
    from reference.measure.router import Tracing
    from reference.model import load_model

    same = (arm.weights, arm.arithmetic) == (base.arm.weights, base.arm.arithmetic)
    model = base.model if same else load_model(folder, arm.weights, arm.arithmetic)
    return Tracing(model, base.tokens, base.context, arm)


def _decisions(tracing: Tracing, advance: Any) -> dict[int, Routing]:
    """The decisions of a whole text, by layer."""
    from reference.measure.router import joined

    windows = []
    for window in tracing.run():
        windows.append(window)
        advance()
    return {layer: joined([window[layer] for window in windows]) for layer in windows[0]}
