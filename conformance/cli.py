"""The command line: `bitforbit check`, `goldens`, `generate`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    closing,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conformance.commands import prefix
from reference.errors import BitforbitError, RequestError

if TYPE_CHECKING:
    from reference.model import Model

OK, FAILED, COULD_NOT_RUN = 0, 1, 2

DESCRIPTION = """\
The executable specification of LLM inference, and the suite that holds a backend to it.

  bitforbit check                        does this machine reproduce every golden, to the bit?
  bitforbit check my_backend.py          is my backend right?
  bitforbit generate --model PATH --prompt TEXT
  bitforbit schedule                     what does a long prompt do to others?
  bitforbit prefix                       what does reuse save, and what do moved chunks cost?
"""

CHECK = """\
Judge a backend by the goldens and the invariances.

BACKEND is a Python file that defines a class `Backend` (SPEC 17), or one of numpy (the reference
on this machine; the default), numpy-float32, torch, torch-float32. With --process it is instead
a program in any language that answers frames of safetensors over its standard input and output
(docs/protocol.md; examples/c and examples/node are two such programs).

A case is named <level>/<operation>/<name>:<rule>, for example kernel/linear/k33_t5:bits; a pattern
may leave out the rule. Exit code: 0 all passed that are implemented, 1 something failed or nothing
passed, 2 could not run.

  bitforbit check my_backend.py --level kernel
  bitforbit check my_backend.py --case 'kernel/attention/*'
  bitforbit check my_backend.py --case '*:gauge' --json report.json
  bitforbit check --process './my_backend --flag' --timeout 10
"""

SERVE = """\
Answer HTTP requests on 127.0.0.1, as llama-server (/completion) and OpenAI (/v1/completions,
/v1/chat/completions, /v1/models) do; also /health and /metrics. Needs the extra `serve`.

This is the reference that clients and adapters of other servers are tried against: correct and
bounded. It is not a production server.

  bitforbit serve --model fixtures/tiny-dense --port 8080
"""

CALIBRATE = """\
Try every known fault and every legitimate variant on the suite.

Each fault must fail a case, on the exact lane or over float32 in another order, and each variant
must pass all. Beside it stands what rtol 1e-2, NMSE 5e-4, cosine 0.999 and equal text would have
said of the same answers, and how often diagnosis names the right fault. Exit code: 0 all as it
must be, 1 a fault is missed or a variant accused.

  bitforbit calibrate
  bitforbit calibrate --area attention --json calibration.json
"""

GENERATE = """\
Generate text with a model folder (config.json, *.safetensors, tokenizer.json).

  bitforbit generate --model fixtures/tiny-dense --prompt "In the beginning"
  bitforbit generate --model PATH --prompt @prompt.txt -n 64 --temperature 0.8 --seed 7 --json
  bitforbit generate --model fixtures/tiny-dense --draft fixtures/tiny-draft --prompt "And God"
  bitforbit generate --model PATH --prompt @turn-2.txt --prompt-cache conversation.cache
"""

SCHEDULE = """\
Measure what one long prompt does to users who are in the middle of their answers: without it, with
it computed in one pass, and with it computed in chunks.

  bitforbit schedule
  bitforbit schedule --model PATH --long 4000 --users 4 --chunk 256 --plot schedule.svg
