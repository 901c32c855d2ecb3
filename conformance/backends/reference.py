"""The reference itself as a backend: `bitforbit check` with no argument tries this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.golden import Array
from reference import arithmetic, attention, elementary, normalization, quantization, rotary
from reference.arithmetic import F32
from reference.config import Section, parse_rope
from reference.engine import Engine
from reference.feedforward import ACTIVATIONS, gated_mlp
from reference.model import Model, load_model
from reference.sampling import Law, Sampling, philox, sample
from reference.speculation import Proposal, verify
from reference.weights import Arithmetic, Mode, add, linear

Ints = NDArray[np.int64]


class ReferenceBackend:
    """Every operation of SPEC 17 by the exact lane of `reference`."""

    name = "numpy"
    numerics: Mapping[str, Any] = {"operands": "float32", "accumulator": "exact", "kv": "float32"}
    arithmetic: Arithmetic = "exact"

    exp = staticmethod(elementary.exp)
    log = staticmethod(elementary.log)
    sin = staticmethod(elementary.sin)
    cos = staticmethod(elementary.cos)
    tanh = staticmethod(elementary.tanh)
    sigmoid = staticmethod(elementary.sigmoid)
    silu = staticmethod(elementary.silu)
    gelu_tanh = staticmethod(elementary.gelu_tanh)
    softmax = staticmethod(elementary.softmax)
    rms_norm = staticmethod(normalization.rms_norm)
    philox = staticmethod(philox)

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """SPEC 2.2 and 10.1."""
        return add(arithmetic.matmul(x, w), bias)

    def quantize_int4(self, w: F32, group: int) -> tuple[Array, Array]:
        """SPEC 5.1 and, with group 0, 5.3."""
        make = quantization.quantize_int4 if group else quantization.quantize_int4_row
        matrix = make(w)
        return matrix.packed, matrix.scales

    def quantize_int8(self, x: F32) -> tuple[Array, Array]:
        """SPEC 5.4."""
        return quantization.quantize_int8(x)

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """SPEC 5.5."""
        return quantization.linear_int4(x, int4_matrix(x, packed, scales, group))

    def rope_constants(self, parameters: Mapping[str, Any], position: int) -> tuple[F32, F32]:
        """SPEC 7.1 and 7.2."""
        rope = dict(parameters)
        head_dim, positions = rope.pop("head_dim"), rope.pop("max_position_embeddings")
        keys = Section({"rope_parameters": rope}, "rope_constants")
        inv_freq, factor = rotary.rope_constants(parse_rope(keys, head_dim, positions), position)
        return inv_freq.copy(), np.array([factor])

    def rope(self, x: F32, positions: Ints, inv_freq: F32, factor: float, interleaved: bool) -> F32:
        """SPEC 7.3 and 7.4."""
        cos, sin = rotary.turn(positions.astype(np.float32)[:, None] * inv_freq, np.float32(factor))
        return rotary.rotate(x, cos, sin, interleaved)

    def attention(self, q: F32, k: F32, v: F32, mode: str, **options: Any) -> F32:
        """SPEC 8.2 and 8.3."""
        run = attention.attention_exact if mode == "exact" else attention.attention_fast
        return run(q, k, v, **options)

    def gated_mlp(self, x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        """SPEC 9."""
        gate_up = linear(np.concatenate([gate, up]), None, "float32", self.arithmetic)
        last = linear(down, None, "float32", self.arithmetic)
        return gated_mlp(x, gate_up, last, ACTIVATIONS[activation])

    def sample(
        self,
        logits: F32,
        previous: Ints,
        seed: int,
        request: int,
        position: int,
        **options: Any,
    ) -> Ints:
        """SPEC 13."""
        return np.array([sample(logits, Sampling(**options), previous, seed, request, position)])

    def verify_draft(
        self,
        logits: F32,
        draft: Ints,
        draft_weights: Ints,
        previous: Ints,
        seed: int,
        request: int,
        position: int,
        **options: Any,
    ) -> Ints:
        """SPEC 13.4."""
        laws = [Law(np.flatnonzero(row), row[row > 0]) for row in draft_weights]
        proposal, sampling = Proposal(draft.tolist(), laws), Sampling(**options)
        verdict = verify(logits, proposal, sampling, previous, seed, request, position)
        return np.array(verdict.tokens)

    def load(self, model: str, weights: Mode) -> ReferenceSession:
        """SPEC 10."""
        return ReferenceSession(load_model(model, weights, self.arithmetic))


def int4_matrix(x: F32, packed: Array, scales: Array, group: int) -> quantization.Int4Matrix:
    """The matrix that the arguments of `linear_int4` describe."""
    return quantization.Int4Matrix(packed, scales, x.shape[1], group or x.shape[1])


class ReferenceSession:
    """One model and the tokens fed to it since the last reset (SPEC 17)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.reset()

    def reset(self) -> None:
        """Forget what was fed."""
        self.cache = self.model.new_cache()

    def forward(self, tokens: Sequence[int] | Ints, attention: Any) -> F32:
        """Logits of the next tokens, (T,) -> (T, V)."""
        return self.model.forward(tokens, self.cache, attention)

    def generate(self, prompt: Ints, max_new_tokens: int, exact_prefill: bool) -> tuple[Ints, F32]:
        """Greedy continuation and the logits that chose each token."""
        rows: list[F32] = []
        tokens: list[int] = []
        for logits in Engine(self.model, exact_prefill).steps(
            prompt.tolist(), tokens, max_new_tokens
        ):
            rows.append(logits)
            tokens.append(int(logits.argmax()))
        return np.array(tokens), np.stack(rows)
