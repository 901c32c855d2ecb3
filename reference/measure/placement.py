"""Where experts are stored: what a card saves, and a reply waits, when some stay with the CPU.

A sparse model is mostly experts, of which a token needs a few: so they are what is left in the
CPU's memory where a card is too small. Of the first `n_cpu_moe` layers (llama.cpp's option) the
experts lie there, and all else, the cache too, on the card. The CPU computes them where they are,
and activations cross the link twice; or, in a prefill, they are shipped to the card where that is
faster, which is planned by what is expected, layer by layer.

Each phase of a layer takes the longer of its operations and its bytes (`reference.measure.ceiling`)
and phases follow one another; what is hidden behind another, and embeddings, norms and softmax, are
left out. A pass reads the experts that its tokens hit, so their number decides (`laws`). The sums
here are of expectations; `Offload.simulated` draws who goes where, token by token and layer by
layer, and adds up what that takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from reference.arithmetic import F64, Bools
from reference.config import ModelConfig, parse_config
from reference.errors import RequestError
from reference.loading.huggingface import each_tensor
from reference.measure.ceiling import BYTES, Hardware, Storage
from reference.measure.laws import Ints, Law

ACTIVATION = 2
"""Bytes of a value that crosses the link: float16."""

PER_OCTAVE = 8
"""Lengths tried in each doubling, where a crossover is looked for."""

PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3-30b-a3b": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    }
)
"""Dimensions of real models without their weights: Qwen3-30B-A3B's config.json, as published."""


def published(name: str) -> ModelConfig:
    """The configuration of a published model. Raises RequestError."""
    if name not in PUBLISHED:
        raise RequestError(f"model: {name!r} is none of {', '.join(PUBLISHED)}")
    return parse_config(dict(PUBLISHED[name]), name)


# --------------------------------------------------------------------------------------- placements


Way = Literal["faster", "cpu", "ship"]
"""Of a prefill whose experts lie with the CPU: which computes them, or whichever is faster."""


@dataclass(frozen=True)
class Placement:
    """n_cpu_moe: of so many layers, the first ones, the experts lie with the CPU. way: of prefills.

    In a decode step, the CPU computes.
    """

    n_cpu_moe: int
    way: Way = "faster"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """`24`, `24:cpu` or `24:ship`. Raises RequestError."""
        number, colon, way = text.partition(":")
        good = number.isascii() and number.isdigit() and len(number) < 8
        if not good or (colon and way not in ("cpu", "ship")):
            raise RequestError(f"placement: {text!r} is none, as 24, 24:cpu or 24:ship")
        return cls(int(number), way if colon else "faster")  # type: ignore[arg-type]

    def __str__(self) -> str:
        """As it is parsed."""
        return f"{self.n_cpu_moe}" if self.way == "faster" else f"{self.n_cpu_moe}:{self.way}"


@dataclass(frozen=True)
class Part:
    """How many values a layer has.

    dense: of matrices that every token needs, the router's too. vectors: norms and biases. expert:
    of one expert, 0 without. window: of attention.
    """

    dense: int
    vectors: int
    expert: int
    window: int | None


