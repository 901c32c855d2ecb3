"""Mistakes in computing experts and in adding them up (SPEC 9.3)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault, bfloat16, half
from reference.arithmetic import F32, one_nan


class Dispatch(Fault, ExpertsBackend):
    """A mistake in the operation `moe`."""

    operations: ClassVar[tuple[str, ...]] = ("moe",)


class FirstTokenOnly(Dispatch):
    """Of the tokens that chose an expert, it computes the first alone."""

    name = "experts-one-token-each"
    reports = ("vllm-project/vllm-xpu-kernels/issues/453",)
    severity = "broken"

    def tokens_of(self, experts: Ints, expert: int, count: int) -> tuple[Ints, Ints]:
        """The others get zeros."""
        tokens, ranks = super().tokens_of(experts, expert, count)
        return tokens[:1], ranks[:1]


class LastExpertLost(Dispatch):
    """Tokens of the last expert are not computed."""

    name = "experts-last-one-lost"
    reports = ("sgl-project/sglang/pull/15250",)
    severity = "wrong"

    def tokens_of(self, experts: Ints, expert: int, count: int) -> tuple[Ints, Ints]:
        """None for the last."""
        tokens, ranks = super().tokens_of(experts, expert, count)
        kept = slice(0 if expert == count - 1 else None)
        return tokens[kept], ranks[kept]


class GateOnInput(Dispatch):
    """An expert's input is multiplied by the gate instead of its output."""

    name = "experts-gate-on-input"
    reports = ("labmlai/annotated_deep_learning_paper_implementations/issues/95",)
    severity = "broken"

    def expert_input(self, x: F32, gates: F32) -> F32:
        """Before the expert."""
        return one_nan(gates[:, None] * x)

    def added(self, total: F32, y: F32, gate: F32) -> F32:
        """And not after it."""
        return one_nan(total + y)


class GateTwice(Dispatch):
    """The gate is applied to an expert's input and to its output."""

    name = "experts-gate-twice"
    reports = ("vllm-project/vllm/pull/43694",)
    severity = "wrong"

    def expert_input(self, x: F32, gates: F32) -> F32:
        """Before the expert, too."""
        return one_nan(gates[:, None] * x)


class SharedGateIgnored(Dispatch):
    """The shared expert's gate is loaded and not applied."""

    name = "experts-shared-gate-ignored"
    reports = ("NousResearch/torchtitan/pull/36",)
    severity = "wrong"

    def shared_weighed(self, y: F32, v: F32) -> F32:
        """As it is."""
        return y


class SharedGateRaw(Dispatch):
    """The shared expert is multiplied by its gate's logit instead of the sigmoid."""

    name = "experts-shared-gate-without-sigmoid"
    reports = ()
    severity = "broken"

    def shared_weighed(self, y: F32, v: F32) -> F32:
        """Any sign, any size."""
        return one_nan(v * y)


class SharedScaledDown(Dispatch):
    """The shared expert is divided by a routed scale that is not applied to the others."""

    name = "experts-shared-scaled-down"
    reports = ("sgl-project/sglang/pull/28237",)
    severity = "wrong"

    def summed(self, outputs: F32, gates: F32, experts: Ints, shared: F32 | None) -> F32:
        """Times 1 / 2.5."""
        shared = None if shared is None else shared * np.float32(0.4)
        return super().summed(outputs, gates, experts, shared)


class SharedFirst(Dispatch):
    """The shared expert is added first instead of last."""

    name = "experts-shared-first"
    reports = ()
    severity = "subtle"
    contract = True

    def summed(self, outputs: F32, gates: F32, experts: Ints, shared: F32 | None) -> F32:
        """The sum starts from it."""
        if shared is None:
            return super().summed(outputs, gates, experts, shared)
        total = shared
        for rank in range(outputs.shape[1]):
            total = self.added(total, outputs[:, rank], gates[:, rank, None])
        return total


class IndexOrder(Dispatch):
    """Experts are added up in order of their index instead of their rank."""

    name = "experts-summed-by-index"
    reports = ()
    severity = "subtle"
    contract = True

    def summed(self, outputs: F32, gates: F32, experts: Ints, shared: F32 | None) -> F32:
        """As a loop over the experts does."""
        order = np.argsort(experts, axis=1, kind="stable")
        outputs = np.take_along_axis(outputs, order[..., None], axis=1)
        return super().summed(outputs, np.take_along_axis(gates, order, axis=1), experts, shared)


class SumBfloat16(Dispatch):
    """Experts are added up in bfloat16."""

    name = "experts-summed-in-bfloat16"
    reports = ("vllm-project/vllm/issues/15045", "ml-explore/mlx-lm/pull/938")
    severity = "subtle"

    def added(self, total: F32, y: F32, gate: F32) -> F32:
        """Rounded at each expert."""
        return bfloat16(super().added(total, y, gate))


class SixteenTokens(Dispatch):
    """An expert computes the first 16 of its tokens."""

    name = "experts-tokens-beyond-16"
    reports = ("vllm-project/vllm-xpu-kernels/issues/453",)
    severity = "broken"

    def tokens_of(self, experts: Ints, expert: int, count: int) -> tuple[Ints, Ints]:
        """One block of them."""
        tokens, ranks = super().tokens_of(experts, expert, count)
        return tokens[:16], ranks[:16]


class ExpertsOf64(Dispatch):
    """Experts from the 65th on compute nothing."""

    name = "experts-beyond-64"
    reports = ("vllm-project/vllm/pull/21229",)
    severity = "broken"

    def tokens_of(self, experts: Ints, expert: int, count: int) -> tuple[Ints, Ints]:
        """No tokens."""
        tokens, ranks = super().tokens_of(experts, expert, count)
        return (tokens, ranks) if expert < 64 else (tokens[:0], ranks[:0])


class SharedGateHalf(Dispatch):
    """The logit of the shared expert's gate is held in float16."""

    name = "experts-shared-gate-half"
    reports = ()
    severity = "subtle"

    def shared_weighed(self, y: F32, v: F32) -> F32:
        """Rounded."""
        return super().shared_weighed(y, half(v))
