"""Loading and running the families of SPEC 10.3 (SPEC 9, 10, 12)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.backends.torch import rotary
from conformance.backends.torch.arithmetic import like
from conformance.backends.torch.attention import Cache, Options
from conformance.backends.torch.config import LayerConfig, end_tokens, parse
from conformance.backends.torch.kernels import Kernels, Note, Rows
from conformance.backends.torch.weights import Maker, Weights, read_tensors

MODES = ("float32", "int4", "int4-row")
Angles = tuple[Tensor, Tensor]
"""cos and sin of some positions (T, d/2)."""

NORMS = {
    "before": {"attention": "input_layernorm", "mlp": "post_attention_layernorm"},
    "after": {
        "after_attention": "post_attention_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
    "around": {
        "attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
}
"""The norms of a layer by what they precede or follow, and how they are stored (10.2)."""


def _unnoted(name: str, x: Tensor) -> None:
    """Let a step go by."""


class Rope:
    """The rotation of layers that have the same parameters (7)."""

    def __init__(
        self, parameters: Mapping[str, Any], kernels: Kernels, device: torch.device
    ) -> None:
        self.parameters, self.kernels, self.device = parameters, kernels, device
        self.known: dict[int, tuple[list[float], float]] = {}

    def _constants(self, position: int) -> tuple[list[float], float]:
        """inv_freq and factor at a position, each computed once."""
        key = rotary.first_alike(self.parameters, position)
        if key not in self.known:
            self.known[key] = rotary.constants(self.parameters, key)
        return self.known[key]

    def angles(self, start: int, count: int) -> Angles:
        """Return cos and sin (T, d/2) at positions from start (7.3)."""
        positions = torch.arange(start, start + count, device=self.device)
        rows = [self._constants(p)[0] for p in range(start, start + count)]
        inv_freq = torch.tensor(rows, dtype=torch.float32, device=self.device)
        factor = torch.tensor(self._constants(start)[1], dtype=torch.float32, device=self.device)
        return self.kernels.cos_sin(rotary.angles(positions, inv_freq), factor)


@dataclass(frozen=True)
class Layer:
    """Norms by what they stand at, and prepared projections, of one layer."""

    norms: Mapping[str, Tensor]
    qkv: Sequence[Rows]
    o: Rows
    mlp: Callable[[Tensor, Note], Tensor]
    options: Options
    rope: Rope | None


def _layer(make: Maker, about: LayerConfig, rope: Rope | None) -> Layer:
    """Take the tensors of layer i."""
    c = make.config
    wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
    norms = {place: make.norm(name, c.hidden) for place, name in NORMS[c.family.norms].items()}
    if c.family.qk_norm is not None:
        sizes = {"head": (c.head_dim, c.head_dim), "row": (wide, narrow)}[c.family.qk_norm]
        for x, size in zip("qk", sizes, strict=True):
            norms[f"{x}_{c.family.qk_norm}"] = make.norm(f"self_attn.{x}_norm", size)
    sinks = make.take("self_attn.sinks", c.heads) if c.family.sinks else None
    mlp: Callable[[Tensor, Note], Tensor]
    if about.experts is not None:
        mlp = make.sparse(about.experts)
    else:
        dense = make.dense("mlp", c.intermediate)

        def mlp(x: Tensor, note: Note) -> Tensor:
            return dense(x)

    return Layer(
        norms,
        make.qkv(),
        make.linear(make.projection("self_attn.o_proj", c.hidden, wide, c.o_bias)),
        mlp,
        Options(c.scale, about.window, c.softcap, sinks),
        rope,
    )


class Model:
    """A loaded model; `hidden` and `head` serve prefill and decode alike (10.2)."""

    def __init__(self, folder: Path, mode: str, kernels: Kernels, device: torch.device) -> None:
        """Load a folder with a weight mode of 10.1."""
        if mode not in MODES:
            raise ValueError(f"weight mode {mode!r} is not supported")
        c = self.config = parse(json.loads((folder / "config.json").read_text()))
        self.kernels, self.device = kernels, device
        self.ends = end_tokens(folder)
        self._made_of = (folder, mode)
        weights = Weights(read_tensors(folder), device)
        self.embedding = weights.take("model.embed_tokens.weight", c.vocab, c.hidden)
        ropes = {id(p): Rope(p, kernels, device) for p in (x.rope for x in c.layers) if p}
        self.ropes = tuple(ropes.values())
        self.layers = [
            _layer(
                Maker(weights, c, kernels, mode, f"model.layers.{i}."),
                about,
                ropes.get(id(about.rope)),
            )
            for i, about in enumerate(c.layers)
        ]
        self.norm = Maker(weights, c, kernels, mode, "model.").norm("norm", c.hidden)
        self._head = kernels.linear(self._head_weights(weights), None, "float32")
        weights.finish()

    @cached_property
    def digest(self) -> str:
        """Tells models apart whose caches differ: files, weight mode and arithmetic (11.3)."""
        folder, mode = self._made_of
        seen = hashlib.sha256(f"{mode} {type(self.kernels).__name__}".encode())
        for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
            seen.update(hashlib.sha256(file.read_bytes()).digest())
        return seen.hexdigest()

    def _head_weights(self, weights: Weights) -> Tensor:
        """Return the output head, the embedding where they are tied (12)."""
        name, shape = "lm_head.weight", self.embedding.shape
        if not self.config.tied:
            return weights.take(name, *shape)
        if name in weights.tensors and not torch.equal(weights.take(name, *shape), self.embedding):
            raise ValueError("the model is tied, but lm_head.weight differs from the embedding")
        return self.embedding

    def _normed(self, layer: Layer, place: str, x: Tensor) -> Tensor:
        """The norm that a layer has at a place, if any (10.2)."""
        weight = layer.norms.get(place)
        return x if weight is None else self.kernels.rms_norm(x, weight, self.config.eps)

    def _attend(
        self,
        layer: Layer,
        h: Tensor,
        angles: Angles | None,
        past: Cache | None,
        mode: str,
        note: Note,
    ) -> tuple[Tensor, Cache]:
        """Attention block of one layer on h (T, hidden); also the grown cache."""
        c, rows = self.config, h.shape[0]
        q, k, v = (linear(h) for linear in layer.qkv)
        q, k = self._normed(layer, "q_row", q), self._normed(layer, "k_row", k)
        q = q.view(rows, c.heads, c.head_dim)
        k, v = (x.view(rows, c.kv_heads, c.head_dim) for x in (k, v))
        q, k = self._normed(layer, "q_head", q), self._normed(layer, "k_head", k)
        if angles is not None:
            q, k = rotary.rotate(q, *angles), rotary.rotate(k, *angles)
        for name, x in (("q", q), ("k", k), ("v", v)):
            note(name, x)
        cache = Cache(k, v)
        if past is not None:
            past.append(cache)
            cache = past
        out = self.kernels.attention(q, cache, layer.options, mode)
        note("attention", out)
        return layer.o(out.flatten(1)), cache

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding (T, hidden), scaled where the family does so."""
        x = self.embedding[tokens]
        return x * like(x, math.sqrt(x.shape[1])) if self.config.family.gemma else x

    def hidden(
        self, tokens: Tensor, caches: list[Cache], mode: str, note: Note | None = None
    ) -> Tensor:
        """Return final hidden states (T, hidden) of tokens (T,); the caches grow (10.2)."""
        if bool(((tokens < 0) | (tokens >= self.config.vocab)).any()):
            raise ValueError("a token id is outside the vocabulary")
        note, kernels = note or _unnoted, self.kernels
        start = len(caches[0]) if caches else 0
        angles = {rope: rope.angles(start, len(tokens)) for rope in self.ropes}
        x = self._embedded(tokens)
        note("embedding", x)
        first = not caches
        for i, layer in enumerate(self.layers):

            def here(name: str, x: Tensor, i: int = i) -> None:
                note(f"layer.{i}.{name}", x)

            def normed(place: str, x: Tensor, layer: Layer = layer, here: Note = here) -> Tensor:
                x = self._normed(layer, place, x)
                if place in layer.norms:
                    here(f"{place}_norm", x)
                return x

            angle = angles[layer.rope] if layer.rope is not None else None
            h = normed("attention", x)
            y, cache = self._attend(layer, h, angle, None if first else caches[i], mode, here)
            here("o", y)
            if first:
                caches.append(cache)
            x = kernels.add(x, self._normed(layer, "after_attention", y))
            here("attention_residual", x)
            y = layer.mlp(normed("mlp", x), here)
            here("mlp", y)
            x = kernels.add(x, self._normed(layer, "after_mlp", y))
            here("residual", x)
        x = kernels.rms_norm(x, self.norm, self.config.eps)
        note("final_norm", x)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (T, V) of final hidden states (T, hidden), capped where the family does so."""
        logits = self._head(hidden)
        cap = self.config.final_softcap
        return logits if cap is None else self.kernels.cap(logits, cap)

    def forward(self, tokens: Tensor, caches: list[Cache], mode: str) -> Tensor:
        """Logits (T, V) of tokens (T,) (10.2)."""
        return self.head(self.hidden(tokens, caches, mode))
