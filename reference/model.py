"""One forward pass, run two ways: exact, and in plain float32 (SPEC 10)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference.arguments import whole
from reference.arithmetic import F32
from reference.attention import (
    Run,
    Scores,
    attend_exact_runs,
    attend_fast,
    capped,
    default_scale,
)
from reference.cache import PAGE_SIZE, KVCache, KVType, LayerPages, LayerView, PagePool, PageShape
from reference.config import ModelConfig
from reference.errors import RequestError
from reference.experts import Routing, Shared, moe, route
from reference.feedforward import ACTIVATIONS, ACTIVATIONS_FLOAT32, Function, gated_mlp
from reference.loading import Checkpoint, expected_tensors, load_checkpoint
from reference.memory import Memory, arrays, bytes_of, making_bytes, pass_bytes, row_slices
from reference.normalization import rms_norm, rms_norm_float32
from reference.reuse import keep_freed_memory
from reference.rotary import RopeParameters, cos_sin, rotate
from reference.threads import ROWS, by_rows, share, single_blas
from reference.tokenizer import Tokenizer
from reference.weights import (
    MAKING,
    MODES,
    QUANTIZING,
    Arithmetic,
    Experts,
    GatedMLP,
    Layer,
    Linear,
    Mode,
    Weights,
    add,
    prepare,
)

AttentionKind = Literal["exact", "fast"]

Routed = Callable[[int, Routing], object]
"""Called with the number of each sparse layer, and how it routed all rows of a pass (SPEC 9.2)."""

Rotations = dict[RopeParameters | None, tuple[F32, F32] | tuple[()]]
"""cos and sin of a pass for each rope, (T, d/2) float32; () for layers without rope (SPEC 7.3)."""

FEW, SHARED = 32, 1 << 17
"""Sequences with up to FEW rows share threads, one sequence to a thread, in fast attention, if they
have SHARED scores or more together; longer ones are tiled one by one."""


@dataclass(frozen=True)
class Operations:
    """The steps of a forward pass: the two arithmetics differ in these, and in linear layers.

    aligned: whether `attend` reads aligned keys and values. by_rows: how the steps that compute
    each row by itself are divided among threads.
    """

    rms_norm: Callable[[F32, F32, float], F32]
    linear: Callable[[Linear, F32], F32]
    attend: Callable[[F32, Sequence[Rows], Scores], F32]
    activations: dict[str, Function]
    add: Callable[[F32, F32], F32]
    aligned: bool = True
    by_rows: Callable[..., tuple[F32, ...]] = by_rows


@dataclass(frozen=True)
class Rows:
    """The rows of one sequence in a pass, and the layer of its cache that they attend to."""

    rows: slice
    layer: LayerView
    attention: AttentionKind

    @property
    def count(self) -> int:
        """How many they are."""
        return int(self.rows.stop - self.rows.start)


def by_pages(parts: Sequence[Rows]) -> Iterator[tuple[LayerPages, list[Rows]]]:
    """The parts whose keys and values are stored in the same pool, together, and these pages."""
    groups: dict[int, list[Rows]] = {}
    for part in parts:
        groups.setdefault(id(part.layer.pages), []).append(part)
    return ((group[0].layer.pages, group) for group in groups.values())


def _store(k: F32, v: F32, parts: Sequence[Rows]) -> None:
    """Write k and v, (T, Hkv, D), of all rows to their sequences' caches."""
    for pages, group in by_pages(parts):
        pieces = [piece for part in group for piece in part.layer.writes(part.rows)]
        pages.write(k, v, pieces)


def _attend(q: F32, parts: Sequence[Rows], scores: Scores) -> F32:
    """Attention of rows q (T, Hq, D), each part exact or fast as it asks (SPEC 8)."""
    out = _attend_float32(q, [part for part in parts if part.attention == "fast"], scores)
    for _, group in by_pages([part for part in parts if part.attention == "exact"]):
        runs = [Run(part.rows, part.layer.where, part.layer.length) for part in group]
        attend_exact_runs(q, group[0].layer.aligned(), runs, scores, out)
    return out


def _attend_float32(q: F32, parts: Sequence[Rows], scores: Scores) -> F32:
    """Fast attention of all parts; short ones are divided among threads by sequence (SPEC 8.3).

    Rows of the result that belong to no part are left uninitialized.
    """
    out = np.empty_like(q)

    def attend(part: Rows) -> None:
        layer = part.layer
        out[part.rows] = attend_fast(q[part.rows], layer.plain(), layer.length, scores)

    for part in parts:
        if part.count > FEW:
            attend(part)
    short = [part for part in parts if part.count <= FEW]
    scores_of_all = q.shape[1] * sum(part.count * part.layer.length for part in short)
    share(attend, short, worth_it=scores_of_all >= SHARED)
    return out


