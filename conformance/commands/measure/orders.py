"""`bitforbit orders`: what the order of sums does to a text, and what the contract makes of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance.commands.common import FAILED, OK, count
from conformance.commands.measure.models import add_model, prompt_of, source_of, threads_of
from conformance.commands.measure.plot import Panel, add_plot, series, write_and_draw
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched
from reference.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reference.measure.orders import Orders

DESCRIPTION = """\
The same prompts in seven float32 orders, each one a correct kernel: BLAS, one accumulator, halves,
8 lanes, and the last three with FMA; and eight times under the exact contract, in other chunks,
with other threads, and with the terms of each block in other orders. Counted are the different bits
of the logits, first tokens and continuations, and told is the first decision that flips against the
exact one: a token, or the experts of a token, and how near it was to a tie.

  bitforbit orders
  bitforbit orders -m tiny-moe --prompts 4 --ties 0 -n 64

A token flips where an order moves the margin between the two likeliest ones by more than it is,
which is far less than single logits move: most prompts flip nothing. Some therefore end where two
tokens are nearest to a tie (--ties), as float32 finds them in --search tokens of the text. Linear
layers alone are summed in other orders; attention is the fast one in all float32 arms. No figure
here is a time.
Exit code: 0 the exact lane gave one answer, 1 it gave several, 2 could not run.
"""

ABOUT = ("cpu", "cores", "blas", "numpy", "system", "model", "weights", "text", "threads", "search")


def _token(row: Row) -> str:
    if row["flip_step"] is None:
        return "none"
    return f"token {row['flip_step'] + 1} ({row['flip_arm']}), margin {row['flip_margin']:.2g}"


def _expert(row: Row) -> str:
    if row["experts_flipped"] is None:
        return "-"
    if not row["experts_flipped"]:
        return "none"
    where = f"position {row['expert_flip_position']}, layer {row['expert_flip_layer']}"
    return f"{where} ({row['expert_flip_arm']}), margin {row['expert_flip_margin']:.2g}"


COLUMNS: Columns = {
    "digest": lambda row: row["digest"][:12],
    **{name: partial(shown, name=name) for name in ("prompt", "chosen", "cache_n", "prompt_n")},
    "output": partial(shown, name="output_n"),
    "lane": partial(shown, name="lane"),
    "arms": partial(shown, name="repetitions"),
    "different bits": partial(shown, name="bits"),
    "first tokens": partial(shown, name="first_tokens"),
    "continuations": partial(shown, name="continuations"),
    "change of a logit": partial(span, name="logit_change", form=".1e"),
    "margin of the first token": lambda row: f"{row['base_margin']:.2g}",
    "change of that margin": partial(span, name="margin_change", form=".1e"),
    "first token to flip": _token,
    "first experts to flip": _expert,
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "orders", help="what the order of sums does to a text", description=DESCRIPTION, **style
    )
    add_model(parser)
    for name, default, what in (
        ("prompts", 1, "prompts at equal distances in the text"),
        ("ties", 3, "prompts that end near a tie"),
        ("p", 32, "tokens of a prompt, at most"),
        ("n", 16, "tokens that follow"),
    ):
        parser.add_argument(
            f"-{name}" if len(name) == 1 else f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{what} ({default})",
        )
    parser.add_argument(
        "--search",
        type=count,
        default=32768,
        metavar="N",
        help="tokens in which ties are looked for (32768)",
    )
    parser.add_argument("-t", "--threads", type=count, metavar="N", help="threads (all)")
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Continue every prompt in every order, and print a row for each lane of it."""
    from reference.measure.orders import Orders, windows

    for name in ("prompts", "ties"):
        if getattr(options, name) < 0:
            raise RequestError(f"--{name}: {getattr(options, name)} is below 0")
    if options.prompts + options.ties == 0:
        raise RequestError("--prompts, --ties: there is no prompt; ask for one at least")
    source, plain = source_of(options), source_of(options, arithmetic="float32")
    orders, threads = Orders(source.load(), plain.load(), options.n), threads_of(options)
    orders.check(options.p)
    tokens, text = prompt_of(orders.exact)
    if len(tokens) < options.p:
        raise RequestError(f"-p: the text has {len(tokens)} tokens; give a shorter prompt")
    found = windows(tokens, options.p, options.search)
    about = {
        "model": source.name,
        "digest": orders.exact.digest,
        "weights": source.weights,
        "text": text,
        "threads": threads,
        "search": options.search,
    }
    several: list[str] = []

    def rows() -> Iterator[Row]:
        for row in _rows(options, orders, found):
            if row["lane"] == "exact" and row["bits"] * row["continuations"] > 1:
                several.append(f"prompt {row['prompt']}: {row['bits']} different bits")
            yield {**row, **about}

    code = write_and_draw(options.output, options.plot, COLUMNS, ABOUT, rows(), panels)
    if several:
        print(f"bitforbit: the exact lane is not exact: {'; '.join(several)}", file=sys.stderr)
    return FAILED if several and code == OK else code


def _rows(options: argparse.Namespace, orders: Orders, found: NDArray[np.int64]) -> Iterator[Row]:
    from dataclasses import asdict

    from reference.measure.machine import this_machine
    from reference.measure.orders import prompts, search_passes
    from reference.threads import limited_to

    threads, machine = threads_of(options), asdict(this_machine())
    with limited_to(threads):
        with watched("search", search_passes(len(found))) as advance:
            chosen = prompts(orders.plain, found, options.prompts, options.ties, advance)
        with watched("runs", len(chosen) * len(orders.arms)) as advance:
            for number, prompt in enumerate(chosen, 1):
                for row in orders.rows(prompt, advance):
                    yield {**machine, "prompt": number, **row}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """How many answers each lane gives to a prompt, and how near ties are to what orders move."""
    lanes = {lane: [row for row in rows if row["lane"] == lane] for lane in ("float32", "exact")}
    counts = [
        Panel(
            title,
            "prompt",
            "of all arms",
            [series(lane, mine, "prompt", key, "bars") for lane, mine in lanes.items()],
        )
        for title, key in (("different logits", "bits"), ("different texts", "continuations"))
    ]
    plain = lanes["float32"]
    moved = [
        series("margin of the first token", plain, "prompt", "base_margin", "points"),
        series("its change by the order", plain, "prompt", "margin_change", "points"),
    ]
    return [*counts, Panel("why a token flips", "prompt", "logits", moved, "y")]
