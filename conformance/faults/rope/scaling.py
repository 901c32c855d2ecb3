"""Mistakes in the constants of rope: what is hard-coded, ignored or not clamped (SPEC 7.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from conformance.faults.rope.constants import Constants
from reference.arithmetic import F32, F64


class Of(Constants):
    """A mistake in the constants of one kind; all others are right."""

    kind: ClassVar[str]

    def rope_constants(self, parameters: Mapping[str, Any], position: int) -> tuple[F32, F32]:
        """Right, or wrong where it is that kind."""
        if parameters["rope_type"] != self.kind:
            return super().rope_constants(parameters=parameters, position=position)
        return self.wrong(dict(parameters), position)

    def changed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The parameters as this engine reads them, where it is that kind."""
        if parameters["rope_type"] != self.kind:
            return parameters
        return parameters | self.read(parameters)

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """What is taken for something else."""
        return {}

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """The constants of that kind."""
        return super().rope_constants(parameters=parameters, position=position)


def _plain(parameters: Mapping[str, Any]) -> F64:
    """f(i) in float64."""
    d = int(parameters["head_dim"] * parameters.get("partial_rotary_factor", 1.0))
    powers: F64 = parameters["rope_theta"] ** (-2 * np.arange(d // 2) / d)
    return powers


# llama3


class Llama3(Of):
    """A mistake in llama3 scaling."""

    kind = "llama3"


class FactorEight(Llama3):
    """llama3's factor is 8, whatever the model says."""

    name = "rope-llama3-factor-eight"
    reports = ("pytorch/executorch/issues/7265", "meta-llama/llama-models/issues/241")
    severity = "wrong"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """That of Llama 3.1."""
        return {"factor": 8.0}


class BandsFixed(Llama3):
    """llama3's bands begin and end where Llama 3.1 has them."""

    name = "rope-llama3-bands-fixed"
    reports = ("jmaczan/tiny-vllm/pull/1",)
    severity = "wrong"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """1 and 4."""
        return {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


class OriginalFixed(Llama3):
    """llama3's original length is 8,192, whatever the model says."""

    name = "rope-llama3-original-fixed"
    reports = ()
    severity = "wrong"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """That of Llama 3.1."""
        return {"original_max_position_embeddings": 8192}


class NotBlended(Llama3):
    """Between llama3's bands frequencies are stretched as beyond them, and not blended."""

    name = "rope-llama3-not-blended"
    reports = ()
    severity = "wrong"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """Stretched wherever they are not kept."""
        right, factor = super().wrong(parameters, position)
        plain = _plain(parameters).astype(np.float32)
        return np.where(right == plain, plain, plain / np.float32(parameters["factor"])), factor


# yarn


class Yarn(Of):
    """A mistake in yarn."""

    kind = "yarn"

    def blended(self, parameters: Mapping[str, Any], low: float, high: float) -> F32:
        """inv_freq over a range of pairs."""
        plain = _plain(parameters)
        with np.errstate(all="ignore"):
            ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
        mixed: F32 = (plain * (1 - ramp) + plain / parameters["factor"] * ramp).astype(np.float32)
        return mixed

    def ends(self, parameters: Mapping[str, Any]) -> tuple[float, float]:
        """The range of pairs before it is clamped."""
        d = 2 * len(_plain(parameters))
        old, theta = parameters["original_max_position_embeddings"], parameters["rope_theta"]
        betas = parameters.get("beta_fast", 32), parameters.get("beta_slow", 1)
        low, high = (float(d * np.log(old / (2 * np.pi * b)) / (2 * np.log(theta))) for b in betas)
        if parameters.get("truncate", True):
            low, high = float(np.floor(low)), float(np.ceil(high))
        return low, high


class BetasFixed(Yarn):
    """yarn's range is that of beta_fast 32 and beta_slow 1, whatever the model says."""

    name = "rope-yarn-betas-fixed"
    reports = ("GaijinEntertainment/daScript/pull/3479",)
    severity = "wrong"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The defaults."""
        return {"beta_fast": 32.0, "beta_slow": 1.0}


class BetasSwapped(Yarn):
    """yarn's beta_fast and beta_slow are taken for each other."""

    name = "rope-yarn-betas-swapped"
    reports = ("pytorch/torchtitan/pull/3787",)
    severity = "wrong"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The other way round."""
        fast, slow = parameters.get("beta_fast", 32.0), parameters.get("beta_slow", 1.0)
        return {"beta_fast": slow, "beta_slow": fast}


class OriginalFromContext(Yarn):
    """yarn takes the context's length for the original one."""

    name = "rope-yarn-original-from-context"
    reports = ("NVIDIA-NeMo/Speech/issues/14686",)
    severity = "wrong"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """`max_position_embeddings`."""
        return {"original_max_position_embeddings": parameters["max_position_embeddings"]}


class Ntk(Yarn):
    """yarn's upper frequencies, which it keeps, are those of NTK's base."""

    name = "rope-yarn-of-another-base"
    reports = ("paiml/aprender/pull/2161",)
    severity = "wrong"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """theta * factor^(d / (d - 2))."""
        d = 2 * len(_plain(parameters))
        stretch = parameters["factor"] ** (d / (d - 2)) if d > 2 else 1.0
        return {"rope_theta": parameters["rope_theta"] * max(1.0, stretch)}


class Shrunk(Yarn):
    """yarn's factor on cosines and sines goes below 1 where the scaling shrinks."""

    name = "rope-yarn-mscale-below-one"
    reports = ("ml-explore/mlx-lm/pull/660",)
    severity = "subtle"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """0.1 ln(factor) + 1, whatever the factor."""
        inv_freq, factor = super().wrong(parameters, position)
        if parameters["factor"] >= 1 or "attention_factor" in parameters:
            return inv_freq, factor
        return inv_freq, np.array([0.1 * np.log(parameters["factor"]) + 1], np.float32)


class MscaleAlone(Yarn):
    """mscale counts without mscale_all_dim too."""

    name = "rope-yarn-mscale-alone"
    reports = ("vllm-project/vllm/issues/48621",)
    severity = "subtle"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """0.1 mscale ln(factor) + 1."""
        inv_freq, factor = super().wrong(parameters, position)
        if not parameters.get("mscale") or parameters.get("mscale_all_dim"):
            return inv_freq, factor
        growth = 0.1 * parameters["mscale"] * np.log(parameters["factor"])
        return inv_freq, np.array([growth + 1], np.float32)


class LowNotClamped(Yarn):
    """The lower end of yarn's range may lie below the first pair."""

    name = "rope-yarn-low-not-clamped"
    reports = ()
    severity = "subtle"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """As it comes."""
        inv_freq, factor = super().wrong(parameters, position)
        low, high = self.ends(parameters)
        if low >= 0:
            return inv_freq, factor
        return self.blended(parameters, low, min(high, 2 * len(inv_freq) - 1)), factor


class HighNotClamped(Yarn):
    """The upper end of yarn's range may lie beyond d - 1."""

    name = "rope-yarn-high-not-clamped"
    reports = ("jingyaogong/minimind/issues/602",)
    severity = "subtle"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """As it comes."""
        inv_freq, factor = super().wrong(parameters, position)
        low, high = self.ends(parameters)
        if high <= 2 * len(inv_freq) - 1:
            return inv_freq, factor
        return self.blended(parameters, max(low, 0), high), factor


class EqualEnds(Yarn):
    """yarn divides by the length of its range, which is zero where both ends were clamped."""

    name = "rope-yarn-equal-ends-divide-by-zero"
    reports = ()
    severity = "broken"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """NaN for the pair at both ends."""
        inv_freq, factor = super().wrong(parameters, position)
        low, high = self.ends(parameters)
        low, high = max(low, 0.0), min(high, 2.0 * len(inv_freq) - 1)
        return (self.blended(parameters, low, high) if low == high else inv_freq), factor


# dynamic, longrope, partial


class OriginalIgnored(Of):
    """dynamic scaling begins at the end of the context, whatever original length is given."""

    name = "rope-dynamic-original-ignored"
    reports = ("huggingface/transformers/issues/25104",)
    severity = "wrong"
    kind = "dynamic"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """`max_position_embeddings`."""
        return {"original_max_position_embeddings": parameters["max_position_embeddings"]}


class DynamicLate(Of):
    """dynamic scaling takes a token's position for the length that it makes."""

    name = "rope-dynamic-one-late"
    reports = ()
    severity = "subtle"
    kind = "dynamic"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """p in place of p + 1."""
        return super().wrong(parameters, max(position - 1, 0))


class Longrope(Of):
    """A mistake in longrope."""

    kind = "longrope"


class ShortAlways(Longrope):
    """longrope has the short factors at every position."""

    name = "rope-longrope-short-always"
    reports = ("apache/tvm/pull/18422", "mlc-ai/mlc-llm/pull/3375")
    severity = "wrong"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """Those of position 0."""
        return super().wrong(parameters, 0)


class LongAlways(Longrope):
    """longrope has the long factors at every position."""

    name = "rope-longrope-long-always"
    reports = ("ml-explore/mlx-lm/pull/660", "ggml-org/llama.cpp/issues/24823")
    severity = "wrong"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """Those of the last position."""
        return super().wrong(parameters, 2**24 - 1)


class SwitchEarly(Longrope):
    """longrope changes to the long factors one position early."""

    name = "rope-longrope-one-early"
    reports = ("unslothai/unsloth/pull/10681",)
    severity = "subtle"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """At the last position of the original length."""
        return super().wrong(parameters, position + 1)


class SwitchLate(Longrope):
    """longrope changes to the long factors one position late."""

    name = "rope-longrope-one-late"
    reports = ()
    severity = "subtle"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """Behind the first position beyond the original length."""
        return super().wrong(parameters, max(position - 1, 0))


class LongropeFactorIgnored(Longrope):
    """longrope's factor on cosines and sines is not applied."""

    name = "rope-longrope-factor-ignored"
    reports = ("lablup/mlxcel/issues/1358",)
    severity = "wrong"

    def wrong(self, parameters: dict[str, Any], position: int) -> tuple[F32, F32]:
        """1."""
        return super().wrong(parameters, position)[0], np.ones(1, np.float32)


class FactorsMultiply(Longrope):
    """longrope's lists multiply the frequencies instead of dividing them."""

    name = "rope-longrope-multiplied"
    reports = ()
    severity = "broken"

    def read(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Upside down."""
        return {k: [1 / x for x in parameters[k]] for k in ("short_factor", "long_factor")}


class PartialRounded(Constants):
    """The rotary dimension is rounded to a whole number instead of cut off."""

    name = "rope-partial-rounded"
    reports = ()
    severity = "broken"

    def changed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """To the nearest, and up to an even one."""
        exact = parameters["head_dim"] * parameters.get("partial_rotary_factor", 1.0)
        d = round(exact) + round(exact) % 2
        if d == int(exact):
            return parameters
        return parameters | {"partial_rotary_factor": d / parameters["head_dim"]}
