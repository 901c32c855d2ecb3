"""Loading and running Llama, Mistral, Qwen2 and Qwen3 folders (SPEC 9, 10, 12)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from conformance.backends.torch import rotary
from conformance.backends.torch.attention import Cache, Options
from conformance.operations import NotImplementedByBackendError

MODES = ("float32", "int4", "int4-row")
Linear = Callable[[Tensor], Tensor]
Note = Callable[[str, Tensor], None]
"""Is shown the steps of a forward pass by name (19.2)."""


class Kernels(Protocol):
    """The arithmetic that a model is computed in."""

    def linear(self, w: Tensor, bias: Tensor | None, mode: str) -> Linear:
        """Prepare a linear layer from w (N, K) and bias (N,) (10.1)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension (6)."""

    def cos_sin(self, angle: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of angles (7.3)."""

    def attention(self, q: Tensor, cache: Cache, options: Options, mode: str) -> Tensor:
        """Attention of the last T positions (8)."""

    def activate(self, name: str, gate: Tensor, up: Tensor) -> Tensor:
        """Return RN32(act(gate) * up) (9)."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return RN32(x + y)."""


# Configuration (10.3, 12).

IGNORED = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    ]
)
READ = frozenset(
    [
        "attention_bias",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
        "original_max_position_embeddings",
    ]
)
ROPE_READ = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
    ]
)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class UnknownFamilyError(NotImplementedByBackendError, ValueError):
    """A family of SPEC 10.3 that this backend does not have."""


@dataclass(frozen=True)
class Config:
    """What of a config.json decides the result."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    positions: int
    rope: Mapping[str, Any]


def _rope(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Merge the old and the new style of rope parameters, or refuse (12)."""
    merged: dict[str, Any] = {}
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    top = {name: raw[name] for name in names if name in raw}
    for source in (raw.get("rope_parameters"), raw.get("rope_scaling"), top):
        given = {name: value for name, value in (source or {}).items() if value is not None}
        if "type" in given:
            given = {"rope_type": given["type"]} | given
            if given.pop("type") != given["rope_type"]:
                raise ValueError("rope type and rope_type contradict each other")
        for name, value in given.items():
            if name not in ROPE_READ:
                raise ValueError(f"rope parameter {name!r} is not supported")
            if merged.setdefault(name, value) != value:
                raise ValueError(f"rope parameter {name!r} is given twice, differently")
    places = {"head_dim": head_dim, "max_position_embeddings": raw.get("max_position_embeddings")}
    return merged | places


