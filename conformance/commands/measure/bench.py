"""`bitforbit bench`: how fast prefill and decode are, here or behind HTTP."""

from __future__ import annotations

import argparse
import itertools
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from conformance.commands.common import MODES, count, numbers
from conformance.commands.measure.models import check_threads, fitting
from conformance.commands.measure.plot import Panel, add_plot, grouped, series, write_and_draw
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched
from conformance.commands.memory import PASS as LIMITED_PASS
from conformance.paths import model_folder
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.measure.bench import Arm, Bench, Local, Trial

DESCRIPTION = """\
Measure prefill (pp), generation (tg) and both (pp+tg), at depths of the cache (@ d), in tokens a
second and time to the first token. Lists, split by commas, are tried in all combinations; their
arms take turns, and ratios are medians of paired runs to the first arm. Where there are several,
the first runs twice: that ratio (`do nothing`) is noise.

  bitforbit bench --model PATH -p 512 -n 128 -pg 512,128 -d 0,1024,4096 -t 1,2 -r 5
  bitforbit bench --arithmetic exact,float32 --attention exact,fast --weights float32,int4
  bitforbit bench --memory none,1GiB,512MiB -p 512 -n 16
  bitforbit bench --server http://127.0.0.1:8080 --cold -o jsonl > bench.jsonl

--memory is that of `generate`: layers are made one at a time of the mapped file, and as many stay
as the limit has room for. Each limit is held as if its arm were alone. The exact arithmetic has the
same bits under every limit; in float32 the sums of the output head may have another order
(SPEC 12.3).

A row is `warm` where any prompt token came from a cache, `cold` where none did, and `unknown` where
a server does not say.
"""

PROMPT, OUTPUT = 512, 128
"""Tokens of a test where none are asked for."""

