"""One forward pass, run two ways: exact, and in plain float32 (SPEC 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.attention import Scores, attend_exact, attend_fast, default_scale
from reference.cache import KVCache, LayerCache
from reference.config import ModelConfig
from reference.errors import RequestError
from reference.feedforward import ACTIVATIONS, ACTIVATIONS_FLOAT32, Function, gated_mlp
from reference.loading import Checkpoint, load_folder
from reference.normalization import rms_norm, rms_norm_float32
from reference.rotary import cos_sin, rotate
from reference.threads import ROWS, by_rows, single_blas
from reference.tokenizer import Tokenizer
from reference.weights import Arithmetic, Layer, Linear, Mode, Weights, add, prepare

AttentionKind = Literal["exact", "fast"]


@dataclass(frozen=True)
class Operations:
    """The steps of a forward pass: the two arithmetics differ here and in their linear layers."""

    rms_norm: Callable[[F32, F32, float], F32]
    linear: Callable[[Linear, F32], F32]
    attend: Callable[[F32, LayerCache, int, Scores, AttentionKind], F32]
    activations: dict[str, Function]
    add: Callable[[F32, F32], F32]
    by_rows: Callable[..., tuple[F32, ...]] = by_rows


def _attend(q: F32, cache: LayerCache, length: int, scores: Scores, kind: AttentionKind) -> F32:
    if kind == "exact":
        return attend_exact(q, cache.aligned(length), length, scores)
    return attend_fast(q, cache.plain(length), scores)


def _attend_float32(
    q: F32, cache: LayerCache, length: int, scores: Scores, kind: AttentionKind
) -> F32:
    return attend_fast(q, cache.plain(length), scores)


def _apply(layer: Linear, x: F32) -> F32:
    return layer(x)


EXACT = Operations(rms_norm, _apply, _attend, ACTIVATIONS, add)
FLOAT32 = Operations(rms_norm_float32, _apply, _attend_float32, ACTIVATIONS_FLOAT32, add)


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer (SPEC 10). Made by `load_model`.

    eos_tokens: ids that end a text. tokenizer: None where the folder has none.
    """

    config: ModelConfig
    weights: Weights
    operations: Operations
    tokenizer: Tokenizer | None = None
    eos_tokens: tuple[int, ...] = ()

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence (SPEC 11)."""
        return KVCache(self.config.layers, self.config.kv_heads, self.config.head_dim)

    def forward(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        cache: KVCache | None = None,
        attention: AttentionKind = "exact",
        last_only: bool = False,
    ) -> F32:
        """Logits of T tokens that follow what the cache holds, (T, V) float32 (SPEC 10.2).

        With last_only, of the last one alone, (1, V). Raises RequestError for a token id out of
        range, no token, or more positions than the context has; the cache is then as it was.
        """
        cache = self.new_cache() if cache is None else cache
        ids = self.token_ids(tokens, cache.length)
        if attention not in ("exact", "fast"):
            raise RequestError(f"attention: {attention!r} is none of exact, fast")
        with single_blas(len(ids) >= 2 * ROWS):
            x = self._hidden(ids, cache, attention)
            x = x[-1:] if last_only else x
            norm = self.operations.rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)
            return self.operations.linear(self.weights.head, norm)

    def _hidden(self, ids: NDArray[np.int64], cache: KVCache, attention: AttentionKind) -> F32:
        """What the last layer makes of T tokens, (T, K), and their keys and values in the cache."""
        positions = np.arange(cache.length, cache.length + len(ids))
        rotation = cos_sin(self.config.rope, positions)
        x = self.weights.embedding[ids]
        for index, layer in enumerate(self.weights.layers):
            x = self._layer(index, layer, x, cache, rotation, attention)
        cache.length += len(ids)
        return x

    def _layer(
        self,
        index: int,
        layer: Layer,
        x: F32,
        cache: KVCache,
        rotation: tuple[F32, F32],
        attention: AttentionKind,
    ) -> F32:
        """One decoder layer, x (T, K) -> (T, K)."""
        config, do = self.config, self.operations

        def before(x: F32, cos: F32, sin: F32) -> tuple[F32, F32, F32]:
            h = do.rms_norm(x, layer.input_norm, config.rms_norm_eps)
            q, k, v = self._heads(layer, do.linear(layer.qkv, h))
            q, k = (rotate(heads, cos, sin, config.rope.interleaved) for heads in (q, k))
            return q, k, v

        def after(x: F32, seen: F32) -> tuple[F32]:
            x = do.add(x, do.linear(layer.output, seen.reshape(len(x), -1)))
            h = do.rms_norm(x, layer.post_norm, config.rms_norm_eps)
            gate_up, down = (partial(do.linear, part) for part in (layer.gate_up, layer.down))
            return (do.add(x, gated_mlp(h, gate_up, down, do.activations[config.activation])),)

        q, k, v = do.by_rows(before, x, *rotation)
        cache.layers[index].write(k, v, cache.length)
        scores = Scores(default_scale(config.head_dim), config.windows[index])
        seen = do.attend(q, cache.layers[index], cache.length + len(x), scores, attention)
        return do.by_rows(after, x, seen)[0]

    def _heads(self, layer: Layer, qkv: F32) -> tuple[F32, F32, F32]:
        """Cut (T, (Hq + 2 Hkv) D) into heads, and norm q and k where the family does."""
        config = self.config
        heads = qkv.reshape(len(qkv), -1, config.head_dim)
        q, k, v = np.split(heads, [config.heads, config.heads + config.kv_heads], axis=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self.operations.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = self.operations.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        return q, k, v

    def token_ids(
        self, tokens: Sequence[int] | NDArray[np.integer], start: int = 0
    ) -> NDArray[np.int64]:
        """Token ids as (T,) int64, for positions from `start` on. Raises as `forward` does."""
        try:
            ids = np.asarray(tokens)
        except ValueError:
            ids = np.empty((0, 0))
        if ids.ndim != 1 or len(ids) == 0:
            raise RequestError("tokens: at least one token id is needed, in a flat list")
        if not np.issubdtype(ids.dtype, np.integer):
            raise RequestError(f"tokens: ids must be integers, not {ids.dtype}")
        wrong = (ids < 0) | (ids >= self.config.vocab_size)
        if wrong.any():
            raise RequestError(
                f"tokens: id {ids[wrong][0]} is outside the vocabulary of {self.config.vocab_size}"
            )
        if start + len(ids) > self.config.max_positions:
            raise RequestError(
                f"tokens: {start + len(ids)} positions exceed the model's context of "
                f"{self.config.max_positions}; shorten the prompt"
            )
        return ids.astype(np.int64)


def build_model(checkpoint: Checkpoint, weights: Mode, arithmetic: Arithmetic) -> Model:
    """Make a model of a checkpoint that was read (SPEC 10.1)."""
    if weights not in ("float32", "int4", "int4-row"):
        raise RequestError(f"weights: {weights!r} is none of float32, int4, int4-row")
    if arithmetic not in ("exact", "float32"):
        raise RequestError(f"arithmetic: {arithmetic!r} is none of exact, float32")
    return Model(
        checkpoint.config,
        prepare(checkpoint.config, checkpoint.tensors, weights, arithmetic),
        EXACT if arithmetic == "exact" else FLOAT32,
        checkpoint.tokenizer,
        checkpoint.eos_token_ids,
    )


def load_model(
    path: str | Path, weights: Mode = "float32", arithmetic: Arithmetic = "exact"
) -> Model:
    """Load a Hugging Face folder (SPEC 12).

    weights: `float32` as stored, `int4` by group or `int4-row` (SPEC 10.1). arithmetic: `exact`, or
    plain `float32` (SPEC 1.4). Raises ConfigError, WeightsError, TokenizerError, QuantizationError.
    """
    return build_model(load_folder(Path(path)), weights, arithmetic)
