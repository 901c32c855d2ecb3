"""Mistakes of the router (SPEC 9.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault, bfloat16
from reference.arithmetic import F32, to_float32
from reference.experts import Router


class Routing(Fault, ExpertsBackend):
    """A mistake in the operation `route`."""

    operations: ClassVar[tuple[str, ...]] = ("route",)


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
    reports = ("sgl-project/sglang/pull/31017", "flashinfer-ai/flashinfer/pull/3803")
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
    reports = ("deepspeedai/DeepSpeed/pull/8369",)
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
    reports = ("alibaba/rtp-llm/pull/347",)
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


class ForbiddenInGroups(Routing):
    """A forbidden expert counts as zero in its group's score, which beats negative ones."""

    name = "experts-forbidden-scores-zero-in-its-group"
    reports = ("huggingface/transformers/issues/45440",)
    severity = "wrong"

    def group_scores(self, groups: F32, router: Router) -> F32:
        """0 for -inf."""
        return super().group_scores(np.where(groups == -np.inf, np.float32(0), groups), router)


class EpsilonForAll(Routing):
    """Gates are renormalised with 10^-6 added to their sum, whatever the model says."""

    name = "experts-renormalise-with-1e-6"
    reports = ()
    severity = "subtle"

    def renormalised(self, gates: F32, router: Router) -> F32:
        """Another epsilon."""
        if not router.renormalise:
            return gates
        total = np.cumsum(gates, axis=1, dtype=np.float64)[:, -1:] + 1e-6
        return to_float32(np.asarray(gates / total))


class OneNotRenormalised(Routing):
    """The gate of a single expert is not renormalised."""

    name = "experts-one-not-renormalised"
    reports = ("pytorch/torchtitan/issues/1448",)
    severity = "wrong"

    def renormalised(self, gates: F32, router: Router) -> F32:
        """As it is."""
        return gates if router.top_k == 1 else super().renormalised(gates, router)


class TokensOf32(Routing):
    """Tokens from the 33rd of a call on are routed as the first 32 are."""

    name = "experts-routed-by-32"
    reports = ("tenstorrent/tt-metal/issues/50669",)
    severity = "broken"

    def chosen(self, selection: F32, router: Router) -> Ints:
        """The same again."""
        found = super().chosen(selection, router).copy()
        found[32:] = np.resize(found[:32], found[32:].shape)
        return found


class ScaleBfloat16(Routing):
    """The routed scale is held in bfloat16."""

    name = "experts-scale-bfloat16"
    reports = ()
    severity = "subtle"

    def scaled(self, gates: F32, router: Router) -> F32:
        """Rounded."""
        return gates * bfloat16(np.array(router.scale, np.float32))


class SoftmaxOverflows(Routing):
    """A router's softmax does not subtract the maximum, and large logits overflow."""

    name = "experts-maximum-not-subtracted"
    reports = ()
    severity = "broken"

    def scored(self, logits: F32, router: Router) -> F32:
        """exp of the logits as they are."""
        if router.score != "softmax":
            return super().scored(logits, router)
        p = self.exp(logits)
        return self.divide(p, self.total(p)[:, None])
