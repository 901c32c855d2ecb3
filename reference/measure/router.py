"""How often rounding changes which experts compute a token (SPEC 9.2).

A router's choice is a step function: a change of arithmetic that moves every logit by a hair either
changes no choice, or replaces a whole expert. So a text is routed in two ways, and the decisions
are compared, a decision being that for one token in one layer. It *flips* if the sets of experts
differ; another rank order of the same experts is no flip. Layers are not isolated: what an early
flip changes, all later layers see, as in real use.

One way does nothing: exact attention, with the text fed in other chunks, gives the same bits and so
no flip. A run in which it has one has found a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.errors import RequestError
from reference.experts import Routing
from reference.model import AttentionKind, Model
from reference.weights import Arithmetic, Mode

Ints = NDArray[np.int64]

EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Between the bins of margins, as float32; a bin holds its lower edge. The last one is open."""


@dataclass(frozen=True)
class Arm:
    """A way to route a text. chunked: fed in chunks of 1, 2, 4, 8 ... tokens, and not in one."""

    name: str
    weights: Mode = "float32"
    arithmetic: Arithmetic = "exact"
    attention: AttentionKind = "exact"
    chunked: bool = False


BASE = Arm("exact")
NOTHING = Arm("exact, in other chunks", chunked=True)
ARMS = (
    NOTHING,
    Arm("fast attention", attention="fast"),
    Arm("float32 arithmetic", arithmetic="float32", attention="fast"),
    Arm("int4 weights", weights="int4"),
    Arm("int4-row weights", weights="int4-row"),
)
"""What is compared with the base."""


@dataclass(frozen=True)
class Tracing:
    """How a model routes a text. tokens: (n,) of it. context: tokens of a window, which share none.

    Raises RequestError for a model without experts, and for a context that it does not have.
    """

    model: Model
    tokens: Ints
    context: int
    arm: Arm = BASE

    def __post_init__(self) -> None:
        most = self.model.config.max_positions
        if not self.experts:
            raise RequestError(
                "model: it has no experts, so it routes nothing; give a sparse one, as tiny-moe"
            )
        if not 2 <= self.context <= most:
            raise RequestError(
                f"context: {self.context} is out of range; the model's has 2 to {most} positions"
            )
        if len(self.tokens) < 2:
            raise RequestError("text: it has fewer than 2 tokens, so it has no chunks; give more")

    @property
    def experts(self) -> int:
        """How many experts a sparse layer has; 0 without one."""
        sparse = self.model.config.sparse
        return sparse.router.experts if sparse is not None and any(sparse.layers) else 0

    @property
    def windows(self) -> list[Ints]:
        """The tokens of each window; the last may be shorter."""
        return np.split(self.tokens, range(self.context, len(self.tokens), self.context))

    def run(self) -> Iterator[dict[int, Routing]]:
        """Every sparse layer's decisions, by the layer's number, window after window.

        Raises RequestError where a token cannot be routed (SPEC 9.2).
        """
        for window in self.windows:
            found = self._routed(window)
            for layer, routing in found.items():
                if np.isnan(routing.margins).any():
                    raise RequestError(f"model: a token of layer {layer} has no finite logits")
            yield found

    def _routed(self, window: Ints) -> dict[int, Routing]:
        """The decisions for one window, by layer."""
        ends = 2 ** np.arange(1, len(window).bit_length()) - 1
        chunks = np.split(window, ends) if self.arm.chunked else [window]
        cache = self.model.new_cache()
        parts: dict[int, list[Routing]] = {}

        def note(layer: int, routing: Routing) -> None:
            parts.setdefault(layer, []).append(routing)

        for chunk in filter(len, chunks):
            self.model.forward(chunk, cache, self.arm.attention, last_only=True, routed=note)
        return {layer: joined(routings) for layer, routings in parts.items()}


def joined(parts: Sequence[Routing]) -> Routing:
    """Decisions one after another."""
    return Routing(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("experts", "gates", "margins")
        )
    )


def flips(base: Routing, other: Routing) -> dict[str, Any]:
    """What differs between two ways to route the same n tokens.

    share: flips of the decisions. calls: share of the calls of experts that the other way sends
    elsewhere. largest: margin in the base of a decision that flipped, None without a flip. moved:
    by how much the margin of one that did not flip changed at most, None without one. The bins are
    of the base's margins, in units of the score.
    """
    kept = (base.experts[:, :, None] == other.experts[:, None, :]).any(axis=2)
    flipped = ~kept.all(axis=1)
    bins = np.searchsorted(np.array(EDGES, np.float32), base.margins, side="right")
    return {
        "decisions": len(flipped),
        "flips": int(flipped.sum()),
        "share": float(flipped.mean()),
        "calls": float((~kept).mean()),
        "largest": float(base.margins[flipped].max()) if flipped.any() else None,
        "moved": None if flipped.all() else float(_moves(base, other)[~flipped].max()),
        "bin_decisions": np.bincount(bins, minlength=len(EDGES) + 1).tolist(),
        "bin_flips": np.bincount(bins[flipped], minlength=len(EDGES) + 1).tolist(),
    }


def _moves(base: Routing, other: Routing) -> F32:
    """How far the other way moved each margin, (n,); one that is infinite has no other expert."""
    with np.errstate(invalid="ignore"):
        moves = np.abs(base.margins - other.margins)
    return np.where(np.isinf(base.margins), np.float32(0), moves)


def load(routing: Routing, experts: int) -> list[float]:
    """Share of a layer's calls that each of its experts has; balanced, each has 1 / experts."""
    calls = np.bincount(routing.experts.ravel(), minlength=experts)
    return list((calls / calls.sum()).tolist())
