"""`bitforbit goldens`: make, verify or show the goldens."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.markup import escape

from conformance.commands.common import (
    FAILED,
    MODES,
    OK,
    count,
    older_name,
    progress_bar,
    standard_output,
)
from conformance.commands.judging import add_case, nearest, no_case, patterns
from conformance.commands.workers import add_workers, crew_of
from conformance.golden import Array, OwnModel, id_of, read_all, read_manifest
from conformance.paths import data_folder, model_folder
from conformance.selection import Selection
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.cases.own import OwnGoldens
    from conformance.crew import Crew


class Making(Protocol):
    """Makes goldens, by itself or by a crew, and yields ids."""

    def __call__(self, *, crew: Crew | None) -> Iterator[str]:
        """Begin."""


DESCRIPTION = """\
Goldens: what an operation is given, and what it must answer (docs/golden-format.md).

  bitforbit goldens verify --workers 4                  every one again, its bytes compared
  bitforbit goldens verify --case 'kernel/rms_norm/*'   some
  bitforbit goldens show kernel/rms_norm/eps_1e-5       what one holds
  bitforbit goldens make --model PATH --prompts prompts.txt --out my-goldens
  bitforbit goldens locate my-goldens PATH              the model has moved to PATH
"""

MAKE = """\
Compute and write goldens: the suite's own, or with --model those of a model of yours.

For each prompt of the file these are its logits, fed whole, in chunks and token by token, the
greedy choice after each of its prefixes, and a greedy continuation, by the exact lane; and, unless
--no-bounds is given, how far they may lie from that at any declared precision, for which the model
runs some 200 times. A run that was stopped goes on where it was. Prompts come a line each, or in a
.jsonl file as objects with "prompt" or "tokens", and perhaps "name".

  bitforbit goldens make --model PATH --prompts prompts.txt --out my-goldens --workers 4
  bitforbit check my_backend.py --goldens my-goldens

With workers, every tenth golden is computed by two of them, and a difference stops the run.

Those of the suite take the place of the old ones once all are made: a run that is stopped before
changes nothing. Some can be made alone; the manifest keeps what it has of the others:

  bitforbit goldens make --case 'kernel/rms_norm/*' --case kernel/rope/half
"""


VERIFY = """\
Compute every golden again, and compare its bytes with those that the manifest has.

  bitforbit goldens verify --workers 4
  bitforbit goldens verify --case 'kernel/rms_norm/*'
  bitforbit goldens verify --goldens my-goldens

Exit code: 0 all bytes are the same, 1 some differ, 2 could not run.
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    goldens = commands.add_parser(
        "goldens", help="make, verify or show the goldens", description=DESCRIPTION, **style
    )
    actions = goldens.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("make", help="compute and write goldens", description=MAKE, **style)
    make.add_argument(
        "-m", "--model", type=Path, metavar="PATH", help="a folder or GGUF file of yours"
    )
    make.add_argument("--prompts", type=Path, metavar="FILE", help="prompts for it")
    make.add_argument("--out", type=Path, metavar="DIR", help="a new folder, or one begun before")
    make.add_argument("--name", help="what the goldens call the model (default: its file's name)")
    make.add_argument("--weights", choices=MODES, default="float32", help="(float32)")
    make.add_argument(
        "--last", type=count, default=32, metavar="N", help="rows of logits to keep (default 32)"
    )
    make.add_argument(
        "-n", dest="new_tokens", type=count, default=32, metavar="N", help="tokens to continue by"
    )
    make.add_argument("--no-bounds", action="store_true", help="bits only, much faster")
    make.set_defaults(run=run_make)
    verify = actions.add_parser(
        "verify",
        help="compute goldens again and compare the bytes",
        description=VERIFY,
        **style,
    )
    verify.set_defaults(run=run_verify)
    show = actions.add_parser(
        "show", help="show what a golden holds", description="Show what a golden holds."
    )
    show.add_argument("case", metavar="CASE", help="a golden's id, with or without a rule")
    show.add_argument("--full", action="store_true", help="every number, not a line of each array")
    show.set_defaults(run=run_show)
    text = "say where the model of your goldens lies now"
    locate = actions.add_parser("locate", help=text, description=f"{text.capitalize()}.")
    locate.add_argument("folder", type=Path, metavar="DIR", help="the folder of goldens")
    locate.add_argument("model", type=Path, metavar="PATH", help="the same model, elsewhere")
    locate.set_defaults(run=run_locate)
    for action in (make, verify):
        add_workers(action)
        add_case(action, "goldens")
    for action in (make, verify, show):
        action.add_argument(
            "--goldens", type=Path, metavar="DIR", help="the goldens there, not the suite's own"
        )
        older_name(action, "--folder", "goldens", Path)


def run_make(options: argparse.Namespace) -> int:
    """Make the suite's goldens, or those of a model of one's own."""
    from conformance.cases import recipes
    from conformance.making import make, make_own

    some = options.case is not None
    if options.model is None:
        if options.prompts is not None or options.out is not None:
            raise RequestError(
                "--prompts and --out: they go with --model; --goldens is the suite's"
            )
        folder = options.goldens or data_folder("goldens")
        selection, total = _selected(options, [recipe.id for recipe in recipes()])
        making: Making = partial(make, folder, selection=selection)
    else:
        if some:
            raise RequestError("--case: it is for the suite's own; a model's are made all at once")
        folder, job = _own(options)
        total, making = sum(1 for _ in job.recipes()), partial(make_own, folder, job)
    with crew_of(options) as crew, progress_bar() as progress:
        task = progress.add_task("making goldens", total=total)
        for made, golden in enumerate(making(crew=crew), 1):
            progress.update(task, completed=made, description=golden)
    listed = len(read_manifest(folder))
    made_of_them = f"{total} made of the " if some else ""
    print(f"{made_of_them}{listed} goldens in {folder}", file=sys.stderr)
    return OK


