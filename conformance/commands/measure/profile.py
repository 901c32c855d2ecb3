"""`bitforbit profile`: what a prefill's time goes to, and what a slice of a model shows of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance.commands.measure.models import (
    add_lengths,
    add_model,
    add_runs,
    fitting,
    source_of,
    threads_of,
)
from conformance.commands.measure.plot import Line, Panel, add_plot, grouped, series, write_and_draw
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.measure.profile import Profile
    from reference.measure.source import Source

DESCRIPTION = """\
What the time of a prefill goes to, by the length of the prompt, and how it grows: seconds of n
tokens are fitted as linear * n + quadratic * n^2, with the residual of each length.

  bitforbit profile
  bitforbit profile --random layers=12,hidden=512,heads=8 -p 1024,2048,4096,8192
  bitforbit profile --layers 4 --plot profile.svg       the first 4 layers against the whole

Shares are those of the run with the median time, and add up to 1. QK, softmax and AV are told apart
by computing attention one step after another on the same shapes: columns marked "stepwise" split
attention's share as those steps' CPU times are split. A row of a slice says so (`scope`, `layers`).
"scaled" is its time, times the layers of the whole by its own, to the whole's time in the same
turn: 1 would be a slice that does not mislead; the whole against itself (`do nothing`) is noise.
"""

STEPS = ("attention", "projections", "feedforward", "experts", "norms", "head", "rest")
LENGTHS = (512, 1024, 2048, 4096, 8192)
ABOUT = ("cpu", "cores", "blas", "numpy", "system", "model")


def _share(row: Row, name: str) -> str:
    """A share, and its range over the runs where that is known."""
    value, least, most = (row.get(f"{name}{part}") for part in ("", "_least", "_most"))
    if value is None or least is None or least == most:
        return "-" if value is None else f"{value:.1%}"
    return f"{value:.1%} ({least:.1%} to {most:.1%})"


def _shift(row: Row) -> str:
    if row["attention_shift_median"] is None:
        return "-"
    return f"{span(row, 'attention_shift', '+.1f', 100)} points"


def _fit(row: Row) -> str:
    if row["fit_linear"] is None:
        return "-"
    return (
        f"{1e6 * row['fit_linear']:.4g} us n + {1e9 * row['fit_quadratic']:.4g} ns n^2, "
        f"residuals {' '.join(f'{r:+.1%}' for r in row['fit_residuals'])}"
    )


COLUMNS: Columns = {
    "digest": lambda row: row["digest"][:12],
    **{name: partial(shown, name=name) for name in ("arithmetic", "threads")},
    "lane": partial(shown, name="attention"),
    "scope": partial(shown, name="scope"),
    "layers": lambda row: f"{row['layers']} of {row['of_layers']}",
    **{name: partial(shown, name=name) for name in ("role", "test", "cache_n", "prompt_n")},
    "ms": lambda row: "-" if row["seconds_median"] is None else span(row, "seconds", ".1f", 1000),
    "runs": partial(shown, name="repetitions"),
    **{step: partial(_share, name=f"{step}_share") for step in STEPS},
    "QK, stepwise": partial(_share, name="qk_share_stepwise"),
    "softmax, stepwise": partial(_share, name="softmax_share_stepwise"),
    "AV, stepwise": partial(_share, name="av_share_stepwise"),
    "scaled, to the whole": lambda row: (
        "-" if row["scaled_median"] is None else span(row, "scaled", ".3f")
    ),
    "attention's share, to the whole": _shift,
    "fit": _fit,
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "profile", help="what a prefill's time goes to", description=DESCRIPTION, **style
    )
    add_model(parser)
    add_lengths(parser, "512 to 8192")
    parser.add_argument("--attention", choices=("exact", "fast"), default="fast", help="(fast)")
    parser.add_argument(
        "--arithmetic", choices=("exact", "float32"), default="exact", help="(exact)"
    )
    add_runs(parser, 3)
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print rows as they are there."""
    from reference.measure.profile import Profile

    if options.arithmetic == "float32" and options.attention == "exact":
        raise RequestError("--attention: float32 arithmetic has fast attention alone; use fast")
    source = source_of(options, arithmetic=options.arithmetic)
    model, threads = source.load(), threads_of(options)
    lengths = options.p or fitting(LENGTHS, model.config.max_positions)
    profile = Profile(
        model,
        lengths,
        threads,
        options.layers,
        options.attention,
        options.r,
        0 if options.no_warmup else 1,
    )
    rows = _rows(profile, source)
    return write_and_draw(options.output, options.plot, COLUMNS, ABOUT, rows, panels)


def _rows(profile: Profile, source: Source) -> Iterator[Row]:
    from reference.measure.machine import this_machine

    about = {
        "model": source.name,
        "arithmetic": source.arithmetic,
        "weights": source.weights,
    }
    with watched("runs", profile.runs) as advance:
        for row in profile.rows(this_machine(), advance):
            yield {**row, **about}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Shares by length, of each scope, and time with its fit."""
    kept = [row for row in rows if row["role"] != "do nothing"]
    times, found = [], []
    for name, group in grouped(kept, "scope", "layers").items():
        prefills = [row for row in group if row["test"] != "fit"]
        told = f" of a {name.replace(', ', ' of ')} layers" if name else ""
        shares = [
            series(step, prefills, "prompt_n", f"{step}_share", "stack")
            for step in STEPS
            if any(row[f"{step}_share"] for row in prefills)
        ]
        found.append(Panel(f"what a prefill takes{told}", "tokens", "share", shares))
        times.append(series(name or "measured", prefills, "prompt_n", "seconds"))
        for row in (row for row in group if row["test"] == "fit"):
            lengths = row["fit_lengths"]
            linear = [row["fit_linear"] * n for n in lengths]
            both = [t + row["fit_quadratic"] * n * n for t, n in zip(linear, lengths, strict=True)]
            label = " ".join(filter(None, (name, "fitted")))
            times += [Line(label, lengths, both), Line(f"{label}, linear part", lengths, linear)]
    return [*found, Panel("time of a prefill", "tokens", "seconds", times)]
