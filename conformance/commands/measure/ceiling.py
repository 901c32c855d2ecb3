"""`bitforbit ceiling`: how fast a model could be on a machine, and how near a measurement comes."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.commands.common import count, numbers, positive
from conformance.commands.measure.models import (
    TYPES,
    config_digest,
    config_of,
    fitting,
    threads_of,
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
    from reference.config import ModelConfig
    from reference.measure.ceiling import Hardware, Storage

PREFILLS, DEPTHS = (512, 2048), (0, 1024)
"""Lengths where none are asked for."""

DESCRIPTION = """\
The roofline of a model: operations and bytes of a prefill and of a decode step, what bounds each,
tokens a second at most, and the batch from which decoding is bound by compute.

  bitforbit ceiling --model PATH                        on this machine, measured now
  bitforbit ceiling --model PATH --card h100-sxm --weights int4 -d 0,4096 -b 1,64
  bitforbit ceiling --model PATH --bandwidth 400e9 --rate float16=50e12
  bitforbit ceiling --model PATH --bench bench.jsonl    what was measured, as a share of it

A folder with a config.json is enough, but for --bench. Here, values are float64, as the exact
arithmetic keeps them; on a card they are float16, unless told otherwise.
"""

ABOUT = ("cpu", "cores", "blas", "system", "model", "digest", "hardware", "source")
PARTS = ("median", "least", "most")
ABOVE = (
    "bitforbit: a share above 100 % is no speed but a roofline that is too low: other programs ran "
    "while it was measured (measure it again on an idle machine), it is of another machine, or the "
    "model is so small that it stays in the CPU's caches, which are faster than memory"
)
COLUMNS: Columns = {
    **{name: partial(shown, name=name) for name in ("weights", "kv", "compute", "threads")},
    **{name: partial(shown, name=name) for name in ("test", "batch", "cache_n", "prompt_n")},
    "GFLOP": lambda row: f"{row['operations'] / 1e9:.4g}",
    "MB": lambda row: f"{row['bytes'] / 1e6:.4g}",
    "FLOP/byte": lambda row: f"{row['intensity']:.3g}",
    "ridge point, FLOP/byte": lambda row: f"{row['balance']:.3g}",
    "bound": partial(shown, name="bound"),
    "ms": lambda row: f"{1000 * row['seconds']:.4g}",
    "t/s at most": lambda row: f"{row['rate']:.4g}",
    "compute-bound from batch": lambda row: (
        "" if row["prompt_n"] > 1 else str(row["turning_batch"] or "never")
    ),
    "GB/s": partial(span, name="bandwidth", form=".1f", unit=1e-9),
    "GFLOP/s": partial(span, name="compute_rate", form=".0f", unit=1e-9),
    "runs": partial(shown, name="repetitions"),
}
SHARES: Columns = {
    "digest": lambda row: (row["digest"] or "-")[:12],
    **{
        name: partial(shown, name=name)
        for name in ("arithmetic", "weights", "attention", "threads")
    },
    **{name: partial(shown, name=name) for name in ("test", "cache", "cache_n", "prompt_n")},
    "t/s": partial(span, name="rate"),
    "ms to first token": partial(span, name="ttft", unit=1000),
    "runs": partial(shown, name="repetitions"),
    "t/s at most": lambda row: f"{row['ceiling_rate']:.4g}",
    "share": partial(span, name="share", form=".1%"),
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "ceiling", help="the roofline of a model and a machine", description=DESCRIPTION, **style
    )
    parser.add_argument(
        "-m", "--model", default="tiny-dense", metavar="PATH", help="default tiny-dense"
    )
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--card", metavar="NAME", help="h200-sxm, h100-sxm, a100-sxm-80gb, ...")
    machine.add_argument("--bandwidth", type=positive, metavar="B/S", help="bytes a second")
    parser.add_argument(
        "--rate",
        type=_rate,
        action="append",
        metavar="TYPE=FLOP/S",
        help="operations a second, beside --bandwidth",
    )
    for name, what in (
        ("weights", "of the layers"),
        ("head", "of the output matrix"),
        ("kv", "of the cache"),
        ("compute", "whose rate counts"),
    ):
        parser.add_argument(f"--{name}", choices=TYPES, help=what)
    for option, default, what in (
        (["-p"], None, "tokens of a prefill; 0 for none (512,2048, as far as the context goes)"),
        (["-d"], None, "tokens that the cache holds before (0,1024, as far as the context goes)"),
        (["-b", "--batch"], "1", "sequences that decode together; 0 for none (1)"),
    ):
        parser.add_argument(*option, type=numbers, default=default, metavar="N,..", help=what)
    parser.add_argument("-t", "--threads", type=count, metavar="N", help="measured with (all)")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="json or jsonl of a bench")
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def _rate(text: str) -> tuple[str, float]:
    kind, _, value = text.partition("=")
    if kind not in TYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not TYPE=FLOP/S, as float16=50e12")
    return kind, positive(value)


def run(options: argparse.Namespace) -> int:
    """Count, measure where that is wanted, and print rows."""
    from reference.measure.bench import read_rows
    from reference.measure.ceiling import PRESETS, Ceiling
    from reference.measure.machine import this_machine

    check_plot(options.plot)
    folder = model_folder(options.model)
    config, threads = config_of(folder), threads_of(options)
    benched = read_rows(options.bench) if options.bench is not None else []
    stored = storage(options)
    if not benched:  # refused before anything is measured
        options.p, options.d = lengths_of(options, config.max_positions)
        Ceiling(config, stored, PRESETS["h200-sxm"]).check(max(*options.p, 1), max(options.d))
    if benched:
        hardware_of = cache(partial(_hardware, options))
        rows = shares(options, folder, config, lambda n: hardware_of(n or threads), benched)
        said = ("cpu", *ABOUT[-2:])
        return write_and_draw(options.output, options.plot, SHARES, said, rows, share_panels)
    hardware = _hardware(options, threads)
    about = {
        **asdict(this_machine()),
        "model": folder.resolve().name,
        "digest": config_digest(config),
        "hardware": hardware.name,
        "source": hardware.source,
        "threads": None if hardware.spreads is None else threads,
    }
    rows = _rows(options, config, hardware, about)
    return write_and_draw(options.output, options.plot, COLUMNS, ABOUT, rows, panels)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """The roofline, and where each pass lies under it."""
    bandwidth, rate = (rows[0][f"{name}_median"] for name in ("bandwidth", "compute_rate"))
    at = [row["intensity"] for row in rows]
    turn = rate / bandwidth
    grid = sorted({min(*at, turn) / 2, *at, turn, 2 * max(*at, turn)})
    roof = Line("the machine at most", grid, [min(rate, x * bandwidth) for x in grid])
    passes = [
        Line(
            f"{row['test']}, batch {row['batch']}",
            [row["intensity"]],
            [row["operations"] / row["seconds"]],
            kind="points",
        )
        for row in rows
    ]
    return [Panel("roofline", "FLOP a byte", "FLOP/s", [roof, *passes], "xy")]


def share_panels(rows: Sequence[Row]) -> list[Panel]:
    """What part of its ceiling each row of a bench reaches."""
    arms = grouped(rows, "arithmetic", "weights", "attention", "memory", "threads", "role")
    lines = [series(name, arm, "test", "share", "bars") for name, arm in arms.items()]
    return [Panel("share of the ceiling", "test", "share", lines)]


def lengths_of(options: argparse.Namespace, context: int) -> tuple[list[int], list[int]]:
    """Lengths of prefills, and depths: as asked for, else those that fit a context."""
    longest = PREFILLS[0] if options.p is None else max(options.p)
    depths = options.d or [n for n in DEPTHS if n + longest <= context] or [0]
    return options.p or fitting(PREFILLS, context - max(depths)), depths


def storage(options: argparse.Namespace) -> Storage:
    """How values are stored, as far as it is told."""
    from reference.measure.ceiling import Storage

    here = options.card is None and options.bandwidth is None
    plain = "float64" if here else "float16"
    weights, compute = options.weights or plain, options.compute or plain
    head = options.head or (plain if weights in ("int4", "int8") else weights)
    return Storage(weights, head, options.kv or plain, compute, compute)


def _hardware(options: argparse.Namespace, threads: int) -> Hardware:
    from reference.measure.ceiling import PASSES, Hardware, card, measured_here

    if (options.rate is None) != (options.bandwidth is None):
        raise RequestError("--bandwidth, --rate: each needs the other")
    if options.card is not None:
        return card(options.card)
    if options.bandwidth is not None:
        return Hardware("as given", options.bandwidth, dict(options.rate), "given")
    with watched("measuring", 3 * (PASSES + 1)) as advance:
        return measured_here(threads, on_run=advance)


def _rows(
    options: argparse.Namespace, config: ModelConfig, hardware: Hardware, about: Row
) -> Iterator[Row]:
    """Prefills by length and decode steps by batch, at each depth."""
    from reference.measure.ceiling import Ceiling

    stored = storage(options)
    ceiling = Ceiling(config, stored, hardware)
    passes = [(1, p, d) for d, p in itertools.product(options.d, options.p) if p]
    passes += [(b, 1, d) for d, b in itertools.product(options.d, options.batch) if b]
    for sequences, tokens, depth in passes:
        yield {
            **about,
            **asdict(stored),
            **ceiling.row(sequences, tokens, depth),
            **_speeds(hardware, stored.compute),
        }


def _speeds(hardware: Hardware, precision: str) -> dict[str, Any]:
    """The machine's own figures, with their spread and repetitions where they were measured."""
    told: dict[str, Any] = {"repetitions": None}
    plain = {"bandwidth": hardware.bandwidth, "compute_rate": hardware.rate(precision)}
    for name, key in (("bandwidth", "bandwidth"), ("compute_rate", precision)):
        found = None if hardware.spreads is None else hardware.spreads[key]
        for part in PARTS:
            told[f"{name}_{part}"] = plain[name] if found is None else getattr(found, part)
        told["repetitions"] = None if found is None else found.repetitions
    return told


