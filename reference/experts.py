"""Mixture of experts: which ones compute a token, and how their outputs are added (SPEC 9.2, 9.3).

A router scores the experts for each token, chooses the best few, and gives each a gate by which its
output counts. How it does so is data, `Router`, because families differ in a few switches only. The
choice is a step function of the scores, and so the one place in a network where a rounding error
can change the result at large. Therefore every step is defined to the bit, and the margin of each
choice is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32, NAN, Bools, one_nan, to_float32
from reference.elementary import sigmoid, softmax
from reference.errors import ConfigError
from reference.feedforward import Function
from reference.threads import share

Ints = NDArray[np.int64]
Score = Literal["softmax", "sigmoid", "logits"]

SCORES: dict[Score, Function] = {"softmax": softmax, "sigmoid": sigmoid, "logits": lambda x: x}
"""What a router makes of its logits (SPEC 9.2, step 1)."""


@dataclass(frozen=True)
class Router:
    """How a family routes (SPEC 9.2). Raises ConfigError for what contradicts itself.

    experts, top_k: how many there are, and how many compute a token.
    score: what is made of the logits; with "logits" they are the scores, and the gates are the
    softmax of those chosen.
    selection_bias: (experts,) float32, added to the scores for the choice alone.
    groups, kept_groups: experts are chosen from this many of the groups; one group is no groups.
    group_best: a group's score is its best one, or the sum of its best two.
    renormalise: whether gates are divided by their sum plus epsilon. scale: multiplies them, last.
    """

    experts: int
    top_k: int
    score: Score = "softmax"
    selection_bias: F32 | None = None
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        size = self.experts // self.groups if self.groups > 0 else 0
        largest = float(np.finfo(np.float32).max)
        bias = self.selection_bias
        wanted = {
            "score": (self.score in SCORES, f"one of {', '.join(SCORES)}"),
            "groups": (size * self.groups == self.experts > 0, f"a divisor of {self.experts}"),
            "kept_groups": (0 < self.kept_groups <= self.groups, f"from 1 to {self.groups}"),
            "top_k": (0 < self.top_k <= self.kept_groups * size, "from 1 to the experts kept"),
            "group_best": (0 < self.group_best <= min(2, size), "1 or 2, and within a group"),
            "epsilon": (0 <= self.epsilon < np.inf, "0 or more, and finite"),
            "scale": (abs(self.scale) <= largest, "finite in float32"),
        }
        for name, (good, what) in wanted.items():
            if not good:
                raise ConfigError(f"router: {name} is {getattr(self, name)!r}; it must be {what}")
        if bias is not None and (bias.shape != (self.experts,) or not np.isfinite(bias).all()):
            raise ConfigError(f"router: selection_bias must be {self.experts} finite numbers")
        if bias is not None and self.score == "logits":
            raise ConfigError("router: selection_bias needs the score softmax or sigmoid")


@dataclass(frozen=True)
class Routing:
    """The router's decisions for T tokens (SPEC 9.2).

    experts: (T, k) int64, in rank order. gates: (T, k) float32.
    margins: (T,) float32, by how much scores would have to change to change the choice.
    """

    experts: Ints
    gates: F32
    margins: F32


def route(logits: F32, router: Router) -> Routing:
    """Choose the experts of each token by its logits, (T, E) float32 (SPEC 9.2).

    A row that cannot be routed has the experts 0 to k - 1, and NaN for its gates and margin.
    """
    sound = _sound(logits)
    usable = np.where(sound[:, None], logits, np.float32(0))
    scores = SCORES[router.score](usable)
    selection = _selection(scores, usable, router)
    candidates, group_margins = _candidates(selection, router)
    best, margins = _largest(np.take_along_axis(selection, candidates, axis=1), router.top_k)
    chosen = np.take_along_axis(candidates, best, axis=1)
    gates = gates_of(np.take_along_axis(scores, chosen, axis=1), router)
    margins = np.minimum(margins, group_margins)
    chosen[~sound], gates[~sound], margins[~sound] = np.arange(router.top_k), NAN, NAN
    return Routing(chosen, gates, margins)


def _sound(logits: F32) -> Bools:
    """Which rows can be routed: no NaN, no +inf, something finite, (T, E) -> (T,) (SPEC 9.2)."""
    largest = logits.max(axis=1)
    return np.asarray(np.isfinite(largest))


def _selection(scores: F32, logits: F32, router: Router) -> F32:
    """The scores by which experts are chosen; a logit of -inf comes last (SPEC 9.2, step 2)."""
    bias = router.selection_bias
    biased = scores if bias is None else scores + bias
    return np.where(logits == -np.inf, np.float32(-np.inf), biased)


def _candidates(selection: F32, router: Router) -> tuple[Ints, F32]:
    """The experts of the best groups, (T, n) ascending, and margins (T,) (SPEC 9.2, step 3)."""
    size = router.experts // router.groups
    groups = selection.reshape(-1, router.groups, size)
    with np.errstate(over="ignore"):
        scores = np.sort(groups, axis=2)[..., -router.group_best :].sum(axis=2)
    kept, margins = _largest(scores, router.kept_groups)
    experts = np.sort(kept, axis=1)[..., None] * size + np.arange(size)
    return experts.reshape(len(experts), router.kept_groups * size), margins


def _largest(scores: F32, count: int) -> tuple[Ints, F32]:
    """The `count` largest of each row, in rank order: of equal ones the lowest index first.

    (T, N) -> indices (T, count) and margins (T,): the last of them minus the one that follows. It
    is +0 where both are -inf, and infinite where none follows (SPEC 9.2).
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    if count == scores.shape[1]:
        return order, np.full(len(scores), np.inf, np.float32)
    ranked = np.take_along_axis(scores, order, axis=1)
    last, following = ranked[:, count - 1], ranked[:, count]
    with np.errstate(over="ignore", invalid="ignore"):
        return order[:, :count], np.where(last == following, np.float32(0), last - following)