def _apply(layer: Linear, x: F32) -> F32:
    return layer(x)


EXACT = Operations(rms_norm, _apply, _attend, ACTIVATIONS, add)
FLOAT32 = Operations(
    rms_norm_float32, _apply, _attend_float32, ACTIVATIONS_FLOAT32, add, aligned=False
)


@dataclass(frozen=True)
class Part:
    """One sequence's part of a forward pass: its next tokens, and the cache they go to (SPEC 10.4).

    cache: None for a whole sequence that nothing will follow; its keys and values are dropped layer
    by layer (SPEC 12.3). last: how many of the last tokens need logits; None for all.
    """

    tokens: Sequence[int] | NDArray[np.integer]
    cache: KVCache | None
    attention: AttentionKind = "exact"
    last: int | None = None

    @property
    def start(self) -> int:
        """The position of the first token."""
        return 0 if self.cache is None else self.cache.length

    @property
    def logits(self) -> int:
        """How many tokens need logits."""
        return len(self.tokens) if self.last is None else self.last


@dataclass
class Batch:
    """Parts whose rows go through every layer as one array, one below the other (SPEC 10.4).

    ids: all tokens, (T,) int64. views: every layer of each part's cache, None without a cache.
    rows: those of each part. x: the result of the layer before, (T, K) float32.
    """

    parts: Sequence[Part]
    ids: NDArray[np.int64]
    views: Sequence[list[LayerView] | None]
    rows: Sequence[slice]
    rotations: Rotations
    x: F32

    @property
    def shared(self) -> bool:
        """Whether our threads divide its work, so that BLAS is to keep to one thread."""
        return len(self.ids) >= 2 * ROWS or len(self.parts) > 1


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer (SPEC 10). Made by `load_model`.

    eos_tokens: ids that end a text. tokenizer: None if the model has none. memory: the room for
    layers that are made one at a time (SPEC 12.3), None where all are loaded. Passes may be
    computed on several threads at once, but only one at a time where there is a memory.
    """

    config: ModelConfig
    weights: Weights
    operations: Operations
    tokenizer: Tokenizer | None = None
    eos_tokens: tuple[int, ...] = ()
    memory: Memory | None = None

    @cached_property
    def digest(self) -> str:
        """sha256, in hex, of configuration, prepared weights and arithmetic (SPEC 11.3).

        Two models with the same digest fill a cache with the same values, whether or not their
        layers are made one at a time.
        """
        seen = hashlib.sha256(repr((self.config, self.operations.aligned)).encode())

        def see(name: str, piece: object) -> None:
            for path, array in arrays(name, piece):
                seen.update(f"{path} {array.dtype} {array.shape}".encode())
                seen.update(np.ascontiguousarray(array).data)

        weights, config = self.weights, self.config
        see("final_norm", weights.final_norm)
        for index in range(config.layers):
            see(f"layers.{index}", weights.layers[index])
        for index, rows in enumerate(row_slices(config.vocab_size, config.hidden_size)):
            see(f"embedding.{index}", weights.embedding[rows])
            see(f"head.{index}", weights.head_of(index, rows))
        return seen.hexdigest()

    def new_pool(
        self,
        budget: int | None = None,
        page_size: int = PAGE_SIZE,
        kv_dtype: KVType = "float32",
        originals: bool = False,
    ) -> PagePool:
        """Pages for sequences of this model, within a budget of bytes (SPEC 11.1).

        originals: whether chunks can be moved (SPEC 11.5). Raises RequestError for a page size or a
        type that does not exist, and CacheError for a budget that the machine cannot give.
        """
        shape = replace(self._page_shape, page_size=page_size, dtype=kv_dtype, originals=originals)
        return PagePool(shape, budget)

    @cached_property
    def _page_shape(self) -> PageShape:
        """What the pages of this model hold, but for their size and type."""
        config = self.config
        return PageShape(
            config.kv_heads, config.head_dim, config.windows, aligned=self.operations.aligned
        )

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence, in a pool of its own (SPEC 11)."""
        return KVCache(self.new_pool())

    def forward(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        cache: KVCache | None = None,
        attention: AttentionKind = "exact",
        last_only: bool = False,
        routed: Routed | None = None,
    ) -> F32:
        """Logits of T tokens that follow what the cache holds, (T, V) float32 (SPEC 10.2).

        cache: None for tokens that follow nothing. last_only: give the logits of the last token
        alone, (1, V). routed: is told of the experts chosen. Raises RequestError for a token id out
        of range, no token, or more positions than the context has, and CacheError where the cache
        has no room; the cache is then as it was.
        """
        cache = self.new_cache() if cache is None else cache
        part = Part(tokens, cache, attention, 1 if last_only else None)
        return self.forward_batch([part], routed)[0]

    def forward_batch(self, parts: Sequence[Part], routed: Routed | None = None) -> list[F32]:
        """Logits of several sequences in one pass, which reads each weight once (SPEC 10.4).

        A part's logits, (last, V) float32, are those that it gives alone. Raises as `forward` does;
        all caches are then as they were.
        """
        return next(self.forward_batches([parts], routed))

    def forward_batches(
        self, batches: Sequence[Sequence[Part]], routed: Routed | None = None
    ) -> Iterator[list[F32]]:
        """Logits of batches that all pass one layer before any passes the next (SPEC 12.3).

        So each layer is made once for all of them. Yields what `forward_batch` returns for one
        batch after another; a batch's caches have its positions once its logits are yielded. Raises
        as `forward` does; caches of batches that were not yielded are then as they were.
        """
        parts = [part for batch in batches for part in batch]
        for part in parts:
            self._check(part)
        if not all(batches):
            raise RequestError("parts: there is nothing to compute; give one sequence at least")
        caches = [part.cache for part in parts if part.cache is not None]
        if len(set(map(id, caches))) < len(caches):
            raise RequestError("cache: two parts of a batch have the same; fork it for one of them")
        if self.memory is not None:
            self.memory.prepare([_sizes(batch) for batch in batches])
        try:
            begun = [self._begin(batch) for batch in batches]
            shared = all(batch.shared for batch in begun)
            with single_blas() if shared else nullcontext():
                for index in range(self.config.layers):
                    self._layer_of_all(index, begun, routed)
            while begun:
                yield self._finish(begun.pop(0))
        except BaseException:
            for cache in caches:
                cache.truncate(cache.length)
            raise

    def _check(self, part: Part) -> None:
        """Raise RequestError for a part that a pass of this model cannot have."""
        self.token_ids(part.tokens, part.start)
        if part.cache is not None and not self._page_shape.alike(part.cache.pool.shape):
            raise RequestError(
                "cache: its pages are of another model's shape or arithmetic; make it by this "
                "model's `new_cache` or `new_pool`"
            )
        if part.attention not in ("exact", "fast"):
            raise RequestError(f"attention: {part.attention!r} is none of exact, fast")
        if part.last is not None and not 0 <= part.last <= len(part.tokens):
            raise RequestError(
                f"last: {part.last} is out of range; the part has {len(part.tokens)} tokens"
            )

    def _begin(self, parts: Sequence[Part]) -> Batch:
        """A batch before the first layer, with room for its positions in the caches."""
        ids = [self.token_ids(part.tokens, part.start) for part in parts]
        positions = np.concatenate(
            [np.arange(p.start, p.start + len(i)) for p, i in zip(parts, ids, strict=True)]
        )
        ropes = {self.config.rope_of(index) for index in range(self.config.layers)}
        return Batch(
            parts,
            np.concatenate(ids),
            [p.cache.extend(len(i)) if p.cache else None for p, i in zip(parts, ids, strict=True)],
            _slices(map(len, ids)),
            {rope: cos_sin(rope, positions) if rope else () for rope in ropes},
            self._embedded(np.concatenate(ids)),
        )

    def _layer_of_all(self, index: int, batches: list[Batch], routed: Routed | None) -> None:
        """Take all batches, one after the other, through layer `index`, and write their caches."""
        if self.memory is not None:
            self.memory.on_layer(index)
        layer = self.weights.layers[index]
        for batch in batches:
            seen = [
                Rows(rows, views[index] if views else self._forgotten(index, rows), part.attention)
                for rows, views, part in zip(batch.rows, batch.views, batch.parts, strict=True)
            ]
            with single_blas() if batch.shared else nullcontext():
                batch.x = self._layer(index, layer, batch.x, seen, batch.rotations, routed)

    def _forgotten(self, index: int, rows: slice) -> LayerView:
        """A cache of one layer, for a sequence without a cache of its own (SPEC 12.3)."""
        shape = replace(self._page_shape, windows=(self.config.windows[index],))
        return KVCache(PagePool(shape)).extend(rows.stop - rows.start)[0]

    def _finish(self, batch: Batch) -> list[F32]:
        """The logits of a batch after the last layer; commits its positions to the caches."""
        counts = [part.logits for part in batch.parts]
        with single_blas() if batch.shared else nullcontext():
            x = self._norm(_last_rows(batch.x, batch.rows, counts), self.weights.final_norm)
            logits = self.operations.linear(self.weights.head, x)
            if self.config.final_softcap is not None:
                logits = capped(logits, np.float32(self.config.final_softcap))
        for part in batch.parts:
            if part.cache is not None:
                part.cache.commit(len(part.tokens), part.attention == "exact")
        return [logits[rows] for rows in _slices(counts)]

    def _embedded(self, ids: NDArray[np.int64]) -> F32:
        """Rows of the embedding, (T, K), times `RN32(sqrt(K))` where the family does so."""
        x = self.weights.embedding[ids]
        if not self.config.family.scaled_embedding:
            return x
        with np.errstate(over="ignore"):
            return np.asarray(x * np.float32(np.sqrt(np.float64(self.config.hidden_size))))

    def _layer(
        self,
        index: int,
        layer: Layer,
        x: F32,
        parts: list[Rows],
        rotations: Rotations,
        routed: Routed | None,
    ) -> F32:
        """One decoder layer, x (T, K) float32 -> (T, K) (SPEC 10.2)."""
        do, norms, mlp, rope = self.operations, layer.norms, layer.mlp, self.config.rope_of(index)
        kv_heads = self.config.kv_heads

        def before(x: F32, *rotation: F32) -> tuple[F32, F32, F32]:
            h = self._norm(x, norms.before_attention)
            qk, v = self._heads(layer, do.linear(layer.qkv, h))
            if rope is not None:
                cos, sin = rotation
                qk = rotate(qk, cos, sin, rope.interleaved)
            return qk[:, :-kv_heads], qk[:, -kv_heads:], v

        def after(x: F32, seen: F32) -> tuple[F32, ...]:
            y = do.linear(layer.output, seen.reshape(len(x), -1))
            x = do.add(x, self._norm(y, norms.after_attention))
            h = self._norm(x, norms.before_mlp)
            return (done(x, self._mlp(mlp, h)),) if isinstance(mlp, GatedMLP) else (x, h)

        def done(x: F32, y: F32) -> F32:
            return do.add(x, self._norm(y, norms.after_mlp))

        q, k, v = do.by_rows(before, x, *rotations[rope])
        _store(k, v, parts)
        seen = do.attend(q, parts, self._scores(index, layer))
        if isinstance(mlp, GatedMLP):
            return do.by_rows(after, x, seen)[0]
        x, h = do.by_rows(after, x, seen)  # an expert's rows are gathered from all
        return done(x, self._experts(index, mlp, h, routed))

    def _norm(self, x: F32, weight: F32 | None) -> F32:
        """x normed, or as it is where there is no norm."""
        if weight is None:
            return x
        return self.operations.rms_norm(x, weight, self.config.rms_norm_eps)

    def _scores(self, index: int, layer: Layer) -> Scores:
        """Scale, window, softcap and sinks of a layer's attention (SPEC 8.2)."""
        config = self.config
        return Scores(
            default_scale(config.query_scalar or config.head_dim),
            config.windows[index],
            None if config.attention_softcap is None else np.float32(config.attention_softcap),
            layer.sinks,
        )

    def _mlp(self, mlp: GatedMLP, x: F32) -> F32:
        """A gated layer, x (T, K) float32 -> (T, K) (SPEC 9.1)."""
        do, config = self.operations, self.config
        gate_up, down = (partial(do.linear, part) for part in (mlp.gate_up, mlp.down))
        return gated_mlp(x, gate_up, down, do.activations[config.activation], config.glu_limit)

    def _experts(self, index: int, layer: Experts, x: F32, routed: Routed | None) -> F32:
        """A layer of experts, x (T, K) float32 -> (T, K) (SPEC 9.2, 9.3)."""
        do = self.operations
        routing = route(do.linear(layer.logits, x), layer.router)
        if routed is not None:
            routed(index, routing)
        shared = None
        if layer.shared is not None and layer.shared_gate is not None:
            shared = Shared(partial(self._mlp, layer.shared), partial(do.linear, layer.shared_gate))
        return moe(x, routing, [partial(self._mlp, mlp) for mlp in layer.experts], shared)

    def _heads(self, layer: Layer, qkv: F32) -> tuple[F32, F32]:
        """Cut (T, (Hq + 2 Hkv) D) into the heads of q, k and v; norm q and k as the family does.

        Returns q and k as one array, (T, Hq + Hkv, D), for they are rotated alike, and v, (T, Hkv,
        D).
        """
        config = self.config
        by_head = (len(qkv), -1, config.head_dim)
        keys = config.kv_heads * config.head_dim
        qk, v = qkv[:, :-keys], qkv[:, -keys:]
        if config.qk_norm is not None:
            q, k = qk[:, :-keys], qk[:, -keys:]
            if config.qk_norm == "head":
                q, k = q.reshape(by_head), k.reshape(by_head)
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            qk = np.concatenate([q, k], axis=1)
        return qk.reshape(by_head), v.reshape(by_head)

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