def shares(
    options: argparse.Namespace,
    folder: Path,
    config: ModelConfig,
    hardware_of: Callable[[int | None], Hardware],
    benched: list[dict[str, Any]],
) -> Iterator[Row]:
    """Each row of a bench, with its ceiling, of as many threads. Raises RequestError.

    That is for a row of another model, or of another machine than the one that is measured.
    """
    from reference.measure.ceiling import EXACT, FAST, FLOAT32, Ceiling
    from reference.model import load_model

    digest = cache(lambda weights, arithmetic: load_model(folder, weights, arithmetic).digest)
    kinds = {("exact", "exact"): EXACT, ("exact", "fast"): FAST, ("float32", "fast"): FLOAT32}
    told, above = storage(options), False
    for number, row in enumerate(benched, 1):
        where = f"{options.bench}: row {number}"
        prompt, held = row["prompt_n"], row["cache_n"]
        if prompt is None or held is None:  # a server that does not say: what was sent
            prompt, held = max(row["n_prompt"], 1), row["n_depth"]
        decodes = row["n_output"] - (row["n_prompt"] == 0)
        if min(prompt - 1, decodes) < 0:
            raise RequestError(f"{where} is incomplete or wrong (no token was computed)")
        first = decode = told
        if row["server"] is None:
            kind = row["arithmetic"], row["attention"]
            if kind not in kinds:
                raise RequestError(f"{where} is incomplete or wrong (no model runs as {kind})")
            first = kinds[kind]
            decode = EXACT if first is FAST else first
            if row["digest"] != digest(row["weights"], row["arithmetic"]):
                raise RequestError(f"{where} is not of the model {folder.name}; give its own")
        hardware = hardware_of(row["threads"])
        if hardware.spreads is not None and hardware.name != row["cpu"]:
            raise RequestError(
                f"{where} was measured on {row['cpu']}, and this is {hardware.name}; give --card, "
                "or --bandwidth and --rate"
            )
        after = Ceiling(config, decode, hardware)
        after.check(prompt + decodes, held)
        seconds = Ceiling(config, first, hardware).seconds(prompt, held)
        seconds += sum(after.seconds(1, held + prompt + i) for i in range(decodes))
        most = (prompt + decodes) / seconds
        yield {
            **row,
            "hardware": hardware.name,
            "source": hardware.source,
            "ceiling_rate": most,
            **{f"share_{part}": row[f"rate_{part}"] / most for part in PARTS},
        }
        above = above or row["rate_median"] > most
    if above:
        print(ABOVE, file=sys.stderr)
