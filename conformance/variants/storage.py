"""Engines whose tensors are bfloat16 or float16: all that goes into a step, and all it gives.

Sums, exponentials and angles are float32 (SPEC 16.4). Each result is stored before the next step
reads it, as an engine does that fuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.backends.composed import ComposedSession
from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import half
from conformance.golden import Array
from conformance.variants.precision import Bfloat16, Operands
from reference.arithmetic import F32
from reference.experts import Router


class StoredSession(ComposedSession):
    """A model whose residual stream is stored too."""

    def residual(self, x: F32, y: F32) -> F32:
        """Rounded when stored."""
        assert isinstance(self.backend, Stored)
        return self.backend.rounded(super().residual(x, y))


class Stored(Operands, ExpertsBackend):
    """Tensors of the type of operands, in and out."""

    session = StoredSession

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """The bias, too, is an operand."""
        return self.rounded(super().linear(x, w, None if bias is None else self.rounded(bias)))

    def on_codes(self, x: F32, weights: F32) -> F32:
        """int8 codes of what is stored."""
        return self.rounded(super().on_codes(self.rounded(x), weights))

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """Dequantized weights are stored too."""
        return self.rounded(super().linear_w4a16(x, packed, scales, group, zeros))

    def sigmoid(self, x: F32) -> F32:
        """Of what is stored."""
        return self.rounded(super().sigmoid(self.rounded(x)))

    def silu(self, x: F32) -> F32:
        """Of what is stored."""
        return self.rounded(super().silu(self.rounded(x)))

    def gelu_tanh(self, x: F32) -> F32:
        """Of what is stored."""
        return self.rounded(super().gelu_tanh(self.rounded(x)))

    def softmax(self, x: F32) -> F32:
        """Of what is stored."""
        return self.rounded(super().softmax(self.rounded(x)))

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Of what is stored."""
        return self.rounded(super().rms_norm(self.rounded(x), self.rounded(weight), eps))

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """Cosines and sines are stored too; their angles are float32."""
        cos, sin = super().turns(angle, factor)
        return self.rounded(cos), self.rounded(sin)

    def rope(self, x: F32, positions: Ints, inv_freq: F32, factor: float, interleaved: bool) -> F32:
        """Of what is stored, the part that does not turn among it."""
        x = self.rounded(x)
        return self.rounded(super().rope(x, positions, inv_freq, factor, interleaved))

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """Each product is stored."""
        turn = self.rounded
        return turn(a * cos) - turn(b * sin), turn(b * cos) + turn(a * sin)

    def attention(self, q: F32, k: F32, v: F32, *others: Any, **options: Any) -> F32:
        """Of what is stored, its sinks too."""
        q, k, v = map(self.rounded, (q, k, v))
        if options.get("sinks") is not None:
            options["sinks"] = self.rounded(options["sinks"])
        return self.rounded(super().attention(q, k, v, *others, **options))

    def _routing(self, logits: F32, router: Router) -> tuple[Ints, F32]:
        """Of stored logits; a choice's bias is a constant, and float32."""
        experts, gates = super()._routing(self.rounded(logits), router)
        return experts, self.rounded(gates)

    def moe(self, x: F32, experts: Ints, gates: F32, *weights: Any, **options: Any) -> F32:
        """Of what is stored; its sum is float32."""
        x, gates = self.rounded(x), self.rounded(gates)
        return self.rounded(super().moe(x, experts, gates, *weights, **options))


class StoredBfloat16(Stored, Bfloat16):
    """Tensors in bfloat16 throughout, sums in float32."""

    name = "stored-bfloat16"


class StoredFloat16(Stored):
    """Tensors in float16 throughout, sums in float32."""

    name = "stored-float16"
    numerics: Mapping[str, Any] = {"operands": "float16", "accumulator": "float32", "kv": "float16"}

    def rounded(self, x: F32) -> F32:
        """11 bits, subnormals of float16, infinity beyond its range."""
        return half(x)
