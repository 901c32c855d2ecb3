"""Mistakes of elementary functions, softmax and the gated layer (SPEC 4, 9)."""

from __future__ import annotations

import math

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.fault import Fault, bfloat16, half
from reference.arithmetic import F32, one_nan


class GeluErf(Fault):
    """GELU uses erf where the model says tanh."""

    name = "gelu-erf-for-tanh"
    reports = ("OpenNMT/CTranslate2/issues/1658", "huggingface/transformers/pull/29402")
    severity = "subtle"
    operations = ("gelu_tanh", "gated_mlp")

    def gelu_tanh(self, x: F32) -> F32:
        """0.5 x (1 + erf(x / sqrt 2))."""
        erf = np.array([math.erf(v / math.sqrt(2)) for v in x.ravel().tolist()]).reshape(x.shape)
        with np.errstate(all="ignore"):
            y: F32 = (0.5 * x * (1 + erf)).astype(np.float32)
        return y


class GeluBfloat16(Fault):
    """GELU is computed in the bfloat16 of storage, where 1 + tanh vanishes at -3.5."""

    name = "gelu-bfloat16"
    reports = ("NVIDIA/TileGym/pull/197",)
    severity = "wrong"
    operations = ("gelu_tanh", "gated_mlp")

    def gelu_tanh(self, x: F32) -> F32:
        """0.5 x (1 + bf16(tanh(...)))."""
        with np.errstate(all="ignore"):
            inner = np.float32(0.7978846) * (x + np.float32(0.044715) * x * x * x)
            return np.float32(0.5) * x * bfloat16(np.float32(1) + bfloat16(self.tanh(inner)))


class LogBfloat16(Fault):
    """log is taken of bfloat16 and kept as bfloat16, where float32 is declared."""

    name = "log-bfloat16"
    reports = ("tinygrad/tinygrad/pull/15514", "genlm/genlm-backend/pull/66")
    severity = "wrong"
    operations = ("log",)

    def log(self, x: F32) -> F32:
        """8 bits of it."""
        return one_nan(bfloat16(super().log(bfloat16(x))))


class SiluNan(Fault):
    """silu multiplies by exp(x) / (1 + exp(x)), which is NaN once exp(x) overflows."""

    name = "silu-overflows-to-nan"
    reports = ("ggml-org/llama.cpp/pull/7726",)
    severity = "broken"
    operations = ("silu",)

    def silu(self, x: F32) -> F32:
        """NaN where exp(x) is infinite."""
        with np.errstate(all="ignore"):
            return np.where(np.isinf(self.exp(x)), np.float32(np.nan), super().silu(x))


class ExpFlushed(Fault):
    """exp returns zero where its result is subnormal."""

    name = "exp-subnormals-flushed"
    reports = ("ggml-org/llama.cpp/pull/7154",)
    severity = "subtle"
    operations = ("exp",)

    def exp(self, x: F32) -> F32:
        """Nothing below 2^-126."""
        y = super().exp(x)
        return np.where(y < 2.0**-126, np.float32(0), y)


class ExpNanLost(Fault):
    """exp of NaN is infinity: under finite-math rules it clamps its argument."""

    name = "exp-nan-lost"
    reports = ("ggml-org/llama.cpp/pull/7154", "ggml-org/llama.cpp/pull/7726")
    severity = "wrong"
    operations = ("exp",)

    def exp(self, x: F32) -> F32:
        """Infinity for NaN."""
        return np.where(np.isnan(x), np.float32(np.inf), super().exp(x))


class SoftmaxOverflows(Fault):
    """Softmax does not subtract the maximum."""

    name = "softmax-maximum-not-subtracted"
    reports = ("pytorch/executorch/pull/18407", "intel/xFasterTransformer/pull/326")
    severity = "broken"
    operations = ("softmax",)

    def softmax(self, x: F32) -> F32:
        """exp(x) over its sum."""
        with np.errstate(all="ignore"):
            p = self.exp(x)
            return self.divide(p, self.total(p)[..., None])


