"""`bitforbit quantization`: what four-bit formats lose, and whether their sums have an order."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance.commands.common import FAILED, OK, count, numbers
from conformance.commands.measure.models import (
    add_text,
    encoded,
    text_named,
    threads_of,
    tokenizer_of,
)
from conformance.commands.measure.plot import (
    Line,
    Panel,
    add_plot,
    check_plot,
    grouped,
    series,
    write_and_draw,
)
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched
from conformance.paths import model_folder
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.measure.quantization import Experiment

DESCRIPTION = """\
Group scales or sums without an order: the fork of four-bit weights, and the third way, measured.
For each format: the relative error of the weights, over all and by matrix; perplexity, divergence
from the float32 weights and agreement of the likeliest token, on held-out text; the share of sums
of real activations that change when groups are added in another order; operations for a weight.

  bitforbit quantization                            some 2,000 positions
  bitforbit quantization --positions 20000          those of the published figures
  bitforbit quantization --formats int4,int4-row --plot fork.svg
  bitforbit quantization --widths 512,4096,14336    order alone, of random matrices so wide

int4 has a scale for 32 weights, int4-row-max and int4-row one a row, of the largest magnitude and
searched; q4_0 and q8_0 are those of GGUF files. All run with int8 activations, on codes. Intervals
are of 95 %, by a bootstrap over blocks of 64 positions, the same ones for all: they are paired.
"changed" counts outputs that one of 8 shuffles of the groups changes: in float32; in float32 with
activation scales for each block of 32, as llama.cpp has them; in ours, float64 before its last
rounding, which must be none; and in float64 with scales for each block, which has no such proof.
Exit code: 0 ours has no order, 1 it has one, 2 could not run.
"""

ABOUT = ("cpu", "cores", "blas", "numpy", "system", "model", "text", "threads", "context", "seed")


def _interval(row: Row, name: str, form: str) -> str:
    if row[name] is None:
        return "-"
    value, low, high = (format(row[key], form) for key in (name, f"{name}_low", f"{name}_high"))
    return f"{value} ({low} to {high})"


def _share(row: Row, lane: str) -> str:
    return "-" if row[f"{lane}_changed"] is None else f"{row[f'{lane}_changed']:.2%}"


def _error(row: Row) -> str:
    if row["error"] is None:
        return "-"
    return f"{row['error']:.4f}; {span(row, 'matrix_error', form='.4f')}"


LANES = {
    "float32": "float32",
    "float32_by_block": "float32, scales by block",
    "exact": "ours",
    "float64_by_block": "float64, scales by block",
}
CHANGED: Columns = {
    f"changed, {label}": partial(_share, lane=lane) for lane, label in LANES.items()
}
COLUMNS: Columns = {
    "digest": lambda row: row["digest"][:12],
    "format": partial(shown, name="format"),
    "bits": partial(shown, name="bits"),
    "error of weights; of a matrix": _error,
    "cache_n": partial(shown, name="cache_n"),
    "prompt_n": partial(shown, name="prompt_n"),
    "positions": partial(shown, name="positions"),
    "windows": partial(shown, name="repetitions"),
    "perplexity": partial(_interval, name="perplexity", form=".3f"),
    "times float32's": partial(_interval, name="ratio", form=".4f"),
    "times int4's": partial(_interval, name="to_int4", form=".4f"),
    "KL, nats": partial(_interval, name="kl", form=".4f"),
    "same top": partial(_interval, name="same_top", form=".2%"),
    **CHANGED,
    "integer operations": partial(shown, name="integer_operations"),
    "float64 operations": lambda row: (
        "-" if row["scale_operations"] is None else f"{row['scale_operations']:.4f}"
    ),
    "t/s": partial(span, name="rate", form=".0f"),
}
WIDE: Columns = {
    "digest": lambda row: row["digest"][:12],
    **{name: partial(shown, name=name) for name in ("format", "width", "outputs")},
    **CHANGED,
    "float32, by one shuffle": partial(span, name="float32_changed", form=".2%"),
    "shuffles": partial(shown, name="repetitions"),
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "quantization", help="the fork of four-bit weights", description=DESCRIPTION, **style
    )
    parser.add_argument(
        "-m", "--model", default="tiny-dense", metavar="PATH", help="default tiny-dense"
    )
    add_text(parser)
    parser.add_argument(
        "--formats",
        default="int4,int4-row-max,int4-row,q4_0,q8_0",
        metavar="NAME,..",
        help="(all: int4,int4-row-max,int4-row,q4_0,q8_0)",
    )
    parser.add_argument(
        "--positions", type=count, default=2000, metavar="N", help="that count, at least (2000)"
    )
    parser.add_argument("-c", "--context", type=count, default=512, metavar="N", help="(512)")
    parser.add_argument("-t", "--threads", type=count, metavar="N", help="threads (all)")
    parser.add_argument(
        "--widths", type=numbers, metavar="N,..", help="order alone, of random matrices so wide"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the shuffles (0)")
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a row for the base and for each format."""
    check_plot(options.plot)
    import numpy as np

    from reference.loading import load_checkpoint
    from reference.measure.quantization import Experiment

    if options.seed < 0:
        raise RequestError(f"--seed: {options.seed} is below 0")
    formats = tuple(dict.fromkeys(filter(None, options.formats.split(","))))
    if not formats:
        raise RequestError("--formats: there is none; name one at least")
    if options.widths is not None:
        rows = _wide(options, formats)
        return _checked(
            options, WIDE, ("cpu", "cores", "blas", "numpy", "threads", "seed"), rows, wide_panels
        )
    folder = model_folder(options.model)
    checkpoint = load_checkpoint(folder)
    text, name = text_named(options)
    tokens, bos = encoded(tokenizer_of(checkpoint), text)
    experiment = Experiment(
        checkpoint,
        np.array(tokens, np.int64),
        formats,
        options.positions,
        options.context,
        bos,
    )
    about = {
        "model": folder.resolve().name,
        "text": name,
        "threads": threads_of(options),
    }
    return _checked(options, COLUMNS, ABOUT, _rows(options, experiment, about), panels)


