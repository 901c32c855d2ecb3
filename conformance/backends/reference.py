"""The reference itself as a backend: `bitforbit check` with no argument tries this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from conformance.backends import paging as pages
from conformance.backends.tracing import Steps, trace
from conformance.golden import Array
from reference import arithmetic, attention, blocks, elementary, normalization, quantization, rotary
from reference.arithmetic import F32, NAN
from reference.config import Section, parse_rope
from reference.engine import Engine
from reference.experts import Router, Routing, Score, Shared, moe, route
from reference.feedforward import ACTIVATIONS, Function, gated_mlp
from reference.model import Model, load_model
from reference.sampling import Law, Sampling, philox, sample
from reference.speculation import Proposal, verify
from reference.weights import Arithmetic, Mode, add, linear

Ints = NDArray[np.int64]

Source = tuple[int, int, int]
"""Seed, request and position: what the random words of a token are drawn by (SPEC 13.2)."""


class ReferenceBackend:
    """Every operation of SPEC 17 by the exact lane of `reference`."""

    name = "numpy"
    numerics: Mapping[str, Any] = {"operands": "float32", "accumulator": "exact", "kv": "float32"}
    arithmetic: Arithmetic = "exact"
    activations: Mapping[str, Function] = ACTIVATIONS

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

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """SPEC 5.9."""
        return quantization.linear_w4a16(x, int4_matrix(x, packed, scales, group), zeros)

    linear_q4_0 = staticmethod(blocks.linear_q4_0)
    linear_q8_0 = staticmethod(blocks.linear_q8_0)

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
        return self._mlp(gate, up, down, activation)(x)

    def _mlp(self, gate: F32, up: F32, down: F32, activation: str) -> Function:
        gate_up = linear(np.concatenate([gate, up]), None, "float32", self.arithmetic)
        last = linear(down, None, "float32", self.arithmetic)
        act = self.activations[activation]
        return lambda x: gated_mlp(x, gate_up, last, act)

    def route(
        self,
        logits: F32,
        top_k: int,
        score: Score,
        selection_bias: F32 | None = None,
        **options: Any,
    ) -> tuple[Ints, F32]:
        """SPEC 9.2."""
        router = Router(logits.shape[1], top_k, score, selection_bias, **options)
        return self._routing(logits, router)

    def _routing(self, logits: F32, router: Router) -> tuple[Ints, F32]:
        """The experts of each row in rank order, and their gates, (T, k) both (SPEC 9.2)."""
        routing = route(logits, router)
        return routing.experts, routing.gates

    def moe(
        self,
        x: F32,
        experts: Ints,
        gates: F32,
        gate: F32,
        up: F32,
        down: F32,
        activation: str,
        shared_gate: F32 | None = None,
        shared_up: F32 | None = None,
        shared_down: F32 | None = None,
        shared_router: F32 | None = None,
    ) -> F32:
        """SPEC 9.3."""
        layers = [self._mlp(*weights, activation) for weights in zip(gate, up, down, strict=True)]
        routing = Routing(experts, gates, np.full(len(x), NAN))
        if shared_gate is None or shared_up is None or shared_down is None:
            return moe(x, routing, layers)
        weighed = None
        if shared_router is not None:
            weighed = linear(shared_router, None, "float32", self.arithmetic)
        expert = self._mlp(shared_gate, shared_up, shared_down, activation)
        return moe(x, routing, layers, Shared(expert, weighed))

    def sample(
        self,
        logits: F32,
        previous: Ints,
        seed: int,
        request: int,
        position: int,
        **options: Any,
    ) -> Ints:
        """SPEC 13.1."""
        source = seed, request, position
        return np.array([self._token(logits, Sampling(**options), previous, source)])

    def _token(self, logits: F32, sampling: Sampling, previous: Ints, source: Source) -> int:
        """The token that logits (V,) give (SPEC 13.1)."""
        return sample(logits, sampling, previous, *source)

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
        proposal, source = Proposal(draft.tolist(), laws), (seed, request, position)
        return np.array(self._verdict(logits, proposal, Sampling(**options), previous, source))

    def _verdict(
        self, logits: F32, proposal: Proposal, sampling: Sampling, previous: Ints, source: Source
    ) -> list[int]:
        """The tokens that a draft comes to, by logits (n + 1, V) (SPEC 13.4)."""
        return verify(logits, proposal, sampling, previous, *source).tokens

    paged_attention = staticmethod(pages.paged_attention)
    store_kv = staticmethod(pages.store_kv)
    page_hashes = staticmethod(pages.page_hashes)
    paging = staticmethod(pages.paging)
    prefix_reuse = staticmethod(pages.prefix_reuse)

    def load(self, model: str, weights: Mode) -> ReferenceSession:
        """SPEC 10."""
        return ReferenceSession(load_model(model, weights, self.arithmetic))


def int4_matrix(x: F32, packed: Array, scales: Array, group: int) -> quantization.Int4Matrix:
    """The matrix that the arguments of `linear_int4` or `linear_w4a16` describe."""
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

    def trace(self, tokens: Sequence[int] | Ints, attention: Any) -> Steps:
        """What `forward` computes on the way to its logits, by step (SPEC 19.2)."""
        return trace(self.model, tokens, self.cache, attention)

    def generate(self, prompt: Ints, max_new_tokens: int, exact_prefill: bool) -> tuple[Ints, F32]:
        """Greedy continuation and the logits that chose each token."""
        return self._alone(Engine(self.model, exact_prefill), prompt, max_new_tokens)[:2]

    def complete(self, prompt: Ints, max_new_tokens: int) -> tuple[Ints, F32]:
        """The same, up to an end token of the model's, which is the last (SPEC 14.1)."""
        return self._alone(Engine(self.model), prompt, max_new_tokens, None)[:2]

    def turns(
        self, tokens: Ints, lengths: Ints, max_new_tokens: int
    ) -> tuple[Ints, F32, Ints, Ints]:
        """Greedy continuations of prompts one after the other, and what was reused (SPEC 11.3)."""
        engine = Engine(self.model)
        answers = [
            self._alone(engine, prompt, max_new_tokens) for prompt in pages.split(tokens, lengths)
        ]
        chosen, logits, reused = (np.array(part) for part in zip(*answers, strict=True))
        return chosen, logits, reused[:, 0], lengths - reused[:, 0]

    def speculate(
        self, prompt: Ints, max_new_tokens: int, draft_tokens: int
    ) -> tuple[Ints, F32, Ints]:
        """Greedy, with drafts by n-gram: also what each pass after the prompt's accepted (13.5)."""
        engine = _engine(self.model, draft_tokens)
        rows: list[F32] = []
        accepted: list[int] = []
        request = engine.submit(
            prompt.tolist(), max_new_tokens, stop_tokens=(), on_token=_collector(rows)
        )
        while engine.busy:
            passes, before = request.tally.passes, request.tally.accepted
            engine.step()
            if request.tally.passes > passes:
                accepted.append(request.tally.accepted - before)
        return np.array(request.result().tokens), np.array(rows), np.array(accepted, np.int64)

    def serve(
        self,
        tokens: Ints,
        lengths: Ints,
        max_new_tokens: int,
        page_size: int,
        max_batched_tokens: int,
        draft_tokens: int,
    ) -> tuple[Ints, F32]:
        """Greedy continuations of prompts all at once, (R, n) and (R, n, V) (SPEC 14.2)."""
        engine = _engine(
            self.model, draft_tokens, page_size=page_size, max_batched_tokens=max_batched_tokens
        )
        rows: list[list[F32]] = [[] for _ in lengths]
        requests = [
            engine.submit(
                prompt.tolist(), max_new_tokens, stop_tokens=(), on_token=_collector(rows[i])
            )
            for i, prompt in enumerate(pages.split(tokens, lengths))
        ]
        while engine.busy:
            engine.step()
        return np.array([r.result().tokens for r in requests]), np.array(rows)

    def resume(
        self, prompt: Ints, longer: Ints, max_new_tokens: int, path: str
    ) -> tuple[Ints, F32, Ints]:
        """Save what `prompt` computes, go on from the file with `longer`; what it reused (11.4)."""
        first = Engine(self.model)
        first.generate(prompt.tolist(), 1)
        first.save_cache(Path(path))
        second = Engine(self.model)
        second.restore_cache(Path(path))
        return self._alone(second, longer, max_new_tokens)

    def _alone(
        self, engine: Engine, prompt: Ints, max_new_tokens: int, stop_tokens: Any = ()
    ) -> tuple[Ints, F32, Ints]:
        """Tokens, the logits that chose them, and how many prompt tokens were reused.

        stop_tokens: what ends the text; None for the model's own.
        """
        rows: list[F32] = []
        result = engine.generate(
            prompt.tolist(), max_new_tokens, stop_tokens=stop_tokens, on_token=_collector(rows)
        )
        return np.array(result.tokens), np.stack(rows), np.array([result.cache_n])


def _collector(rows: list[F32]) -> Callable[[int, F32], None]:
    return lambda token, logits: rows.append(logits)


def _engine(model: Model, draft_tokens: int, **options: Any) -> Engine:
    """An engine that drafts by n-gram, or not at all."""
    draft: Literal["ngram"] | None = "ngram" if draft_tokens else None
    return Engine(model, draft=draft, draft_tokens=max(1, draft_tokens), **options)
