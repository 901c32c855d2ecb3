"""`bitforbit judge`: judge the answers in a folder that `bitforbit export` wrote."""

from __future__ import annotations

import argparse
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from conformance.commands.judging import add_expect, add_selection, follow, selected
from conformance.commands.reporting import add_reports
from conformance.paths import data_folder

DESCRIPTION = """\
Judge the answers in a folder that `bitforbit export` wrote, by the rules of `bitforbit check`.

DIR/answers holds one file for each call that was answered, and numerics.json; DIR/README.md says
how. A call without an answer is not implemented. Exit code: 0 all passed that are answered,
1 something failed or nothing passed, 2 could not run.

  bitforbit judge questions
  bitforbit judge questions --case 'kernel/linear/*' --json report.json
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    judge = commands.add_parser(
        "judge", help="judge the answers in an exported folder", description=DESCRIPTION, **style
    )
    judge.add_argument("folder", type=Path, metavar="DIR", help="what `bitforbit export` wrote")
    add_selection(judge)
    add_expect(judge)
    add_reports(judge)
    judge.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Judge the answers, and report."""
    from conformance.backends.folder import FolderBackend
    from conformance.exporting import Listed, judged

    goldens = data_folder("goldens")
    selection, total = selected(options, goldens)
    backend = FolderBackend(options.folder)
    return follow(
        options,
        lambda: (shlex.quote(str(options.folder)), nullcontext(backend)),
        judged,
        Listed.of(selection, backend.manifest),
        total,
        goldens,
    )
