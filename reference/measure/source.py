"""The model that is measured: one from disk, or one of given sizes with random weights.

Speed does not depend on the values of weights, so a random model stands for all models of its
sizes. What a model says does depend on them: how far a random one diverges says nothing of others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from reference.arithmetic import F32
from reference.config import ModelConfig, parse_config
from reference.errors import RequestError
from reference.families import EMBEDDING, HEAD
from reference.loading.huggingface import Checkpoint, each_tensor, expected_tensors
from reference.measure.machine import physical_memory
from reference.memory import making_bytes, shown
from reference.model import Model, build_model, load_model
from reference.weights import MAKING, QUANTIZING, Arithmetic, Mode


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a decoder in the manner of Llama, or of Mixtral where it has experts.

    ffn: width of the gated layer, or of each expert. chosen: experts of a token.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv: int = 2
    head_dim: int = 64
    ffn: int = 704
    vocab: int = 1024
    context: int = 8192
    experts: int = 0
    chosen: int = 2

    @classmethod
    def parse(cls, text: str) -> Dimensions:
        """Sizes from `layers=8,hidden=512`; others have their defaults. Raises RequestError."""
        names, values = [each.name for each in fields(cls)], {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in names:
                raise RequestError(f"random: {name!r} is none of {', '.join(names)}")
            if not (value.isascii() and value.isdigit() and len(value) < 8):
                raise RequestError(f"random: {part!r} is no size, as {name}=8")
            values[name] = int(value)
        return cls(**values)

    def checkpoint(self, seed: int = 0) -> Checkpoint:
        """A model of these sizes whose activations stay near 1. Raises ConfigError."""
        config, rng = self.config, np.random.default_rng(seed)

        def drawn(name: str, shape: Sequence[int]) -> F32:
            if name.endswith("norm.weight"):
                return np.ones(shape, np.float32)
            scale = 1.0 if "embed" in name else shape[-1] ** -0.5
            return rng.standard_normal(shape, np.float32) * np.float32(scale)

        tensors = {n: drawn(n, shape) for n, shape in sorted(expected_tensors(config).items())}
        return Checkpoint(Path("random"), config, tensors, None, ())

    @property
    def config(self) -> ModelConfig:
        """Its configuration. Raises ConfigError."""
        sparse: dict[str, Any] = {
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "sliding_window": None,
        }
        return parse_config(
            {
                "architectures": ["MixtralForCausalLM" if self.experts else "LlamaForCausalLM"],
                "model_type": "mixtral" if self.experts else "llama",
                "num_hidden_layers": self.layers,
                "hidden_size": self.hidden,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv,
                "head_dim": self.head_dim,
                "intermediate_size": self.ffn,
                "vocab_size": self.vocab,
                "max_position_embeddings": self.context,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                **(sparse if self.experts else {}),
            },
            "random",
        )


@dataclass(frozen=True)
class Source:
    """A model that another process can load again. model: a folder or file, or sizes."""

    model: Path | Dimensions
    weights: Mode = "float32"
    arithmetic: Arithmetic = "exact"

    @property
    def name(self) -> str:
        """What a row calls it."""
        if isinstance(self.model, Path):
            return self.model.resolve().name
        plain, sizes = Dimensions(), self.model
        names = [each.name for each in fields(sizes)]
        told = [f"{n}={v}" for n in names if (v := getattr(sizes, n)) != getattr(plain, n)]
        return " ".join(["random", *told])

    def load(self) -> Model:
        """The model. Raises what `load_model` raises, and RequestError for want of memory."""
        if isinstance(self.model, Path):
            return load_model(self.model, self.weights, self.arithmetic)
        self._check_memory(self.model.config)
        return build_model(self.model.checkpoint(), self.weights, self.arithmetic)

    def _check_memory(self, config: ModelConfig) -> None:
        """Raise RequestError where making a random model takes more memory than there is.

        All of its tensors are there, in float32, until what is computed with is made of them, one
        linear layer after the other.
        """
        made, besides = MAKING[self.arithmetic]
        if self.weights != "float32":
            besides = max(besides, QUANTIZING)
        memory, needed = physical_memory(), 0
        for name, shape in each_tensor(config):
            as_drawn = len(shape) == 1 or name == EMBEDDING
            as_drawn |= name == HEAD and self.arithmetic == "float32"
            needed += math.prod(shape) * (4 if as_drawn else 4 + made)
            if needed > memory:  # before there are too many tensors to be named
                break
        else:
            largest = making_bytes(expected_tensors(config), 0, besides)
            if self.arithmetic == "exact":
                largest = max(largest, MAKING["exact"][1] * config.vocab_size * config.hidden_size)
            needed += largest
        if needed > memory:
            raise RequestError(
                f"random: such weights, with what {self.arithmetic} arithmetic makes of them, take "
                f"more than the {shown(memory)} of this machine; give smaller sizes"
            )


def sliced(model: Model, layers: int) -> Model:
    """The first layers of a model, between its own embedding and head. Raises RequestError."""
    if not 1 <= layers < model.config.layers:
        raise RequestError(
            f"layers: {layers} is no slice of a model of {model.config.layers} layers; give 1 to "
            f"{model.config.layers - 1}"
        )
    config = replace(model.config, layers=layers, windows=model.config.windows[:layers])
    weights = replace(model.weights, layers=model.weights.layers[:layers])
    return replace(model, config=config, weights=weights)
