"""Pictures of what a command measured: `--plot FILE.png|svg`, drawn with matplotlib.

A command says what its picture shows as data, a panel a question, and knows nothing of drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from conformance.commands.measure.rows import Columns, Form, Row, write
from reference.errors import RequestError

Kind = Literal["line", "points", "bars", "stack"]
"""`bars` stand beside each other, `stack` are areas one upon the other, as shares of a whole."""


@dataclass(frozen=True)
class Line:
    """One series: y over x, with the range `low` to `high` where there are several runs of each."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    kind: Kind = "line"


@dataclass(frozen=True)
class Panel:
    """One pair of axes. log: axes on a logarithmic scale, among "x" and "y".

    marks, levels: vertical and horizontal lines, by what they stand for.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: str = ""
    marks: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)


def add_plot(parser: Any) -> None:
    """Add `--plot`."""
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it, .png or .svg (needs the extra plot)"
    )


def check_plot(path: Path | None) -> None:
    """Raise RequestError where nothing could be drawn there; to be called before the work."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg") or not path.parent.is_dir() or path.is_dir():
        raise RequestError(f"--plot: {path} is no .png or .svg in a folder that exists")
    try:
        found = find_spec("matplotlib") is not None
    except ValueError:  # what find_spec raises for a module that was blocked
        found = False
    if not found:
        raise RequestError("--plot: it needs matplotlib; pip install 'bitforbit[plot]'")


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels one below the other, as PNG or SVG by the file's name.

    Raises RequestError without the extra `plot`, and where the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, panel)
    try:
        figure.savefig(path)
    except OSError as error:
        raise RequestError(f"--plot: cannot draw {path} ({error.strerror})") from error


def _draw(axes: Any, panel: Panel) -> None:
    stacked = [line for line in panel.lines if line.kind == "stack"]
    if stacked:
        labels = [line.label for line in stacked]
        axes.stackplot(stacked[0].x, *(line.y for line in stacked), labels=labels, alpha=0.8)
    bars = [line for line in panel.lines if line.kind == "bars"]
    names = list(dict.fromkeys(str(x) for line in bars for x in line.x))
    for index, line in enumerate(bars):
        aside = (index - (len(bars) - 1) / 2) / (len(bars) + 1)
        places = [names.index(str(x)) + aside for x in line.x]
        axes.bar(places, line.y, 1 / (len(bars) + 1), yerr=_errors(line), label=line.label)
    if bars:
        axes.set_xticks(range(len(names)), names)
    for line in panel.lines:
        if line.kind == "points":
            axes.errorbar(line.x, line.y, _errors(line), fmt="o", capsize=3, label=line.label)
        elif line.kind == "line":
            (drawn,) = axes.plot(line.x, line.y, "o-", label=line.label)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=drawn.get_color(), alpha=0.2)
    for label, value in panel.marks.items():
        axes.axvline(value, color="gray", linestyle=":", label=label)
    for label, value in panel.levels.items():
        axes.axhline(value, color="black", linestyle="--", linewidth=0.8, label=label)
    if "x" in panel.log:
        axes.set_xscale("log", base=2)
    if "y" in panel.log:
        axes.set_yscale("log")
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")


def _errors(line: Line) -> list[list[float]] | None:
    if line.low is None or line.high is None:
        return None
    return [
        [y - low for y, low in zip(line.y, line.low, strict=True)],
        [high - y for y, high in zip(line.y, line.high, strict=True)],
    ]


def series(label: str, rows: Iterable[Row], x: str, y: str, kind: Kind = "line") -> Line:
    """A figure of the rows, `<y>` or its median and range, over another; rows without it left out.

    x, y: keys of a row; of a spread its name, as in `rate` for `rate_median`.
    """
    single = [row for row in rows if row.get(y, row.get(f"{y}_median")) is not None]
    xs = [row[x] for row in single]
    if all(y in row for row in single):
        return Line(label, xs, [row[y] for row in single], kind=kind)
    median, least, most = (
        [row[f"{y}_{part}"] for row in single] for part in ("median", "least", "most")
    )
    return Line(label, xs, median, least, most, kind)


def write_and_draw(
    form: Form,
    plot: Path | None,
    columns: Columns,
    about: Iterable[str],
    rows: Iterable[Row],
    panels: Callable[[list[Row]], Sequence[Panel]],
) -> int:
    """`rows.write`, and then the picture of the rows that were kept, where one is asked for."""
    check_plot(plot)
    kept: list[Row] = []

    def keeping() -> Iterator[Row]:
        for row in rows:
            kept.append(row)
            yield row

    code = write(form, columns, about, keeping())
    if plot is not None and kept:
        draw(panels(kept), plot)
    return code


def grouped(rows: Iterable[Row], *keys: str) -> dict[str, list[Row]]:
    """Rows by what tells them apart: the values of `keys` that are not the same for all."""
    listed = list(rows)
    told = [key for key in keys if len({str(row.get(key)) for row in listed}) > 1]
    groups: dict[str, list[Row]] = {}
    for row in listed:
        name = ", ".join(str(row.get(key)) for key in told if row.get(key) not in (None, ""))
        groups.setdefault(name, []).append(row)
    return groups
