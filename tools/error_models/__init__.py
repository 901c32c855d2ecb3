"""Random legitimate computations, by the error model that bounds each (SPEC 16.4)."""

from __future__ import annotations

from collections.abc import Callable

from tools.error_models.data import Computed
from tools.error_models.kernels import activation, alike, dot, int4, norm, rope, softmax, w4a16
from tools.error_models.layers import attention, experts, gates, mlp
from tools.error_models.machine import FORMATS, Machine, Rng
from tools.error_models.whole import whole

__all__ = ["FORMATS", "MANY", "MODELS", "Computed", "Machine"]

MODELS: dict[str, Callable[[Rng, Machine], Computed]] = {
    "dot": dot,
    "alike": alike,
    "int4": int4,
    "w4a16": w4a16,
    "activation": activation,
    "softmax": softmax,
    "rms_norm": norm,
    "rope": rope,
    "attention": attention,
    "gated_mlp": mlp,
    "route": gates,
    "moe": experts,
    "noise": whole,
}

MANY = {"noise": 100}
"""Seeds a computation, for the models whose one computation gives hundreds of results."""
