"""Mistakes of routing and of mixtures of experts (SPEC 9.2, 9.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault, bfloat16
from reference.arithmetic import F32, one_nan
from reference.experts import Router


class Routing(Fault, ExpertsBackend):
    """A mistake in the operation `route`."""

    operations: ClassVar[tuple[str, ...]] = ("route",)


class Dispatch(Fault, ExpertsBackend):
    """A mistake in the operation `moe`."""

    operations: ClassVar[tuple[str, ...]] = ("moe",)


class RenormaliseForgotten(Routing):
    """Gates are not divided by their sum."""

    name = "experts-renormalise-forgotten"
    reports = ("pytorch/torchtitan/issues/1448",)
    severity = "wrong"

    def renormalised(self, gates: F32, router: Router) -> F32:
        """As they are."""
        return gates


class RenormaliseAlways(Routing):
    """Gates are divided by their sum in families that do not."""

    name = "experts-renormalise-always"
    reports = ("lablup/mlxcel/pull/391",)
    severity = "wrong"

    def renormalised(self, gates: F32, router: Router) -> F32:
        """Whatever the family says."""
        return super().renormalised(gates, replace(router, renormalise=True))


class RenormaliseOverTokens(Routing):
    """Where a token has one expert, gates are divided by their sum over the tokens."""

    name = "experts-renormalise-over-tokens"
    reports = ("databricks/megablocks/pull/87",)
    severity = "wrong"

    def renormalised(self, gates: F32, router: Router) -> F32:
        """The axis of the experts was dropped."""
        if router.top_k > 1 or not router.renormalise:
            return super().renormalised(gates, router)
        return np.asarray(gates / gates.sum(axis=0, keepdims=True))


class EpsilonForgotten(Routing):
    """Gates are divided by their sum without its epsilon, and are NaN where all vanish."""

    name = "experts-renormalise-without-epsilon"
    reports = ()
    severity = "subtle"

    def renormalised(self, gates: F32, router: Router) -> F32:
        """Zero over zero."""
        return super().renormalised(gates, replace(router, epsilon=0.0))


class SoftmaxAfterChoice(Routing):
    """The softmax is over the chosen logits, where it should be over those of all experts."""

    name = "experts-softmax-after-choice"
    reports = ("Lightning-AI/litgpt/issues/2013",)
    severity = "wrong"

    def weighed(self, scores: F32, logits: F32, experts: Ints, router: Router) -> F32:
        """Of k logits."""
        if router.score != "softmax":
            return super().weighed(scores, logits, experts, router)
        return self.softmax(np.take_along_axis(logits, experts, axis=1))


class RawLogits(Routing):
    """Gates that are not renormalised are the logits themselves."""

    name = "experts-gates-are-logits"
    reports = ("sgl-project/sglang/pull/35160",)
    severity = "broken"

    def weighed(self, scores: F32, logits: F32, experts: Ints, router: Router) -> F32:
        """The softmax is in the other branch."""
        if router.renormalise:
            return super().weighed(scores, logits, experts, router)
        return np.take_along_axis(logits, experts, axis=1)


class SoftmaxForSigmoid(Routing):
    """Scores are a softmax where the family has a sigmoid."""

    name = "experts-softmax-for-sigmoid"
    reports = ("ml-explore/mlx-lm/pull/1354",)
    severity = "wrong"

    def scored(self, logits: F32, router: Router) -> F32:
        """One kind for all."""
        return super().scored(
            logits, replace(router, score="softmax") if router.score == "sigmoid" else router
        )


class BiasInGates(Routing):
    """The selection bias, meant for the choice, is left in the gates."""

    name = "experts-bias-in-gates"
    reports = ("vllm-project/vllm/pull/12002", "ml-explore/mlx-lm/pull/1354")
    severity = "subtle"

    def weighed(self, scores: F32, logits: F32, experts: Ints, router: Router) -> F32:
        """The biased scores of the chosen."""
        bias = router.selection_bias
        biased = scores if bias is None else scores + bias
        return super().weighed(biased, logits, experts, router)


class BiasIgnored(Routing):
    """Experts are chosen without the selection bias."""

    name = "experts-bias-ignored"
    reports = ()
    severity = "wrong"

    def selection(self, scores: F32, logits: F32, router: Router) -> F32:
        """By the scores."""
        return super().selection(scores, logits, replace(router, selection_bias=None))


class BiasBfloat16(Routing):
    """The selection bias is held in bfloat16, and near ties fall the other way."""

    name = "experts-bias-bfloat16"
    reports = ("vllm-project/vllm/pull/23640",)
    severity = "subtle"

    def selection(self, scores: F32, logits: F32, router: Router) -> F32:
        """Rounded."""
        bias = router.selection_bias
        bias = None if bias is None else bfloat16(bias)
        return super().selection(scores, logits, replace(router, selection_bias=bias))


class ForbiddenChosen(Routing):
    """An expert whose logit is minus infinity is chosen for its bias."""

    name = "experts-forbidden-chosen"
    reports = ()
    severity = "wrong"

    def selection(self, scores: F32, logits: F32, router: Router) -> F32:
        """Score and bias alone."""
        return super().selection(scores, np.zeros_like(logits), router)


class DroppedGroupsZero(Routing):
    """Experts of dropped groups score zero, which beats negative ones, instead of being removed."""

    name = "experts-dropped-groups-score-zero"
    reports = (
        "sgl-project/sglang/pull/3705",
        "vllm-project/vllm/pull/13474",
        "huggingface/transformers/issues/45440",
    )
    severity = "subtle"

    def chosen(self, selection: F32, router: Router) -> Ints:
        """All are candidates."""
        mask = np.zeros((len(selection), router.groups), bool)
        np.put_along_axis(mask, self.kept_groups(selection, router), True, axis=1)
        wide = np.repeat(mask, router.experts // router.groups, axis=1)
        return self.largest(np.where(wide, selection, np.float32(0)), router.top_k)


class GroupMaximum(Routing):
    """A group's score is its largest, where it should be the sum of its two largest."""

    name = "experts-group-scores-maximum"
    reports = ("vllm-project/vllm/pull/13474",)
    severity = "subtle"

    def group_scores(self, groups: F32, router: Router) -> F32:
        """The best one."""
        return super().group_scores(groups, replace(router, group_best=1))