def _selected(options: argparse.Namespace, ids: list[str]) -> tuple[Selection, int]:
    """What `--case` takes of the goldens of these ids, and how many. Raises RequestError."""
    for pattern in patterns(options):
        if not any(map(Selection(patterns=(pattern,)).takes_golden, ids)):
            raise RequestError(no_case((), pattern, ids))
    selection = Selection(patterns=patterns(options))
    return selection, sum(map(selection.takes_golden, ids))


def _own(options: argparse.Namespace) -> tuple[Path, OwnGoldens]:
    """The folder to write, and the job that the options describe."""
    from conformance.cases.own import OwnGoldens
    from conformance.making.prompts import NAME, read_prompts
    from reference.loading import load_checkpoint

    if options.prompts is None or options.out is None or options.goldens is not None:
        raise RequestError("--model: give --prompts FILE and --out DIR with it, and no --goldens")
    path = model_folder(str(options.model)).resolve()
    name = options.name or path.name.removesuffix(".gguf")
    if not NAME.fullmatch(name):
        raise RequestError(
            f"--name: {name!r} is no name for goldens; give one of up to 80 letters, digits, `.`, "
            "`_` and `-`"
        )
    checkpoint = load_checkpoint(path)
    config = checkpoint.config
    most = config.max_positions - options.new_tokens
    prompts = read_prompts(options.prompts, checkpoint.tokenizer, config.vocab_size, most)
    model = OwnModel(name, str(path), checkpoint.digest)
    bounds = not options.no_bounds
    job = OwnGoldens(model, prompts, options.weights, options.last, options.new_tokens, bounds)
    return options.out, job


def run_verify(options: argparse.Namespace) -> int:
    """Make goldens again, and compare."""
    from conformance.making import verify

    folder = options.goldens or data_folder("goldens")
    selection, total = _selected(options, list(map(id_of, read_manifest(folder))))
    different, made = [], 0
    with crew_of(options) as crew, progress_bar() as progress:
        task = progress.add_task("verifying goldens", total=total)
        for made, (golden, same) in enumerate(verify(folder, crew, selection), 1):
            progress.update(task, completed=made, description=golden)
            if not same:
                different.append(golden)
    for golden in sorted(different):
        print(f"differs: {golden}")
    print(
        f"{made - len(different)} goldens made again with the same bytes, {len(different)} differ"
    )
    return FAILED if different else OK


def run_locate(options: argparse.Namespace) -> int:
    """Write another place of the model into the manifest, if the same model lies there."""
    from conformance.making import locate

    model = locate(options.folder, options.model.resolve())
    print(f"{options.folder}: {model.name} is at {model.path}")
    return OK


def run_show(options: argparse.Namespace) -> int:
    """Show what one golden holds."""
    import numpy as np

    folder = options.goldens or data_folder("goldens")
    wanted, _, rule = options.case.partition(":")
    golden = next(read_all(folder, {wanted}), None)
    if golden is None:
        near = nearest(wanted, map(id_of, read_manifest(folder)))
        raise RequestError(f"{wanted}: no such golden{near}; `bitforbit check --list` shows all")
    if rule and rule not in golden.rules:
        rules = ", ".join(golden.rules)
        raise RequestError(f"{options.case}: {wanted} has no rule {rule!r}, only {rules}")
    console = standard_output()
    console.print(f"[bold]{golden.id}[/]  SPEC {golden.section}  rules {', '.join(golden.rules)}")
    if golden.note:
        console.print(escape(golden.note))
    console.print(f"{golden.operation}({json.dumps(dict(golden.parameters))})", markup=False)
    for kind, arrays in (("in", golden.inputs), ("out", golden.outputs), ("gauge", golden.gauges)):
        for name, array in arrays.items():
            model = f"  x {golden.terms[name]}" if kind == "gauge" and name in golden.terms else ""
            console.print(f"{kind}.{name}: {array.dtype} {array.shape}{model}", markup=False)
            if options.full:
                text = np.array2string(array, threshold=sys.maxsize, max_line_width=100)
            else:
                text = _in_short(array)
            console.print(text, markup=False)
    return OK


def _in_short(array: Array) -> str:
    """A line of an array: its range, what is not finite, and how it begins."""
    import numpy as np

    with np.errstate(invalid="ignore"):  # a signalling NaN is a value like others here
        wide = array.astype(np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    parts = [f"from {finite.min():.6g} to {finite.max():.6g}"] if finite.size else []
    if finite.size < wide.size:
        parts.append(f"{wide.size - finite.size} not finite")
    begins = " ".join(str(x) for x in array.ravel()[:6])
    more = " ..." if array.size > 6 else ""
    return "  " + "; ".join([*parts, f"begins {begins}{more}"] if array.size else ["nothing"])