def gates_of(scores: F32, router: Router) -> F32:
    """Gates of the chosen from their scores, (T, k) in rank order (SPEC 9.2, steps 5 to 7)."""
    gates = softmax(scores) if router.score == "logits" else scores
    with np.errstate(all="ignore"):
        if router.renormalise:
            total = np.cumsum(gates, axis=1, dtype=np.float64)[:, -1:] + router.epsilon
            gates = to_float32(gates / total)
        return one_nan(gates * np.float32(router.scale))


@dataclass(frozen=True)
class Shared:
    """An expert that computes every token (SPEC 9.3).

    gate: (T, K) -> (T, 1), a linear layer whose sigmoid its output is multiplied by; None is 1.
    """

    expert: Function
    gate: Function | None = None

    def __call__(self, x: F32) -> F32:
        """(T, K) float32 -> (T, K) float32."""
        y = self.expert(x)
        return y if self.gate is None else _times(sigmoid(self.gate(x)), y)


def moe(x: F32, routing: Routing, experts: Sequence[Function], shared: Shared | None = None) -> F32:
    """Add the outputs of the experts of each token, times gates, in rank order (SPEC 9.3).

    x: (T, K) float32; returns the same shape. experts: E functions (n, K) -> (n, K) that compute
    each row from itself alone, such as gated_mlp with its weights. One that no token chose is not
    called. shared: is added last.
    """
    run = by_token if len(x) == 1 else by_expert
    outputs = run(x, routing.experts, experts)
    total = np.zeros_like(x)
    for rank in range(outputs.shape[1]):
        total = _plus(total, _times(routing.gates[:, rank, None], outputs[:, rank]))
    return total if shared is None else _plus(total, shared(x))


def by_token(x: F32, chosen: Ints, experts: Sequence[Function]) -> F32:
    """What each chosen expert makes of its token: x (T, K), chosen (T, k) -> (T, k, K) (SPEC 9.3).

    One call for each token and expert, as in a decode step, which has no tokens to gather.
    """
    outputs = np.empty((*chosen.shape, x.shape[1]), np.float32)
    for token, rank in np.ndindex(chosen.shape):
        outputs[token, rank] = experts[int(chosen[token, rank])](x[token, None])[0]
    return outputs


def by_expert(x: F32, chosen: Ints, experts: Sequence[Function]) -> F32:
    """The same with one call for each expert, on all of its tokens, as in a prefill (SPEC 9.3)."""
    outputs = np.empty((*chosen.shape, x.shape[1]), np.float32)

    def compute(expert: int) -> None:
        tokens, ranks = np.nonzero(chosen == expert)
        outputs[tokens, ranks] = experts[expert](x[tokens])

    share(compute, np.unique(chosen).tolist())
    return outputs


def _plus(x: F32, y: F32) -> F32:
    """RN32(x + y)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return one_nan(x + y)


def _times(x: F32, y: F32) -> F32:
    """RN32(x * y)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return one_nan(x * y)
