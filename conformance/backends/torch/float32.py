"""Plain float32 torch: what an ordinary engine computes, and what the bounds are for (SPEC 1.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conformance.backends.torch import attention, quantization
from conformance.backends.torch import experts as mixture
from conformance.backends.torch.arithmetic import NAN, canonical
from conformance.backends.torch.attention import Cache, Options
from conformance.backends.torch.backend import ExactKernels, TorchBackend
from conformance.backends.torch.kernels import Rows


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


FUNCTIONS: Mapping[str, Rows] = {
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class Float32Kernels(ExactKernels):
    """The operations in float32, in whatever order torch sums; NaN where the SPEC asks for it."""

    functions = FUNCTIONS

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax of each row."""
        return canonical(torch.softmax(x, -1))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm with a float32 mean of squares."""
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight
        return canonical(torch.where(torch.isfinite(x).all(-1, keepdim=True), y, NAN))

    def cos_sin(self, angle: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin in float32."""
        return factor * torch.cos(angle), factor * torch.sin(angle)

    def attention(self, q: Tensor, cache: Cache, options: Options, mode: str) -> Tensor:
        """Float32 attention, whatever the mode."""
        return attention.attention(q, cache, options, "fast")

    def product(self, w: Tensor) -> Rows:
        """Prepare a float32 GEMM; what is not finite spreads to the whole dot (1.3)."""
        finite = torch.isfinite(w).all(-1)

        def apply(x: Tensor) -> Tensor:
            good = torch.isfinite(x).all(-1)[:, None] & finite
            return canonical(torch.where(good, x @ w.mT, NAN))

        return apply

    def product_int4(self, w: quantization.Int4) -> Rows:
        """Prepare a float32 GEMM of the int8 codes with the dequantized weights."""
        width = w.codes.shape[1]
        group = width if w.scales.shape[1] == 1 else quantization.GROUP
        weights = w.codes * w.scales.repeat_interleave(group, -1)[:, :width]
        plain = weights.float()

        def apply(x: Tensor) -> Tensor:
            codes, scale, _ = quantization.quantize_int8(x)
            return canonical((codes.float() @ plain.mT) * scale[:, None])

        return apply

    def renormalise(self, gates: Tensor, epsilon: float) -> Tensor:
        """Gates over their float32 sum."""
        return gates / (gates.sum(-1, keepdim=True) + epsilon)

    def combine(self, x: Tensor, experts: Tensor, gates: Tensor, layers: Sequence[Rows]) -> Tensor:
        """Expert by expert, as it comes."""
        return mixture.expert_order(x, experts, gates, layers)


class TorchFloat32Backend(TorchBackend):
    """Every operation of section 17 in ordinary float32 torch."""

    name = "torch-float32"
    numerics: Mapping[str, Any] = {
        "operands": "float32",
        "accumulator": "float32",
        "fma": True,
        "flush_to_zero": False,
        "kv": "float32",
    }
    kernels_type = Float32Kernels