def parts(config: ModelConfig) -> list[Part]:
    """The layers of a model, from the shapes of its tensors."""
    dense, vectors, experts = ([0] * config.layers for _ in range(3))
    for name, shape in each_tensor(config):
        if not name.startswith("model.layers."):
            continue
        index, size = int(name.split(".")[2]), math.prod(shape)
        sparse = config.sparse_of(index)
        if sparse is not None and f".{sparse.stored.experts}." in name:
            experts[index] += size
        elif len(shape) == 2:
            dense[index] += size
        else:
            vectors[index] += size
    count = 1 if config.sparse is None else config.sparse.router.experts
    each = [size // count for size in experts]
    return [Part(*sizes) for sizes in zip(dense, vectors, each, config.windows, strict=True)]


@dataclass(frozen=True)
class Passes:
    """Some passes of the same kind, (n,) each: new tokens of each sequence, and those before."""

    sequences: int
    tokens: Ints
    depth: Ints

    @property
    def total(self) -> Ints:
        """Tokens of a pass."""
        return self.sequences * self.tokens


@dataclass(frozen=True)
class Offload:
    """A model on a card and a CPU.

    stored: how, and what the card computes in. cpu_compute: the CPU's precision. link: bytes a
    second between them. latency: seconds that a transfer takes beside. laws: of each layer, those
    without experts have none. batch: sequences that decode together; their prompts are computed one
    by one, in passes of `chunk` tokens. memory: bytes of the card, None without a limit. Raises
    RequestError for a model without experts and for what is out of range.
    """

    config: ModelConfig
    stored: Storage
    cpu_compute: str
    gpu: Hardware
    cpu: Hardware
    link: float
    latency: float
    laws: tuple[Law | None, ...]
    batch: int = 1
    chunk: int = 512
    memory: float | None = None

    def __post_init__(self) -> None:
        if self.config.sparse is None or not any(self.config.sparse.layers):
            raise RequestError("model: it has no experts to be placed; give a sparse one")
        if not self.link > 0 or not self.latency >= 0:
            raise RequestError("link: its bandwidth must be above 0, and its latency not below")
        if min(self.batch, self.chunk) < 1:
            raise RequestError("batch, chunk: each must be 1 or more")
        self.gpu.rate(self.stored.compute)
        self.cpu.rate(self.cpu_compute)

    @cached_property
    def layers(self) -> list[Part]:
        """Its layers."""
        return parts(self.config)

    def on_cpu(self, placement: Placement) -> list[bool]:
        """Which layers have their experts in the CPU's memory. Raises RequestError."""
        count = placement.n_cpu_moe
        if not 0 <= count <= len(self.layers):
            raise RequestError(
                f"n_cpu_moe: {count} is out of range; the model has {len(self.layers)} layers"
            )
        return [i < count and part.expert > 0 for i, part in enumerate(self.layers)]

    def bytes_of(self, placement: Placement, positions: int) -> tuple[float, float]:
        """Bytes on the card and in the CPU's memory, with a cache of so many positions.

        The embedding, whose rows are looked up, lies with the CPU, and if it is the head too then
        also on the card.
        """
        config, weight = self.config, BYTES[self.stored.weights]
        assert config.sparse is not None
        head = config.vocab_size * config.hidden_size * BYTES[self.stored.head]
        pools = [head + config.hidden_size * self._vector, head]
        kept = 2 * config.kv_heads * config.head_dim * BYTES[self.stored.kv] * self.batch
        for part, cpu in zip(self.layers, self.on_cpu(placement), strict=True):
            held = positions if part.window is None else min(part.window, positions)
            pools[0] += weight * part.dense + self._vector * part.vectors + kept * held
            pools[cpu] += weight * part.expert * config.sparse.router.experts
        return pools[0], pools[1]

    @property
    def _vector(self) -> float:
        """Bytes of a value of norms and biases."""
        return min(BYTES[self.stored.head], BYTES["float32"])

    def fits(self, placement: Placement, positions: int) -> bool:
        """Whether the card holds its part."""
        return self.memory is None or self.bytes_of(placement, positions)[0] <= self.memory

    # ------------------------------------------------------------------------------ one layer

    def _card(self, operations: Any, moved: Any) -> F64:
        """Seconds of a phase on the card, the longer of the two."""
        rate = self.gpu.rate(self.stored.compute)
        return np.asarray(np.maximum(operations / rate, moved / self.gpu.bandwidth))

    def _dense(self, part: Part, passes: Passes) -> F64:
        """Seconds of attention and of what every token needs, on the card, (n,)."""
        config = self.config
        channels, kept = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
        held = passes.depth if part.window is None else np.minimum(passes.depth, part.window - 1)
        products = 2.0 * passes.total * part.dense
        attention = 4.0 * passes.sequences * channels * visible(passes, part.window)
        read = BYTES[self.stored.weights] * part.dense + self._vector * part.vectors
        cache = BYTES[self.stored.kv] * kept * passes.sequences * (passes.tokens + held)
        return self._card(products + attention, read + cache)

    def _experts(self, part: Part, passes: Passes, hit: F64) -> tuple[F64, F64, F64]:
        """Seconds of the experts, (n,): where they lie on the card, with the CPU, and shipped."""
        assert self.config.sparse is not None
        operations = 2.0 * passes.total * self.config.sparse.router.top_k * part.expert
        moved = BYTES[self.stored.weights] * part.expert * hit
        card = self._card(operations, moved)
        rate = self.cpu.rate(self.cpu_compute)
        crossing = ACTIVATION * passes.total * self.config.hidden_size / self.link
        cpu = np.maximum(operations / rate, moved / self.cpu.bandwidth)
        return (
            card,
            cpu + 2 * (self.latency + crossing),
            card + self.latency + moved / self.link,
        )

    def _head(self, sequences: int) -> float:
        """Seconds of the logits of each sequence's last token."""
        values = self.config.vocab_size * self.config.hidden_size
        return float(self._card(2.0 * sequences * values, BYTES[self.stored.head] * values))

    # ------------------------------------------------------------------------------ all layers

    def ships(self, part: Part, passes: Passes, hit: F64, way: Way | None) -> Bools:
        """Which passes ship a layer's experts, if it has them with the CPU. way: None in decode."""
        _, cpu, shipped = self._experts(part, passes, hit)
        if way == "faster":
            return np.asarray(shipped < cpu)
        return np.full(len(hit), way == "ship")

    def seconds(
        self,
        placement: Placement,
        passes: Passes,
        prefill: bool,
        hits: Callable[[int], F64] | None = None,
    ) -> F64:
        """Seconds of each pass through all layers, without the head, (n,).

        hits: by layer, how many experts each pass hits; the expected number where it is None.
        """
        total, first = np.zeros(len(passes.tokens)), 0
        where, way = self.on_cpu(placement), placement.way if prefill else None
        keys = [
            (part, id(law), cpu, None if hits is None else index)
            for index, (part, law, cpu) in enumerate(
                zip(self.layers, self.laws, where, strict=True)
            )
        ]
        for (part, _, cpu, _), alike in groupby(keys):  # layers that are alike are computed once
            index, count = first, len(list(alike))
            first += count
            each = self._dense(part, passes)
            law = self.laws[index]
            if law is not None:
                expected = law.distinct(passes.total)
                hit = expected if hits is None else hits(index)
                card, there, shipped = self._experts(part, passes, hit)
                ships = self.ships(part, passes, expected, way)  # planned before it is known
                each = each + (np.where(ships, shipped, there) if cpu else card)
            total += count * each
        return total

    def prompt_passes(self, prompt: int, held: int) -> Passes:
        """The passes of one prompt's prefill, after `held` tokens that a cache has."""
        depth = np.arange(held, prompt, self.chunk)
        return Passes(1, np.minimum(self.chunk, prompt - depth), depth)

    def steps(self, prompt: int, reply: int) -> Passes:
        """The decode steps after the first token, which the prefill gives."""
        depth = np.arange(prompt, prompt + reply - 1)
        return Passes(self.batch, np.ones_like(depth), depth)

    def prefill_seconds(self, placement: Placement, prompt: int, held: int = 0) -> float:
        """Expected seconds of the prefills of all prompts, of which `held` tokens are reused."""
        passes = self.prompt_passes(prompt, held)
        return self.batch * (float(self.seconds(placement, passes, True).sum()) + self._head(1))

    def decode_seconds(self, placement: Placement, prompt: int, reply: int = 2) -> float:
        """Expected seconds of the decode steps that follow a prompt; of the first one, as it is."""
        seconds = self.seconds(placement, self.steps(prompt, reply), False)
        return float(seconds.sum()) + len(seconds) * self._head(self.batch)

    def total_seconds(self, placement: Placement, prompt: int, reply: int, held: int = 0) -> float:
        """Expected seconds of the replies, of so many tokens each, prefill and all."""
        prefill = self.prefill_seconds(placement, prompt, held)
        return prefill + self.decode_seconds(placement, prompt, reply)

    def shipped_share(self, placement: Placement, prompt: int, held: int = 0) -> float:
        """Of the layers and passes whose experts lie with the CPU, how many ship; 0 without any."""
        passes = self.prompt_passes(prompt, held)
        where = zip(self.layers, self.laws, self.on_cpu(placement), strict=True)
        found = [
            self.ships(part, passes, law.distinct(passes.total), placement.way)
            for part, law, cpu in where
            if cpu and law is not None
        ]
        return float(np.mean(found)) if found else 0.0

    def simulated(
        self, placements: Sequence[Placement], prompt: int, reply: int, held: int, seed: int
    ) -> list[float]:
        """Seconds of the replies as `total_seconds` has them, with experts drawn by their laws.

        The same draws for each of the placements, so that these differ by where experts lie alone.
        The prompts of a batch are drawn once.
        """
        rng = np.random.default_rng(seed)
        phases = (
            (self.prompt_passes(prompt, held), True, self.batch),
            (self.steps(prompt, reply), False, 1),
        )
        totals = np.zeros(len(placements))
        for passes, prefill, times in phases:
            drawn = [self._drawn(law, rng, passes) for law in self.laws]
            for index, placement in enumerate(placements):
                each = self.seconds(placement, passes, prefill, drawn.__getitem__)
                heads = self._head(1) if prefill else len(each) * self._head(self.batch)
                totals[index] += times * (float(each.sum()) + heads)
        return [float(total) for total in totals]

    @staticmethod
    def _drawn(law: Law | None, rng: np.random.Generator, passes: Passes) -> F64:
        """How many experts of a layer each pass hits, (n,)."""
        hit = np.zeros(len(passes.tokens))
        for tokens in np.unique(passes.total) if law is not None else ():
            assert law is not None
            same = passes.total == tokens
            hit[same] = law.hit(rng, int(same.sum()), int(tokens))
        return hit


def visible(passes: Passes, window: int | None) -> F64:
    """Positions that the queries of a sequence see together, (n,), `window` at most each."""
    depth, tokens = passes.depth.astype(np.float64), passes.tokens
    if window is None:
        return np.asarray(tokens * depth + tokens * (tokens + 1) / 2)
    growing = np.clip(window - depth, 0, tokens)
    whole = growing * depth + growing * (growing + 1) / 2
    return np.asarray(whole + (tokens - growing) * window)


# --------------------------------------------------------------------------------------- crossovers


@dataclass(frozen=True)
class Crossover:
    """Which of two placements is the faster, and from what length of a prompt the other one is.

    first: the one that is faster for short prompts, None where they are alike, or neither fits.
    length: None where the other one never is.
    """

    first: Placement | None
    length: int | None


def crossover(
    seconds: Callable[[Placement, int], float], pair: tuple[Placement, Placement], most: int
) -> Crossover:
    """Where one of two placements overtakes the other, as prompts grow up to `most` tokens.

    seconds: of a placement and a length, infinite where it does not fit: so the other one overtakes
    it where the cache is full. Lengths an eighth of an octave apart are compared; where the faster
    one is another, the first such length between them is found by halving.
    """

    def faster(prompt: int) -> Placement | None:
        times = [seconds(placement, prompt) for placement in pair]
        return None if times[0] == times[1] else pair[int(times[1] < times[0])]

    lengths = np.unique(np.geomspace(1, most, int(PER_OCTAVE * np.log2(most)) + 2).astype(int))
    first, low = None, 1
    for length in lengths.tolist():
        now = faster(length)
        if first is None:
            first = now
        elif now not in (None, first):
            high = length
            while high - low > 1:
                middle = (low + high) // 2
                other = faster(middle) not in (None, first)
                low, high = (low, middle) if other else (middle, high)
            return Crossover(first, high)
        low = length
    return Crossover(first, None)


def reused(prompt: int, reuse: float) -> int:
    """Tokens of a prompt that a cache has; one at least is computed. Raises RequestError."""
    if not 0 <= reuse <= 1:
        raise RequestError(f"reuse: {reuse} is out of range; it must be from 0 to 1")
    return min(int(reuse * prompt), prompt - 1)


def from_none_to_all(layers: int, count: int = 5) -> list[Placement]:
    """Placements of none to all layers' experts, `count` of them or fewer."""
    return [Placement(n) for n in sorted({round(x) for x in np.linspace(0, layers, count)})]
