"""Tensors of a model folder, and the parts of a layer that are made of them (SPEC 12.1)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from conformance.backends.torch.config import Config, Experts
from conformance.backends.torch.experts import Router, Shared, moe, route
from conformance.backends.torch.kernels import Kernels, Note, Rows, gated_mlp


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model folder, widened to float32."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if not (folder / files[0]).exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(folder / file)
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"tensor {name!r} is not finite")
    return {name: tensor.float() for name, tensor in tensors.items()}


class Weights:
    """Tensors by name; each is taken once, with its shape checked."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self.tensors = tensors
        self.device = device

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor out, on the device."""
        tensor = self.tensors.pop(name, None)
        if tensor is None or tuple(tensor.shape) != shape:
            raise ValueError(f"tensor {name!r} is missing or is not of shape {shape}")
        return tensor.to(self.device)

    def finish(self) -> None:
        """Refuse what is left over."""
        left = [
            name
            for name in self.tensors
            if not name.endswith("rotary_emb.inv_freq") and not name.startswith("mtp.")
        ]
        if left:
            raise ValueError(f"unknown tensors: {', '.join(sorted(left))}")


Projection = tuple[Tensor, Tensor | None]
"""Weights (N, K) of a linear layer, and its bias (N,) where it has one."""

ROUTERS = {"each": "mlp.gate", "mixtral": "block_sparse_moe.gate", "stacked": "mlp.router"}


@dataclass(frozen=True)
class Maker:
    """Makes the parts of one layer of its tensors, which are named from `prefix` on."""

    weights: Weights
    config: Config
    kernels: Kernels
    mode: str
    prefix: str

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of the layer."""
        return self.weights.take(self.prefix + name, *shape)

    def norm(self, name: str, size: int) -> Tensor:
        """Weights of a norm (size,), 1 + w where the family stores w (6)."""
        w = self.take(f"{name}.weight", size)
        return 1 + w if self.config.family.offset else w

    def projection(self, name: str, n: int, k: int, biased: bool = False) -> Projection:
        """A linear layer's tensors."""
        bias = self.take(f"{name}.bias", n) if biased else None
        return self.take(f"{name}.weight", n, k), bias

    def fused(self, name: str, sizes: list[int], k: int) -> list[Projection]:
        """Those of several that are stored as one, without biases."""
        whole = self.take(f"{name}.weight", sum(sizes), k)
        return [(w, None) for w in torch.split(whole, sizes)]

    def linear(self, projection: Projection) -> Rows:
        """Prepare one in the weight mode (10.1)."""
        return self.kernels.linear(*projection, self.mode)

    def qkv(self) -> list[Rows]:
        """The projections to queries, keys and values."""
        c = self.config
        sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        if c.family.fused:
            parts = self.fused("self_attn.qkv_proj", sizes, c.hidden)
        else:
            parts = [
                self.projection(f"self_attn.{name}_proj", n, c.hidden, c.qkv_bias)
                for name, n in zip("qkv", sizes, strict=True)
            ]
        return [self.linear(part) for part in parts]

    def mlp(self, parts: list[Projection]) -> Rows:
        """A feed-forward layer of gate, up and down (9.1)."""
        c = self.config
        return gated_mlp(self.kernels, map(self.linear, parts), c.activation, c.limit)

    def dense(self, name: str, inner: int) -> Rows:
        """A feed-forward layer that is stored under a name (9.1)."""
        c = self.config
        if c.family.fused:
            parts = self.fused(f"{name}.gate_up_proj", [inner, inner], c.hidden)
        else:
            parts = [
                self.projection(f"{name}.{part}_proj", inner, c.hidden, c.mlp_bias)
                for part in ("gate", "up")
            ]
        return self.mlp([*parts, self.projection(f"{name}.down_proj", c.hidden, inner, c.mlp_bias)])

    def sparse(self, about: Experts) -> SparseLayer:
        """A layer of experts; routers stay as stored in every mode (9.2, 9.3)."""
        k, stacked = self.config.hidden, about.stored == "stacked"
        router = self.projection(ROUTERS[about.stored], about.count, k, stacked)
        experts = self._stacked(about) if stacked else self._one_by_one(about)
        shared = None
        if about.shared is not None:
            gate = self.projection("mlp.shared_expert_gate", 1, k)
            expert = self.dense("mlp.shared_expert", about.shared)
            shared = Shared(expert, self.kernels.linear(*gate, "float32"))
        logits = self.kernels.linear(*router, "float32")
        return SparseLayer(logits, about.router, [*map(self.mlp, experts)], shared, self.kernels)

    def _one_by_one(self, about: Experts) -> list[list[Projection]]:
        """Experts that are stored one by one."""
        name, parts = "mlp.experts", ("gate_proj", "up_proj", "down_proj")
        if about.stored == "mixtral":
            name, parts = "block_sparse_moe.experts", ("w1", "w3", "w2")
        n, k = about.inner, self.config.hidden
        shapes = ((n, k), (n, k), (k, n))
        return [
            [
                self.projection(f"{name}.{e}.{part}", *shape)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            for e in range(about.count)
        ]

    def _stacked(self, about: Experts) -> list[list[Projection]]:
        """Experts in one tensor: outputs last, those of gate and up taking turns."""
        count, n, k, name = about.count, about.inner, self.config.hidden, "mlp.experts"
        both = self.take(f"{name}.gate_up_proj", count, k, 2 * n).mT
        both_bias = self.take(f"{name}.gate_up_proj_bias", count, 2 * n)
        down = self.take(f"{name}.down_proj", count, n, k).mT.contiguous()
        down_bias = self.take(f"{name}.down_proj_bias", count, k)
        return [
            [
                (both[e, 0::2].contiguous(), both_bias[e, 0::2]),
                (both[e, 1::2].contiguous(), both_bias[e, 1::2]),
                (down[e], down_bias[e]),
            ]
            for e in range(count)
        ]


@dataclass(frozen=True)
class SparseLayer:
    """Experts with their router, and a shared one (9.2, 9.3)."""

    logits: Rows
    router: Router
    experts: list[Rows]
    shared: Shared | None
    kernels: Kernels

    def __call__(self, x: Tensor, note: Note) -> Tensor:
        """Of rows x (T, K)."""
        experts, gates = route(self.logits(x), self.router, None, self.kernels)
        note("experts", experts)
        return moe(x, experts, gates, self.experts, self.shared, self.kernels)
