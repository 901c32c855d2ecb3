"""`bitforbit placement`: what it costs to leave experts with the CPU, and from what length on."""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

from conformance.commands.common import FAILED, OK, count, older_name
from conformance.commands.measure.bench import numbers
from conformance.commands.measure.ceiling import TYPES, config_of, positive
from conformance.commands.measure.models import prompt_of, threads_of
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
from conformance.paths import model_folder
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.config import ModelConfig
    from reference.experts import Routing
    from reference.measure.ceiling import Hardware
    from reference.measure.placement import Law, Offload, Placement

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
EXPERTS: Columns = {
    "model": partial(shown, name="of"),
    "digest": lambda row: row["digest"][:12],
    "experts": lambda row: f"{row['chosen']} of {row['experts']}",
    "tokens": partial(shown, name="tokens"),
    **{
        name: partial(lambda row, key: "-" if row[key] is None else f"{row[key]:.2f}", key=key)
        for name, key in (("uniform", "uniform"), ("zipf", "zipf"), ("loads", "loads"))
    },
    "exponent": lambda row: f"{row['exponent']:.3f}",
    "measured, apart": lambda row: _hits(row, "apart"),
    "together": lambda row: _hits(row, "together"),
    "batches": partial(shown, name="repetitions"),
}


def _hits(row: Row, name: str) -> str:
    if row[f"{name}_mean"] is None:
        return "-"
    return f"{row[f'{name}_mean']:.2f}; {span(row, name, form='.4g')}"


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
        rows = experts(options)
        return write_and_draw(options.output, options.plot, EXPERTS, ABOUT[:4], rows, expert_panels)
    offload, about = _offload(options)
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


# ----------------------------------------------------------------------------------------- options


def _config(options: argparse.Namespace) -> tuple[str, ModelConfig]:
    from reference.measure.placement import PUBLISHED, published

    if options.model in PUBLISHED:
        return options.model, published(options.model)
    folder = model_folder(options.model)
    return folder.resolve().name, config_of(folder)


def _digest(config: ModelConfig) -> str:
    return hashlib.sha256(repr(config).encode()).hexdigest()


def _router(config: ModelConfig) -> tuple[int, int]:
    """How many experts there are, and how many a token has. Raises RequestError."""
    if config.sparse is None or not any(config.sparse.layers):
        raise RequestError("model: it has no experts to be placed; give a sparse one")
    return config.sparse.router.experts, config.sparse.router.top_k


def _machine(options: argparse.Namespace) -> tuple[Hardware, Hardware, float | None]:
    """Card, CPU, and the card's memory. Raises RequestError."""
    from reference.measure.ceiling import PASSES, Hardware, card, measured_here

    for pool in ("gpu", "cpu"):
        given = [getattr(options, f"{pool}_{name}") for name in ("bandwidth", "rate")]
        if (given[0] is None) != (given[1] is None):
            raise RequestError(f"--{pool}-bandwidth, --{pool}-rate: each needs the other")
    gpu = card(options.card)
    if options.gpu_rate is not None:
        rates = {options.compute: options.gpu_rate}
        gpu = Hardware("as given", options.gpu_bandwidth, rates, "given")
    gpu.rate(options.compute)
    memory = options.gpu_memory or gpu.memory
    if options.cpu_rate is not None:
        rates = {"float32": options.cpu_rate}
        return gpu, Hardware("as given", options.cpu_bandwidth, rates, "given"), memory
    threads = threads_of(options)
    with watched("measuring", 3 * (PASSES + 1)) as advance:
        return gpu, measured_here(threads, on_run=advance), memory