def _windows(family: str, raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer (10.3)."""
    window = raw.get("sliding_window")
    if family == "MistralForCausalLM":
        return (window,) * layers
    if family == "LlamaForCausalLM" or not raw.get("use_sliding_window") or window is None:
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(layers))
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError("layer_types is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def parse(raw: Mapping[str, Any]) -> Config:
    """Read a config.json, refusing by name what is not supported (10.3)."""
    (family,) = raw["architectures"]
    if family not in FAMILIES:
        raise UnknownFamilyError(f"model of {family}")
    for name, value in raw.items():
        if name not in READ | IGNORED and value not in (None, False):
            raise ValueError(f"configuration key {name!r} is not supported")
    if raw.get("hidden_act", "silu") not in ACTIVATIONS:
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported")
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    llama = family == "LlamaForCausalLM"
    biased = family in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(raw.get("attention_bias"))
    return Config(
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        layers=layers,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=ACTIVATIONS[raw.get("hidden_act", "silu")],
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=biased or family == "Qwen2ForCausalLM",
        o_bias=biased,
        mlp_bias=llama and bool(raw.get("mlp_bias")),
        qk_norm=family == "Qwen3ForCausalLM",
        windows=_windows(family, raw, layers),
        positions=raw["max_position_embeddings"],
        rope=_rope(raw, head_dim),
    )


# Weights (12).


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
        left = [name for name in self.tensors if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ValueError(f"unknown tensors: {', '.join(sorted(left))}")


# The model (10.2).


def _unnoted(name: str, x: Tensor) -> None:
    """Let a step go by."""


@dataclass(frozen=True)
class Layer:
    """Norms and prepared projections of one layer."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    linear: Mapping[str, Linear]
    window: int | None


def _layer(weights: Weights, c: Config, i: int, kernels: Kernels, mode: str) -> Layer:
    """Take the tensors of layer i."""
    prefix = f"model.layers.{i}."
    wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {
        "self_attn.q_proj": (wide, c.hidden, c.qkv_bias),
        "self_attn.k_proj": (narrow, c.hidden, c.qkv_bias),
        "self_attn.v_proj": (narrow, c.hidden, c.qkv_bias),
        "self_attn.o_proj": (c.hidden, wide, c.o_bias),
        "mlp.gate_proj": (c.intermediate, c.hidden, c.mlp_bias),
        "mlp.up_proj": (c.intermediate, c.hidden, c.mlp_bias),
        "mlp.down_proj": (c.hidden, c.intermediate, c.mlp_bias),
    }
    linear = {}
    for name, (n, k, biased) in shapes.items():
        w = weights.take(f"{prefix}{name}.weight", n, k)
        bias = weights.take(f"{prefix}{name}.bias", n) if biased else None
        linear[name.split(".")[1][:-5]] = kernels.linear(w, bias, mode)

    def head_norm(name: str) -> Tensor | None:
        return weights.take(f"{prefix}self_attn.{name}.weight", c.head_dim) if c.qk_norm else None

    return Layer(
        weights.take(f"{prefix}input_layernorm.weight", c.hidden),
        weights.take(f"{prefix}post_attention_layernorm.weight", c.hidden),
        head_norm("q_norm"),
        head_norm("k_norm"),
        linear,
        c.windows[i],
    )


class Model:
    """A loaded model; `forward` serves prefill and decode alike (10.2)."""

    def __init__(self, folder: Path, mode: str, kernels: Kernels, device: torch.device) -> None:
        """Load a folder with a weight mode of 10.1."""
        if mode not in MODES:
            raise ValueError(f"weight mode {mode!r} is not supported")
        c = self.config = parse(json.loads((folder / "config.json").read_text()))
        self.kernels, self.device = kernels, device
        self._made_of = (folder, mode)
        weights = Weights(read_tensors(folder), device)
        self.embedding = weights.take("model.embed_tokens.weight", c.vocab, c.hidden)
        self.layers = [_layer(weights, c, i, kernels, mode) for i in range(c.layers)]
        self.norm = weights.take("model.norm.weight", c.hidden)
        self.head = kernels.linear(self._head(weights), None, "float32")
        weights.finish()
        self.constants: dict[int, tuple[list[float], float]] = {}

    @cached_property
    def digest(self) -> str:
        """Tells models apart whose caches differ: files, weight mode and arithmetic (11.3)."""
        folder, mode = self._made_of
        seen = hashlib.sha256(f"{mode} {type(self.kernels).__name__}".encode())
        for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
            seen.update(hashlib.sha256(file.read_bytes()).digest())
        return seen.hexdigest()

    def _head(self, weights: Weights) -> Tensor:
        """Return the output head, the embedding where they are tied (12)."""
        name, shape = "lm_head.weight", self.embedding.shape
        if not self.config.tied:
            return weights.take(name, *shape)
        if name in weights.tensors and not torch.equal(weights.take(name, *shape), self.embedding):
            raise ValueError("the model is tied, but lm_head.weight differs from the embedding")
        return self.embedding

    def _constants(self, position: int) -> tuple[list[float], float]:
        """inv_freq and factor at a position, each computed once."""
        key = rotary.first_alike(self.config.rope, position)
        if key not in self.constants:
            self.constants[key] = rotary.constants(self.config.rope, key)
        return self.constants[key]

    def _cos_sin(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin (T, d/2) at positions from start (7.3)."""
        positions = torch.arange(start, start + count, device=self.device)
        rows = [self._constants(p)[0] for p in range(start, start + count)]
        inv_freq = torch.tensor(rows, dtype=torch.float32, device=self.device)
        factor = torch.tensor(self._constants(start)[1], dtype=torch.float32, device=self.device)
        return self.kernels.cos_sin(rotary.angles(positions, inv_freq), factor)

    def _attend(
        self,
        layer: Layer,
        h: Tensor,
        angle: tuple[Tensor, Tensor],
        past: Cache | None,
        mode: str,
        note: Note,
    ) -> tuple[Tensor, Cache]:
        """Attention block of one layer on normed h (T, hidden); also the grown cache."""
        c, kernels, rows = self.config, self.kernels, h.shape[0]
        q = layer.linear["q"](h).view(rows, c.heads, c.head_dim)
        k = layer.linear["k"](h).view(rows, c.kv_heads, c.head_dim)
        v = layer.linear["v"](h).view(rows, c.kv_heads, c.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, c.eps)
            k = kernels.rms_norm(k, layer.k_norm, c.eps)
        q, k = rotary.rotate(q, *angle), rotary.rotate(k, *angle)
        for name, x in (("q", q), ("k", k), ("v", v)):
            note(name, x)
        cache = Cache(k, v)
        if past is not None:
            past.append(cache)
            cache = past
        options = Options(window=layer.window)
        out = kernels.attention(q, cache, options, mode)
        note("attention", out)
        return layer.linear["o"](out.flatten(1)), cache

    def hidden(
        self, tokens: Tensor, caches: list[Cache], mode: str, note: Note | None = None
    ) -> Tensor:
        """Return final hidden states (T, hidden) of tokens (T,); the caches grow (10.2)."""
        if bool(((tokens < 0) | (tokens >= self.config.vocab)).any()):
            raise ValueError("a token id is outside the vocabulary")
        note = note or _unnoted
        kernels, eps = self.kernels, self.config.eps
        angle = self._cos_sin(len(caches[0]) if caches else 0, len(tokens))
        x = self.embedding[tokens]
        note("embedding", x)
        first = not caches
        for i, layer in enumerate(self.layers):

            def here(name: str, x: Tensor, i: int = i) -> None:
                note(f"layer.{i}.{name}", x)

            h = kernels.rms_norm(x, layer.input_norm, eps)
            here("attention_norm", h)
            y, cache = self._attend(layer, h, angle, None if first else caches[i], mode, here)
            here("o", y)
            if first:
                caches.append(cache)
            x = kernels.add(x, y)
            here("attention_residual", x)
            h = kernels.rms_norm(x, layer.post_norm, eps)
            here("mlp_norm", h)
            gate, up = layer.linear["gate"](h), layer.linear["up"](h)
            y = layer.linear["down"](kernels.activate(self.config.activation, gate, up))
            here("mlp", y)
            x = kernels.add(x, y)
            here("residual", x)
        x = kernels.rms_norm(x, self.norm, eps)
        note("final_norm", x)
        return x

    def forward(self, tokens: Tensor, caches: list[Cache], mode: str) -> Tensor:
        """Logits (T, V) of tokens (T,) (10.2)."""
        return self.head(self.hidden(tokens, caches, mode))
