"""What a person sees of a run: a table by area, then each failure with the line that repeats it."""

from __future__ import annotations

import platform
from collections import defaultdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.runner import Result, summary

SHOWN = 20
"""Failures that are shown one by one."""


def machine() -> str:
    """This machine in a line: processor family, numpy and its BLAS."""
    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    return f"{platform.machine()}, numpy {np.__version__}, {blas['name']} {blas['version']}"


def show(console: Console, name: str, results: list[Result], seconds: float) -> None:
    """Print the summary table, the failures, and a closing line."""
    table = Table(
        title=f"{name} against the specification", title_justify="left", caption=machine()
    )
    for column in ("area", "rule"):
        table.add_column(column)
    for column in ("passed", "failed", "not impl.", "worst margin"):
        table.add_column(column, justify="right")
    for (area, rule), group in _areas(results).items():
        counts = summary(group)
        failed = counts["failed"] + counts["cannot_evaluate"]
        table.add_row(
            area,
            rule,
            str(counts["passed"]) if counts["passed"] else "-",
            f"[bold red]{failed}[/]" if failed else "-",
            f"[yellow]{counts['not_implemented']}[/]" if counts["not_implemented"] else "-",
            _worst(group, rule),
        )
    console.print(table)
    failures = [r for r in results if r.outcome in ("fail", "cannot evaluate")]
    for result in failures[:SHOWN]:
        console.print(
            f"[bold red]{result.outcome.upper()}[/] {escape(result.id)}  (SPEC {result.section})"
        )
        console.print(f"     {escape(result.message)}", highlight=False)
        console.print(
            f"     bitforbit check {escape(name)} --case '{escape(result.id)}'", style="dim"
        )
    if len(failures) > SHOWN:
        console.print(f"... and {len(failures) - SHOWN} more; --json FILE has all")
    counts = summary(results)
    parts = [f"{counts['passed']} passed", f"{counts['failed']} failed"]
    parts += [
        f"{counts[k]} {k.replace('_', ' ')}"
        for k in ("not_implemented", "cannot_evaluate")
        if counts[k]
    ]
    console.print(f"[bold]{', '.join(parts)}[/] in {seconds:.1f} s")


def _areas(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups["/".join(result.id.split("/")[:2]), result.rule].append(result)
    return groups


def _worst(group: list[Result], rule: str) -> str:
    """The largest margin of a bounded rule; `bits` has none."""
    margins = [r.worst for r in group if r.worst is not None]
    if rule == "bits" or not margins:
        return ""
    worst = max(margins)
    return f"[red]{worst:.3g}[/]" if worst > 1 else f"{worst:.3f}"
