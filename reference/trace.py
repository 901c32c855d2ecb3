"""What a run of the engine did, pass by pass, and how long its users waited (SPEC 14.2)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from reference.errors import RequestError

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Pass:
    """One forward pass. started, ended: seconds since the engine was made.

    shares: the number of each request in it, the kind of its share, and its tokens. chosen: how
    many tokens each request got from it.
    """

    started: float
    ended: float
    shares: tuple[tuple[int, Kind, int], ...]
    chosen: dict[int, int]


@dataclass(frozen=True)
class Latency:
    """Seconds between a request's tokens: median, 99th percentile, and the longest."""

    p50: float
    p99: float
    longest: float


@dataclass
class Trace:
    """All passes since an engine was told to record them."""

    passes: list[Pass] = field(default_factory=list)

    def add(self, done: Pass) -> None:
        """Record a pass."""
        self.passes.append(done)

    def times(self, request: int) -> list[float]:
        """When each token of a request was chosen, in seconds."""
        return [p.ended for p in self.passes for _ in range(p.chosen.get(request, 0))]

    @property
    def numbers(self) -> list[int]:
        """The numbers of all requests that had a share, ascending."""
        return sorted({number for p in self.passes for number, _, _ in p.shares})

    def latency(self, requests: Sequence[int], since: float = 0.0) -> Latency:
        """The time between the tokens of some requests, over all gaps that end after `since`.

        A request's first token ends no gap. Without a gap, all figures are 0.
        """
        gaps = np.array(
            [
                end - start
                for request in requests
                for start, end in itertools.pairwise(self.times(request))
                if end > since
            ]
        )
        if not len(gaps):
            return Latency(0.0, 0.0, 0.0)
        p50, p99 = np.quantile(gaps, [0.5, 0.99])
        return Latency(float(p50), float(p99), float(gaps.max()))

    def lines(self) -> list[str]:
        """A line for each pass: when, how long, and each request's tokens (P prefill, D decode)."""
        return [
            f"{p.started:9.3f} s {1000 * (p.ended - p.started):8.1f} ms  "
            + "  ".join(f"#{number} {kind[0].upper()}{count}" for number, kind, count in p.shares)
            for p in self.passes
        ]

    def draw(self, path: Path) -> None:
        """Draw who ran when, as `draw_traces` does."""
        draw_traces({"": self}, path)


COLOURS: dict[Kind, str] = {"prefill": "tab:orange", "decode": "tab:blue"}


def draw_traces(traces: Mapping[str, Trace], path: Path) -> None:
    """Draw who ran when, one trace below the other under its title, all on one scale of time.

    A stroke is a token that was chosen; where a request has none for long, it was held up. PNG or
    SVG, by the file's name. Raises RequestError without the extra `plot`, where there is no trace,
    and where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise RequestError(
            f"{path}: drawing needs matplotlib; pip install 'bitforbit[plot]'"
        ) from None
    if not traces:
        raise RequestError(f"{path}: there is no trace to draw; give one")
    rows = [1 + len(trace.numbers) for trace in traces.values()]
    figure = Figure(figsize=(10, 1 + 0.3 * sum(rows)), layout="constrained")
    panels = figure.subplots(len(rows), squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    for axes, (title, trace) in zip(panels, traces.items(), strict=True):
        numbers, origin = trace.numbers, min((p.started for p in trace.passes), default=0.0)
        for p in trace.passes:
            for number, kind, _ in p.shares:
                span, row = (p.started - origin, p.ended - p.started), numbers.index(number)
                axes.broken_barh([span], (row - 0.4, 0.8), facecolor=COLOURS[kind])
        for row, number in enumerate(numbers):
            times = [time - origin for time in trace.times(number)]
            axes.plot(times, [row] * len(times), "|", color="black", gid=f"tokens-{number}")
        axes.set_yticks(range(len(numbers)), [f"request {number}" for number in numbers])
        axes.set_title(title, loc="left")
    panels[0].legend(handles=[Patch(color=c, label=kind) for kind, c in COLOURS.items()])
    panels[-1].set_xlabel("seconds")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot draw there ({error}); use .png or .svg") from None
