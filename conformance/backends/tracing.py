"""The steps of a forward pass, by name and in order, as the reference computes them (SPEC 19.2)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.attention import Scores
from reference.cache import KVCache
from reference.experts import Routing
from reference.model import AttentionKind, Model, Operations, Rows

Array = NDArray[Any]
Steps = dict[str, Array]
"""What was traced, by step: (T, ...) each, float32 but for the router's choice, int64."""

OF_LAYER: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention_norm": ("the norm before attention", ("element",)),
    "q": ("q after rope", ("head", "element")),
    "k": ("k after rope", ("key-value head", "element")),
    "v": ("v", ("key-value head", "element")),
    "attention": ("attention", ("head", "element")),
    "o": ("the output projection", ("element",)),
    "attention_residual": ("the residual after attention", ("element",)),
    "mlp_norm": ("the norm before the feed-forward layer", ("element",)),
    "experts": ("the router's choice", ("rank",)),
    "mlp": ("the feed-forward layer", ("element",)),
    "residual": ("the residual after the feed-forward layer", ("element",)),
}
"""Steps of `layer.<index>.`, in order: what each is, its axes after the position (SPEC 19.2)."""

OUTSIDE: dict[str, tuple[str, tuple[str, ...]]] = {
    "embedding": ("the embedding", ("element",)),
    "final_norm": ("the final norm", ("element",)),
    "logits": ("the logits", ("token",)),
}
"""Steps outside of the layers."""


def step_names(layers: int) -> list[str]:
    """Every step of a model, in the order in which they are computed (SPEC 19.2)."""
    inside = [f"layer.{index}.{step}" for index in range(layers) for step in OF_LAYER]
    return ["embedding", *inside, "final_norm", "logits"]


def described(name: str) -> tuple[str, tuple[str, ...]]:
    """What a step is, in words, and the names of its axes: `layer 3, q after rope`."""
    if name in OUTSIDE:
        words, axes = OUTSIDE[name]
        return words, ("position", *axes)
    match = re.fullmatch(r"layer\.(\d+)\.(\w+)", name)
    if match is None or match[2] not in OF_LAYER:
        raise KeyError(name)
    words, axes = OF_LAYER[match[2]]
    return f"layer {match[1]}, {words}", ("position", *axes)


class Watcher:
    """Notes the steps of a forward pass as its operations come by, without changing any of them.

    A norm is known by its weight, attention and residuals by the order in which they come.
    """

    def __init__(self, model: Model) -> None:
        self.steps: Steps = {}
        self._norms = dict(_norms(model))
        self._layer = itertools.count()
        self._residual = itertools.count()

    def watched(self, do: Operations) -> Operations:
        """The same operations, looked at; a pass then takes all rows of a layer together."""

        def rms_norm(x: F32, weight: F32, eps: float) -> F32:
            y = do.rms_norm(x, weight, eps)
            before, after = self._norms.get(id(weight), (None, None))
            if before is not None:
                self.steps[before] = x
            if after is not None:
                self.steps[after] = y
            return y

        def attend(q: F32, parts: Sequence[Rows], scores: Scores) -> F32:
            y = do.attend(q, parts, scores)
            at = f"layer.{next(self._layer)}"
            (layer,), rows = (part.layer for part in parts), len(q)
            k, v, _ = layer.plain().read(layer.length - rows, layer.length)
            self.steps[f"{at}.q"], self.steps[f"{at}.attention"] = q, y
            for name, x in (("k", k), ("v", v)):
                self.steps[f"{at}.{name}"] = np.ascontiguousarray(x.swapaxes(0, 1))
            return y

        def add(x: F32, y: F32) -> F32:
            total = do.add(x, y)
            layer, second = divmod(next(self._residual), 2)
            branch, whole = ("mlp", "residual") if second else ("o", "attention_residual")
            self.steps.setdefault("embedding", x)
            self.steps.setdefault(f"layer.{layer}.{branch}", y)
            self.steps[f"layer.{layer}.{whole}"] = total
            return total

        return replace(
            do,
            rms_norm=rms_norm,
            attend=attend,
            add=add,
            by_rows=lambda work, *rows: work(*rows),
        )

    def routed(self, index: int, routing: Routing) -> None:
        """Note a router's choice."""
        self.steps[f"layer.{index}.experts"] = routing.experts


def _norms(model: Model) -> Iterator[tuple[int, tuple[str | None, str | None]]]:
    """By the id of a norm's weight: the steps that are its input and its output.

    A norm after a branch is no step: its input is the branch's result.
    """
    yield id(model.weights.final_norm), (None, "final_norm")
    for index, layer in enumerate(model.weights.layers):
        at, norms = f"layer.{index}", layer.norms
        yield id(norms.before_attention), (None, f"{at}.attention_norm")
        yield id(norms.before_mlp), (None, f"{at}.mlp_norm")
        yield id(norms.after_attention), (f"{at}.o", None)
        yield id(norms.after_mlp), (f"{at}.mlp", None)


def trace(
    model: Model,
    tokens: Sequence[int] | NDArray[np.int64],
    cache: KVCache | None = None,
    attention: AttentionKind = "exact",
) -> Steps:
    """Every step of one forward pass, in order (SPEC 19.2). Raises as `Model.forward` does."""
    watcher = Watcher(model)
    watching = replace(model, operations=watcher.watched(model.operations))
    logits = watching.forward(tokens, cache, attention, routed=watcher.routed)
    steps = {**watcher.steps, "logits": logits}
    return {name: steps[name] for name in step_names(model.config.layers) if name in steps}


def joined(parts: Sequence[Mapping[str, Array]]) -> Steps:
    """The steps of several passes, one behind the other; those that each of them has."""
    first = parts[0]
    return {
        name: np.concatenate([np.asarray(part[name]) for part in parts])
        for name in first
        if all(name in part for part in parts)
    }
