"""What a person sees of a run: a table by area, then each failure with the line that repeats it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance import faults
from conformance.calibration.findings import Calibration, by_area
from conformance.diagnosis import FAIR
from conformance.diagnosis.differences import worst_line
from conformance.faults import AnyFault
from conformance.reports.failures import area_of, chosen, nearest_faults
from conformance.reports.record import (
    Record,
    by_weight,
    has_failed,
    headline,
    is_fair,
    machine,
    worst_of,
)
from conformance.reports.track import TRACKED
from conformance.rules import ASK_BITS, OWN_DISTANCE
from conformance.tables import print_table
from conformance.variants import variants as all_variants

Case = Mapping[str, Any]

SHOWN = 20
"""Failures that are shown, those that read the same as one, and changes of a kind."""

NAMED = 3
"""Cases that are named beside the one that reads as they do."""

NOT_ASKED = "{} of bits {} not asked of a backend that rounds (SPEC 18); --contract exact asks all"

NO_VERDICT = ("not implemented", "not judged")
"""Outcomes that are neither a pass nor a failure."""

UNLISTED = ("newly_passing", "added")
"""Changes that are counted alone."""


def show(console: Console, data: Record) -> None:
    """Print the table by area and rule, the failures in full, what changed, and a closing line."""
    name, contract = escape(data["backend"]["name"]), data["contract"]
    console.print(f"[italic]{name} against the specification, contract {contract}[/]")
    table = Table(caption=data["machine"])
    for column in ("area", "rule"):
        table.add_column(column)
    for column in ("passed", "failed", "not impl.", "worst margin"):
        table.add_column(column, justify="right")
    level, lacking = "", Counter[str]()
    for (area, rule), group in _areas(data["cases"]).items():
        if all(case["outcome"] in NO_VERDICT for case in group):
            lacking[area] += sum(case["outcome"] == "not implemented" for case in group)
            continue
        if area.split("/")[0] != level:
            level = area.split("/")[0]
            table.add_section()
        counts = Counter(case["outcome"] for case in group)
        failed, missing = sum(map(has_failed, group)), counts["not implemented"]
        table.add_row(
            area,
            rule,
            str(counts["pass"]) if counts["pass"] else "-",
            f"[bold red]{failed}[/]" if failed else "-",
            f"[yellow]{missing}[/]" if missing else "-",
            _worst(group, rule),
        )
    if table.row_count:
        print_table(console, table)
    if any(lacking.values()):
        areas = ", ".join(f"{area} ({count})" for area, count in lacking.items() if count)
        console.print(f"not implemented: {escape(areas)}", style="yellow", highlight=False)
    _show_unjudged(console, data["cases"])
    own = sum(OWN_DISTANCE in case["message"] for case in data["cases"])
    if own:
        console.print(f"* without {own} margin{'s' * (own > 1)}: most {OWN_DISTANCE}", style="dim")
    failed_cases = by_weight(data)
    told = [case for case in failed_cases if not is_fair(data, case)]
    groups = _alike(told)
    shown = chosen(groups, SHOWN)
    for group in shown:
        _show_failure(console, group, data["again"])
    seen = {case["id"] for group in shown for case in group}
    _show_rest(console, [case for case in told if case["id"] not in seen])
    if len(told) > 1:
        _show_nearest(console, told)
    _show_fair(console, [case for case in failed_cases if is_fair(data, case)])
    if "track" in data:
        _show_track(console, data["track"])
    for line in data.get("now_passing", ()):
        console.print(
            f"[green]{escape(line['place'])}[/]: none of the {line['cases']} cases of "
            f"{escape(line['glob'])} fails any more; take the line out",
            highlight=False,
        )
    if data["summary"].get("not_asked"):
        count = data["summary"]["not_asked"]
        words = ("1 case", "is") if count == 1 else (f"{count} cases", "are")
        console.print(NOT_ASKED.format(*words), style="dim")
    console.print(f"[bold]{headline(data)}[/] in {data['seconds']:.1f} s")


def _show_unjudged(console: Console, cases: Iterable[Case]) -> None:
    """Cases of which the declared precision leaves no verdict: a line for each reason."""
    reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        if case["outcome"] == "not judged":
            reasons[case["message"]][area_of(case)] += 1
    for reason, counts in reasons.items():
        areas = ", ".join(f"{area} ({count})" for area, count in counts.items())
        line = escape(f"not judged, as declared: {areas}: {reason}")
        console.print(line, style="yellow", highlight=False)


def _show_fair(console: Console, cases: Iterable[Case]) -> None:
    """Bits that another order of sums explains: a line an operation."""
    counts = Counter(map(area_of, cases))
    if not counts:
        return
    console.print(f"[bold]{FAIR}[/]; --contract bounds does not ask for these bits")
    for area, count in counts.items():
        console.print(f"     {area}: bits of {count} case{'s' if count > 1 else ''} differ")


def _show_rest(console: Console, cases: Sequence[Case]) -> None:
    """How many failures were not shown, and of which operations."""
    if cases:
        counts = Counter(map(area_of, cases))
        areas = ", ".join(f"{count} of {area}" for area, count in counts.items())
        console.print(f"... and {len(cases)} more: {areas}; --json FILE has all", highlight=False)


def _show_nearest(console: Console, cases: Iterable[Case]) -> None:
    """The known faults that failures look like, a line each, the most frequent first."""
    nearest = nearest_faults(cases)
    if nearest:
        console.print("[bold]nearest known faults[/], by the failures that name them first")
    for names, about, count in nearest[:SHOWN]:
        why = f"  {about}" if about else ""
        either = " or ".join(names.split(" "))
        console.print(f"{count:5}  {escape(either)}{escape(why)}", highlight=False)


def _alike(cases: Iterable[Case]) -> list[list[Case]]:
    """Failures of which all that is told is the same, as one; in the order of their first."""
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        told = case["outcome"], case["message"], worst_element(case), *case.get("diagnosis", ())
        groups[told].append(case)
    return list(groups.values())


def _show_failure(console: Console, group: Sequence[Case], again: str) -> None:
    """One failure: what is wrong, the worst element, the nearest faults, and how to repeat it.

    group: the failure, and then those that read the same.
    """
    case, *others = group
    console.print(
        f"[bold red]{case['outcome'].upper()}[/] {escape(case['id'])}  (SPEC {case['section']})"
    )
    console.print(f"     {escape(case['message'])}", highlight=False)
    worst = worst_element(case)
    if worst:
        console.print(f"     {escape(worst)}", highlight=False)
    for nearest in case.get("diagnosis", ()):
        console.print(f"     [yellow]{escape(nearest)}[/]", highlight=False)
    line = f"     bitforbit {again} --case '{case['id']}'"
    console.print(escape(line), style="dim", soft_wrap=True)  # it can be copied whole
    if others:
        names = ", ".join(other["id"] for other in others[:NAMED])
        cases = "case" if len(others) == 1 else "cases"
        more = ", ..." if len(others) > NAMED else ""
        line = f"     and {len(others)} more {cases} with the same message: {names}{more}"
        console.print(escape(line), highlight=False)


def worst_element(case: Case) -> str:
    """The line of a failure's worst element, "" where its message says it all."""
    return worst_line(case.get("outputs", ()), case["message"])