"""


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog="bitforbit", description=DESCRIPTION, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"bitforbit {version('bitforbit')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prefix.add(commands, {"formatter_class": raw})

    check = commands.add_parser(
        "check", help="judge a backend", description=CHECK, formatter_class=raw
    )
    check.add_argument("backend", nargs="?", metavar="BACKEND")
    check.add_argument(
        "--process", metavar="COMMAND", help="judge the program that this command line starts"
    )
    check.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="for each call of the program (default 60); a late one fails and is started again",
    )
    check.add_argument(
        "--level", action="append", default=[], help="only this level; may be repeated"
    )
    check.add_argument("--case", default="*", metavar="GLOB", help="only cases whose id matches")
    check.add_argument("--device", choices=("cpu", "cuda"), help="for the torch backends")
    check.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - is standard output"
    )
    check.add_argument(
        "--no-diagnosis", action="store_true", help="do not compare failures with known faults"
    )
    check.set_defaults(run=_check)

    calibrate = commands.add_parser(
        "calibrate",
        help="measure the suite itself",
        description=CALIBRATE,
        formatter_class=raw,
    )
    calibrate.add_argument("--area", metavar="AREA", help="only the faults of this area")
    calibrate.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    calibrate.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write the report as JSON; - is stdout"
    )
    calibrate.set_defaults(run=_calibrate)

    catalogue = commands.add_parser("faults", help="list or show the known faults")
    about = catalogue.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = about.add_parser("list", help="every fault in a line", description="List all faults.")
    listing.add_argument("--area", metavar="AREA", help="only those of this area")
    listing.set_defaults(run=_faults_list)
    one = about.add_parser("show", help="one fault", description="Show a fault and its code.")
    one.add_argument("fault", metavar="NAME", help="a fault's name")
    one.set_defaults(run=_faults_show)

    goldens = commands.add_parser("goldens", help="make, verify or show the goldens")
    actions = goldens.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action, text in (
        ("make", _make, "compute and write every golden"),
        ("verify", _verify, "compute every golden again and compare the bytes"),
    ):
        sub = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        sub.add_argument(
            "--folder", type=Path, help="the folder of goldens (default: the suite's own)"
        )
        sub.set_defaults(run=action)
    show = actions.add_parser(
        "show", help="show what a golden holds", description="Show what a golden holds."
    )
    show.add_argument("case", metavar="CASE", help="a golden's id, with or without a rule")
    show.add_argument(
        "--folder", type=Path, help="the folder of goldens (default: the suite's own)"
    )
    show.set_defaults(run=_show)

    generate = commands.add_parser(
        "generate", help="generate text", description=GENERATE, formatter_class=raw
    )
    generate.add_argument("--model", required=True, metavar="PATH", help="a model folder")
    generate.add_argument(
        "--prompt", required=True, metavar="TEXT|@FILE", help="the prompt, or a file of it"
    )
    generate.add_argument("-n", "--max-new-tokens", type=int, default=128, metavar="N")
    generate.add_argument("--weights", choices=("float32", "int4", "int4-row"), default="float32")
    generate.add_argument("--arithmetic", choices=("exact", "float32"), default="exact")
    generate.add_argument("--exact-prefill", action="store_true", help="never use fast attention")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0, help="keep the K likeliest; 0 keeps all")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest that sum up to P"
    )
    generate.add_argument(
        "--min-p", type=float, default=0.0, help="keep what has P times the likeliest's share"
    )
    generate.add_argument("--repetition-penalty", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    generate.add_argument(
        "--draft",
        metavar="ngram|PATH",
        help="speculate: drafts by n-gram lookup, or by a smaller model with the same vocabulary",
    )
    generate.add_argument(
        "--draft-tokens", type=int, default=4, metavar="N", help="drafted tokens of a pass (4)"
    )
    generate.add_argument(
        "--page-size", type=int, default=16, metavar="N", help="positions of a cache page (16)"
    )
    generate.add_argument(
        "--kv-dtype",
        choices=("float32", "float16", "bfloat16", "int8"),
        default="float32",
        help="what keys and values are rounded to (float32)",
    )
    generate.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="FILE",
        help="start from what FILE holds, if it exists, and write what was computed to it",
    )
    generate.add_argument("--json", action="store_true", help="print the result as one JSON object")
    generate.set_defaults(run=_generate)

    serve = commands.add_parser(
        "serve", help="answer HTTP requests", description=SERVE, formatter_class=raw
    )
    serve.add_argument("--model", required=True, metavar="PATH", help="a model folder")
    serve.add_argument("--alias", metavar="NAME", help="what requests call the model: its folder")
    serve.add_argument("--port", type=int, default=8080, help="0 takes any that is free")
    serve.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="instead of the model's own"
    )
    serve.add_argument("--weights", choices=("float32", "int4", "int4-row"), default="float32")
    serve.add_argument("--arithmetic", choices=("exact", "float32"), default="exact")
    serve.add_argument("--exact-prefill", action="store_true", help="never use fast attention")
    serve.add_argument(
        "--max-sequences", type=_count, default=256, metavar="N", help="at once; more get a 503"
    )
    serve.add_argument(
        "--max-body", type=_count, default=4 << 20, metavar="BYTES", help="more get a 413"
    )
    serve.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="for each request"
    )
    serve.set_defaults(run=_serve)

    schedule = commands.add_parser(
        "schedule", help="measure chunked prefill", description=SCHEDULE, formatter_class=raw
    )
    schedule.add_argument(
        "--model", default="tiny-dense", metavar="PATH", help="a model folder (default tiny-dense)"
    )
    schedule.add_argument("--long", type=int, default=4000, metavar="TOKENS", help="default 4000")
    schedule.add_argument("--users", type=int, default=4, metavar="N", help="default 4")
    schedule.add_argument("--chunk", type=int, default=256, metavar="TOKENS", help="default 256")
    schedule.add_argument("--trace", action="store_true", help="print every pass")
    schedule.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw who ran when, as .png or .svg"
    )
    schedule.add_argument("--json", action="store_true", help="print the figures as JSON")
    schedule.set_defaults(run=_schedule)
    return top


def _count(text: str) -> int:
    """A limit: a whole number above 0."""
    if not (text.isascii() and text.isdigit() and 0 < int(text[:20]) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    """A time limit: positive, and one that a clock can count."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 passed, 1 failed, 2 could not run."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except BitforbitError as error:
        print(f"bitforbit: {' '.join(str(error).split())}", file=sys.stderr)
        return COULD_NOT_RUN
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COULD_NOT_RUN
    except OSError as error:
        print(f"bitforbit: {' '.join(str(error).split())}", file=sys.stderr)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        print("bitforbit: interrupted", file=sys.stderr)
        return COULD_NOT_RUN
    return code


