"""Every operation as a sequence of small steps, so that a mistake or a variant is one method.

`ComposedBackend` gives the reference's own bits; `OwnOrderBackend` takes the same steps in float32,
in an order of its own. `ComposedSession` is a whole model made of a backend's operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backends.plain import PlainBackend
from conformance.backends.reference import Ints, ReferenceBackend
from conformance.golden import Array
from conformance.operations import NotImplementedByBackendError
from reference.arithmetic import (
    F32,
    F64,
    NAN,
    Aligned,
    Bools,
    align,
    align_rows,
    dot64,
    largest,
    matmul,
    one_nan,
    sum64,
    to_float32,
    weighted_sum,
)
from reference.attention import attention_fast
from reference.config import ModelConfig
from reference.errors import RequestError
from reference.loading import Checkpoint, load_folder
from reference.model import AttentionKind
from reference.quantization import GROUP, Int4Matrix, check_scales, dequantize, quantize_int4_row
from reference.rotary import RopeParameters
from reference.sampling import WEIGHT_ONE, Words, philox4x32
from reference.scheduler import prefill_attention
from reference.weights import Mode, add

Floats = NDArray[np.floating[Any]]


class ComposedBackend(ReferenceBackend):
    """The exact lane in steps (SPEC 17). `fast` attention is the reference's own."""

    name = "composed"

    # ------------------------------------------------------------------ arithmetic

    def product(self, x: F32, w: F32) -> F32:
        """x (T, K) times w (N, K) -> (T, N) (SPEC 2.2)."""
        return matmul(x, _aligned(w))

    def total(self, p: F32) -> Floats:
        """The sum over the last axis (SPEC 2.4)."""
        return sum64(p)

    def mean_square(self, x: F32) -> Floats:
        """The mean of squares over the last axis (SPEC 6)."""
        return np.asarray(dot64(x, x) / x.shape[-1])

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Rows v (S, D) with weights p (T, S): their sum (T, D) and that of p (T,) (SPEC 2.5)."""
        return weighted_sum(p, align_rows(v))

    def divide(self, a: Floats, b: Floats) -> F32:
        """RN32(a / b)."""
        with np.errstate(all="ignore"):
            return to_float32(np.asarray(a / b))

    # ------------------------------------------------------------------ linear layers (SPEC 2, 5)

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """SPEC 10.1."""
        return add(self.product(x, w), bias)

    def group_scales(self, w: F32, group: int) -> NDArray[np.float16]:
        """The float16 scale of each group of each row, (N, G) (SPEC 5.1)."""
        peaks = [largest(np.ascontiguousarray(w[:, i : i + group])) for i in _starts(w, group)]
        peak = np.stack(peaks, axis=1).astype(np.float64)
        scales = self.ideal_scale(peak).astype(np.float16)
        scales[(peak > 0) & (scales == 0)] = np.float16(2.0**-24)
        scales[peak == 0] = np.float16(1)
        return scales

    def ideal_scale(self, peak: F64) -> F64:
        """A group's scale before it is rounded to float16 (SPEC 5.1)."""
        return peak / 7

    def codes(self, w: F32, scales: F64) -> F64:
        """q of every weight, given the scale of every weight, (N, K) (SPEC 5.1)."""
        ratio: F64 = w / scales
        return np.copysign(np.minimum(np.floor(np.abs(ratio) + 0.5), 7), ratio)

    def pack(self, codes: F64) -> NDArray[np.uint8]:
        """Two codes a byte, even k in the low nibble (SPEC 5.2)."""
        nibbles = (codes + 8).astype(np.uint8)
        if nibbles.shape[1] % 2:
            nibbles = np.pad(nibbles, [(0, 0), (0, 1)], constant_values=8)
        return nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)

    def quantize_int4(self, w: F32, group: int) -> tuple[Array, Array]:
        """SPEC 5.1 and, with group 0, 5.3."""
        group = group or w.shape[1]
        scales = self.group_scales(w, group)
        return self.pack(self.codes(w, spread(scales, w.shape[1], group))), scales

    def int8_scale(self, x: F32) -> F32:
        """One scale a row, RN32(max|x| / 127), (T,) (SPEC 5.4)."""
        return largest(np.ascontiguousarray(x)) / np.float32(127)

    def int8_codes(self, ratio: F32) -> F32:
        """From x / s to codes (SPEC 5.4)."""
        return np.clip(np.rint(ratio), -127, 127)

    def quantize_int8(self, x: F32) -> tuple[Array, Array]:
        """SPEC 5.4."""
        finite = np.isfinite(x).all(axis=-1)
        with np.errstate(all="ignore"):
            scale = np.where(finite, self.int8_scale(x), NAN).astype(np.float32)
            usable = finite & (scale > 0)
            divisor = np.where(usable, scale, np.float32(1))[:, None]
            ratio: F32 = (np.where(usable[:, None], x, np.float32(0)) / divisor).astype(np.float32)
            return self.int8_codes(ratio).astype(np.int8), scale

    def int4_weights(self, packed: Array, scales: Array, width: int, group: int) -> F32:
        """scale * q of every weight, (N, K) (SPEC 5.1, 5.2)."""
        return dequantize(Int4Matrix(packed, scales, width, group))

    def int4_sums(self, codes: F32, weights: F32) -> Floats:
        """Codes (T, K) times dequantized weights (N, K), exact (SPEC 5.5)."""
        return codes.astype(np.float64) @ weights.T.astype(np.float64) + 0.0

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """SPEC 5.5."""
        return self.on_codes(x, self.int4_weights(packed, scales, x.shape[1], group or x.shape[1]))

    def linear_w4a16(
        self, x: F32, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> F32:
        """SPEC 5.9."""
        return self.product(
            x, self.dequantized(packed, scales, x.shape[1], group or x.shape[1], zeros)
        )

    def dequantized(
        self, packed: Array, scales: Array, width: int, group: int, zeros: Array | None
    ) -> F32:
        """scale * (code - zero) of every weight, (N, K) (SPEC 5.9)."""
        weights = self.int4_weights(packed, scales, width, group)
        if zeros is None:
            return weights
        moved = scales.astype(np.float64) * (8 - zeros.astype(np.float64))
        return to_float32(weights + spread(moved, width, group))

    def on_codes(self, x: F32, weights: F32) -> F32:
        """int8 codes of x (T, K) on dequantized weights (N, K) (SPEC 5.5)."""
        codes, scale = self.quantize_int8(x)
        sums = self.int4_sums(codes.astype(np.float32), weights)
        with np.errstate(all="ignore"):
            return one_nan(to_float32(np.asarray(sums * scale[:, None].astype(sums.dtype))))

    def block_scales(self, blocks: Array) -> F32:
        """The scale of each block of rows (N, G, bytes), (N, G) (SPEC 5.7)."""
        return np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)

    def q4_0_codes(self, blocks: Array) -> F32:
        """The codes of blocks (N, G, 18), (N, G, 32) (SPEC 5.7)."""
        nibbles = np.concatenate([blocks[:, :, 2:] & 15, blocks[:, :, 2:] >> 4], axis=2)
        return nibbles.astype(np.float32) - np.float32(8)

    def q8_0_codes(self, blocks: Array) -> F32:
        """The codes of blocks (N, G, 34), (N, G, 32) (SPEC 5.7)."""
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).astype(np.float32)

    def linear_q4_0(self, x: F32, blocks: Array) -> F32:
        """SPEC 5.7."""
        return self.on_blocks(x, self.q4_0_codes(blocks), self.block_scales(blocks))

    def linear_q8_0(self, x: F32, blocks: Array) -> F32:
        """SPEC 5.7."""
        return self.on_blocks(x, self.q8_0_codes(blocks), self.block_scales(blocks))

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """x (T, K) on codes (N, G, 32) with their scales (N, G) (SPEC 5.7)."""
        return self.on_codes(x, (codes * scales[:, :, None]).reshape(len(codes), -1))

    # ------------------------------------------------------------------ norms, rope, MLP, softmax

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """r of SPEC 6."""
        return to_float32(np.asarray(1 / np.sqrt(mean_square + mean_square.dtype.type(eps))))

    def scaled_row(self, x: F32, r: F32, weight: F32) -> F32:
        """RN32(RN32(x r) w) (SPEC 6)."""
        y: F32 = x * r[..., None] * weight
        return y

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """SPEC 6."""
        with np.errstate(all="ignore"):
            y = self.scaled_row(x, self.inverse_root(self.mean_square(x), eps), weight)
        y[~np.isfinite(x).all(axis=-1)] = NAN
        return one_nan(y)

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """RN32(p * inv_freq), (T, d/2) (SPEC 7.3)."""
        angle: F32 = positions.astype(np.float32)[:, None] * inv_freq
        return angle

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """Cos and sin of angles, each times the factor (SPEC 7.3)."""
        return np.float32(factor) * self.cos(angle), np.float32(factor) * self.sin(angle)

    def pairs(self, head_dim: int, half: int, interleaved: bool) -> tuple[slice, slice]:
        """Which elements of a head are the first and the second of each pair (SPEC 7.4)."""
        if interleaved:
            return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        return slice(0, half), slice(half, 2 * half)

    def rope(self, x: F32, positions: Ints, inv_freq: F32, factor: float, interleaved: bool) -> F32:
        """SPEC 7.3 and 7.4."""
        with np.errstate(all="ignore"):
            cos, sin = (t[:, None] for t in self.turns(self.angles(positions, inv_freq), factor))
            first, second = self.pairs(x.shape[-1], cos.shape[-1], interleaved)
            out = x.copy()
            out[..., first], out[..., second] = map(
                one_nan, self.rotated(x[..., first], x[..., second], cos, sin)
            )
        return out

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """Both of each pair, turned (SPEC 7.4)."""
        return a * cos - b * sin, b * cos + a * sin

    def activate(self, activation: str, x: F32) -> F32:
        """An activation by name (SPEC 4.2)."""
        return self.silu(x) if activation == "silu" else self.gelu_tanh(x)

    def gated_mlp(self, x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        """SPEC 9."""
        with np.errstate(all="ignore"):
            a = self.activate(activation, self.linear(x=x, w=gate))
            return self.linear(x=one_nan(a * self.linear(x=x, w=up)), w=down)

    def softmax(self, x: F32) -> F32:
        """SPEC 4.3."""
        with np.errstate(all="ignore"):
            p = self.exp(x - x.max(axis=-1, keepdims=True))
            return self.divide(p, self.total(p)[..., None])

    # ------------------------------------------------------------------ attention (SPEC 8)

    def attention(
        self,
        q: F32,
        k: F32,
        v: F32,
        mode: str,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: F32 | None = None,
        **others: Any,
    ) -> F32:
        """SPEC 8.2, head by head."""
        if self.attends_fast(mode):
            return attention_fast(q, k, v, scale, window, softcap, sinks)
        factor = np.float32(1 / math.sqrt(q.shape[2])) if scale is None else np.float32(scale)
        out = np.empty_like(q)
        with np.errstate(all="ignore"):
            for head in range(q.shape[1]):
                source = self.key_value_head(head, q.shape[1], k.shape[1])
                out[:, head] = self.head(
                    q[:, head], k[:, source], v[:, source], factor, window,
                    None if softcap is None else np.float32(softcap),
                    np.float32(-np.inf) if sinks is None else sinks[head],
                )  # fmt: skip
        return out

    def attends_fast(self, mode: str) -> bool:
        """Whether to hand over to the reference's fast attention (SPEC 8.3)."""
        return mode == "fast"

    def key_value_head(self, head: int, heads: int, kv_heads: int) -> int:
        """The key-value head that a query head reads (SPEC 1.2)."""
        return head // (heads // kv_heads)

    def head(
        self,
        q: F32,
        k: F32,
        v: F32,
        scale: np.float32,
        window: int | None,
        softcap: np.float32 | None,
        sink: np.float32,
    ) -> F32:
        """One head, q (T, D), k and v (S, D) -> (T, D) (SPEC 8.2)."""
        visible = self.visible(len(q), len(k), window)
        finite = np.asarray(np.isfinite(k).all(axis=-1) & np.isfinite(v).all(axis=-1))
        usable = np.asarray(np.isfinite(q).all(axis=-1))
        q, k, v = (
            np.where(good[:, None], x, np.float32(0))
            for x, good in ((q, usable), (k, finite), (v, finite))
        )
        t = self.scores(q, k, scale)
        no_sink = bool(np.isnan(sink) or sink == np.inf)
        broken = np.asarray(~usable | self.touched(visible, ~(np.isfinite(t) & finite)) | no_sink)
        t = np.where(broken[:, None], np.float32(0), t)
        sink = sink if np.isfinite(sink) else np.float32(-np.inf)
        u = np.where(visible, self.capped(t, softcap), np.float32(-np.inf))
        out = self.divide(*self.sums(u, v, sink))
        out[broken] = NAN
        return self.blinded(one_nan(out), visible, v)

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Who sees whom, (T, S) (SPEC 8.1)."""
        back = np.arange(keys - rows, keys)[:, None] - np.arange(keys)
        return back >= 0 if window is None else (back >= 0) & (back < window)

    def touched(self, visible: Bools, broken: Bools) -> Bools:
        """The rows that see something broken, (T,) (SPEC 8.2)."""
        return np.asarray((visible & broken).any(axis=-1))

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """t of SPEC 8.2, (T, S)."""
        t: F32 = self.product(q, k) * scale
        return t

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """u of SPEC 8.2."""
        return t if softcap is None else softcap * self.tanh(t / softcap)

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Numerator (T, D) and denominator (T, 1) from scores, -inf where not visible."""
        m = self.peak(u, sink)
        p = self.shares(u, m)
        num, den = self.weighted(p, v)
        return num, (den + self.sink_share(sink, m))[:, None]

    def peak(self, u: F32, sink: np.float32) -> F32:
        """m of SPEC 8.2, (T,); 0 where nothing counts."""
        m = np.maximum(u.max(axis=-1, initial=-np.inf), sink)
        return np.where(m == -np.inf, np.float32(0), m)

    def shares(self, u: F32, m: F32) -> F32:
        """p of SPEC 8.2."""
        return self.exp(u - m[:, None])

    def sink_share(self, sink: np.float32, m: F32) -> F32:
        """What a sink adds to the denominator, (T,) (SPEC 8.2)."""
        return self.exp(sink - m)

    def blinded(self, out: F32, visible: Bools, v: F32) -> F32:
        """A row that sees nothing is +0 (SPEC 8.2)."""
        out[~visible.any(axis=-1)] = 0
        return out

    # ------------------------------------------------------------------ sampling (SPEC 13)

    def counter(self, request: int, positions: Ints, stream: int) -> list[Words]:
        """The counter of SPEC 13.2."""
        zeros = np.zeros(positions.shape, np.uint64)
        low = positions.astype(np.uint64) & np.uint64(0xFFFFFFFF)
        return [low, zeros + np.uint64(request), zeros + np.uint64(stream), zeros]

    def key(self, seed: int) -> tuple[int, int]:
        """The key of SPEC 13.2."""
        return seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF

    def word(self, out: Sequence[Words]) -> Words:
        """The 64 bits that are used (SPEC 13.2)."""
        return out[0] | out[1] << np.uint64(32)

    def philox(self, seed: int, request: int, positions: Ints, stream: int = 0) -> Words:
        """SPEC 13.2."""
        return self.word(philox4x32(self.counter(request, positions, stream), self.key(seed)))

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """Step 1 of SPEC 13.1."""
        if penalty == 1:
            return logits
        out, seen = logits.copy(), np.unique(previous)
        out[seen] = self.made_less_likely(out[seen], penalty)
        return out

    def made_less_likely(self, x: F32, penalty: np.float32) -> F32:
        """A penalised logit (SPEC 13.1)."""
        return np.where(x > 0, x / penalty, x * penalty)

    def greedy(self, logits: F32) -> int:
        """The likeliest token, of equal ones the lowest id (SPEC 13.1)."""
        return int(logits.argmax())

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Step 2 of SPEC 13.1."""
        z: F32 = (logits - logits.max()) / temperature
        return z

    def weights(self, z: F32) -> Ints:
        """Step 3 of SPEC 13.1."""
        return np.rint(self.exp(z).astype(np.float64) * WEIGHT_ONE).astype(np.int64)

    def ranked(self, weights: Ints) -> Ints:
        """Step 4 of SPEC 13.1."""
        return np.argsort(-weights, kind="stable")

    def keep_top_k(self, ranked: Ints, weights: Ints, top_k: int) -> Ints:
        """Step 4 of SPEC 13.1."""
        return ranked[:top_k] if top_k else ranked

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Step 5 of SPEC 13.1."""
        cumulative = np.cumsum(weights[ranked])
        needed = math.ceil(Fraction(top_p) * int(cumulative[-1]))
        return ranked[: int(np.searchsorted(cumulative, needed)) + 1]

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """Step 6 of SPEC 13.1."""
        least = math.ceil(Fraction(min_p) * int(weights[ranked[0]]))
        return ranked[weights[ranked] >= least]

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """Step 7 of SPEC 13.1."""
        kept = np.sort(kept)
        cumulative = np.cumsum(weights[kept])
        target = word * int(cumulative[-1]) >> 64
        return int(kept[np.searchsorted(cumulative, target, side="right")])

    def sample(
        self,
        logits: F32,
        previous: Ints,
        seed: int,
        request: int,
        position: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        **ignored: Any,
    ) -> Ints:
        """SPEC 13.1."""
        with np.errstate(all="ignore"):
            logits = self.penalised(logits, previous, np.float32(repetition_penalty))
            if np.isnan(logits).any() or not np.isfinite(logits).any():
                raise RequestError("logits: NaN or nothing finite; there is no token to choose")
            if np.float32(temperature) == 0:
                return np.array([self.greedy(logits)])
            weights = self.weights(self.tempered(logits, np.float32(temperature)))
            kept = self.keep_top_k(self.ranked(weights), weights, top_k)
            kept = self.keep_top_p(kept, weights, top_p)
            kept = self.keep_min_p(kept, weights, min_p)
            word = int(self.philox(seed=seed, request=request, positions=np.array([position]))[0])
            return np.array([self.drawn(kept, weights, word)])

    # ------------------------------------------------------------------ whole models (SPEC 10)

    session: type[ComposedSession]

    def load(self, model: str, weights: Mode) -> Any:
        """SPEC 10, by the operations above."""
        return self.session(self, model, weights)


def spread(scales: NDArray[np.floating[Any]], width: int, group: int) -> F64:
    """The scale of every weight, (N, G) -> (N, K)."""
    return np.repeat(scales.astype(np.float64), group, axis=1)[:, :width]


def _starts(w: F32, group: int) -> range:
    return range(0, w.shape[1], group)


_ALIGNED: dict[int, tuple[F32, Aligned]] = {}


def _aligned(w: F32) -> F32 | Aligned:
    """A read-only matrix is aligned once; it is kept with the result, so that its id stays its."""
    if w.flags.writeable:
        return w
    if id(w) not in _ALIGNED:
        _ALIGNED[id(w)] = (w, align(w))
    return _ALIGNED[id(w)][1]


FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class ComposedSession:
    """A model put together from a backend's operations (SPEC 10, 17), of a dense family."""

    def __init__(self, backend: ComposedBackend, model: str, weights: Mode) -> None:
        self.backend, self.mode = backend, weights
        checkpoint = _checkpoint(Path(model))
        if checkpoint.config.architecture not in FAMILIES:
            raise NotImplementedByBackendError(f"model of {checkpoint.config.architecture}")
        self.config = self.understood(checkpoint.config)
        self.tensors = dict(checkpoint.tensors)
        for tensor in self.tensors.values():
            tensor.flags.writeable = False
        self.quantized = {
            name: self.quantize(name, tensor)
            for name, tensor in self.tensors.items()
            if name.endswith("proj.weight") and weights != "float32"
        }
        self.reset()

    def understood(self, config: ModelConfig) -> ModelConfig:
        """What is made of the configuration."""
        return config

    def quantize(self, name: str, w: F32) -> tuple[Array, Array, int]:
        """Codes, scales and group of a projection (SPEC 10.1)."""
        if self.mode == "int4":
            packed, scales = self.backend.quantize_int4(w=w, group=GROUP)
            check_scales(Int4Matrix(packed, scales, w.shape[1], GROUP), name)
            return packed, scales, GROUP
        matrix = quantize_int4_row(w, search=True)
        return matrix.packed, matrix.scales, 0

    def reset(self) -> None:
        """Forget what was fed."""
        self.length = 0
        self.keys: list[list[F32]] = [[] for _ in range(self.config.layers)]
        self.values: list[list[F32]] = [[] for _ in range(self.config.layers)]

    def forward(self, tokens: Sequence[int] | Ints, attention: AttentionKind = "exact") -> F32:
        """Logits of the next tokens, (T,) -> (T, V) (SPEC 10.2)."""
        ids = np.asarray(tokens, np.int64)
        positions = self.positions(len(ids))
        x = self.embed(ids)
        for index in range(self.config.layers):
            x = self.layer(index, x, positions, attention)
        self.length += len(ids)
        return self.logits(x)

    def positions(self, count: int) -> Ints:
        """The positions of the next `count` tokens."""
        return np.arange(self.length, self.length + count)

    def embed(self, ids: Ints) -> F32:
        """Rows of the embedding."""
        return self.tensors["model.embed_tokens.weight"][ids]

    def layer(self, index: int, x: F32, positions: Ints, attention: AttentionKind) -> F32:
        """One decoder layer, (T, K) -> (T, K)."""
        h = self.norm(f"model.layers.{index}.input_layernorm", x)
        x = self.residual(x, self.attend(index, h, positions, attention))
        h = self.norm(f"model.layers.{index}.post_attention_layernorm", x)
        return self.residual(x, self.feed_forward(index, h))

    def norm(self, name: str, x: F32) -> F32:
        """RMSNorm by the weight of that name."""
        weight, eps = self.tensors[f"{name}.weight"], self.config.rms_norm_eps
        return self.backend.rms_norm(x=x, weight=weight, eps=eps)

    def residual(self, x: F32, y: F32) -> F32:
        """RN32(x + y)."""
        return add(x, y)

    def project(self, index: int, name: str, x: F32) -> F32:
        """A projection of a layer, in the mode of its weights (SPEC 10.1)."""
        at = f"model.layers.{index}.{name}_proj"
        bias = self.bias(at)
        if self.mode == "float32":
            return self.backend.linear(x=x, w=self.tensors[f"{at}.weight"], bias=bias)
        packed, scales, group = self.quantized[f"{at}.weight"]
        return add(self.backend.linear_int4(x=x, packed=packed, scales=scales, group=group), bias)

    def bias(self, at: str) -> F32 | None:
        """A projection's bias, where it has one."""
        return self.tensors.get(f"{at}.bias")

    def attend(self, index: int, h: F32, positions: Ints, attention: AttentionKind) -> F32:
        """Attention of a layer, with its projections."""
        q, k, v = (self.heads(index, name, h) for name in "qkv")
        q, k = self.placed(index, "q", q, positions), self.placed(index, "k", k, positions)
        self.remember(index, k, v)
        keys, values = self.recalled(index)
        y = self.backend.attention(
            q=q, k=keys, v=values, mode=attention, scale=self.scale(),
            window=self.config.windows[index], softcap=None,
        )  # fmt: skip
        return self.project(index, "self_attn.o", y.reshape(len(h), -1))

    def scale(self) -> float | None:
        """What multiplies a score; None is 1 / sqrt(head_dim)."""
        return None

    def heads(self, index: int, name: str, h: F32) -> F32:
        """q, k or v, (T, H, D)."""
        y = self.project(index, f"self_attn.{name}", h)
        return y.reshape(len(h), -1, self.config.head_dim)

    def placed(self, index: int, name: str, x: F32, positions: Ints) -> F32:
        """q or k, normed where the family does, then rotated."""
        return self.rotated(self.normed_heads(index, name, x), positions)

    def normed_heads(self, index: int, name: str, x: F32) -> F32:
        """q or k, (T, H, D), each head normed where the family does (SPEC 10.3)."""
        if not self.config.qk_norm:
            return x
        flat = self.norm(f"model.layers.{index}.self_attn.{name}_norm", x.reshape(-1, x.shape[2]))
        return flat.reshape(x.shape)

    def rotated(self, x: F32, positions: Ints) -> F32:
        """q or k, (T, H, D), at the tokens' positions (SPEC 7)."""
        parts = []
        for here in self.alike(positions):
            last = int(positions[here][-1])
            constants = self.backend.rope_constants(self.rope_parameters(), last)
            parts.append(
                self.backend.rope(
                    x=x[here],
                    positions=positions[here],
                    inv_freq=constants[0],
                    factor=float(constants[1][0]),
                    interleaved=self.config.rope.interleaved,
                )
            )
        return np.concatenate(parts)

    def alike(self, positions: Ints) -> list[slice]:
        """Runs of positions that share their constants: all, but for `dynamic` (SPEC 7.2)."""
        if self.config.rope.kind != "dynamic":
            return [slice(0, len(positions))]
        return [slice(i, i + 1) for i in range(len(positions))]

    def rope_parameters(self) -> dict[str, Any]:
        """The rope of the configuration, as the operation takes it (SPEC 17)."""
        rope, config = self.config.rope, self.config
        about = {
            "head_dim": config.head_dim,
            "max_position_embeddings": rope.original_max_positions or config.max_positions,
            "rope_theta": rope.theta,
            "partial_rotary_factor": rope.rotary_dim / config.head_dim,
        }
        return {**about, **_scaling(rope)}

    def remember(self, index: int, k: F32, v: F32) -> None:
        """Append k and v, (T, Hkv, D), to a layer's cache (SPEC 11)."""
        self.keys[index].append(k)
        self.values[index].append(v)

    def recalled(self, index: int) -> tuple[F32, F32]:
        """All keys and values of a layer, (S, Hkv, D)."""
        return np.concatenate(self.keys[index]), np.concatenate(self.values[index])

    def feed_forward(self, index: int, h: F32) -> F32:
        """The gated layer (SPEC 9)."""
        with np.errstate(all="ignore"):
            gate = self.backend.activate(self.config.activation, self.project(index, "mlp.gate", h))
            return self.project(index, "mlp.down", one_nan(gate * self.project(index, "mlp.up", h)))

    def logits(self, x: F32) -> F32:
        """Logits of hidden rows, (T, K) -> (T, V)."""
        name = "model.embed_tokens.weight" if self.config.tied else "lm_head.weight"
        return self.backend.linear(x=self.norm("model.norm", x), w=self.tensors[name])

    def prefill(self, prompt_n: int, exact_prefill: bool) -> AttentionKind:
        """Which attention the prompt gets (SPEC 8.4)."""
        return prefill_attention(prompt_n, exact_prefill)

    def choose(self, logits: F32) -> int:
        """The next token."""
        return int(logits.argmax())

    def generate(self, prompt: Ints, max_new_tokens: int, exact_prefill: bool) -> tuple[Ints, F32]:
        """Greedy continuation and the logits that chose each token (SPEC 14, 17)."""
        self.reset()
        rows = [self.forward(prompt, self.prefill(len(prompt), exact_prefill))[-1]]
        tokens = [self.choose(rows[0])]
        while len(tokens) < max_new_tokens and self.length < self.config.max_positions:
            rows.append(self.forward(tokens[-1:])[-1])
            tokens.append(self.choose(rows[-1]))
        return np.array(tokens), np.stack(rows)


ComposedBackend.session = ComposedSession


@cache
def _checkpoint(path: Path) -> Checkpoint:
    """A folder is read once a run: many a fault loads the same model."""
    return load_folder(path)


def _scaling(rope: RopeParameters) -> Mapping[str, Any]:
    """The keys of a kind of rope (SPEC 7.2)."""
    names = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": (
            "factor", "beta_fast", "beta_slow", "truncate",
            "attention_factor", "mscale", "mscale_all_dim",
        ),
    }.get(rope.kind, ())  # fmt: skip
    about = {"rope_type": rope.kind, **{name: getattr(rope, name) for name in names}}
    if rope.kind in ("llama3", "yarn"):
        about["original_max_position_embeddings"] = rope.original_max_positions
    return about


