"""`bitforbit placement`: what it costs to leave experts with the CPU, and from what length on."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

from conformance.commands.common import FAILED, OK, count, numbers, older_name, positive
from conformance.commands.measure import experts
from conformance.commands.measure.models import TYPES
from conformance.commands.measure.offload import offload_of, placements_of
from conformance.commands.measure.plot import (
    Line,
    Panel,
    add_plot,
    check_plot,
    grouped,
    write_and_draw,
)
from conformance.commands.measure.plot import series as drawn
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.measure.placement import Offload, Placement

DESCRIPTION = """\
Expert offload: the experts of the first n layers lie with the CPU (llama.cpp's n_cpu_moe), all else
on the card. Bytes in each memory, time of a decode token and of a prefill, and of a whole reply.

  bitforbit placement                                   Qwen3-30B-A3B's dimensions, 0 to 48 layers
  bitforbit placement --gpu-memory 16e9 -p 512,8192 --reuse 0.9 --link 63e9
  bitforbit placement --show crossovers -n 0,24:cpu,24:ship,48
  bitforbit placement --show experts                    how many experts a batch hits
  bitforbit placement -m PATH --card h100-sxm --cpu-bandwidth 300e9 --cpu-rate 4e12

A prefill has the CPU compute its experts, or ships them to the card, whichever is faster; 24:cpu
and 24:ship fix it. A model is a folder with a config.json, no weights needed. The CPU is measured,
or given; the card, the link (PCIe 4.0 x16) and its latency are at their peaks, so that times are
least ones. Each total is simulated -r times, with experts drawn token by token.
Routing: uniform; zipf, its exponent fitted to the calls of a real router; or measured, the loads of
that router, for a model of as many experts and layers.
Exit code: 0 each total is within 2 % of the simulated ones, 1 one is not, 2 could not run.
"""

TOLERANCE = 0.02
"""How far a total may be from the range of the simulated ones."""

ABOUT = (
    *("cpu", "cores", "blas", "system", "model", "experts", "chosen", "weights", "kv"),
    *("card", "source", "gpu_memory", "cpu_source", "threads", "link", "latency"),
    *("routing", "batch", "reply", "chunk"),
)
POOLS: Columns = {
    "CPU GB/s": partial(span, name="cpu_bandwidth", form=".1f", unit=1e-9),
    "CPU GFLOP/s": partial(span, name="cpu_rate", form=".0f", unit=1e-9),
}
PLACEMENTS: Columns = {
    "digest": lambda row: row["digest"][:12],
    "n_cpu_moe": partial(shown, name="placement"),
    "GB, card": lambda row: f"{row['gpu_bytes'] / 1e9:.2f}" + ("" if row["fits"] else ", too many"),
    "GB, CPU": lambda row: f"{row['cpu_bytes'] / 1e9:.2f}",
    "cache_n": partial(shown, name="cache_n"),
    "prompt_n": partial(shown, name="prompt_n"),
    "experts hit": lambda row: f"{row['experts_hit']:.4g}",
    "ms a decode step": lambda row: f"{1000 * row['decode_seconds']:.2f}",
    "s prefill": lambda row: f"{row['prefill_seconds']:.3f}",
    "shipped": lambda row: f"{row['shipped']:.0%}",
    "s in all": lambda row: f"{row['total_seconds']:.3f}",
    "simulated": partial(span, name="simulated", form=".3f"),
    "runs": partial(shown, name="repetitions"),
    "off by": lambda row: f"{row['off']:.2%}",
    **POOLS,
}
CROSSOVERS: Columns = {
    "digest": lambda row: row["digest"][:12],
    "of": partial(shown, name="first"),
    "and": partial(shown, name="second"),
    "reuse": partial(shown, name="reuse"),
    "faster for short prompts": partial(shown, name="faster"),
    "the other one from": lambda row: "never" if row["length"] is None else str(row["length"]),
    "prompts up to": partial(shown, name="most"),
    **POOLS,
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "placement", help="experts on a card or with the CPU", description=DESCRIPTION, **style
    )
    parser.add_argument(
        "-m", "--model", default="qwen3-30b-a3b", metavar="NAME", help="(qwen3-30b-a3b), or a path"
    )
    parser.add_argument(
        "--show", choices=("placements", "crossovers", "experts"), default="placements", help="what"
    )
    parser.add_argument("-n", metavar="N,..", help="layers with the CPU (none to all)")
    for option, default, what in (
        ("-p", "512,4096,16384", "tokens of a prompt"),
        ("--passes", "1,2,4,8,16,32,64,128,256", "tokens of a pass, for --show experts"),
    ):
        parser.add_argument(
            option, type=numbers, default=default, metavar="N,..", help=f"{what} ({default})"
        )
    older_name(parser, "-b", "passes", numbers)
    for option, number, what in (
        ("--reply", 256, "tokens of a reply"),
        ("--batch", 1, "sequences that decode together"),
        ("--chunk", 512, "tokens of a pass of a prefill"),
        ("--tokens", 2048, "of the text that is routed"),
        ("-r", 3, "simulations"),
    ):
        parser.add_argument(
            option, type=count, default=number, metavar="N", help=f"{what} ({number})"
        )
    parser.add_argument(
        "--reuse", type=float, default=0.9, metavar="X", help="share of a prompt in a cache (0.9)"
    )
    parser.add_argument("--card", default="rtx-4090", metavar="NAME", help="(rtx-4090)")
    for option, default_of, what in (
        ("--gpu-memory", None, "bytes (the card's)"),
        ("--gpu-bandwidth", None, "bytes a second, beside --gpu-rate, of a card that is given"),
        ("--gpu-rate", None, "operations a second"),
        ("--cpu-bandwidth", None, "beside --cpu-rate (measured)"),
        ("--cpu-rate", None, "operations a second, of float32 (measured)"),
        ("--link", 31.5e9, "bytes a second between them (31.5e9)"),
        ("--latency", 1e-5, "seconds of a transfer beside (1e-5)"),
    ):
        parser.add_argument(option, type=positive, default=default_of, metavar="X", help=what)
    for name, default, what in (
        ("weights", "int4", "of the layers"),
        ("head", "float16", "of embedding and output matrix"),
        ("kv", "float16", "of the cache"),
        ("compute", "float16", "whose rate counts, on the card"),
    ):
        parser.add_argument(f"--{name}", choices=TYPES, default=default, help=f"{what} ({default})")
    parser.add_argument(
        "--routing", choices=("uniform", "zipf", "measured"), default="uniform", help="(uniform)"
    )
    parser.add_argument("--zipf", type=positive, metavar="S", help="exponent (fitted)")
    parser.add_argument(
        "--traced", default="tiny-moe", metavar="PATH", help="whose router is measured (tiny-moe)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(0)")
    parser.add_argument("-t", "--threads", type=count, metavar="N", help="threads (all)")
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print rows of what is to be shown."""
    check_plot(options.plot)
    if options.seed < 0:
        raise RequestError(f"--seed: {options.seed} is below 0")
    if options.show == "experts":
        if not 1 <= min(options.passes) <= max(options.passes) <= options.tokens:
            raise RequestError(f"--passes: a pass has 1 to {options.tokens} tokens; raise --tokens")
        rows = experts.rows_of(options)
        return write_and_draw(
            options.output, options.plot, experts.COLUMNS, ABOUT[:4], rows, experts.panels
        )
    offload, about = offload_of(options)
    if options.show == "crossovers":
        rows = crossovers(options, offload, about)
        return write_and_draw(
            options.output, options.plot, CROSSOVERS, ABOUT, rows, crossover_panels
        )
    wrong: list[str] = []

    def watched_rows() -> Iterator[Row]:
        for row in totals(options, offload, about):
            least, most = row["simulated_least"], row["simulated_most"]
            if not least * (1 - TOLERANCE) <= row["total_seconds"] <= most * (1 + TOLERANCE):
                wrong.append(f"{row['placement']} at {row['prompt']}: {row['off']:.1%}")
            yield row

    code = write_and_draw(
        options.output, options.plot, PLACEMENTS, ABOUT, watched_rows(), total_panels
    )
    if wrong:
        print(f"bitforbit: not what was simulated: {'; '.join(wrong)}", file=sys.stderr)
    return FAILED if wrong and code == OK else code


def totals(options: argparse.Namespace, offload: Offload, about: dict[str, Any]) -> Iterator[Row]:
    """Each placement, by the length of the prompt, without and with reuse."""
    import numpy as np

    from reference.measure.machine import Spread
    from reference.measure.placement import reused
    from reference.measure.turns import fields

    told = placements_of(options, offload.config)
    cases = [(p, reuse) for p in options.p for reuse in dict.fromkeys((0.0, options.reuse))]
    hit = [float(law.distinct(np.array([options.batch]))[0]) for law in offload.laws if law]
    with watched("simulations", len(cases) * options.r) as advance:
        for prompt, reuse in cases:
            held = reused(prompt, reuse)
            runs = []
            for number in range(options.r):
                seed = options.seed + number
                runs.append(offload.simulated(told, prompt, options.reply, held, seed))
                advance()
            for placement, seconds in zip(told, zip(*runs, strict=True), strict=True):
                gpu, cpu = offload.bytes_of(placement, prompt + options.reply)
                spread = Spread.of(seconds)
                total = offload.total_seconds(placement, prompt, options.reply, held)
                yield {
                    **about,
                    "placement": str(placement),
                    "n_cpu_moe": placement.n_cpu_moe,
                    "gpu_bytes": gpu,
                    "cpu_bytes": cpu,
                    "fits": offload.fits(placement, prompt + options.reply),
                    "prompt": prompt,
                    "reuse": reuse,
                    "cache_n": held,
                    "prompt_n": prompt - held,
                    "experts_hit": sum(hit) / len(hit),
                    "decode_seconds": offload.decode_seconds(placement, prompt),
                    "prefill_seconds": offload.prefill_seconds(placement, prompt, held),
                    "shipped": offload.shipped_share(placement, prompt, held),
                    "total_seconds": total,
                    "repetitions": spread.repetitions,
                    **fields("simulated", spread),
                    "off": total / spread.median - 1,
                }


def crossovers(
    options: argparse.Namespace, offload: Offload, about: dict[str, Any]
) -> Iterator[Row]:
    """Any two placements, without and with reuse."""
    from reference.measure.placement import crossover, reused

    told = placements_of(options, offload.config)
    most = offload.config.max_positions - options.reply
    pairs = list(combinations(told, 2))
    if not pairs:
        raise RequestError("-n: a crossover is one of two placements; give two at least")
    reuses = dict.fromkeys((0.0, options.reuse))
    with watched("pairs", len(pairs) * len(reuses)) as advance:
        for reuse in reuses:

            @cache
            def seconds(placement: Placement, prompt: int, reuse: float = reuse) -> float:
                if not offload.fits(placement, prompt + options.reply):
                    return math.inf
                held = reused(prompt, reuse)
                return offload.total_seconds(placement, prompt, options.reply, held)

            for pair in pairs:
                found = crossover(seconds, pair, most)
                advance()
                yield {
                    **about,
                    "first": str(pair[0]),
                    "second": str(pair[1]),
                    "reuse": reuse,
                    "faster": None if found.first is None else str(found.first),
                    "length": found.length,
                    "most": most,
                    "repetitions": about["cpu_repetitions"],
                }


def total_panels(rows: Sequence[Row]) -> list[Panel]:
    """Time of a reply by the length of the prompt, and bytes of each memory."""
    found = []
    for reuse, some in grouped(rows, "reuse").items():
        lines = [
            drawn(name or some[0]["placement"], mine, "prompt", "total_seconds")
            for name, mine in grouped(some, "placement").items()
        ]
        title = f"a reply of {some[0]['reply']} tokens" + (f", reuse {reuse}" if reuse else "")
        found.append(Panel(title, "tokens of the prompt", "s", lines, "xy"))
    longest = max(row["prompt"] for row in rows)
    last = [row for row in rows if row["prompt"] == longest and row["reuse"] == rows[0]["reuse"]]
    names = [row["placement"] for row in last]
    bars = [
        Line(pool, names, [row[key] / 1e9 for row in last], kind="bars")
        for pool, key in (("card", "gpu_bytes"), ("CPU", "cpu_bytes"))
    ]
    memory = rows[0]["gpu_memory"]
    levels = {} if memory is None else {"the card holds": memory / 1e9}
    return [*found, Panel("memory", "layers with the CPU", "GB", bars, levels=levels)]


def crossover_panels(rows: Sequence[Row]) -> list[Panel]:
    """From what length the other of two placements is faster."""
    some = [row for row in rows if row["length"] is not None]
    lines = [
        Line(
            name or f"reuse {rows[0]['reuse']:g}",
            [f"{row['first']} and {row['second']}" for row in mine],
            [row["length"] for row in mine],
            kind="bars",
        )
        for name, mine in grouped(some, "reuse").items()
    ]
    return [Panel("crossover", "", "tokens of the prompt", lines, "y" if lines else "")]