def _traces(options: argparse.Namespace) -> tuple[dict[int, Routing], int, str]:
    """A real router's decisions for a text, by layer; its experts; and the model's digest."""
    import numpy as np

    from reference.measure.router import Tracing, joined
    from reference.model import load_model
    from reference.threads import limited_to

    model = load_model(model_folder(options.traced))
    tokens = np.array(prompt_of(model, options.tokens)[0], np.int64)
    tracing = Tracing(model, tokens, min(len(tokens), model.config.max_positions))
    found = []
    with limited_to(threads_of(options)), watched("windows", len(tracing.windows)) as advance:
        for window in tracing.run():
            found.append(window)
            advance()
    layers = {layer: joined([window[layer] for window in found]) for layer in found[0]}
    return layers, tracing.experts, model.digest


def _exponent(layers: dict[int, Routing], experts: int) -> float:
    import numpy as np

    from reference.measure.placement import zipf_exponent

    calls = [np.bincount(r.experts.ravel(), minlength=experts) for r in layers.values()]
    return zipf_exponent([each.tolist() for each in calls])


def _laws(options: argparse.Namespace, config: ModelConfig) -> tuple[tuple[Law | None, ...], str]:
    """How the tokens of each layer choose, and what that is called. Raises RequestError."""
    from reference.measure.placement import traced, uniform, zipf

    experts, chosen = _router(config)
    sparse = [config.sparse_of(index) is not None for index in range(config.layers)]
    if options.routing == "measured":
        layers, there, _ = _traces(options)
        k = next(iter(layers.values())).experts.shape[1]
        wanted = [index for index, has in enumerate(sparse) if has]
        if (there, k, list(layers)) != (experts, chosen, wanted):
            raise RequestError(
                f"--routing: {options.traced} has {k} of {there} experts in {len(layers)} layers, "
                f"and the model {chosen} of {experts} in {len(wanted)}; take uniform or zipf"
            )
        each = {layer: traced(routing, experts) for layer, routing in layers.items()}
        laws = tuple(each.get(index) for index in range(config.layers))
        return laws, f"measured, {options.traced}"
    law, name = uniform(experts, chosen), "uniform"
    if options.routing == "zipf":
        exponent, name = options.zipf, "zipf {:g}"
        if exponent is None:
            layers, there, _ = _traces(options)
            exponent, name = _exponent(layers, there), f"zipf {{:.3f}}, fitted to {options.traced}"
        law, name = zipf(experts, chosen, exponent), name.format(exponent)
    return tuple(law if has else None for has in sparse), name


def _offload(options: argparse.Namespace) -> tuple[Offload, dict[str, Any]]:
    """What is placed, and what all rows say."""
    from reference.measure.ceiling import Storage
    from reference.measure.machine import this_machine
    from reference.measure.placement import Offload, reused

    name, config = _config(options)
    experts, chosen = _router(config)
    reused(1, options.reuse)
    placements_of(options, config)
    longest = config.max_positions - options.reply
    if options.show == "placements" and not 1 <= min(options.p) <= max(options.p) <= longest:
        raise RequestError(
            f"-p: prompts have 1 to {longest} tokens, for a reply of {options.reply} in the "
            f"model's context of {config.max_positions}"
        )
    if longest < 2:
        raise RequestError(f"--reply: the model's context has {config.max_positions} positions")
    laws, routing = _laws(options, config)
    gpu, cpu, memory = _machine(options)
    stored = Storage(options.weights, options.head, options.kv, options.compute, options.compute)
    offload = Offload(
        *(config, stored, "float32", gpu, cpu, options.link, options.latency, laws),
        batch=options.batch,
        chunk=options.chunk,
        memory=memory,
    )
    return offload, {
        **asdict(this_machine()),
        "model": name,
        "digest": _digest(config),
        "experts": experts,
        "chosen": chosen,
        **{key: getattr(options, key) for key in ("weights", "head", "kv", "compute")},
        "card": gpu.name,
        "source": gpu.source,
        "gpu_memory": memory,
        "cpu_source": cpu.source,
        "threads": None if cpu.spreads is None else threads_of(options),
        **_spread(cpu, "bandwidth", cpu.bandwidth),
        **_spread(cpu, "float32", cpu.rate("float32"), "rate"),
        "cpu_repetitions": None if cpu.spreads is None else cpu.spreads["float32"].repetitions,
        **{key: getattr(options, key) for key in ("link", "latency")},
        "routing": routing,
        **{key: getattr(options, key) for key in ("batch", "reply", "chunk", "seed")},
    }


