"""A record as one page of HTML that needs nothing else: no network, no file beside it.

The charts are drawn here, as plain SVG, so that the page says everything without a script too; the
script filters, sorts and moves the focus.
"""

from __future__ import annotations

import base64
import hashlib
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from conformance.diagnosis.differences import CELLS
from conformance.reports.badge import verdict
from conformance.reports.failures import nearest_faults
from conformance.reports.record import Record, by_weight, failures, worst_of
from conformance.reports.track import TRACKED
from conformance.rules import ASK_BITS

Case = Mapping[str, Any]

LETTER = {
    "pass": "p",
    "fail": "f",
    "not implemented": "n",
    "not judged": "j",
    "cannot evaluate": "c",
}
"""Class of an outcome in the style sheet."""

HEAT = (1 / 8, 1.0, 8.0, 64.0, 4096.0)
"""Upper edges of the colours of a heat map, in bounds: two within the bound, four beyond it."""

SQUARES, SIDE, STEP = 16, 8, 10
"""Cases in a row of the matrix; a square's side, and the way to the next, in pixels."""


def page(data: Record) -> str:
    """The page of a record (docs/report.md)."""
    script, style = _part("page.js"), _part("page.css")
    environment = Environment(
        loader=FunctionLoader(_part),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, percent=percent, when=when)
    cases = [_case(i, case) for i, case in enumerate(data["cases"])]
    order = {case["id"]: place for place, case in enumerate(by_weight(data))}
    return environment.get_template("page.html.j2").render(
        data=data,
        verdict=verdict(data)[0],
        failed=len(failures(data)),
        outcomes=[(o, LETTER[o], sum(c["outcome"] == o for c in cases)) for o in LETTER],
        letter=LETTER,
        levels=_levels(data["cases"]),
        charts=_charts(data["cases"]),
        faults=nearest_faults(failures(data)),
        cases=sorted(cases, key=lambda c: order.get(c["id"], len(order))),
        rules=sorted({c["rule"] for c in cases}),
        tracked=TRACKED,
        script=script,
        style=style,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _part(name: str) -> str:
    return files("conformance.reports").joinpath(name).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------- numbers


def number(value: float | None) -> str:
    """Three digits; None is infinite, as in a record."""
    if value is None or math.isinf(value):
        return "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:,.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}·10{_superscript(int(power))}"


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def when(text: str) -> str:
    """A time in UTC to the minute; what is no time is left as it is."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return text


def percent(share: float) -> str:
    """A share of 1 in percent, never 0 or 100 unless it is."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{100 * share:.3g} %"


def _margin(case: Case) -> str:
    """What stands in the column of margins: a share under `bits`."""
    worst = worst_of(case)
    if worst is None:
        return "–"
    if case["rule"] in ASK_BITS:
        return "" if worst == 0 else percent(worst)
    return number(worst)


# -------------------------------------------------------------------------------------- matrix


def _levels(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """By level, a tile for each operation, in it a square for each case."""
    areas: dict[str, dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        areas[case["level"]][case["id"].split("/")[1]].append(case)
    return [
        {
            "name": level,
            **_counts([c for group in operations.values() for c in group]),
            "tiles": [_tile(level, name, group) for name, group in sorted(operations.items())],
        }
        for level, operations in areas.items()
    ]


def _tile(level: str, operation: str, cases: list[Case]) -> dict[str, Any]:
    rules = sorted({case["rule"] for case in cases})
    rows = [(rule, [c["outcome"] for c in cases if c["rule"] == rule]) for rule in rules]
    return {
        "area": f"{level}/{operation}/",
        "name": operation,
        **_counts(cases),
        "rows": [{"rule": rule, **_squares(outcomes)} for rule, outcomes in rows],
    }


def _counts(cases: Sequence[Case]) -> dict[str, int]:
    counts = Counter(case["outcome"] for case in cases)
    return {"total": len(cases), **{LETTER[o]: counts[o] for o in LETTER}}


def _squares(outcomes: Sequence[str]) -> dict[str, Any]:
    """A path for each outcome."""
    paths: dict[str, str] = defaultdict(str)
    for i, outcome in enumerate(outcomes):
        x, y = STEP * (i % SQUARES), STEP * (i // SQUARES)
        paths[LETTER[outcome]] += f"M{x + 1} {y + 1}h{SIDE}v{SIDE}h-{SIDE}z"
    rows = math.ceil(len(outcomes) / SQUARES)
    return {"paths": dict(paths), "width": STEP * SQUARES, "height": STEP * rows}


# ------------------------------------------------------------------------------------- margins


def _charts(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """For each rule how its margins are distributed, in all and by operation.

    Margins lie on a logarithmic axis of decades. Places are in percent of its length, so that the
    charts fit any width.
    """
    rules: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if worst_of(case) is not None:
            rules[case["rule"]].append(case)
    return [_chart(rule, group) for rule, group in sorted(rules.items(), reverse=True)]


def _chart(rule: str, cases: list[Case]) -> dict[str, Any]:
    values = [margin for c in cases if (margin := worst_of(c)) is not None]
    low, high = -4, 0 if rule in ASK_BITS else 1 if max(values) <= 10 else 4

    def place(value: float) -> float:
        decades = low if value <= 0 else min(math.log10(value), high)
        return round(2 + 96 * (max(decades, low) - low) / (high - low), 2)

    areas: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case, value in zip(cases, values, strict=True):
        area = "/".join(case["id"].split("/")[:2])
        areas[area].append({"at": place(value), "letter": LETTER[case["outcome"]]})
    worst = {
        area: max((v for c, v in zip(cases, values, strict=True) if c["id"].startswith(f"{area}/")))
        for area in areas
    }
    shown = percent if rule in ASK_BITS else number
    exact = [area for area in areas if worst[area] == 0]
    return {
        "rule": rule,
        "cases": len(cases),
        "limit": None if rule in ASK_BITS else place(1.0),
        "bars": _bars([place(v) for v in values], [LETTER[c["outcome"]] for c in cases]),
        "ticks": [
            {"at": place(10.0**k), "text": _tick(k, low, high, rule in ASK_BITS), "minor": k % 2}
            for k in range(low, high + 1)
        ],
        "strips": [
            {"area": a, "dots": areas[a], "worst": shown(worst[a])}
            for a in sorted(areas, key=lambda a: -worst[a])
            if a not in exact
        ],
        "exact": exact,
    }


def _tick(power: int, low: int, high: int, share: bool) -> str:
    if share:
        text = f"{10.0 ** (power + 2):g} %"
    else:
        text = f"{10.0**power:g}" if -3 <= power <= 3 else f"10{_superscript(power)}"
    beyond = power == high and not share
    return f"≤ {text}" if power == low else f"≥ {text}" if beyond else text


def _bars(places: Sequence[float], letters: Sequence[str]) -> list[dict[str, Any]]:
    """Columns of 2 percent each, passes below failures; heights in percent of the tallest."""
    columns: dict[int, Counter[str]] = defaultdict(Counter)
    for place, letter in zip(places, letters, strict=True):
        columns[min(int((place - 1) / 2), 48)][letter] += 1
    tallest = max((sum(c.values()) for c in columns.values()), default=1)
    bars = []
    for column, counts in sorted(columns.items()):
        top = 0.0
        for letter in sorted(counts, reverse=True):  # p before n, f and c
            height = 100 * counts[letter] / tallest
            top += height
            bars.append(
                {
                    "x": round(1.2 + 2 * column, 2),
                    "y": round(100 - top, 2),
                    "height": round(height, 2),
                    "letter": letter,
                    "count": counts[letter],
                }
            )
    return bars


# --------------------------------------------------------------------------------------- cases


def _case(number_: int, case: Case) -> dict[str, Any]:
    worst = worst_of(case)
    return {
        **case,
        "number": number_,
        "letter": LETTER[case["outcome"]],
        "margin": _margin(case),
        "order": -1 if worst is None else min(worst, 1e300),
        "diagnosis": case.get("diagnosis", []),
        "outputs": [_output(output) for output in case.get("outputs", ())],
    }


def _output(output: Mapping[str, Any]) -> dict[str, Any]:
    """An output with its charts."""
    if "worst" not in output:
        return {**output, "charts": False}
    elements = math.prod(output["shape"])
    return {
        **output,
        "charts": True,
        "elements": elements,
        "share": output["differing"] / elements,
        "ulp_rows": _ulp_rows(output["ulp"], output["not_a_number"]),
        "map": _heat(output, output["heat"]),
        "profiles": [_heat(output, heat) for heat in output["axes"]],
    }


def _ulp_rows(entries: Sequence[Mapping[str, Any]], nan: int) -> list[dict[str, Any]]:
    """Rows of the histogram: powers of two up to 16, then of 16; the bars' lengths by logarithm."""
    rows: dict[float, int] = defaultdict(int)
    shown: list[tuple[str, int]] = []
    for entry in entries:
        top = entry["upto"]
        rows[top if top <= 16 else 16.0 ** math.ceil(math.log2(top) / 4)] += entry["count"]
    below = -1.0
    for top in (0.0, 1.0, 2.0, 4.0, 8.0, *(16.0**k for k in range(1, 17))):
        if rows.get(top):
            shown.append((upto(below, top), rows[top]))
        below = top
    if nan:
        shown.append(("NaN", nan))
    most = math.log1p(max((count for _, count in shown), default=1))
    return [
        {"text": text, "count": count, "length": round(100 * math.log1p(count) / most, 1)}
        for text, count in shown
    ]


def upto(below: float, top: float) -> str:
    """The whole numbers above `below` and up to `top`."""
    if top - below == 1:
        return f"{top:.0f}"
    if top < 1e6:
        return f"{below + 1:,.0f} – {top:,.0f}"
    return f"2{_superscript(int(math.log2(below)))} – 2{_superscript(int(math.log2(top)))}"


def _heat(output: Mapping[str, Any], heat: Mapping[str, Any]) -> dict[str, Any]:
    """A heat map: a path for each colour, the cell of the worst element, and its size in pixels."""
    cells, axes = heat["cells"], heat["axes"]
    rows, columns = len(cells), len(cells[0])
    paths: dict[int, str] = defaultdict(str)
    whole = output["unit"] == "1"
    for y, row in enumerate(cells):
        x = 0
        for shade, run in groupby(row, lambda value: _shade(value, whole)):
            length = len(list(run))
            if shade:
                paths[shade] += f"M{x} {y}h{length}v1h-{length}z"
            x += length
    at = [_cell(output["worst"]["index"][a], output["shape"][a]) for a in axes]
    wide, high = max(5, min(14, 320 // columns)), max(5, min(18, 160 // rows))
    return {
        "paths": sorted(paths.items()),
        "rows": rows,
        "columns": columns,
        "width": wide * columns,
        "height": high * rows,
        "worst": ([0] * (2 - len(at)) + at)[::-1],
        "lengths": [output["shape"][a] for a in axes],
        "axes": axes,
        "pooled": max(output["shape"][a] for a in axes) > CELLS,
    }


def _cell(index: int, length: int) -> int:
    if length <= CELLS:
        return index
    return bisect_right([i * length // CELLS for i in range(CELLS)], index) - 1


def _shade(value: float | None, whole: bool) -> int:
    """0 for the same bits, then by `HEAT`; of integers none is within a bound."""
    if value == 0:
        return 0
    margin = math.inf if value is None else max(value, 1.5) if whole else value
    return 1 + sum(margin > edge for edge in HEAT)
