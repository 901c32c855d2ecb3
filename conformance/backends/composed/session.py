"""A whole model made of a backend's operations (SPEC 10, 17)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.backends.reference import Ints
from conformance.golden import Array
from conformance.operations import NotImplementedByBackendError
from reference.arithmetic import F32, one_nan
from reference.config import ModelConfig
from reference.loading import Checkpoint, load_folder
from reference.model import AttentionKind
from reference.quantization import GROUP, Int4Matrix, check_scales, quantize_int4_row
from reference.rotary import RopeParameters
from reference.scheduler import prefill_attention
from reference.weights import Mode, add

if TYPE_CHECKING:
    from conformance.backends.composed.backend import ComposedBackend


FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class ComposedSession:
    """A model put together from a backend's operations (SPEC 10, 17), of a dense family."""

    def __init__(self, backend: ComposedBackend, model: str, weights: Mode) -> None:
        self.backend, self.mode = backend, weights
        checkpoint = _checkpoint(Path(model))
        if checkpoint.config.architecture not in FAMILIES:
            raise NotImplementedByBackendError(f"model of {checkpoint.config.architecture}")
        self.config = self.understood(checkpoint.config)
        self.ends = self.ending(Path(model), checkpoint.eos_token_ids)
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

    def ending(self, folder: Path, ids: Sequence[int]) -> Sequence[int]:
        """The tokens that end a text, of a model's folder (SPEC 12.1)."""
        return ids

    def quantize(self, name: str, w: F32) -> tuple[Array, Array, int]:
        """Codes, scales and group of a projection (SPEC 10.1)."""
        if self.mode == "int4":
            packed, scales = self.backend.quantize_int4(w=w, group=GROUP)
            check_scales(Int4Matrix(packed, scales, w.shape[1], GROUP), name)
            return packed, scales, GROUP
        matrix = self.searched(w)
        return matrix.packed, matrix.scales, 0

    def searched(self, w: F32) -> Int4Matrix:
        """One scale a row, the best of 19 (SPEC 5.3)."""
        return quantize_int4_row(w, search=True)

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

    def context(self) -> int:
        """How many positions choose a token (SPEC 14.1)."""
        return self.config.max_positions

    def choose(self, logits: F32) -> int:
        """The next token."""
        return int(logits.argmax())

    def generate(self, prompt: Ints, max_new_tokens: int, exact_prefill: bool) -> tuple[Ints, F32]:
        """Greedy continuation and the logits that chose each token (SPEC 14, 17)."""
        self.reset()
        rows = [self.forward(prompt, self.prefill(len(prompt), exact_prefill))[-1]]
        tokens = [self.choose(rows[0])]
        while len(tokens) < max_new_tokens and self.length < self.context():
            rows.append(self.forward(tokens[-1:])[-1])
            tokens.append(self.choose(rows[-1]))
        return np.array(tokens), np.stack(rows)

    def complete(self, prompt: Ints, max_new_tokens: int) -> tuple[Ints, F32]:
        """The same up to an end token of the model's, which is the last (SPEC 14.1, 17)."""
        tokens, rows = self.generate(prompt, max_new_tokens, exact_prefill=False)
        ended = self.ended(prompt, tokens)
        return tokens[:ended], rows[:ended]

    def ended(self, prompt: Ints, tokens: Ints) -> int:
        """How many tokens there are up to the one that ends the text; all where none does."""
        return next((i + 1 for i, token in enumerate(tokens) if token in self.ends), len(tokens))


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
