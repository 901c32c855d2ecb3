"""Mixture of experts in torch (SPEC 9.2, 9.3).

What rounds comes from the kernels, exact or float32; here is what chooses, gathers and adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.backends.torch.arithmetic import NAN, canonical, like
from conformance.backends.torch.kernels import Kernels, Rows


@dataclass(frozen=True)
class Router:
    """The parameters of `route` (17)."""

    top_k: int
    score: str
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0


def choose(selection: Tensor, router: Router) -> Tensor:
    """Experts in rank order by selection scores (T, E) without NaN: (T, k) (9.2, 3 and 4).

    Sorting is stable, so equal scores keep the order of their indices; adding +0 makes -0 equal +0.
    """
    rows, experts = selection.shape
    groups = (selection + 0.0).reshape(rows, router.groups, experts // router.groups)
    best = groups.sort(-1, descending=True).values[..., : router.group_best]
    by_score = _descending(best.sum(-1))
    kept = by_score[:, : router.kept_groups].sort(-1).values
    within = torch.gather(groups, 1, kept[..., None].expand(-1, -1, groups.shape[2]))
    rank = _descending(within.reshape(rows, -1))[:, : router.top_k]
    size = groups.shape[2]
    group = torch.gather(kept, 1, torch.div(rank, size, rounding_mode="floor"))
    return group * size + rank % size


def _descending(x: Tensor) -> Tensor:
    """Indices of each row from its largest, the lowest first among equals."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices


def select(logits: Tensor, scores: Tensor, bias: Tensor | None, router: Router) -> Tensor:
    """Experts of each row that can be routed (9.2, 2 to 4)."""
    selection = scores if bias is None else scores + bias
    return choose(torch.where(logits == -torch.inf, -torch.inf, selection), router)


def exact_total(gates: Tensor, epsilon: float) -> Tensor:
    """Sum of gates (T, k) in float64, in rank order, epsilon last: (T, 1) (9.2, 6)."""
    total = torch.zeros(len(gates), dtype=torch.float64, device=gates.device)
    for gate in gates.double().unbind(-1):
        total = total + gate
    return (total + like(total, epsilon))[:, None]


def rank_order(x: Tensor, experts: Tensor, gates: Tensor, layers: Sequence[Rows]) -> Tensor:
    """Sum of gate times output over the experts of a token, float32, in rank order (9.3)."""
    outputs = torch.zeros(*experts.shape, x.shape[1], dtype=x.dtype, device=x.device)
    for expert, layer in enumerate(layers):
        tokens, ranks = torch.nonzero(experts == expert, as_tuple=True)
        if len(tokens):
            outputs[tokens, ranks] = layer(x[tokens])
    total = torch.zeros_like(x)
    for rank in range(experts.shape[1]):
        total = total + gates[:, rank, None] * outputs[:, rank]
    return canonical(total)


def expert_order(x: Tensor, experts: Tensor, gates: Tensor, layers: Sequence[Rows]) -> Tensor:
    """The same sum as it comes, expert by expert."""
    total = torch.zeros_like(x)
    for expert, layer in enumerate(layers):
        tokens, ranks = torch.nonzero(experts == expert, as_tuple=True)
        if len(tokens):
            total.index_add_(0, tokens, gates[tokens, ranks, None] * layer(x[tokens]))
    return canonical(total)


def unroutable(logits: Tensor) -> Tensor:
    """Rows with NaN or +inf, or with nothing but -inf: (T, 1) bool (9.2)."""
    return ~torch.isfinite(logits.amax(-1, keepdim=True))


def settle(experts: Tensor, gates: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest experts with NaN gates where a row cannot be routed (9.2)."""
    lowest = torch.arange(experts.shape[1], device=experts.device).expand_as(experts)
    return torch.where(lost, lowest, experts), canonical(torch.where(lost, NAN, gates))


def route(
    logits: Tensor, router: Router, bias: Tensor | None, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Experts (T, k) int64 in rank order and their gates (T, k), by logits (T, E) (9.2)."""
    lost = unroutable(logits)
    logits = torch.where(lost, 0.0, logits)
    scores = logits
    if router.score != "logits":
        scores = {"softmax": kernels.softmax, "sigmoid": kernels.functions["sigmoid"]}[
            router.score
        ](logits)
    experts = select(logits, scores, bias, router)
    gates = torch.gather(scores, 1, experts)
    if router.score == "logits":
        gates = kernels.softmax(gates)
    if router.renormalise:
        gates = kernels.renormalise(gates, router.epsilon)
    gates = gates * like(gates, router.scale)
    return settle(experts, gates, lost)


@dataclass(frozen=True)
class Shared:
    """A shared expert; gate: a linear layer with one output, where it has one (9.3)."""

    expert: Rows
    gate: Rows | None


def moe(
    x: Tensor,
    experts: Tensor,
    gates: Tensor,
    layers: Sequence[Rows],
    shared: Shared | None,
    kernels: Kernels,
) -> Tensor:
    """Experts of rows x (T, K) with their routing, and the shared one, last (9.3)."""
    total = kernels.combine(x, experts, gates, layers)
    if shared is None:
        return total
    y = shared.expert(x)
    if shared.gate is not None:
        y = kernels.functions["sigmoid"](shared.gate(x)) * y
    return kernels.add(total, y)
