"""The roofline: how fast a model could be on a machine, and what stands in the way.

A pass does so many operations and moves so many bytes; a machine does so many of each a second, and
can do both at once. So a pass takes at least `max(operations / rate, bytes / bandwidth)`. The one
that decides is its bound, and `operations / bytes` against `rate / bandwidth` tells which it is
(Williams, Waterman, Patterson: "Roofline", CACM 52(4), 2009).

Counted is what no implementation can do without: two operations for each weight and token, four for
each query's visible position, head and channel of attention; each weight read once a pass, each
held key and value once, each new one written. Norms, rope, softmax and activations are left out:
they are far below a percent. What an implementation moves beyond that is what its share shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np

from reference.config import ModelConfig
from reference.errors import RequestError
from reference.families import EMBEDDING, HEAD
from reference.loading.huggingface import each_tensor
from reference.measure.machine import Spread, this_machine
from reference.threads import limited_to

BYTES: Mapping[str, float] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int8": 1,
        "int4": 0.5 + 2 / 32,  # a float16 scale a group of 32 (SPEC 5.1)
    }
)
"""Bytes of a stored value."""

MOST = 1 << 24
"""The largest batch that is thought of."""

PASSES = 5
"""How often this machine is measured."""


@dataclass(frozen=True)
class Storage:
    """How a model is stored, and computed. weights: of layers, the router's too. head: its own.

    kv: of the cache. compute, attention: the precisions whose rates count, of products with weights
    and of attention. Norms, biases and embedding are float32, or as the head. Raises RequestError.
    """

    weights: str
    head: str
    kv: str
    compute: str
    attention: str

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value not in BYTES:
                raise RequestError(f"{name}: {value!r} is none of {', '.join(BYTES)}")


EXACT = Storage(*["float64"] * 5)
"""This engine's exact arithmetic, which keeps aligned values (SPEC 2.1)."""

FAST = Storage("float64", "float64", "float32", "float64", "float32")
"""The same with fast attention."""

FLOAT32 = Storage(*["float32"] * 5)
"""This engine's plain arithmetic."""


@dataclass(frozen=True)
class Sizes:
    """How many values a model has, by when they are read.

    layers: matrices that every token needs. head: the output matrix. expert: of one expert, over
    all layers that have experts. vectors: norms and biases. row: of the embedding.
    """

    layers: int
    head: int
    expert: int
    experts: int
    chosen: int
    vectors: int
    row: int


@cache
def sizes(config: ModelConfig) -> Sizes:
    """Count the values of a model, from the shapes of its tensors."""
    sparse, hidden = config.sparse, config.hidden_size
    count = 0 if sparse is None else sparse.router.experts
    matrices = experts = vectors = 0
    for name, shape in each_tensor(config):
        if name in (EMBEDDING, HEAD):  # the head is read whole, tied or not
            continue
        size = math.prod(shape)
        if sparse is not None and f".{sparse.stored.experts}." in name:
            experts += size
        elif len(shape) == 2:
            matrices += size
        else:
            vectors += size
    return Sizes(
        matrices,
        config.vocab_size * hidden,
        experts // max(count, 1),
        count,
        0 if sparse is None else sparse.router.top_k,
        vectors,
        hidden,
    )


@dataclass(frozen=True)
class Work:
    """What a pass must do: operations, a multiplication and an addition being two, and bytes.

    products: operations of products with weights. attention: those of attention.
    """

    products: float
    attention: float
    bytes: float

    @property
    def operations(self) -> float:
        """All operations."""
        return self.products + self.attention

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes


def work(config: ModelConfig, stored: Storage, sequences: int, tokens: int, depth: int) -> Work:
    """A pass over `tokens` new tokens of each sequence, after `depth` held ones.

    Logits are those of each sequence's last token. Of experts, as many are read as tokens that
    choose at random would hit: `E (1 - (1 - k/E)^T)`.
    """
    n, total = sizes(config), sequences * tokens
    channels, kept = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    products = 2.0 * total * (n.layers + n.chosen * n.expert) + 2.0 * sequences * n.head
    hit = n.experts * (1 - (1 - n.chosen / n.experts) ** total) if n.experts else 0.0
    read = BYTES[stored.weights] * (n.layers + hit * n.expert)
    read += BYTES[stored.head] * n.head
    read += min(BYTES[stored.head], BYTES["float32"]) * (n.vectors + total * n.row)
    seen = moved = 0
    for window in config.windows:
        most = depth + tokens if window is None else window
        seen += _visible(depth, tokens, most)
        moved += tokens + (depth if window is None else min(depth, window - 1))
    attention = 4.0 * sequences * channels * seen
    return Work(products, attention, read + BYTES[stored.kv] * kept * sequences * moved)


