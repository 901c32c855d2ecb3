"""The operations as a backend has them: arrays in, arrays out (SPEC 17)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conformance.backends.torch import (
    arithmetic,
    attention,
    elementary,
    pages,
    quantization,
    rotary,
    sampling,
)
from conformance.backends.torch import experts as mixture
from conformance.backends.torch.attention import Cache, Options
from conformance.backends.torch.kernels import Rows, gated_mlp
from conformance.backends.torch.model import Model
from conformance.backends.torch.pages import BlockTables, PrefixStore, split
from conformance.backends.torch.session import Session

Array = NDArray[Any]


class ExactKernels:
    """The arithmetic of the exact contract, on tensors."""

    functions: Mapping[str, Rows] = elementary.FUNCTIONS

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax of each row (4.3)."""
        return elementary.softmax(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension (6)."""
        return arithmetic.rms_norm(x, weight, eps)

    def cos_sin(self, angle: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of angles, times yarn's factor (7.3)."""
        return rotary.cos_sin(angle, factor)

    def attention(self, q: Tensor, cache: Cache, options: Options, mode: str) -> Tensor:
        """Attention of the last T positions (8)."""
        return attention.attention(q, cache, options, mode)

    def linear(self, w: Tensor, bias: Tensor | None, mode: str) -> Rows:
        """Prepare a linear layer from w (N, K) and bias (N,) (10.1)."""
        if mode == "float32":
            product = self.product(w)
        elif mode == "int4":
            product = self.product_int4(quantization.quantize_by_group(w))
        else:
            product = self.product_int4(quantization.quantize_by_search(w))
        if bias is None:
            return product
        return lambda x: self.add(product(x), bias)

    def product(self, w: Tensor) -> Rows:
        """Prepare the product with w (N, K) float32 (2.2)."""
        prepared = arithmetic.align(w)
        return lambda x: arithmetic.matmul(arithmetic.align(x), prepared)

    def product_int4(self, w: quantization.Int4) -> Rows:
        """Prepare the product with quantized weights (5.5)."""
        prepared = quantization.weights_for_linear(w)
        return lambda x: quantization.linear_int4(x, prepared)

    def product_blocks(self, w: quantization.Int4) -> Rows:
        """Prepare the product with the codes of GGUF's blocks (5.7)."""
        prepared = quantization.weights_of_blocks(w)
        return lambda x: quantization.linear_int4(x, prepared)

    def activate(self, name: str, gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
        """Return RN32(act(gate) * up), both clamped where there is a limit (9.1)."""
        if limit is not None:
            gate, up = gate.clamp(max=limit), 1 + up.clamp(-limit, limit)
        return arithmetic.canonical(self.functions[name](gate) * up)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return RN32(x + y) (1.3)."""
        return arithmetic.canonical(x + y)

    def cap(self, x: Tensor, c: float) -> Tensor:
        """Return RN32(c * tanh(RN32(x / c))) (10.2)."""
        divisor = arithmetic.like(x, c)
        return divisor * self.functions["tanh"](x / divisor)

    def renormalise(self, gates: Tensor, epsilon: float) -> Tensor:
        """Return gates (T, k) divided by their sum (9.2)."""
        return (gates.double() / mixture.exact_total(gates, epsilon)).float()

    def combine(self, x: Tensor, experts: Tensor, gates: Tensor, layers: Sequence[Rows]) -> Tensor:
        """Sum of gate times output over each token's experts (9.3)."""
        return mixture.rank_order(x, experts, gates, layers)


class TorchBackend:
    """Every operation of section 17; arrays are numpy, shapes as in its table."""

    name = "torch"
    numerics: Mapping[str, Any] = {
        "operands": "float32",
        "accumulator": "exact",
        "fma": False,
        "flush_to_zero": False,
        "kv": "float32",
    }
    kernels_type: type[ExactKernels] = ExactKernels

    def __init__(self, device: str = "cpu", threads: int | None = 1) -> None:
        """Compute on device "cpu" or "cuda".

        The suite's cases are small: one CPU thread is as fast as several, and does not stall where
        cores are shared. `threads=None` leaves torch as it is.
        """
        self.device = torch.device(device)
        self.kernels = self.kernels_type()
        torch.backends.cuda.matmul.allow_tf32 = False
        if threads is not None:
            torch.set_num_threads(threads)

    def _in(self, x: Array) -> Tensor:
        return torch.tensor(np.asarray(x), device=self.device)

    def _out(self, x: Tensor) -> Array:
        array: Array = x.cpu().contiguous().numpy()
        return array

    # Elementary (4).

    def _apply(self, name: str, x: Array) -> Array:
        return self._out(arithmetic.canonical(self.kernels.functions[name](self._in(x))))

    def exp(self, x: Array) -> Array:
        """Exponential (4.1)."""
        return self._apply("exp", x)

    def log(self, x: Array) -> Array:
        """Natural logarithm (4.1)."""
        return self._apply("log", x)

    def sin(self, x: Array) -> Array:
        """Sine (4.1)."""
        return self._apply("sin", x)

    def cos(self, x: Array) -> Array:
        """Cosine (4.1)."""
        return self._apply("cos", x)

    def tanh(self, x: Array) -> Array:
        """Hyperbolic tangent (4.1)."""
        return self._apply("tanh", x)

    def sigmoid(self, x: Array) -> Array:
        """Sigmoid (4.2)."""
        return self._apply("sigmoid", x)

    def silu(self, x: Array) -> Array:
        """SiLU (4.2)."""
        return self._apply("silu", x)

    def gelu_tanh(self, x: Array) -> Array:
        """GELU, tanh form (4.2)."""
        return self._apply("gelu_tanh", x)

    def softmax(self, x: Array) -> Array:
        """Softmax of each row (4.3)."""
        return self._out(self.kernels.softmax(self._in(x)))

    # Linear layers (2, 5, 6).

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """Product x w^T + bias (2.2, 10.1)."""
        b = None if bias is None else self._in(bias)
        return self._out(self.kernels.linear(self._in(w), b, "float32")(self._in(x)))

    def quantize_int4(self, w: Array, group: int) -> tuple[Array, Array]:
        """Packed codes and scales, by group of 32 or by row (5.1, 5.3)."""
        if group not in (0, quantization.GROUP):
            raise ValueError(f"group {group} is neither 0 nor 32")
        by_group = group == quantization.GROUP
        quantize = quantization.quantize_by_group if by_group else quantization.quantize_by_row
        result = quantize(self._in(w))
        return (
            self._out(quantization.pack(result.codes)),
            self._out(result.scales.float().to(torch.float16)),
        )

    def quantize_int8(self, x: Array) -> tuple[Array, Array]:
        """Codes and scale of each row (5.4)."""
        codes, scale, _ = quantization.quantize_int8(self._in(x))
        return self._out(codes.to(torch.int8)), self._out(scale)

    def linear_int4(self, x: Array, packed: Array, scales: Array, group: int) -> Array:
        """Quantized linear layer (5.5)."""
        codes = quantization.unpack(self._in(packed), np.shape(x)[1])
        groups = 1 if group == 0 else -(-codes.shape[1] // quantization.GROUP)
        if np.shape(scales) != (codes.shape[0], groups):
            raise ValueError(f"scales do not fit groups of {group}")
        w = quantization.Int4(codes, self._in(scales).double())
        return self._out(self.kernels.product_int4(w)(self._in(x)))

    def linear_w4a16(
        self, x: Array, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> Array:
        """Linear layer of float activations on int4 codes (5.9)."""
        codes = quantization.unpack(self._in(packed), np.shape(x)[1])
        groups = 1 if group == 0 else -(-codes.shape[1] // group)
        if any(np.shape(a) != (codes.shape[0], groups) for a in (scales, zeros) if a is not None):
            raise ValueError(f"scales or zeros do not fit groups of {group}")
        w = quantization.Int4(codes, self._in(scales).double())
        weights = quantization.dequantize(w, None if zeros is None else self._in(zeros), group)
        return self._out(self.kernels.product(weights)(self._in(x)))

    def linear_q4_0(self, x: Array, blocks: Array) -> Array:
        """Linear layer on Q4_0 blocks (5.7)."""
        w = quantization.unpack_q4_0(self._blocks(x, blocks, 18))
        return self._out(self.kernels.product_blocks(w)(self._in(x)))

    def linear_q8_0(self, x: Array, blocks: Array) -> Array:
        """Linear layer on Q8_0 blocks (5.7)."""
        w = quantization.unpack_q8_0(self._blocks(x, blocks, 34))
        return self._out(self.kernels.product_blocks(w)(self._in(x)))

    def _blocks(self, x: Array, blocks: Array, size: int) -> Tensor:
        groups, rest = divmod(np.shape(x)[1], quantization.GROUP)
        if rest or np.shape(blocks)[1:] != (groups, size):
            raise ValueError(f"blocks {np.shape(blocks)} do not fit x {np.shape(x)}")
        return self._in(blocks)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """RMSNorm of each row (6)."""
        return self._out(self.kernels.rms_norm(self._in(x), self._in(weight), float(eps)))

    # Positions and attention (7, 8).

    def rope_constants(
        self, parameters: Mapping[str, Any], position: int = 0
    ) -> tuple[Array, Array]:
        """inv_freq and factor (7.2)."""
        inv_freq, factor = rotary.constants(parameters, int(position))
        return np.array(inv_freq, dtype=np.float32), np.array([factor], dtype=np.float32)

    def rope(
        self,
        x: Array,
        positions: Array,
        inv_freq: Array,
        factor: float = 1.0,
        interleaved: bool = False,
    ) -> Array:
        """Rotate heads (7.3, 7.4)."""
        angle = rotary.angles(self._in(positions), self._in(inv_freq))
        c, s = self.kernels.cos_sin(angle, arithmetic.like(angle, float(factor)))
        return self._out(rotary.rotate(self._in(x), c, s, bool(interleaved)))

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        mode: str = "exact",
    ) -> Array:
        """Attention of the last T of S positions (8)."""
        options = Options(
            None if scale is None else float(scale),
            None if window is None else int(window),
            None if softcap is None else float(softcap),
            None if sinks is None else self._in(sinks),
        )
        cache = Cache(self._in(k), self._in(v))
        return self._out(self.kernels.attention(self._in(q), cache, options, mode))

    def paged_attention(
        self,
        q: Array,
        k_pages: Array,
        v_pages: Array,
        block_table: Array,
        length: int,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        mode: str = "exact",
    ) -> Array:
        """Attention of the last T of `length` positions, which lie in pages (11.1)."""
        table = self._in(block_table)
        k, v = (pages.gather(self._in(x), table, int(length)) for x in (k_pages, v_pages))
        options = Options(
            None if scale is None else float(scale),
            None if window is None else int(window),
            None if softcap is None else float(softcap),
        )
        return self._out(self.kernels.attention(self._in(q), Cache(k, v), options, mode))

    # The cache (11).

    def store_kv(self, x: Array, dtype: str) -> Array:
        """Values as a cache of a type gives them back (11.2)."""
        return self._out(pages.store(self._in(x), dtype))

    def page_hashes(
        self, tokens: Array, page_size: int, digest: str, dtype: str, salt: str = ""
    ) -> Array:
        """The chain of hashes from its root (11.3)."""
        chain = pages.hashes(tokens.tolist(), int(page_size), digest, dtype, salt)
        return np.array([list(value) for value in chain], dtype=np.uint8)

    def paging(self, script: Array, page_size: int) -> Array:
        """Run a script of block tables, counting after each line (11.1)."""
        counts = pages.run(script.tolist(), int(page_size))
        return np.array(counts, dtype=np.int64).reshape(-1, 3)

    def prefix_reuse(self, tokens: Array, lengths: Array, page_size: int, pages: int) -> Array:
        """How many tokens of each prompt come from those before (11.3)."""
        store = PrefixStore(BlockTables(int(page_size), int(pages)))
        found = [store.compute(prompt) for prompt in split(tokens.tolist(), lengths.tolist())]
        return np.array(found, dtype=np.int64)

    # Feed-forward (9).

    def gated_mlp(
        self, x: Array, gate: Array, up: Array, down: Array, activation: str = "silu"
    ) -> Array:
        """Feed-forward (9)."""
        return self._out(self._mlp(gate, up, down, activation)(self._in(x)))

    def _mlp(self, gate: Array, up: Array, down: Array, activation: str) -> Rows:
        return gated_mlp(self.kernels, map(self._linear, (gate, up, down)), activation)

    def _linear(self, w: Array) -> Rows:
        return self.kernels.linear(self._in(w), None, "float32")

    # Mixture of experts (9).

    def route(
        self,
        logits: Array,
        top_k: int,
        score: str,
        selection_bias: Array | None = None,
        **options: Any,
    ) -> tuple[Array, Array]:
        """Experts of each row in rank order, and their gates (9.2)."""
        router = mixture.Router(int(top_k), score, **options)
        bias = None if selection_bias is None else self._in(selection_bias)
        experts, gates = mixture.route(self._in(logits), router, bias, self.kernels)
        return self._out(experts), self._out(gates)

    def moe(
        self,
        x: Array,
        experts: Array,
        gates: Array,
        gate: Array,
        up: Array,
        down: Array,
        activation: str,
        shared_gate: Array | None = None,
        shared_up: Array | None = None,
        shared_down: Array | None = None,
        shared_router: Array | None = None,
    ) -> Array:
        """Experts with their routing given, and a shared one (9.3)."""
        rows = self._in(x)
        layers = [self._mlp(*w, activation) for w in zip(gate, up, down, strict=True)]
        shared = None
        if shared_gate is not None and shared_up is not None and shared_down is not None:
            expert = self._mlp(shared_gate, shared_up, shared_down, activation)
            gated = None if shared_router is None else self._linear(shared_router)
            shared = mixture.Shared(expert, gated)
        routing = self._in(experts), self._in(gates)
        return self._out(mixture.moe(rows, *routing, layers, shared, self.kernels))

    # Sampling (13).

    def philox(self, seed: int, request: int, positions: Array, stream: int = 0) -> Array:
        """64 random bits for each position (13.2)."""
        words = sampling.philox(int(seed), int(request), self._in(positions), int(stream))
        return self._out(words).view(np.uint64)

    def sample(
        self,
        logits: Array,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        previous: Array,
        seed: int,
        request: int,
        position: int,
    ) -> Array:
        """Choose one token (13.1)."""
        sampler = sampling.Sampler(
            float(temperature), int(top_k), float(top_p), float(min_p), float(repetition_penalty)
        )
        positions = np.array([position], dtype=np.int64)
        x = int(self.philox(seed, request, positions)[0])
        row, ids = self._in(logits), self._in(np.asarray(previous, dtype=np.int64))
        return np.array([sampling.sample(row, sampler, ids, x)], dtype=np.int64)

    def verify_draft(
        self,
        logits: Array,
        draft: Array,
        draft_weights: Array,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        previous: Array,
        seed: int,
        request: int,
        position: int,
    ) -> Array:
        """Judge drafted tokens (13.4)."""
        sampler = sampling.Sampler(
            float(temperature), int(top_k), float(top_p), float(min_p), float(repetition_penalty)
        )
        positions = position + np.arange(len(draft) + 1, dtype=np.int64)
        words = [self.philox(seed, request, positions, stream).tolist() for stream in range(4)]
        ids = self._in(np.asarray(previous, dtype=np.int64))
        proposed, weights = self._in(draft), self._in(draft_weights)
        tokens = sampling.verify(self._in(logits), proposed, weights, sampler, ids, words)
        return np.array(tokens, dtype=np.int64)

    # Models (10, 12).

    def load(self, model: str | Path, weights: str = "float32") -> Session:
        """Load a model folder with a weight mode of 10.1."""
        return Session(Model(Path(model), weights, self.kernels, self.device))