def _check(options: argparse.Namespace) -> int:
    from conformance import report
    from conformance.diagnosis import explain
    from conformance.paths import data_folder
    from conformance.rules import unit_roundoff
    from conformance.runner import LEVELS, Answers, Selection, count, run
    from conformance.runner import report as as_json

    unknown = [level for level in options.level if level not in LEVELS]
    if unknown:
        raise RequestError(f"--level: {unknown[0]!r} is none of {', '.join(LEVELS)}")
    folder = data_folder("goldens")
    selection = Selection(tuple(options.level), options.case)
    total = count(folder, selection)
    nothing = f"--case: no case matches {options.case!r}; `bitforbit check --json -` lists all ids"
    if total == 0:
        raise RequestError(nothing)
    write = _opened(options.json)
    to_stdout = options.json == "-"
    console = Console(stderr=to_stdout)
    results, started, seen = [], perf_counter(), set()
    answers: Answers = {}
    name, opened = _backend(options)
    try:
        # What a backend prints must not come between the lines of the report.
        with (
            opened as backend,
            _sigterm_interrupts(),
            redirect_stdout(sys.stderr),
            _progress(Console(stderr=True)) as progress,
        ):
            task = progress.add_task("checking", total=total)
            for result in run(backend, folder, selection, answers):
                results.append(result)
                seen.add(result.id.rsplit(":", 1)[0])
                progress.update(task, completed=len(seen), description=result.level)
            u = unit_roundoff(backend.numerics)
            progress.update(task, description="comparing with known faults")
            explanations = {} if options.no_diagnosis else explain(results, answers, folder, u)
    except KeyboardInterrupt:  # what was found so far is not lost
        if write is not None:
            write({**as_json(results), "interrupted": True})
        raise
    if not results:
        raise RequestError(nothing)
    if not to_stdout:
        report.show(console, name, results, perf_counter() - started, explanations)
    if write is not None:
        write(as_json(results, explanations))
    outcomes = {r.outcome for r in results}
    return OK if "pass" in outcomes and outcomes <= {"pass", "not implemented"} else FAILED