class GroupsIgnored(Routing):
    """Experts are chosen from all groups."""

    name = "experts-groups-ignored"
    reports = ()
    severity = "wrong"

    def chosen(self, selection: F32, router: Router) -> Ints:
        """One group."""
        return self.largest(selection, router.top_k)


class TiesHighest(Routing):
    """Of equal experts the highest index comes first."""

    name = "experts-ties-to-the-highest"
    reports = ("vllm-project/vllm/pull/55514", "vllm-project/vllm/pull/52679")
    severity = "subtle"

    def largest(self, scores: F32, count: int) -> Ints:
        """From the end."""
        width = scores.shape[1]
        return np.asarray(width - 1 - super().largest(scores[:, ::-1], width)[:, :count])


class ScaleForgotten(Routing):
    """Renormalised gates are not multiplied by the routed scale."""

    name = "experts-scale-forgotten-where-renormalised"
    reports = ("sgl-project/sglang/pull/31449",)
    severity = "wrong"

    def scaled(self, gates: F32, router: Router) -> F32:
        """In the other branch alone."""
        return gates if router.renormalise else super().scaled(gates, router)


class ScaleNested(Routing):
    """Gates that are not renormalised are not multiplied by the routed scale."""

    name = "experts-scale-only-where-renormalised"
    reports = ("sgl-project/sglang-jax/pull/1282",)
    severity = "wrong"

    def scaled(self, gates: F32, router: Router) -> F32:
        """Inside the branch."""
        return super().scaled(gates, router) if router.renormalise else gates


class ScaleTwice(Routing):
    """The routed scale is applied by the router and once more by the layer."""

    name = "experts-scale-twice"
    reports = ("sgl-project/sglang/pull/35152", "kvcache-ai/sglang/pull/86")
    severity = "wrong"

    def scaled(self, gates: F32, router: Router) -> F32:
        """Squared."""
        return super().scaled(super().scaled(gates, router), router)


class LogitsBfloat16(Routing):
    """The router's logits are rounded to bfloat16."""

    name = "experts-logits-bfloat16"
    reports = ("vllm-project/vllm/pull/14027", "vllm-project/vllm-ascend/pull/9617")
    severity = "subtle"

    def scored(self, logits: F32, router: Router) -> F32:
        """Of rounded logits."""
        return super().scored(bfloat16(logits), router)


class GatesBfloat16(Routing):
    """Gates are rounded to bfloat16, undeclared."""

    name = "experts-gates-bfloat16"
    reports = ("NVIDIA-NeMo/Automodel/issues/3650",)
    severity = "subtle"

    def scaled(self, gates: F32, router: Router) -> F32:
        """Rounded last."""
        return bfloat16(super().scaled(gates, router))


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
    reports = ()
    severity = "broken"

    def expert_input(self, x: F32, gates: F32) -> F32:
        """Before the expert."""
        return one_nan(gates[:, None] * x)

    def added(self, total: F32, y: F32, gate: F32) -> F32:
        """And not after it."""
        return one_nan(total + y)


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
    reports = ()
    severity = "subtle"

    def added(self, total: F32, y: F32, gate: F32) -> F32:
        """Rounded at each expert."""
        return bfloat16(super().added(total, y, gate))