def _spread(cpu: Hardware, key: str, plain: float, name: str | None = None) -> dict[str, float]:
    found = None if cpu.spreads is None else cpu.spreads[key]
    parts = ("median", "least", "most")
    return {
        f"cpu_{name or key}_{part}": plain if found is None else getattr(found, part)
        for part in parts
    }


def placements_of(options: argparse.Namespace, config: ModelConfig) -> list[Placement]:
    """Those that are asked for. Raises RequestError."""
    from reference.measure.placement import Placement, from_none_to_all

    if options.n is None:
        return from_none_to_all(config.layers)
    told = [Placement.parse(text) for text in dict.fromkeys(options.n.split(","))]
    for placement in told:
        if placement.n_cpu_moe > config.layers:
            raise RequestError(
                f"-n: {placement} is out of range; the model has {config.layers} layers"
            )
    return told


# --------------------------------------------------------------------------------------------- rows


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


def experts(options: argparse.Namespace) -> Iterator[Row]:
    """How many experts a batch hits: of the model whose router is traced, and of the other one."""
    import numpy as np

    from reference.measure.machine import Spread, this_machine
    from reference.measure.placement import distinct_in, traced, uniform, zipf
    from reference.measure.turns import fields

    name, config = _config(options)
    placed = _router(config)
    layers, count_of, digest = _traces(options)
    k = next(iter(layers.values())).experts.shape[1]
    exponent = options.zipf or _exponent(layers, count_of)
    machine = {**asdict(this_machine()), "threads": threads_of(options)}
    models = [(options.traced, digest, count_of, k, layers), (name, _digest(config), *placed, None)]
    for of, its_digest, total, chosen, routed in models:
        laws = [traced(r, total) for r in (routed or {}).values()]
        for tokens in options.passes:
            at = np.array([tokens])
            told = {
                **machine,
                "of": of,
                "digest": its_digest,
                "experts": total,
                "chosen": chosen,
                "tokens": tokens,
                "uniform": float(uniform(total, chosen).distinct(at)[0]),
                "zipf": float(zipf(total, chosen, exponent).distinct(at)[0]),
                "exponent": exponent,
                "loads": float(np.mean([law.distinct(at)[0] for law in laws])) if laws else None,
            }
            hits: dict[str, Spread | None] = {"apart": None, "together": None}
            for way in hits if routed else ():
                assert routed is not None
                found = [distinct_in(r, total, tokens, way == "together") for r in routed.values()]
                hits[way] = Spread.of(np.concatenate(found).astype(float).tolist())
            some = hits["apart"]
            told["repetitions"] = None if some is None else some.repetitions
            yield {**told, **fields("apart", hits["apart"]), **fields("together", hits["together"])}


# ----------------------------------------------------------------------------------------- pictures


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


def expert_panels(rows: Sequence[Row]) -> list[Panel]:
    """Experts that a batch hits, by its size."""
    found = []
    for name, mine in grouped(rows, "of").items():
        lines = [
            Line(key, [row["tokens"] for row in mine], [row[key] for row in mine])
            for key in ("uniform", "zipf", "loads")
            if mine[0][key] is not None
        ]
        if mine[0]["apart_mean"] is not None:
            lines += [
                Line(
                    f"measured, {way}",
                    [row["tokens"] for row in mine],
                    [row[f"{way}_mean"] for row in mine],
                    [row[f"{way}_least"] for row in mine],
                    [row[f"{way}_most"] for row in mine],
                )
                for way in ("apart", "together")
            ]
        found.append(Panel(f"experts hit, {name or mine[0]['of']}", "tokens", "", lines, "x"))
    return found