ABOUT = ("cpu", "cores", "blas", "numpy", "system", "server", "model")
COLUMNS: Columns = {
    "digest": lambda row: (row["digest"] or "-")[:12],
    **{name: partial(shown, name=name) for name in ("arithmetic", "weights", "attention")},
    "memory": lambda row: row["memory"] or ("none" if row["server"] is None else "-"),
    **{name: partial(shown, name=name) for name in ("threads", "test", "cache")},
    **{name: partial(shown, name=name) for name in ("cache_n", "prompt_n")},
    "t/s": lambda row: f"{row['rate_mean']:.2f} ± {row['rate_deviation']:.2f}",
    "t/s, median": partial(span, name="rate"),
    "ms to first token": partial(span, name="ttft", unit=1000),
    "runs": partial(shown, name="repetitions"),
    "to the first arm": lambda row: (
        f"{row['role']} {span(row, 'ratio', '.3f')}".strip() if row["role"] != "first" else "first"
    ),
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    bench = commands.add_parser("bench", help="measure speed", description=DESCRIPTION, **style)
    where = bench.add_mutually_exclusive_group()
    where.add_argument(
        "-m", "--model", default="tiny-dense", metavar="PATH", help="default tiny-dense"
    )
    where.add_argument("--server", metavar="URL", help="measure a llama-server, or one like it")
    for name, default, what in (
        ("-p", None, f"tokens of a prompt; 0 for none ({PROMPT}, or what the context has)"),
        ("-n", None, f"tokens generated; 0 for none ({OUTPUT}, or what the context has)"),
        ("-d", "0", "tokens that the cache holds before"),
    ):
        bench.add_argument(name, type=numbers, default=default, metavar="N,..", help=what)
    bench.add_argument(
        "-pg", type=_pair, action="append", default=[], metavar="P,N", help="a prompt, then tokens"
    )
    bench.add_argument("-t", "--threads", type=numbers, metavar="N,..", help="threads (all)")
    bench.add_argument("-r", type=int, default=5, metavar="N", help="repetitions (5)")
    bench.add_argument("--no-warmup", action="store_true", help="keep the first run too")
    for name, default, among in (
        ("arithmetic", "exact", ("exact", "float32")),
        ("attention", "fast", ("exact", "fast")),
        ("weights", "float32", MODES),
    ):
        kind = partial(_names, among=among)
        told = f"{', '.join(among)} ({default})"
        bench.add_argument(f"--{name}", type=kind, default=default, metavar="A,..", help=told)
    bench.add_argument(
        "--memory",
        type=memories,
        default=[None],
        metavar="none|SIZE,..",
        help="limits, as 512MiB or 4GiB; none: all layers in memory (none)",
    )
    bench.add_argument(
        "--cold", action="store_true", help="prompts to the server share no prefix, else are alike"
    )
    bench.add_argument(
        "--api", choices=("llama", "openai"), help="/completion (llama), or /v1/completions"
    )
    bench.add_argument(
        "--vocab", type=count, metavar="N", help="token ids sent are below (what it says, or 256)"
    )
    add_form(bench)
    add_plot(bench)
    bench.set_defaults(run=run)


def _pair(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9][0-9]{0,8},[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of whole numbers, as 512,128")
    prompt, output = map(int, text.split(","))
    return prompt, output


def memories(text: str) -> list[str | None]:
    """A list of limits, each once; None is no limit."""
    from reference.memory import bytes_of

    limits = [None if part == "none" else part for part in dict.fromkeys(text.split(","))]
    try:
        for limit in limits:
            if limit is not None:
                bytes_of(limit)
    except RequestError as error:
        raise argparse.ArgumentTypeError(f"{error}, or none") from None
    return limits


def _names(text: str, among: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if wrong := [name for name in names if name not in among]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(among)}")
    return names


def run(options: argparse.Namespace) -> int:
    """Measure, and print each row as it is there."""
    if options.server is None and (options.cold or options.vocab or options.api):
        raise RequestError(
            "--cold, --vocab, --api: they are for --server; here every prompt is new"
        )
    if options.server is not None:
        if options.memory != [None]:
            raise RequestError("--memory: it is of a model here, not of --server")
        return measure(options, [_server(options)], trials_of(options))
    arms = _local(options)
    return measure(options, arms, trials_of(options, arms[0].model.config.max_positions))


def measure(options: argparse.Namespace, arms: Sequence[Arm], trials: Sequence[Trial]) -> int:
    """Measure the arms, and print each row as it is there."""
    from reference.measure.bench import Bench

    bench = Bench(arms, trials, options.r, 0 if options.no_warmup else 1)
    rows = _rows(bench)
    return write_and_draw(options.output, options.plot, COLUMNS, ABOUT, rows, panels)


def _rows(bench: Bench) -> Iterator[Row]:
    from reference.measure.machine import this_machine

    machine = this_machine()
    with watched("runs", bench.runs) as advance:
        for row in bench.rows(advance):
            yield row.figures(machine)


ARM = ("model", "arithmetic", "weights", "attention", "memory", "threads", "server")


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Rates by test, ratios to the first arm, and where there are several, by length and depth."""
    arms = grouped([row for row in rows if row["role"] != "do nothing"], *ARM)
    rates = [series(name, arm, "test", "rate", "bars") for name, arm in arms.items()]
    found = [Panel("speed", "test", "tokens/s", rates, "y")]
    ratios = grouped([row for row in rows if "ratio_median" in row], *ARM, "role")
    if ratios:
        lines = [series(name, arm, "test", "ratio", "bars") for name, arm in ratios.items()]
        title = "to the first arm, paired"
        found.append(Panel(title, "test", "ratio", lines, levels={"the first arm": 1.0}))
    sizes = (
        ("prefill by length", "n_prompt", "n_output", "n_depth"),
        ("generation by depth", "n_depth", "n_prompt", "n_output"),
    )
    for title, x, without, apart in sizes:
        mine = {name: [row for row in arm if not row[without]] for name, arm in arms.items()}
        if len({row[x] for arm in mine.values() for row in arm}) > 1:
            lines = [
                series(f"{name} {part}".strip(), group, x, "rate")
                for name, arm in mine.items()
                for part, group in grouped(arm, apart).items()
            ]
            found.append(Panel(title, "tokens", "tokens/s", lines))
    return found


def trials_of(options: argparse.Namespace, context: int | None = None) -> list[Trial]:
    """The tests that the options ask for, depth by depth; else those that fit a context."""
    from reference.measure.bench import Trial

    room = max(PROMPT, OUTPUT) if context is None else context - max(options.d)
    prompts = fitting([PROMPT], room) if options.p is None else options.p
    outputs = fitting([OUTPUT], room) if options.n is None else options.n
    kinds = [(p, 0) for p in prompts if p] + [(0, n) for n in outputs if n] + options.pg
    return [Trial(prompt, output, depth) for depth in options.d for prompt, output in kinds]


def _local(options: argparse.Namespace) -> list[Local]:
    """Every combination once; float32 arithmetic has one attention alone (SPEC 1.4)."""
    from reference.measure.bench import PASS, Local
    from reference.model import AttentionKind, load_model
    from reference.threads import thread_count

    folder = model_folder(options.model)
    arms: list[Local] = []
    threads = options.threads or [thread_count()]
    for wanted in threads:
        check_threads(wanted)
    asked = [
        one
        for one in itertools.product(options.arithmetic, options.weights, options.memory)
        if one[0] == "exact" or "fast" in options.attention
    ]
    # A limit is of all that the process holds: what has none is loaded last.
    models = {
        one: load_model(folder, one[1], one[0], one[2])
        for one in sorted(asked, key=lambda one: one[2] is None)
    }
    name = Path(folder).resolve().name
    for arithmetic, weights, memory in asked:
        kinds = [kind for kind in get_args(AttentionKind) if kind in options.attention]
        model = models[arithmetic, weights, memory]
        most = PASS if memory is None else LIMITED_PASS
        arms += [
            Local(model, name, arithmetic, weights, kind, wanted, memory=memory, most=most)
            for kind, wanted in itertools.product(
                ["fast"] if arithmetic == "float32" else kinds, threads
            )
        ]
    if not arms:
        raise RequestError("--attention: float32 arithmetic has fast attention alone; add fast")
    return arms


def _server(options: argparse.Namespace) -> Arm:
    """The server that is asked for, once it has told what it is."""
    if find_spec("httpx") is None:
        raise RequestError("--server: it needs httpx; pip install 'bitforbit[http]'")
    import httpx
    import numpy as np

    from reference.measure.server import LLAMA, OPENAI, Prompts, Server, about, fingerprint

    try:
        client = httpx.Client(base_url=options.server, timeout=httpx.Timeout(10, read=600))
    except (httpx.InvalidURL, ValueError) as error:
        raise RequestError(f"--server: {options.server} is no address ({error})") from error
    name, vocabulary = about(client)
    rng = np.random.default_rng(secrets.randbits(64) if options.cold else 0)
    prompts = Prompts(options.vocab or vocabulary or 256, options.cold, rng)
    api = OPENAI if options.api == "openai" else LLAMA
    return Server(client, prompts, name, fingerprint(client, name, prompts.new(1)), api)
