"""`bitforbit speedup`: how much faster prefill is with threads or processes, bit for bit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from conformance.commands.common import FAILED, OK, count, numbers
from conformance.commands.measure.models import add_model, source_of
from conformance.commands.measure.plot import Line, Panel, add_plot, series, write_and_draw
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched
from reference.errors import RequestError

DESCRIPTION = """\
Prefill of the same prompts by 1 to N workers: threads, which share out the tiles of one prompt
after another, and processes of one thread each, which share out the prompts. Speed-ups are medians
of paired runs against one thread in this process, which runs twice: that ratio is noise. All take
turns, so that the rows come together, after the last turn.

  bitforbit speedup
  bitforbit speedup --model PATH -w 1,2,4,8 --prompts 16 -p 1024 --plot speedup.svg

The logits of every prompt must have the same bits in every arm.
Exit code: 0 they have, 1 they have not, 2 could not run.
"""

ABOUT = ("cpu", "cores", "blas", "numpy", "system", "model", "arithmetic", "weights")
COLUMNS: Columns = {
    "digest": lambda row: row["digest"][:12],
    **{name: partial(shown, name=name) for name in ("attention", "workers", "count")},
    "threads of each": partial(shown, name="threads"),
    **{name: partial(shown, name=name) for name in ("prompts", "cache_n", "prompt_n")},
    "ms": partial(span, name="seconds", form=".1f", unit=1000),
    "t/s": partial(span, name="rate", form=".0f"),
    "runs": partial(shown, name="repetitions"),
    "speed-up": lambda row: (
        "first" if row["role"] == "first" else f"{row['role']} {span(row, 'speedup')}".strip()
    ),
    "same bits": lambda row: "yes" if row["same_bits"] else "NO",
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "speedup", help="prefill by threads and processes", description=DESCRIPTION, **style
    )
    add_model(parser)
    parser.add_argument(
        "-w", type=numbers, metavar="N,..", help="workers (1 to the cores, 4 at most)"
    )
    parser.add_argument("--only", choices=("threads", "processes"), help="one kind of them")
    parser.add_argument("--prompts", type=count, default=4, metavar="N", help="(4)")
    parser.add_argument("-p", type=count, default=512, metavar="N", help="tokens of each (512)")
    parser.add_argument("--attention", choices=("exact", "fast"), default="fast", help="(fast)")
    parser.add_argument("-r", type=int, default=3, metavar="N", help="repetitions (3)")
    parser.add_argument("--no-warmup", action="store_true", help="keep the first run too")
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a row for each arm."""
    import numpy as np

    from reference.measure.machine import this_machine
    from reference.measure.speedup import KINDS, Speedup

    source = source_of(options)
    model, machine = source.load(), this_machine()
    counts = options.w or list(range(1, min(4, machine.cores) + 1))
    rng = np.random.default_rng(0)
    if options.p > model.config.max_positions:  # before so many are drawn
        raise RequestError(
            f"-p: {options.p} positions are needed, and the model's context has "
            f"{model.config.max_positions}"
        )
    prompts = rng.integers(0, model.config.vocab_size, (options.prompts, options.p)).tolist()
    kinds = KINDS if options.only is None else (options.only,)
    warm_up = 0 if options.no_warmup else 1
    speedup = Speedup(source, model, prompts, counts, kinds, options.attention, options.r, warm_up)
    about = {"model": source.name, "arithmetic": source.arithmetic, "weights": source.weights}
    wrong: list[str] = []

    def rows() -> Iterator[Row]:
        with watched("runs", speedup.runs) as advance:
            for row in speedup.rows(machine, advance):
                if not row["same_bits"]:
                    wrong.append(f"{row['count']} {row['workers']}")
                yield {**row, **about}

    code = write_and_draw(options.output, options.plot, COLUMNS, ABOUT, rows(), panels)
    if wrong:
        print(f"bitforbit: other bits with {', '.join(wrong)}", file=sys.stderr)
    return FAILED if wrong and code == OK else code


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Speed-up over the number of workers, and what it would be at best."""
    found = []
    for kind in ("threads", "processes"):
        mine = [row for row in rows if row["workers"] == kind and not row["role"]]
        if mine:
            found.append(series(kind, mine, "count", "speedup"))
    counts = sorted({row["count"] for row in rows})
    best = Line("at best", counts, [float(n) for n in counts])
    noise = [row["speedup_median"] for row in rows if row["role"] == "do nothing"]
    levels = {"one thread to itself": noise[0]} if noise else {}
    lines = [*found, best]
    return [Panel("prefill", "workers", "to one thread", lines, levels=levels)]