def _show_track(console: Console, track: Mapping[str, Any]) -> None:
    """What changed against an earlier run."""
    before = track["before"]
    console.print(
        f"[bold]against the run of {escape(before['started'])}[/] of {escape(before['backend'])}: "
        f"{escape(before['headline'])}"
    )
    for key, (words, style) in TRACKED.items():
        if not track[key]:
            continue
        console.print(f"  [{style}]{len(track[key])} {words}[/]")
        for entry in track[key][:SHOWN] if key not in UNLISTED else ():
            line = entry
            if key == "grown":
                line = f"{entry['id']}  {entry['before']:.3g} -> {entry['now']:.3g}"
            console.print(f"     {escape(line)}", highlight=False)
        if len(track[key]) > SHOWN and key not in UNLISTED:
            console.print(f"     ... and {len(track[key]) - SHOWN} more")
    if not any(track[key] for key in TRACKED):
        console.print("  nothing changed")


def show_calibration(console: Console, result: Calibration, seconds: float) -> None:
    """Print faults by area, what the naive gates make of them, diagnosis, and what is wrong."""
    known, variants = len(result.faults), len(result.variants)
    part = not result.part.whole
    if part:
        console.print(
            f"[bold]a part[/]: {known} of {len(faults.faults())} faults, "
            f"{variants} of {len(all_variants())} variants; of the rest nothing is said"
        )
    if known:
        _show_areas(console, result)
    gates = Table(title="the same data, judged by", title_justify="left")
    gates.add_column("gate")
    counted = []  # columns: what is counted of the suite, and of a gate's pair of counts
    if known:
        gates.add_column(f"caught of {known} fault{'s' * (known > 1)}", justify="right")
        counted.append((known - len(result.missed()), 0))
    if variants:
        gates.add_column(f"accused of {variants} variant{'s' * (variants > 1)}", justify="right")
        counted.append((len(result.accused()), 1))
    gates.add_row("[bold]this suite[/]", *(f"[bold]{own}[/]" for own, _ in counted))
    for gate, hits in result.gates().items():
        gates.add_row(gate, *(str(hits[at]) for _, at in counted))
    print_table(console, gates)
    first, three, asked = result.diagnosis()
    if asked:
        among = ", among the faults of this part alone" if part else ""
        console.print(
            f"diagnosis of {asked} failures in float32{among}: the right fault first in "
            f"{first / asked:.1%}, among three in {three / asked:.1%}"
        )
    for name in result.missed():
        console.print(f"[bold red]MISSED[/] {escape(name)}: no case shows this fault")
    for variant in result.variants:
        for case in variant.trial.failed:
            console.print(f"[bold red]ACCUSED[/] {variant.variant.name}: fails {escape(case)}")
    for variant in result.variants:
        if variant.trial.undecided:
            console.print(
                f"no verdict at the precision of {variant.variant.name}: "
                f"{len(variant.trial.undecided)} of "
                f"{variant.trial.judged + len(variant.trial.undecided)} cases"
            )
    console.print(f"in {seconds:.0f} s")


