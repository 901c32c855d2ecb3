"""What a run of the engine did, pass by pass, and what each user felt of it (SPEC 14.2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Pass:
    """One forward pass: seconds since the trace began, and who computed how many tokens.

    shares: (request number, kind, tokens) each. chosen: tokens that each request got of it.
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
        """When each token of a request was chosen, seconds."""
        return [p.ended for p in self.passes for _ in range(p.chosen.get(request, 0))]

    def latency(self, requests: Sequence[int]) -> Latency:
        """The time between tokens over several requests, each request's first token left out."""
        gaps = np.concatenate([np.diff(self.times(request)) for request in requests])
        if not len(gaps):
            return Latency(0.0, 0.0, 0.0)
        p50, p99 = np.quantile(gaps, [0.5, 0.99])
        return Latency(float(p50), float(p99), float(gaps.max()))

    def lines(self) -> list[str]:
        """One line a pass: when, how long, and the tokens of each, P for prefill, D for decode."""
        return [
            f"{p.started:9.3f} s {1000 * (p.ended - p.started):8.1f} ms  "
            + "  ".join(f"#{number} {kind[0].upper()}{count}" for number, kind, count in p.shares)
            for p in self.passes
        ]

    def draw(self, path: Path) -> None:
        """Draw who ran when, as PNG or SVG by the file's name; needs the extra `plot`."""
        from matplotlib.figure import Figure

        bars: dict[tuple[int, Kind], list[tuple[float, float]]] = defaultdict(list)
        for p in self.passes:
            for number, kind, _ in p.shares:
                bars[number, kind].append((p.started, p.ended - p.started))
        numbers = sorted({number for number, _ in bars})
        figure = Figure(figsize=(10, 1 + 0.4 * len(numbers)), layout="constrained")
        axes = figure.subplots()
        colours: dict[Kind, str] = {"prefill": "tab:orange", "decode": "tab:blue"}
        for (number, kind), spans in bars.items():
            axes.broken_barh(spans, (numbers.index(number) - 0.4, 0.8), facecolor=colours[kind])
        for kind, colour in colours.items():
            axes.broken_barh([], (0, 0), facecolor=colour, label=kind)
        axes.set_yticks(range(len(numbers)), [f"request {number}" for number in numbers])
        axes.set_xlabel("seconds")
        axes.legend(loc="upper right")
        figure.savefig(path)