def _visible(depth: int, tokens: int, most: int) -> int:
    """Positions that the queries at depth, depth + 1, ... see together, each `most` at most."""
    growing = min(max(most - depth, 0), tokens)
    return growing * depth + growing * (growing + 1) // 2 + (tokens - growing) * most


# --------------------------------------------------------------------------------------- machines


@dataclass(frozen=True)
class Hardware:
    """bandwidth: bytes a second. rates: operations a second, by precision, without sparsity.

    source: where the figures are from. spreads: of each of them, where measured here. memory: bytes
    that it holds, as its maker says it, None where that is not known. Raises RequestError.
    """

    name: str
    bandwidth: float
    rates: Mapping[str, float]
    source: str
    spreads: Mapping[str, Spread] | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        for name, value in {"bandwidth": self.bandwidth, **self.rates}.items():
            if not 0 < value < math.inf:
                raise RequestError(f"{name}: {value} is out of range; it must be above 0")

    def rate(self, precision: str) -> float:
        """Operations a second. Raises RequestError where it is not known."""
        if precision not in self.rates:
            raise RequestError(
                f"compute: the rate of {self.name} in {precision} is not known; it is in "
                f"{', '.join(self.rates)}"
            )
        return self.rates[precision]

    def times(self, done: Work, stored: Storage) -> tuple[float, float]:
        """Seconds that the operations and the bytes take, each alone."""
        products, attention = self.rate(stored.compute), self.rate(stored.attention)
        computed = done.products / products + done.attention / attention
        return computed, done.bytes / self.bandwidth

    def seconds(self, done: Work, stored: Storage) -> float:
        """Seconds that a pass takes at least."""
        return max(self.times(done, stored))

    def bound(self, done: Work, stored: Storage) -> str:
        """`compute` or `memory`."""
        computed, moved = self.times(done, stored)
        return "compute" if computed >= moved else "memory"


def turning_batch(
    config: ModelConfig, stored: Storage, hardware: Hardware, depth: int
) -> int | None:
    """The smallest batch whose decode step is bound by compute; None where there is none.

    More sequences share the weights, but each brings its own keys and values: where these alone
    take longer than its operations, no batch is large enough.
    """

    def bound(batch: int) -> bool:
        done = work(config, stored, batch, 1, depth)
        return hardware.bound(done, stored) == "compute"

    high = 1
    while not bound(high):
        high *= 2
        if high > MOST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) else (middle, high)
    return high


T = 1e12

_H100 = {
    "float64": 67 * T,
    "float32": 67 * T,
    "float16": 989.4 * T,
    "bfloat16": 989.4 * T,
    "int8": 1978.9 * T,
}

PRESETS: Mapping[str, Hardware] = MappingProxyType(
    {
        card.name: card
        for card in (
            Hardware(
                "h200-sxm",
                4.8e12,
                _H100,
                "NVIDIA H200 Tensor Core GPU datasheet, SXM; its sparse figures halved",
                memory=141e9,
            ),
            Hardware(
                "h100-sxm",
                3.35e12,
                _H100,
                "NVIDIA H100 Tensor Core GPU datasheet, SXM; its sparse figures halved",
                memory=80e9,
            ),
            Hardware(
                "a100-sxm-80gb",
                2.039e12,
                {
                    "float64": 19.5 * T,
                    "float32": 19.5 * T,
                    "float16": 312 * T,
                    "bfloat16": 312 * T,
                    "int8": 624 * T,
                },
                "NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM, without sparsity",
                memory=80e9,
            ),
            Hardware(
                "l40s",
                864e9,
                {
                    "float32": 91.6 * T,
                    "float16": 362.05 * T,
                    "bfloat16": 362.05 * T,
                    "int8": 733 * T,
                },
                "NVIDIA L40S datasheet, without sparsity",
                memory=48e9,
            ),
            Hardware(
                "rtx-4090",
                1.008e12,
                {
                    "float32": 82.6 * T,
                    "float16": 165.2 * T,
                    "bfloat16": 165.2 * T,
                    "int8": 660.6 * T,
                },
                "NVIDIA Ada GPU architecture whitepaper, float32 accumulation, without sparsity",
                memory=24e9,
            ),
            Hardware(
                "mi300x",
                5.3e12,
                {
                    "float64": 163.4 * T,
                    "float32": 163.4 * T,
                    "float16": 1307.4 * T,
                    "bfloat16": 1307.4 * T,
                    "int8": 2614.9 * T,
                },
                "AMD Instinct MI300X accelerator data sheet, matrix, without sparsity",
                memory=192e9,
            ),
        )
    }
)
"""Well-known cards: peak figures of their makers, which no program reaches."""


