"""Mistakes in reading a model's configuration and weights (SPEC 10.3, 12)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from conformance.faults.fault import SessionFault
from reference.arithmetic import F32
from reference.config import ModelConfig


class ConfigFault(SessionFault):
    """A mistake that a whole model shows."""

    operations: ClassVar[tuple[str, ...]] = ("forward",)


class ThetaDefault(ConfigFault):
    """rope_theta is not read, and its old default is used."""

    name = "loading-rope-theta-default"
    reports = ("lyogavin/airllm/pull/369", "karpathy/llama2.c/issues/356")
    severity = "wrong"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """10,000."""
        return replace(config, rope=replace(config.rope, theta=10000.0))


class ScalingIgnored(ConfigFault):
    """rope_scaling is not read."""

    name = "loading-rope-scaling-ignored"
    reports = ("ggml-org/llama.cpp/pull/8676", "Blaizzy/mlx-vlm/pull/1709")
    severity = "wrong"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """The default kind."""
        return replace(config, rope=replace(config.rope, kind="default"))


class PartialFactorIgnored(ConfigFault):
    """partial_rotary_factor is not read."""

    name = "loading-partial-rotary-ignored"
    reports = ("ml-explore/mlx-lm/pull/1698",)
    severity = "broken"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """The whole head."""
        return replace(config, rope=replace(config.rope, rotary_dim=config.head_dim))


class WindowNotRead(ConfigFault):
    """sliding_window is not read."""

    name = "loading-window-ignored"
    reports = ("EricLBuehler/mistral.rs/issues/246",)
    severity = "wrong"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """No window."""
        return replace(config, windows=(None,) * config.layers)


class WindowOnWrongLayers(ConfigFault):
    """The window is applied to the layers that should have none, and the reverse."""

    name = "loading-window-on-wrong-layers"
    reports = ("huggingface/transformers/issues/35896",)
    severity = "wrong"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """The other way round, where layers differ."""
        sizes = {w for w in config.windows if w is not None}
        if len(set(config.windows)) < 2:
            return config
        swapped = tuple(None if w is not None else max(sizes) for w in config.windows)
        return replace(config, windows=swapped)


class WindowOnEveryLayer(ConfigFault):
    """The window is applied to every layer."""

    name = "loading-window-on-every-layer"
    reports = ("Lightning-AI/litgpt/pull/1995", "vllm-project/vllm/pull/17772")
    severity = "wrong"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """One for all."""
        sizes = [w for w in config.windows if w is not None]
        return replace(config, windows=(sizes[0] if sizes else None,) * config.layers)


class EpsilonDefault(ConfigFault):
    """rms_norm_eps is not read, and 1e-6 is used."""

    name = "loading-epsilon-default"
    reports = ("ggml-org/llama.cpp/issues/2373",)
    severity = "subtle"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """1e-6."""
        return replace(config, rms_norm_eps=1e-6)


class ActivationDefault(ConfigFault):
    """hidden_act is not read, and silu is used."""

    name = "loading-activation-default"
    reports = ("huggingface/transformers/pull/29402",)
    severity = "wrong"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """silu."""
        return replace(config, activation="silu")


class TiedAlways(ConfigFault):
    """The head is taken for the embedding although the model stores its own."""

    name = "loading-head-tied-always"
    reports = ("InternLM/lmdeploy/pull/2568", "trymirai/lalamo/pull/10")
    severity = "broken"

    def understood(self, config: ModelConfig) -> ModelConfig:
        """Tied."""
        return replace(config, tied=True)


class AttentionBiasDropped(ConfigFault):
    """Biases of q, k and v are not loaded."""

    name = "loading-qkv-bias-dropped"
    reports = ("sbryngelson/ANEForge/pull/253",)
    severity = "broken"

    def bias(self, at: str) -> F32 | None:
        """None for q, k and v."""
        return None if at.endswith(("q_proj", "k_proj", "v_proj")) else super().bias(at)


class MlpBiasDropped(ConfigFault):
    """Biases of the gated layer are not loaded."""

    name = "loading-mlp-bias-dropped"
    reports = ("OminiX-ai/OminiX-MLX/pull/7",)
    severity = "wrong"

    def bias(self, at: str) -> F32 | None:
        """None in the gated layer."""
        return None if ".mlp." in at else super().bias(at)


class KeyBiasDropped(ConfigFault):
    """The bias of k is lost where q, k and v are joined."""

    name = "loading-key-bias-dropped"
    reports = ("vllm-project/vllm/pull/40160",)
    severity = "subtle"

    def bias(self, at: str) -> F32 | None:
        """None for k."""
        return None if at.endswith("k_proj") else super().bias(at)
