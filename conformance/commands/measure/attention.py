"""`bitforbit attention`: what fast attention gains, what it changes, and what memory both need."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance.commands.measure.models import (
    add_lengths,
    add_model,
    add_runs,
    prompt_of,
    source_of,
    threads_of,
)
from conformance.commands.measure.plot import Panel, add_plot, grouped, series, write_and_draw
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched

if TYPE_CHECKING:
    from reference.measure.attention import Comparison

DESCRIPTION = """\
Exact against fast attention, by the length of the prompt: how many times as fast, and how far the
logits of the last rows are from the exact ones. Below the floor of 512 tokens the engine is exact.

  bitforbit attention --plot floor.svg         gain grows with the length, divergence does not
  bitforbit attention -m tiny-moe              which experts compute a token changes too
  bitforbit attention --random layers=12,hidden=512,heads=8 -p 1024,2048,4096,8192 --layers 4

"gain" is the median of ratios of exact to fast within a turn; exact to itself is noise. "held" is
attention with the scores of all rows in memory, one layer of it: the same operations, counted as
they are done, and memory that grows with the square of the length.
"""

ABOUT = ("cpu", "cores", "blas", "numpy", "system", "model", "weights", "text", "floor")


def _megabytes(row: Row, name: str) -> str:
    return "-" if row[name] is None else f"{row[name] / 1e6:.1f}"


def _operations(row: Row, kind: str) -> str:
    tiled, held = (row[f"{kind}_{name}_operations"] for name in ("by_step", "held"))
    told = f"{tiled / 1e9:.4g}"
    return told if held in (None, tiled) else f"{told} and {held / 1e9:.4g}"


def _experts(row: Row) -> str:
    if row["expert_decisions"] is None:
        return "-"
    share = row["expert_flips"] / row["expert_decisions"]
    return f"{row['expert_flips']} of {row['expert_decisions']} ({share:.2%})"


COLUMNS: Columns = {
    "digest": lambda row: row["digest"][:12],
    **{name: partial(shown, name=name) for name in ("threads", "scope")},
    "layers": lambda row: f"{row['layers']} of {row['of_layers']}",
    **{name: partial(shown, name=name) for name in ("test", "cache_n", "prompt_n")},
    "runs": partial(shown, name="repetitions"),
    "ms, exact": partial(span, name="exact_seconds", form=".1f", unit=1000),
    "ms, fast": partial(span, name="fast_seconds", form=".1f", unit=1000),
    "gain": partial(span, name="gain"),
    "exact to itself": partial(span, name="do_nothing"),
    "least cosine": lambda row: f"1 - {1 - row['cosine_least']:.2g}",
    "largest change of a logit": lambda row: f"{row['logit_change']:.3g}",
    "KL, nats": lambda row: f"{row['kl_mean']:.2g} (most {row['kl_most']:.2g})",
    "top-1 flips": lambda row: f"{row['top_flips']} of {row['rows']}",
    "expert flips": _experts,
    "MB of a pass, exact": partial(_megabytes, name="exact_pass_bytes"),
    "fast": partial(_megabytes, name="fast_pass_bytes"),
    **{
        f"MB of a layer, {kind}, {name}": partial(_megabytes, name=f"{kind}_{name}_bytes")
        for kind in ("exact", "fast")
        for name in ("tiled", "held")
    },
    **{
        f"GFLOP of it, {kind}, tiled and held": partial(_operations, kind=kind)
        for kind in ("exact", "fast")
    },
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "attention", help="exact against fast attention", description=DESCRIPTION, **style
    )
    add_model(parser)
    add_lengths(parser, "128 to 2048")
    add_runs(parser, 3)
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print rows as they are there."""
    from reference.measure.attention import Comparison
    from reference.measure.profile import check_lengths

    source = source_of(options)
    model, threads = source.load(), threads_of(options)
    context = model.config.max_positions
    lengths = options.p or [n for n in (128, 256, 512, 1024, 2048) if n <= context] or [context]
    check_lengths(lengths, model)
    tokens, text = prompt_of(model, max(lengths))
    warm_up = 0 if options.no_warmup else 1
    comparison = Comparison(model, tokens, lengths, threads, options.layers, options.r, warm_up)
    about = {
        "model": source.name,
        "arithmetic": source.arithmetic,
        "weights": source.weights,
        "text": text,
    }
    rows = _rows(comparison, about)
    return write_and_draw(options.output, options.plot, COLUMNS, ABOUT, rows, panels)


def _rows(comparison: Comparison, about: Row) -> Iterator[Row]:
    from reference.measure.machine import this_machine

    with watched("runs", comparison.runs) as advance:
        for row in comparison.rows(this_machine(), advance):
            yield {**row, **about}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """What justifies the floor: gain and divergence by length; and memory, tiled and held."""
    floor = {"floor": float(rows[0]["floor"])}
    groups = grouped(rows, "scope", "layers")
    gain = [
        series(f"exact to fast {name}".strip(), group, "prompt_n", "gain")
        for name, group in groups.items()
    ]
    noise = [
        series(f"exact to itself {name}".strip(), group, "prompt_n", "do_nothing")
        for name, group in groups.items()
    ]
    apart = [
        series(f"{what} {name}".strip(), group, "prompt_n", key)
        for name, group in groups.items()
        for what, key in (
            ("mean KL, nats", "kl_mean"),
            ("largest change of a logit", "logit_change"),
        )
    ]
    whole = next(iter(groups.values()))
    held = [
        series(f"{kind}, {name}", whole, "prompt_n", f"{kind}_{name}_bytes")
        for kind in ("exact", "fast")
        for name in ("tiled", "held")
    ]
    return [
        Panel("gain", "tokens", "ratio", [*gain, *noise], "x", floor, {"no gain": 1.0}),
        Panel("divergence", "tokens", "of fast from exact", apart, "xy", floor),
        Panel("memory of a layer's attention", "tokens", "bytes", held, "xy"),
    ]