def _checked(
    options: argparse.Namespace,
    columns: Columns,
    about: Sequence[str],
    rows: Iterator[Row],
    pictures: Callable[[list[Row]], Sequence[Panel]],
) -> int:
    """Print rows, and fail where exact sums have an order."""
    ordered: list[str] = []

    def kept() -> Iterator[Row]:
        for row in rows:
            if row["exact_changed"]:
                ordered.append(f"{row['format']}: {row['exact_changed']:.2%} of the sums changed")
            yield row

    code = write_and_draw(options.output, options.plot, columns, about, kept(), pictures)
    if ordered:
        print(f"bitforbit: exact sums have an order: {'; '.join(ordered)}", file=sys.stderr)
    return FAILED if ordered and code == OK else code


def _wide(options: argparse.Namespace, formats: Sequence[str]) -> Iterator[Row]:
    """What an order changes, by width and format."""
    from reference.measure.formats import Quantized
    from reference.measure.group_order import drawn, order_figures
    from reference.measure.machine import this_machine
    from reference.threads import limited_to

    threads, machine = threads_of(options), asdict(this_machine())
    made = [drawn(width, options.seed) for width in options.widths]
    with limited_to(threads), watched("matrices", len(made) * len(formats)) as advance:
        for w, x in made:
            for kind in formats:
                quantized = Quantized.of({"drawn": w}, ["drawn"], kind)
                figures = order_figures(quantized, {("drawn",): x}, options.seed)
                advance()
                yield {
                    **machine,
                    "threads": threads,
                    "seed": options.seed,
                    "digest": hashlib.sha256(w.tobytes()).hexdigest(),
                    "format": kind,
                    "width": w.shape[1],
                    "repetitions": figures["orders"],
                    **figures,
                }


def _rows(
    options: argparse.Namespace, experiment: Experiment, about: dict[str, Any]
) -> Iterator[Row]:
    """A row each, of all windows or of those that an interrupt left."""
    from reference.measure.group_order import order_figures
    from reference.measure.machine import this_machine
    from reference.measure.quantization import BASE, Text, reduced, text_figures
    from reference.measure.turns import fields
    from reference.threads import limited_to

    parts: list[dict[str, Text]] = []
    interrupted = False
    with limited_to(about["threads"]):
        evaluations = experiment.evaluations
        tensors, read = experiment.checkpoint.tensors, experiment.read()
        try:
            with watched("windows", len(evaluations[BASE].windows)) as advance:
                for scores in experiment.run():
                    parts.append(reduced(scores))
                    advance()
        except KeyboardInterrupt:
            interrupted = True
        texts = text_figures(parts) if parts else {}
        windows = evaluations[BASE].windows[: len(parts)]
        measured: dict[str, dict[str, Any]] = {}
        for kind, quantized in experiment.quantized.items() if parts else ():
            whole, spread = quantized.errors(tensors)
            measured[kind] = {
                "error": whole,
                "matrices": spread.repetitions,
                **fields("matrix_error", spread),
                **quantized.costs(),
                **order_figures(quantized, read, options.seed),
            }
            measured[BASE] = dict.fromkeys(measured[kind])  # is not quantized
    for kind, figures in texts.items():
        yield {
            **asdict(this_machine()),
            **about,
            "context": options.context,
            "seed": options.seed,
            "digest": evaluations[kind].model.digest,
            "format": kind,
            "cache_n": 0,
            "prompt_n": sum(w.stop - w.start - 1 for w in windows),
            **figures,
            **measured[kind],
        }
    if interrupted:
        raise KeyboardInterrupt


def panels(rows: Sequence[Row]) -> list[Panel]:
    """What each format loses, and what an order changes."""
    told = [row for row in rows if row["error"] is not None]
    names = [row["format"] for row in told]

    def interval(name: str) -> Line:
        value, low, high = ([row[f"{name}{end}"] for row in told] for end in ("", "_low", "_high"))
        return Line("95 %", names, value, low, high, "points")

    return [
        Panel(title, "", axis, [interval(name)])
        for title, axis, name in (
            ("perplexity, times float32's", "ratio", "ratio"),
            ("divergence from float32", "KL, nats", "kl"),
        )
    ] + [
        Panel(
            "outputs that another order changes",
            "",
            "share",
            [
                Line(label, names, [row[f"{lane}_changed"] for row in told], kind="bars")
                for lane, label in LANES.items()
            ],
        )
    ]


def wide_panels(rows: Sequence[Row]) -> list[Panel]:
    """What an order changes, by width."""
    return [
        Panel(
            f"outputs that another order changes, {label}",
            "width",
            "share",
            [
                series(name or rows[0]["format"], mine, "width", f"{lane}_changed")
                for name, mine in grouped(rows, "format").items()
            ],
            "x",
        )
        for lane, label in LANES.items()
    ]
