"""`bitforbit goldens`: make, verify or show the goldens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from conformance.commands.common import FAILED, OK, progress_bar
from reference.errors import RequestError


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    goldens = commands.add_parser("goldens", help="make, verify or show the goldens")
    actions = goldens.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action, text in (
        ("make", run_make, "compute and write every golden"),
        ("verify", run_verify, "compute every golden again and compare the bytes"),
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
    show.set_defaults(run=run_show)


def run_make(options: argparse.Namespace) -> int:
    """Make every golden."""
    from conformance.cases import recipes
    from conformance.make import make
    from conformance.paths import data_folder

    folder = options.folder or data_folder("goldens")
    console = Console(stderr=True)
    with progress_bar(console) as progress:
        task = progress.add_task("making goldens", total=sum(1 for _ in recipes()))
        for made, golden in enumerate(make(folder), 1):
            progress.update(task, completed=made, description=golden)
    console.print(f"{made} goldens in {folder}")
    return OK


def run_verify(options: argparse.Namespace) -> int:
    """Make every golden again, and compare."""
    from conformance.cases import recipes
    from conformance.make import verify
    from conformance.paths import data_folder

    folder = options.folder or data_folder("goldens")
    console = Console(stderr=True)
    different = []
    with progress_bar(console) as progress:
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


def run_show(options: argparse.Namespace) -> int:
    """Show what one golden holds."""
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