class SoftmaxNarrow(Fault):
    """The maximum of a row of fewer than 32 is at least 0, which the idle lanes of a warp give."""

    name = "softmax-maximum-of-idle-lanes"
    reports = ("m0at/rvllm/pull/1",)
    severity = "broken"
    operations = ("softmax",)

    def softmax(self, x: F32) -> F32:
        """A row far below 0 has no exponential that is not 0."""
        if x.shape[-1] >= 32:
            return super().softmax(x)
        with np.errstate(all="ignore"):
            p = self.exp(x - np.maximum(x.max(axis=-1, keepdims=True), 0))
            return self.divide(p, self.total(p)[..., None])


class SoftmaxSumHalf(Fault):
    """Softmax holds its denominator in float16."""

    name = "softmax-sum-half"
    reports = ("tenstorrent/tt-metal/issues/10209",)
    severity = "subtle"
    operations = ("softmax",)

    def total(self, p: F32) -> Floats:
        """Rounded."""
        return half(super().total(p).astype(np.float32)).astype(np.float64)


class GateAndUpSwapped(Fault):
    """The activation is applied to `up` instead of `gate`."""

    name = "mlp-gate-and-up-swapped"
    reports = ("ml-explore/mlx-lm/pull/767",)
    severity = "broken"
    operations = ("gated_mlp",)

    def gated_mlp(self, x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        """The two exchanged."""
        return super().gated_mlp(x, up, gate, down, activation)


class ActivationOfProduct(Fault):
    """The activation is applied to the product of gate and up."""

    name = "mlp-activation-of-product"
    reports = ("Nijikadesu/breakdown-minimind/issues/3",)
    severity = "broken"
    operations = ("gated_mlp",)

    def gated_mlp(self, x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        """down(act(gate(x) up(x)))."""
        product = self.linear(x=x, w=gate) * self.linear(x=x, w=up)
        return self.linear(x=self.activate(activation, product), w=down)


class SiluForGelu(Fault):
    """The gated layer uses silu whatever the model says."""

    name = "mlp-silu-for-gelu"
    reports = ("huggingface/transformers/pull/29402", "Dao-AILab/sonic-moe/issues/2")
    severity = "wrong"
    operations = ("gated_mlp",)

    def activate(self, activation: str, x: F32) -> F32:
        """Always silu."""
        return super().activate("silu", x)


class HiddenHalf(Fault):
    """The gated layer's inner values are held in float16."""

    name = "mlp-hidden-half"
    reports = ("ROCm/hip-ep/pull/672", "intel/auto-round/issues/457")
    severity = "subtle"
    operations = ("gated_mlp",)

    def activate(self, activation: str, x: F32) -> F32:
        """Rounded."""
        return half(super().activate(activation, x))


class SoftmaxOf1024(Fault):
    """Exponentials beyond the first 1,024 of a row are not in the denominator."""

    name = "softmax-sum-of-1024"
    reports = ()
    severity = "wrong"
    operations = ("softmax",)

    def total(self, p: F32) -> Floats:
        """Of the first."""
        return super().total(p[..., :1024].copy())


class SoftmaxTail(Fault):
    """Of a long row, what does not fill a vector of four is not in the denominator."""

    name = "softmax-sum-of-whole-vectors"
    reports = ()
    severity = "wrong"
    operations = ("softmax",)

    def total(self, p: F32) -> Floats:
        """Of whole fours, beyond 128."""
        width = p.shape[-1]
        return super().total(p[..., : width // 4 * 4].copy() if width > 128 else p)


class SiluEnds(Fault):
    """silu of the gated layer is that of -20 for whatever is below."""

    name = "mlp-silu-ends-at-minus-20"
    reports = ()
    severity = "subtle"
    operations = ("gated_mlp",)

    def activate(self, activation: str, x: F32) -> F32:
        """Clamped."""
        return super().activate(activation, np.maximum(x, np.float32(-20)))
