"""`bitforbit export`: write a folder of inputs, to be answered anywhere."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.commands.common import OK, progress_bar
from conformance.commands.judging import add_selection, selected
from conformance.paths import data_folder
from reference.errors import RequestError

DESCRIPTION = """\
Write a folder of questions for a backend that lives where this suite does not: a file of inputs a
call, a manifest, the small models that are asked for, SPEC.md, and a README that says all that
whoever answers must know. `bitforbit judge DIR` then judges the answers.

  bitforbit export questions
  bitforbit export questions --level kernel --contract bounds
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    export = commands.add_parser(
        "export", help="write inputs to be answered elsewhere", description=DESCRIPTION, **style
    )
    export.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    add_selection(export)
    export.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Export what was asked for."""
    from conformance.exporting import export

    selection, total = selected(options, data_folder("goldens"))
    if options.contract is not None:
        selection = replace(selection, contract=options.contract)
    folder: Path = options.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder}: it is there already and not an empty folder; give a new one")
    with progress_bar() as progress:
        task = progress.add_task("exporting", total=total)
        calls = 0
        for calls, call_id in enumerate(export(folder, selection), 1):
            progress.update(task, completed=calls, description=call_id)
    print(f"{calls} calls in {folder}; see {folder / 'README.md'}")
    return OK
