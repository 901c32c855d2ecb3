"""Mistakes of rope's constants (SPEC 7.1, 7.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.faults.fault import Fault, bfloat16
from reference.arithmetic import F32


class Constants(Fault):
    """A mistake in the operation `rope_constants`."""

    operations = ("rope_constants",)

    def rope_constants(self, parameters: Mapping[str, Any], position: int) -> tuple[F32, F32]:
        """From changed parameters."""
        return super().rope_constants(self.changed(dict(parameters)), position)

    def changed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """What is made of the parameters."""
        return parameters


class MscaleIgnored(Constants):
    """yarn's factor is computed without mscale and mscale_all_dim."""

    name = "rope-yarn-mscale-ignored"
    reports = ("vllm-project/vllm/issues/48621",)
    severity = "wrong"

    def changed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Without the two keys."""
        return {k: v for k, v in parameters.items() if not k.startswith("mscale")}


class AttentionFactorIgnored(Constants):
    """A given attention_factor of yarn is computed anew."""

    name = "rope-yarn-attention-factor-ignored"
    reports = ("ml-explore/mlx-lm/pull/1507",)
    severity = "wrong"

    def changed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Without the key."""
        return {k: v for k, v in parameters.items() if k != "attention_factor"}


class Llama3FactorsMissing(Constants):
    """llama3 scaling is not applied."""

    name = "rope-llama3-factors-missing"
    reports = ("ggml-org/llama.cpp/pull/8676",)
    severity = "wrong"

    def changed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The default kind instead."""
        keep = ("head_dim", "max_position_embeddings", "rope_theta", "partial_rotary_factor")
        if parameters["rope_type"] != "llama3":
            return parameters
        return {"rope_type": "default"} | {k: v for k, v in parameters.items() if k in keep}


class TruncatedAlways(Constants):
    """yarn's range is rounded to whole pairs even where the model says not to."""

    name = "rope-yarn-truncated-always"
    reports = ("vllm-project/vllm/issues/27722", "sgl-project/sglang/pull/14270")
    severity = "subtle"

    def changed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Without the key."""
        return {k: v for k, v in parameters.items() if k != "truncate"}


class FactorInPower(Constants):
    """yarn's factor multiplies theta inside the power."""

    name = "rope-yarn-factor-in-power"
    reports = ("apache/tvm/pull/18576",)
    severity = "wrong"

    def rope_constants(self, parameters: Mapping[str, Any], position: int) -> tuple[F32, F32]:
        """Stretched frequencies of the base factor * theta, blended as before."""
        inv_freq, factor = super().rope_constants(parameters, position)
        if parameters["rope_type"] != "yarn":
            return inv_freq, factor
        stretch, theta = parameters["factor"], parameters["rope_theta"]
        plain = theta ** (-np.arange(len(inv_freq)) / len(inv_freq))
        ramp = (plain - inv_freq) / (plain - plain / stretch)
        within = (stretch * theta) ** (-np.arange(len(inv_freq)) / len(inv_freq))
        return (plain * (1 - ramp) + within * ramp).astype(np.float32), factor


class HighClampedToHalf(Constants):
    """The upper end of yarn's range is clamped to d / 2 - 1 instead of d - 1."""

    name = "rope-yarn-range-clamped"
    reports = ("keras-team/keras-hub/pull/2981",)
    severity = "subtle"

    def rope_constants(self, parameters: Mapping[str, Any], position: int) -> tuple[F32, F32]:
        """The blend over the shorter range, where it ends beyond d / 2 - 1."""
        inv_freq, factor = super().rope_constants(parameters, position)
        if parameters["rope_type"] != "yarn":
            return inv_freq, factor
        d, theta = 2 * len(inv_freq), parameters["rope_theta"]
        old = parameters["original_max_position_embeddings"]

        def pair(beta: float) -> float:
            return float(d * np.log(old / (2 * np.pi * beta)) / (2 * np.log(theta)))

        low, high = pair(parameters.get("beta_fast", 32)), pair(parameters.get("beta_slow", 1))
        if parameters.get("truncate", True):
            low, high = np.floor(low), np.ceil(high)
        if high <= d // 2 - 1:
            return inv_freq, factor
        low, high = max(low, 0), d // 2 - 1
        plain = theta ** (-np.arange(d // 2) / (d // 2))
        ramp = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
        blended = plain * (1 - ramp) + plain / parameters["factor"] * ramp
        return blended.astype(np.float32), factor


class DynamicBaseFixed(Constants):
    """dynamic scaling keeps the base of the first position."""

    name = "rope-dynamic-base-fixed"
    reports = ("huggingface/transformers/issues/25104",)
    severity = "wrong"

    def rope_constants(self, parameters: Mapping[str, Any], position: int) -> tuple[F32, F32]:
        """Always position 0."""
        return super().rope_constants(parameters, 0)


class ThetaFixed(Constants):
    """rope_theta is always 10,000."""

    name = "rope-theta-hard-coded"
    reports = ("karpathy/llama2.c/issues/356", "lyogavin/airllm/pull/369")
    severity = "wrong"

    def changed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The old default."""
        return parameters | {"rope_theta": 10000.0}


class PartialExponent(Constants):
    """With a partial rotation, frequencies are spread over the whole head."""

    name = "rope-partial-exponent"
    reports = ("pie-project/pie/pull/603",)
    severity = "broken"

    def rope_constants(self, parameters: Mapping[str, Any], position: int) -> tuple[F32, F32]:
        """theta^(-2i / head_dim)."""
        whole = {k: v for k, v in parameters.items() if k != "partial_rotary_factor"}
        inv_freq, factor = super().rope_constants(whole, position)
        share = parameters.get("partial_rotary_factor", 1.0)
        return inv_freq[: int(parameters["head_dim"] * share) // 2].copy(), factor


class ConstantsBfloat16(Constants):
    """inv_freq is stored in bfloat16."""

    name = "rope-constants-bfloat16"
    reports = ("sgl-project/sglang-jax/issues/1472",)
    severity = "wrong"

    def rope_constants(self, parameters: Mapping[str, Any], position: int) -> tuple[F32, F32]:
        """Rounded."""
        inv_freq, factor = super().rope_constants(parameters, position)
        return bfloat16(inv_freq), factor