def _slices(counts: Iterable[int]) -> list[slice]:
    """Slices of so many rows each, one after the other."""
    return [slice(a, b) for a, b in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def _last_rows(x: F32, rows: Sequence[slice], counts: Sequence[int]) -> F32:
    """The last rows of each part of x (T, K), `counts` of them."""
    if sum(counts) == len(x):
        return x
    return np.concatenate([x[r.stop - n : r.stop] for r, n in zip(rows, counts, strict=True)])


def _sizes(batch: Sequence[Part]) -> tuple[int, int]:
    """Tokens and logits of a batch."""
    return sum(len(part.tokens) for part in batch), sum(part.logits for part in batch)


def build_model(
    checkpoint: Checkpoint, weights: Mode, arithmetic: Arithmetic, memory: int | None = None
) -> Model:
    """Make a model of a checkpoint that was read (SPEC 10.1, 12.3).

    memory: bytes in which the process is to stay, or None. Raises QuantizationError, and
    RequestError for a mode or an arithmetic that does not exist or does not fit the checkpoint, and
    for too small a memory.
    """
    if weights not in MODES:
        raise RequestError(f"weights: {weights!r} is none of {', '.join(MODES)}")
    if weights == "native" and not checkpoint.blocks:
        raise RequestError(
            f"weights: {checkpoint.path} stores no projection as Q4_0 or Q8_0, so that there are "
            "no native weights; use float32"
        )
    if arithmetic not in ("exact", "float32"):
        raise RequestError(f"arithmetic: {arithmetic!r} is none of exact, float32")
    if memory is None:
        keep_freed_memory()
    room = None if memory is None else _memory(checkpoint.config, weights, arithmetic, memory)
    return Model(
        checkpoint.config,
        prepare(
            checkpoint.config, checkpoint.tensors, weights, arithmetic, checkpoint.blocks, room
        ),
        EXACT if arithmetic == "exact" else FLOAT32,
        checkpoint.tokenizer,
        checkpoint.eos_token_ids,
        room,
    )


def _memory(config: ModelConfig, weights: Mode, arithmetic: Arithmetic, limit: int) -> Memory:
    """The room that a limit of bytes leaves for a model's layers and passes (SPEC 12.3)."""
    held, besides = MAKING[arithmetic]
    if weights != "float32":
        besides = max(besides, QUANTIZING)
    making = making_bytes(expected_tensors(config), held, besides)
    return Memory(limit, making, partial(pass_bytes, config, arithmetic == "exact"))


def load_model(
    path: str | Path,
    weights: Mode = "float32",
    arithmetic: Arithmetic = "exact",
    memory: int | str | None = None,
) -> Model:
    """Load a Hugging Face folder, or a GGUF file (SPEC 12).

    weights: `float32` as stored, `int4` by group, `int4-row`, or `native`, by the codes of a GGUF
    file (SPEC 10.1). arithmetic: `exact`, or plain `float32` (SPEC 1.4). memory: bytes, or a size
    such as `4GiB`, in which this process is to stay, its caches not counted; layers are then made
    one at a time (SPEC 12.3). Raises ConfigError, WeightsError, TokenizerError, QuantizationError,
    and RequestError for a mode that does not exist or too small a memory.
    """
    limit = bytes_of(memory) if isinstance(memory, str) else memory
    if limit is not None:
        limit = whole("memory", limit, 1)
    return build_model(load_checkpoint(Path(path), limit is not None), weights, arithmetic, limit)
