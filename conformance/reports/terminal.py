"""What a person sees of a run: a table by area, then each failure with the line that repeats it."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance import faults
from conformance.calibration import Calibration, by_area
from conformance.diagnosis import Explanation
from conformance.faults import AnyFault
from conformance.runner import Result, summary

SHOWN = 20
"""Failures that are shown one by one."""


def machine() -> str:
    """This machine in a line: processor family, numpy and its BLAS."""
    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    return f"{platform.machine()}, numpy {np.__version__}, {blas['name']} {blas['version']}"


def show(
    console: Console,
    name: str,
    results: list[Result],
    seconds: float,
    explanations: Mapping[str, Explanation] | None = None,
) -> None:
    """Print the summary table, the failures with what may explain them, and a closing line."""
    explained = explanations or {}
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
        if result.id in explained:
            _explain(console, explained[result.id])
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


def _explain(console: Console, explanation: Explanation) -> None:
    """The worst element, and the nearest known faults."""
    if explanation.worst:
        console.print(f"     {escape(explanation.worst)}", highlight=False)
    for nearest in explanation.nearest:
        console.print(f"     [yellow]{escape(nearest)}[/]", highlight=False)


def show_calibration(console: Console, result: Calibration, seconds: float) -> None:
    """Print faults by area, what the naive gates make of them, diagnosis, and what is wrong."""
    table = Table(title="faults caught", title_justify="left", caption=machine())
    table.add_column("area")
    columns = ("faults", "caught", "exact", "float32", "bits alone")
    for column in columns:
        table.add_column(column, justify="right")
    counts = by_area(result)
    for name, row in counts.items():
        table.add_row(name, *(str(row[column]) for column in columns))
    table.add_section()
    total = sum(counts.values(), Counter[str]())
    table.add_row("all", *(str(total[column]) for column in columns))
    console.print(table)
    known, variants = len(result.faults), len(result.variants)
    gates = Table(title="the same data, judged by", title_justify="left")
    gates.add_column("gate")
    for column in (f"caught of {known} faults", f"accused of {variants} variants"):
        gates.add_column(column, justify="right")
    caught = known - len(result.missed())
    gates.add_row("[bold]this suite[/]", f"[bold]{caught}[/]", f"[bold]{len(result.accused())}[/]")
    for gate, (hit, accused) in result.gates().items():
        gates.add_row(gate, str(hit), str(accused))
    console.print(gates)
    first, three, asked = result.diagnosis()
    if asked:
        console.print(
            f"diagnosis of {asked} failures in float32: the right fault first in "
            f"{first / asked:.1%}, among three in {three / asked:.1%}"
        )
    for name in result.missed():
        console.print(f"[bold red]MISSED[/] {escape(name)}: no case shows this fault")
    for variant in result.variants:
        for case in variant.trial.failed:
            console.print(f"[bold red]ACCUSED[/] {variant.variant.name}: fails {escape(case)}")
    console.print(f"in {seconds:.0f} s")


def list_faults(console: Console, catalogue: Iterable[AnyFault]) -> None:
    """Print every fault in a line: area, name, severity, description."""
    table = Table(title="known faults", title_justify="left")
    for column in ("area", "name", "severity", "what is wrong"):
        table.add_column(column, no_wrap=column == "name")
    for fault in catalogue:
        table.add_row(
            faults.area(fault), fault.name, fault.severity, escape(faults.description(fault))
        )
    console.print(table)


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
