"""`bitforbit faults`: what the catalogue of known faults holds."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from conformance.commands.common import OK, standard_output
from reference.errors import RequestError

DESCRIPTION = """\
Mistakes that engines make, each a few lines over the reference. `bitforbit calibrate` tries them.

  bitforbit faults list --area attention
  bitforbit faults show attention-sink-counted-twice    what it is, where it was reported, its code
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    catalogue = commands.add_parser(
        "faults", help="list or show the known faults", description=DESCRIPTION, **style
    )
    about = catalogue.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = about.add_parser("list", help="every fault in a line", description="List all faults.")
    listing.add_argument("--area", metavar="AREA", help="only those of this area")
    listing.set_defaults(run=run_list)
    one = about.add_parser("show", help="one fault", description="Show a fault and its code.")
    one.add_argument("fault", metavar="NAME", help="a fault's name")
    one.set_defaults(run=run_show)


def run_list(options: argparse.Namespace) -> int:
    """List the faults."""
    from conformance.faults import area, areas, faults
    from conformance.reports import terminal

    if options.area is not None and options.area not in areas():
        raise RequestError(f"--area: {options.area!r} is none of {', '.join(areas())}")
    terminal.list_faults(
        standard_output(), [f for f in faults() if options.area in (None, area(f))]
    )
    return OK


def run_show(options: argparse.Namespace) -> int:
    """Show one fault and its code."""
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
