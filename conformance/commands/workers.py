"""The options by which a command shares its work out to other processes or machines."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from conformance.commands.common import count

if TYPE_CHECKING:
    from conformance.crew import Crew


def add_workers(
    command: argparse.ArgumentParser, default: str = "this one does it all", cluster: bool = True
) -> None:
    """Add `--workers`, and `--scheduler` where the work can go to a cluster."""
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--workers",
        type=process_count,
        metavar="N",
        help=f"share out to N processes here (default: {default})",
    )
    if cluster:
        where.add_argument(
            "--scheduler", metavar="ADDRESS", help="share out to a Dask cluster (extra dask)"
        )


def process_count(text: str) -> int:
    """How many processes; beyond so many a core they take memory alone."""
    from reference.threads import A_CORE, cores

    wanted, most = count(text), A_CORE * cores()
    if wanted > most:
        raise argparse.ArgumentTypeError(
            f"{wanted} are too many; give {most} at most, {A_CORE} a core"
        )
    return wanted


def crew_of(options: argparse.Namespace) -> AbstractContextManager[Crew | None]:
    """The workers that were asked for, None where this process does it all."""
    if options.workers is None and options.scheduler is None:
        return nullcontext()
    from conformance.crew import cluster, processes

    return cluster(options.scheduler) if options.scheduler else processes(options.workers)