def _backend(options: argparse.Namespace) -> tuple[str, AbstractContextManager[Any]]:
    """The backend that was asked for, to be closed at the end, and the options that name it."""
    from conformance.backends import resolve, resolve_process

    if options.process is None:
        if options.timeout is not None:
            raise RequestError("--timeout: only programs have one; use it with --process")
        name = options.backend or "numpy"
        return name, nullcontext(resolve(name, options.device))
    if options.backend is not None or options.device is not None:
        raise RequestError("--process: it goes neither with a BACKEND nor with --device")
    name = f"--process {shlex.quote(options.process)}"
    if options.timeout is not None:
        name += f" --timeout {options.timeout:g}"
    return name, closing(resolve_process(options.process, options.timeout))


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM, which a CI sends, end a run as Ctrl-C does, with its report written."""
    if threading.current_thread() is not threading.main_thread():  # only there may one ask for it
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _opened(target: str | None) -> Callable[[Any], None] | None:
    """A writer of JSON to a file or to standard output, checked before the work is done."""
    if target is None:
        return None
    if target == "-":
        return lambda data: print(json.dumps(data, indent=1))
    path = Path(target)
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(f"--json: cannot write {target}; its folder must exist")
    if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
        return lambda data: _write(path, data, target)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise RequestError(f"--json: cannot write {target} ({error.strerror})") from error

    def write(data: Any) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            _write(temporary, data, target)
            os.replace(temporary, path)
        except OSError as error:
            raise RequestError(f"--json: cannot write {target} ({error.strerror})") from error
        finally:
            temporary.unlink(missing_ok=True)

    return write


def _write(path: Path, data: Any, target: str) -> None:
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise RequestError(f"--json: cannot write {target} ({error.strerror})") from error


def _calibrate(options: argparse.Namespace) -> int:
    from conformance import report
    from conformance.calibration import Calibration, FaultRow, as_json, measure
    from conformance.faults import areas, faults
    from conformance.paths import data_folder
    from conformance.variants import variants

    if options.area is not None and options.area not in areas():
        raise RequestError(f"--area: {options.area!r} is none of {', '.join(areas())}")
    if options.jobs is not None and options.jobs < 1:
        raise RequestError(f"--jobs: {options.jobs} is out of range; it must be 1 or more")
    write = _opened(options.json)
    to_stdout = options.json == "-"
    started, done = perf_counter(), None
    total = len(faults()) + len(variants())
    with _progress(Console(stderr=True)) as progress:
        task = progress.add_task("calibrating", total=total if options.area is None else None)
        for row in measure(data_folder("goldens"), options.area, options.jobs):
            if isinstance(row, Calibration):
                done = row
                break
            name = row.fault.name if isinstance(row, FaultRow) else row.variant.name
            progress.update(task, advance=1, description=name)
    if done is None:
        raise RequestError("calibrate: nothing was measured")
    if not to_stdout:
        report.show_calibration(Console(), done, perf_counter() - started)
    if write is not None:
        write(as_json(done))
    return FAILED if done.missed() or done.accused() else OK


def _faults_list(options: argparse.Namespace) -> int:
    from conformance import report
    from conformance.faults import area, areas, faults

    if options.area is not None and options.area not in areas():
        raise RequestError(f"--area: {options.area!r} is none of {', '.join(areas())}")
    report.list_faults(Console(), [f for f in faults() if options.area in (None, area(f))])
    return OK


def _faults_show(options: argparse.Namespace) -> int:
    import inspect

    from conformance.faults import area, description, fault
    from conformance.faults.fault import GITHUB

    found = fault(options.fault)
    print(f"{found.name}  ({area(found)}, {found.severity})")
    print(description(found))
    print(f"changes: {', '.join(found.operations)}")
    for thread in found.reports:
        print(f"report: {GITHUB}{thread}")
    print()
    print(inspect.getsource(found).rstrip())
    return OK


def _make(options: argparse.Namespace) -> int:
    from conformance.cases import recipes
    from conformance.make import make
    from conformance.paths import data_folder

    folder = options.folder or data_folder("goldens")
    console = Console(stderr=True)
    with _progress(console) as progress:
        task = progress.add_task("making goldens", total=sum(1 for _ in recipes()))
        for made, golden in enumerate(make(folder), 1):
            progress.update(task, completed=made, description=golden)
    console.print(f"{made} goldens in {folder}")
    return OK


def _verify(options: argparse.Namespace) -> int:
    from conformance.cases import recipes
    from conformance.make import verify
    from conformance.paths import data_folder

    folder = options.folder or data_folder("goldens")
    console = Console(stderr=True)
    different = []
    with _progress(console) as progress:
        task = progress.add_task("verifying goldens", total=sum(1 for _ in recipes()))
        for made, (golden, same) in enumerate(verify(folder), 1):
            progress.update(task, completed=made, description=golden)
            if not same:
                different.append(golden)
    for golden in different:
        print(f"differs: {golden}")
    print(
        f"{made - len(different)} goldens made again with the same bytes, {len(different)} differ"
    )
    return FAILED if different else OK


def _show(options: argparse.Namespace) -> int:
    from conformance.golden import read_all
    from conformance.paths import data_folder

    folder = options.folder or data_folder("goldens")
    wanted = options.case.rsplit(":", 1)[0]
    golden = next(read_all(folder, {wanted}), None)
    if golden is None:
        raise RequestError(
            f"{options.case}: no such golden; `bitforbit check --json -` lists all ids"
        )
    console = Console()
    console.print(f"[bold]{golden.id}[/]  SPEC {golden.section}  rules {', '.join(golden.rules)}")
    if golden.note:
        console.print(escape(golden.note))
    console.print(f"{golden.operation}({json.dumps(dict(golden.parameters))})", markup=False)
    for kind, arrays in (("in", golden.inputs), ("out", golden.outputs), ("gauge", golden.gauges)):
        for name, array in arrays.items():
            model = f"  x {golden.terms[name]}" if kind == "gauge" else ""
            console.print(f"{kind}.{name}: {array.dtype} {array.shape}{model}", markup=False)
            console.print(str(array), markup=False)
    return OK


def _generate(options: argparse.Namespace) -> int:
    from conformance.paths import model_folder
    from reference.engine import Engine, Options
    from reference.model import load_model
    from reference.sampling import Sampling

    prompt = _prompt(options.prompt)
    sampling = Sampling(
        options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty
    )
    model = load_model(model_folder(options.model), options.weights, options.arithmetic)

    def speak(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    engine = Engine(
        model,
        options.exact_prefill,
        page_size=options.page_size,
        kv_dtype=options.kv_dtype,
        draft=_draft(options.draft),
        draft_tokens=options.draft_tokens,
    )
    if options.prompt_cache is not None and options.prompt_cache.exists():
        engine.restore_cache(options.prompt_cache)
    wanted: Options = {"sampling": sampling, "seed": options.seed, "stop": options.stop}
    if not options.json:
        wanted["on_text"] = speak
    result = engine.generate(prompt, options.max_new_tokens, **wanted)
    if options.prompt_cache is not None:
        engine.save_cache(options.prompt_cache)
    times = result.timings
    if options.json:
        fields = {
            "text": result.text,
            "tokens": result.tokens,
            "stop": result.stop,
            "prompt_n": result.prompt_n,
            "cache_n": result.cache_n,
            "draft": {**vars(result.draft), "acceptance_rate": result.draft.acceptance_rate},
            "timings": vars(times),
        }
        print(json.dumps(fields))
        return OK
    print()
    first = times.time_to_first_token * 1000
    reused = f" and {result.cache_n} reused" if result.cache_n else ""
    drafts = ""
    if options.draft is not None:
        drafts = (
            f"; {result.draft.acceptance_rate:.0%} of {result.draft.drafted} drafted tokens "
            f"accepted, {result.draft.tokens_per_pass:.2f} tokens a pass"
        )
    print(
        f"{result.prompt_n} prompt tokens{reused}, first token after {first:.0f} ms "
        f"({times.prefill_rate:.0f} tokens/s); "
        f"{len(result.tokens)} tokens at {times.decode_rate:.0f} tokens/s{drafts}",
        file=sys.stderr,
    )
    return OK


def _draft(given: str | None) -> Literal["ngram"] | Model | None:
    """What --draft names: nothing, n-gram lookup, or a model that is loaded."""
    from conformance.paths import model_folder
    from reference.model import load_model

    if given is None:
        return None
    return "ngram" if given == "ngram" else load_model(model_folder(given))


def _serve(options: argparse.Namespace) -> int:
    from conformance.paths import model_folder
    from reference.engine import Engine
    from reference.model import load_model

    try:
        from reference.chat import ChatTemplate
        from reference.serve import Limits, create_app, listen, serve
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise RequestError(
            f"serve: the package {package} is missing; pip install 'bitforbit[serve]'"
        ) from None

    folder = model_folder(options.model)
    limits = Limits(options.max_body, options.max_sequences, options.timeout)
    with listen(options.port) as door:  # before the model is loaded, which may take a while
        model = load_model(folder, options.weights, options.arithmetic)
        template = ChatTemplate.load(folder, options.chat_template)
        name = options.alias or folder.resolve().name
        app = create_app(Engine(model, options.exact_prefill), name, template, limits)
        print(f"{name}: http://{':'.join(map(str, door.getsockname()))}", flush=True)
        with suppress(KeyboardInterrupt):  # the way to end a server
            serve(app, door)
    return OK


def _schedule(options: argparse.Namespace) -> int:
    from conformance.paths import model_folder
    from reference.measure.schedule import Experiment, computed, draw
    from reference.model import load_model

    if options.plot is not None and (
        options.plot.suffix not in (".png", ".svg") or not options.plot.parent.is_dir()
    ):
        raise RequestError(f"--plot: {options.plot} is no .png or .svg in a folder that exists")
    if options.plot is not None and find_spec("matplotlib") is None:
        raise RequestError("--plot: drawing needs matplotlib; install bitforbit[plot]")
    model = load_model(model_folder(options.model))
    experiment = Experiment(model, options.long, options.users, options.chunk)
    with _progress(Console(stderr=True)) as progress:
        task = progress.add_task("tokens", total=experiment.work)
        arms = list(experiment.arms(lambda done: progress.advance(task, computed(done))))
    if options.plot is not None:
        draw(arms, options.plot)
    if options.json:
        print(json.dumps([arm.figures() for arm in arms], indent=1))
        return OK
    table = Table(title="milliseconds; `between tokens` is over all users, from then on")
    for column in ("long prompt", "tokens a pass", "between tokens: p50", "p99", "longest"):
        table.add_column(column, justify="left" if column == "long prompt" else "right")
    for column in ("its first token after", "all tokens a second"):
        table.add_column(column, justify="right")
    for arm in arms:
        gaps = (arm.users.p50, arm.users.p99, arm.users.longest)
        first = "" if arm.long is None else f"{1000 * arm.long.timings.time_to_first_token:.0f}"
        table.add_row(
            arm.name,
            str(arm.budget),
            *(f"{1000 * gap:.1f}" for gap in gaps),
            first,
            f"{arm.throughput:.0f}",
        )
        if options.trace:
            print(f"{arm.name}:", *arm.trace.lines(), sep="\n")
    Console().print(table)
    same = all(arm.tokens == arms[0].tokens for arm in arms)
    print(f"users got {'the same tokens in all arms' if same else 'DIFFERENT TOKENS'}")
    return OK if same else FAILED


def _prompt(given: str) -> str:
    """The prompt's text; `@FILE` reads a file."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompt: cannot read {given[1:]} as UTF-8 text ({error})") from error


if __name__ == "__main__":
    sys.exit(main())