def card(name: str) -> Hardware:
    """A preset. Raises RequestError."""
    if name not in PRESETS:
        raise RequestError(f"card: {name!r} is none of {', '.join(PRESETS)}")
    return PRESETS[name]


def measured_here(
    threads: int,
    size: int = 1536,
    stream: int = 1 << 30,
    clock: Callable[[], float] = perf_counter,
    on_run: Callable[[], object] = lambda: None,
) -> Hardware:
    """This machine, as its BLAS sees it, medians of runs after one to warm up.

    Bandwidth: a float32 matrix of `stream` bytes times a vector, which reads each value once. It
    must be well above the last cache, of which servers have some 0.3 GB. Rates: products of square
    matrices, `size` wide.
    """
    matrix = np.ones((stream // 4 // 4096, 4096), np.float32)
    vector = np.ones(4096, np.float32)
    cases: list[tuple[str, Any, Any, float]] = [("bandwidth", matrix, vector, matrix.nbytes)]
    for kind in ("float32", "float64"):
        square = np.ones((size, size), kind)
        cases.append((kind, square, square, 2.0 * size**3))
    found: dict[str, list[float]] = {name: [] for name, *_ in cases}
    with limited_to(threads):
        for turn in range(PASSES + 1):
            for name, a, b, amount in cases:
                started = clock()
                np.matmul(a, b)
                seconds = clock() - started
                on_run()
                if turn:
                    found[name].append(amount / seconds)
    spreads = {name: Spread.of(values) for name, values in found.items()}
    rates = {kind: spreads[kind].median for kind in ("float32", "float64")}
    source = f"measured here: BLAS, {threads} threads, median of {PASSES}"
    return Hardware(this_machine().cpu, spreads["bandwidth"].median, rates, source, spreads)


# ------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Ceiling:
    """A model on a machine."""

    config: ModelConfig
    stored: Storage
    hardware: Hardware

    def check(self, tokens: int, depth: int) -> None:
        """Raise RequestError where the model's context has not so many positions."""
        most = self.config.max_positions
        if depth + tokens > most:
            raise RequestError(
                f"ceiling: {depth + tokens} positions are needed, and the model's context has "
                f"{most}; lower -p or -d"
            )

    def row(self, sequences: int, tokens: int, depth: int) -> dict[str, Any]:
        """A prefill of `tokens`, or a decode step where that is 1. Raises RequestError."""
        self.check(tokens, depth)
        done = work(self.config, self.stored, sequences, tokens, depth)
        seconds, decodes = self.hardware.seconds(done, self.stored), tokens == 1
        turning = turning_batch(self.config, self.stored, self.hardware, depth) if decodes else None
        return {
            "test": ("tg1" if decodes else f"pp{tokens}") + (f" @ d{depth}" if depth else ""),
            "batch": sequences,
            "cache_n": depth,
            "prompt_n": tokens,
            "operations": done.operations,
            "bytes": done.bytes,
            "intensity": done.intensity,
            "balance": self.hardware.rate(self.stored.compute) / self.hardware.bandwidth,
            "bound": self.hardware.bound(done, self.stored),
            "seconds": seconds,
            "rate": sequences * tokens / seconds,
            "turning_batch": turning,
        }

    def seconds(self, tokens: int, depth: int) -> float:
        """Seconds that a pass of one sequence takes at least."""
        done = work(self.config, self.stored, 1, tokens, depth)
        return self.hardware.seconds(done, self.stored)
