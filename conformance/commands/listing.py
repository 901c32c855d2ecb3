"""`check --list`: the cases that a backend would be asked, those that it would not, and why."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.commands.common import OK, json_writer
from conformance.rules import contract_of
from conformance.rules.contract import left_out
from conformance.selection import Selection
from reference.errors import RequestError

if TYPE_CHECKING:
    from conformance.backends import Opening
    from conformance.runner import Case

NOT_OF_A_LIST = ("html", "junit", "badge", "track", "expect")
"""Options that are of a run."""


def listed(
    options: argparse.Namespace, name: str, opening: Opening, folder: Path, selection: Selection
) -> int:
    """Print the cases, or write them as JSON. The backend is opened, and no operation is called.

    name: what the backend is called. folder: of the goldens. Raises RequestError, BackendError.
    """
    from conformance.runner import cases

    given = [option for option in NOT_OF_A_LIST if getattr(options, option)]
    if given:
        raise RequestError(f"--{given[0]}: it tells of a run, and --list runs nothing")
    write = json_writer(options.json)
    with opening.opened() as backend:
        numerics = backend.numerics
    contract = options.contract or contract_of(numerics)
    chosen = list(cases(folder, replace(selection, contract=contract)))
    why = {case.id: left_out(case, numerics, contract).get(case.rule) for case in chosen}
    if write is not None:
        write(
            {
                "backend": {"name": name, "numerics": numerics},
                "contract": contract,
                "cases": [_entry(case, why[case.id]) for case in chosen],
            }
        )
    if options.json == "-":
        return OK
    width = max(len(case.id) for case in chosen)
    left: dict[str, list[str]] = defaultdict(list)
    for case in chosen:
        line, reason = f"{case.id:{width}}  SPEC {case.section}", why[case.id]
        if reason is None:
            print(line)
        else:
            left[reason].append(line)
    count = len(chosen) - sum(map(len, left.values()))
    declared = numerics.get("accumulator", "float32")
    print(f"\n{count} asked of {name}, which declares {declared}, under the contract {contract}")
    for reason, lines in left.items():
        print(f"\n{len(lines)} not asked: {reason}")
        for line in lines:
            print(f"  {line}")
    return OK


def _entry(case: Case, why: str | None) -> dict[str, Any]:
    """What JSON says of a case."""
    entry = {"id": case.id, "level": case.level, "section": case.section, "rule": case.rule}
    return {**entry, "asked": why is None} | ({} if why is None else {"why": why})
