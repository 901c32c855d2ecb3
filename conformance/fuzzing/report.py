"""What a run of drawn cases gave: as JSON, and for a person."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.fuzzing.running import Failure, Judged, Tally
from conformance.tables import print_table

FORMAT = "bitforbit-fuzz-1"


def command(backend: str, judged: Judged) -> str:
    """The line that repeats one case."""
    return f"bitforbit fuzz {backend} --case {shlex.quote(str(judged.made.case))}".rstrip()


def as_json(
    backend: str,
    numerics: Mapping[str, Any],
    seed: int,
    tallies: Iterable[Tally],
    interrupted: bool = False,
) -> dict[str, Any]:
    """The record of a run. backend: the words that name it on the command line."""
    return {
        "format": FORMAT,
        "backend": backend,
        "numerics": dict(numerics),
        "seed": seed,
        "interrupted": interrupted,
        "operations": [
            {
                "operation": tally.operation,
                "offered": tally.offered,
                "passed": tally.passed,
                "failed": tally.failed,
                "not_implemented": tally.absent,
                "not_judged": tally.unjudged,
                "worst": tally.worst,
                "failures": [_failure(backend, failure) for failure in tally.failures],
                "repeats": [command(backend, judged) for judged in tally.repeats],
            }
            for tally in tallies
        ],
    }


def _failure(backend: str, failure: Failure) -> dict[str, Any]:
    return {
        "drawn": _judged(backend, failure.drawn),
        "least": _judged(backend, failure.least),
        "where": failure.where,
        "diagnosis": list(failure.nearest),
    }


def _judged(backend: str, judged: Judged) -> dict[str, Any]:
    return {
        "id": judged.id,
        "command": command(backend, judged),
        "message": judged.verdict.message,
        "choices": {choice.name: choice.value for choice in judged.made.choices},
    }


def show(console: Console, backend: str, seed: int, tallies: Iterable[Tally]) -> None:
    """Print a table by operation, then each failure with the line that repeats it."""
    tallies = list(tallies)
    table = Table(title=f"{escape(backend)}, seed {seed}", title_justify="left")
    table.add_column("operation")
    for column in ("passed", "failed", "not impl.", "not judged", "worst margin"):
        table.add_column(column, justify="right")
    for tally in tallies:
        if not tally.offered:
            continue
        table.add_row(
            tally.operation,
            str(tally.passed) if tally.passed else "-",
            f"[bold red]{tally.failed}[/]" if tally.failed else "-",
            f"[yellow]{tally.absent}[/]" if tally.absent else "-",
            str(tally.unjudged) if tally.unjudged else "-",
            f"{tally.worst:.2g}" if tally.worst else "",
        )
    print_table(console, table)
    missing = ", ".join(tally.operation for tally in tallies if not tally.offered)
    if missing:
        console.print(f"[yellow]not implemented[/]: {missing}", highlight=False)
    for tally in tallies:
        for failure in tally.failures:
            _show(console, backend, failure)
        if tally.repeats:
            console.print(f"... and {len(tally.repeats)} more of {tally.operation}; --json has all")
    passed, failed = (sum(getattr(t, n) for t in tallies) for n in ("passed", "failed"))
    console.print(f"[bold]{passed:,} passed, {failed:,} failed[/]; seed {seed}")


def _show(console: Console, backend: str, failure: Failure) -> None:
    """One failure: as drawn, made small, what is wrong there, and what explains it."""
    least, drawn = failure.least, failure.drawn
    console.print(f"[bold red]FAIL[/] {drawn.id}  (SPEC {drawn.golden.section})")
    line = f"{least.golden.operation}({_sizes(least)})"
    console.print(f"     {escape(line)}", highlight=False)
    console.print(f"     {escape(least.verdict.message)}", highlight=False)
    if failure.where:
        console.print(f"     {escape(failure.where)}", highlight=False)
    for nearest in failure.nearest:
        console.print(f"     [yellow]{escape(nearest)}[/]", highlight=False)
    console.print(f"     {escape(command(backend, least))}", style="dim", soft_wrap=True)
    if least is not drawn:
        console.print(
            f"     {escape(command(backend, drawn))}   as drawn", style="dim", soft_wrap=True
        )


def _sizes(judged: Judged) -> str:
    """The arguments of a call: shapes of arrays, other values as they are."""
    arrays = [f"{n} {list(a.shape)}" for n, a in judged.golden.inputs.items()]
    others = [f"{n} {v}" for n, v in judged.golden.parameters.items()]
    return ", ".join(arrays + others)