def _show_areas(console: Console, result: Calibration) -> None:
    """Print the faults that are caught, by area."""
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
    print_table(console, table)


def list_faults(console: Console, catalogue: Iterable[AnyFault]) -> None:
    """Print every fault in a line: area, name, severity, description."""
    table = Table(title="known faults", title_justify="left")
    for column in ("area", "name", "severity", "what is wrong"):
        table.add_column(column)
    for fault in catalogue:
        table.add_row(
            faults.area(fault), fault.name, fault.severity, escape(faults.description(fault))
        )
    print_table(console, table)


def _areas(cases: Iterable[Case]) -> dict[tuple[str, str], list[Case]]:
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups["/".join(case["id"].split("/")[:2]), case["rule"]].append(case)
    return groups


def _worst(group: list[Case], rule: str) -> str:
    """The largest margin of a bounded rule; `bits` has none.

    A passing margin whose bound is the exact lane's own distance says nothing of the backend, and
    would hide the others: it is left out, with a star.
    """
    if rule in ASK_BITS:
        return ""
    counted = [case for case in group if OWN_DISTANCE not in case["message"]]
    star = "*" * (len(counted) < len(group))
    margins = [margin for c in counted if (margin := worst_of(c)) is not None]
    if not margins:
        return star
    worst = max(margins)
    return f"[red]{worst:.3g}[/]{star}" if worst > 1 else f"{worst:.3f}{star}"