class OwnOrderBackend(ComposedBackend, PlainBackend):
    """The same steps in float32, every contraction in two halves: an order of its own."""

    name = "own-order"
    numerics: Mapping[str, Any] = {"operands": "float32", "accumulator": "float32", "kv": "float32"}

    def product(self, x: F32, w: F32) -> F32:
        """Two float32 GEMMs; what is not finite makes its whole dot NaN, as SPEC 2.6 asks."""
        half = x.shape[-1] // 2
        with np.errstate(all="ignore"):
            y = x[:, half:] @ w[:, half:].T + x[:, :half] @ w[:, :half].T
        y[~np.isfinite(x).all(axis=1)] = np.nan
        y[:, ~np.isfinite(w).all(axis=1)] = np.nan
        return one_nan(y)

    def total(self, p: F32) -> Floats:
        """From the last to the first."""
        return np.asarray(p[..., ::-1].sum(axis=-1))

    def mean_square(self, x: F32) -> Floats:
        """The squares' float32 mean."""
        return np.asarray((x * x).sum(axis=-1) / np.float32(x.shape[-1]))

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """A float32 GEMM."""
        return self.product(p, np.ascontiguousarray(v.T)), self.total(p)

    def attends_fast(self, mode: str) -> bool:
        """Never: one float32 attention serves both."""
        return False

    def int4_sums(self, codes: F32, weights: F32) -> Floats:
        """A float32 GEMM on the codes."""
        return self.product(codes, weights)

    def softmax(self, x: F32) -> F32:
        """By the steps."""
        return ComposedBackend.softmax(self, x)
