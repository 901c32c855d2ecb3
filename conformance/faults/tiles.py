"""Mistakes that show beyond a tile's size, or on the way that a single row takes."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from conformance.backends.composed import Floats
from conformance.backends.composed.cache import CacheBackend
from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault, half
from reference.arithmetic import F32, Bools
from reference.attention import Scores, default_scale
from reference.experts import Router


class Attention(Fault):
    """A mistake in the operation `attention`."""

    operations = ("attention",)


class OnePartition(Attention):
    """A decode step sees the newest 256 keys alone: one partition of those that share the work."""

    name = "attention-decode-one-partition"
    reports = ()
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Of one row."""
        seen = super().visible(rows, keys, window)
        return seen & (np.arange(keys) >= keys - 256) if rows == 1 else seen


class PartitionsAveraged(Attention):
    """The partitions of 256 keys of a decode step are averaged instead of weighted."""

    name = "attention-decode-partitions-averaged"
    reports = ("flashinfer-ai/flashinfer/pull/58",)
    severity = "wrong"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """The mean over them."""
        if len(u) > 1 or u.shape[1] <= 256:
            return super().sums(u, v, sink)
        steps = super().sums
        firsts = range(0, u.shape[1], 256)
        parts = [steps(u[:, i : i + 256], v[i : i + 256], sink) for i in firsts]
        total = np.asarray(sum(num / den for num, den in parts))
        return total, np.full((1, 1), float(len(parts)))


class DecodeForgets(Attention):
    """A decode step is not given one of its options."""

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """Left out for one row."""
        if len(q) == 1:
            about, sink = self.left(about, sink, q.shape[1])
        return super().head(q, k, v, about, sink)

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """What reaches the step, for heads of that width."""
        return about, sink


class DecodeSoftcap(DecodeForgets):
    """A decode step does not apply the soft cap."""

    name = "attention-decode-softcap-ignored"
    reports = ("vllm-project/vllm-metal/pull/666",)
    severity = "wrong"

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """No soft cap."""
        return replace(about, softcap=None), sink


class DecodeWindow(DecodeForgets):
    """A decode step does not apply the window."""

    name = "attention-decode-window-ignored"
    reports = ("EricLBuehler/mistral.rs/issues/2094",)
    severity = "wrong"

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """No window."""
        return replace(about, window=None), sink


class DecodeSinks(DecodeForgets):
    """A decode step has no sinks."""

    name = "attention-decode-sinks-ignored"
    reports = ("vllm-project/vllm-metal/pull/550",)
    severity = "wrong"

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """No sink."""
        return about, np.float32(-np.inf)


class DecodeScale(DecodeForgets):
    """A decode step divides by the root of head_dim whatever scale is given."""

    name = "attention-decode-scale-ignored"
    reports = ()
    severity = "wrong"

    def left(self, about: Scores, sink: np.float32, width: int) -> tuple[Scores, np.float32]:
        """The default."""
        return replace(about, scale=default_scale(width)), sink


class WidthOf128(Attention):
    """Scores are over the first 128 elements of a head."""

    name = "attention-head-dim-of-128"
    reports = ()
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """The rest is left out."""
        return super().scores(q[:, :128].copy(), k[:, :128].copy(), scale)


class GroupsOfEight(Attention):
    """A group of more than eight query heads goes on with the next key-value head."""

    name = "attention-groups-of-eight"
    reports = ("HazyResearch/HipKittens/pull/22",)
    severity = "broken"

    def key_value_head(self, head: int, heads: int, kv_heads: int) -> int:
        """Eight to each, in turns."""
        return head // min(heads // kv_heads, 8) % kv_heads


class Linear(Fault):
    """A mistake in the operation `linear`."""

    operations = ("linear",)


class ColumnsBeyond128(Linear):
    """Output columns beyond whole tiles of 128 are never written, if there is one tile."""

    name = "linear-columns-beyond-128"
    reports = ("ml-explore/mlx/issues/4250",)
    severity = "broken"

    def product(self, x: F32, w: F32) -> F32:
        """Zero."""
        y = super().product(x, w).copy()
        if len(w) > 128:
            y[:, len(w) // 128 * 128 :] = 0
        return y


class BiasOfManyRows(Linear):
    """A single row goes another way, on which no bias is added."""

    name = "linear-bias-dropped-of-one-row"
    reports = ("robertknight/rten/pull/462", "libxsmm/libxsmm/pull/1094")
    severity = "wrong"

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """Without it."""
        return super().linear(x, w, None if len(x) == 1 else bias)


class RowOf1024(Linear):
    """Of a single row, the terms beyond 1,024 are left out: one for each thread."""

    name = "linear-one-row-of-1024-terms"
    reports = ()
    severity = "wrong"

    def product(self, x: F32, w: F32) -> F32:
        """The first."""
        if len(x) > 1 or x.shape[1] <= 1024:
            return super().product(x, w)
        return super().product(x[:, :1024].copy(), w[:, :1024].copy())


class NormOf1024(Fault):
    """Squares beyond the first 1,024 of a row are left out: one for each thread."""

    name = "norm-squares-of-1024"
    reports = ()
    severity = "wrong"
    operations = ("rms_norm",)

    def mean_square(self, x: F32) -> Floats:
        """Divided by the whole width."""
        width = x.shape[-1]
        if width <= 1024:
            return super().mean_square(x)
        part = np.asarray(super().mean_square(x[..., :1024].copy()))
        return part * part.dtype.type(1024 / width)


class SoftmaxOf1024(Fault):
    """Exponentials beyond the first 1,024 of a row are not in the denominator."""

    name = "softmax-sum-of-1024"
    reports = ()
    severity = "wrong"
    operations = ("softmax",)

    def total(self, p: F32) -> Floats:
        """Of the first."""
        return super().total(p[..., :1024].copy())


class SoftmaxTail(Fault):
    """Of a long row, what does not fill a vector of four is not in the denominator."""

    name = "softmax-sum-of-whole-vectors"
    reports = ()
    severity = "wrong"
    operations = ("softmax",)

    def total(self, p: F32) -> Floats:
        """Of whole fours, beyond 128."""
        width = p.shape[-1]
        return super().total(p[..., : width // 4 * 4].copy() if width > 128 else p)


class RowsOf64(Fault):
    """Rows from the 65th on are never written by the weight-only kernel."""

    name = "w4a16-rows-beyond-64"
    reports = ("huggingface/optimum-quanto/pull/315",)
    severity = "broken"
    operations = ("linear_w4a16",)

    def product(self, x: F32, w: F32) -> F32:
        """Zero."""
        y = super().product(x, w).copy()
        y[64:] = 0
        return y


class BlockRowsOf64(Fault):
    """Rows from the 65th on are never written by the kernels of Q4_0 and Q8_0."""

    name = "block-rows-beyond-64"
    reports = ()
    severity = "broken"
    operations = ("linear_q4_0", "linear_q8_0")

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """Zero."""
        y = super().on_blocks(x, codes, scales).copy()
        y[64:] = 0
        return y


class TokensOf32(Fault, ExpertsBackend):
    """Tokens from the 33rd of a call on are routed as the first 32 are."""

    name = "experts-routed-by-32"
    reports = ("tenstorrent/tt-metal/issues/50669",)
    severity = "broken"
    operations = ("route",)

    def chosen(self, selection: F32, router: Router) -> Ints:
        """The same again."""
        found = super().chosen(selection, router).copy()
        found[32:] = np.resize(found[:32], found[32:].shape)
        return found


class SixteenTokens(Fault, ExpertsBackend):
    """An expert computes the first 16 of its tokens."""

    name = "experts-tokens-beyond-16"
    reports = ("vllm-project/vllm-xpu-kernels/issues/453",)
    severity = "broken"
    operations = ("moe",)

    def tokens_of(self, experts: Ints, expert: int, count: int) -> tuple[Ints, Ints]:
        """One block of them."""
        tokens, ranks = super().tokens_of(experts, expert, count)
        return tokens[:16], ranks[:16]


class ExpertsOf64(Fault, ExpertsBackend):
    """Experts from the 65th on compute nothing."""

    name = "experts-beyond-64"
    reports = ("vllm-project/vllm/pull/21229",)
    severity = "broken"
    operations = ("moe",)

    def tokens_of(self, experts: Ints, expert: int, count: int) -> tuple[Ints, Ints]:
        """No tokens."""
        tokens, ranks = super().tokens_of(experts, expert, count)
        return (tokens, ranks) if expert < 64 else (tokens[:0], ranks[:0])


class SharedGateHalf(Fault, ExpertsBackend):
    """The logit of the shared expert's gate is held in float16."""

    name = "experts-shared-gate-half"
    reports = ()
    severity = "subtle"
    operations = ("moe",)

    def shared_weighed(self, y: F32, v: F32) -> F32:
        """Rounded."""
        return super().shared_weighed(y, half(v))


class SiluEnds(Fault):
    """silu of the gated layer is that of -20 for whatever is below."""

    name = "mlp-silu-ends-at-minus-20"
    reports = ()
    severity = "subtle"
    operations = ("gated_mlp",)

    def activate(self, activation: str, x: F32) -> F32:
        """Clamped."""
        return super().activate(activation, np.maximum(x, np.float32(-20)))


class Paged(Fault, CacheBackend):
    """A mistake in the operation `paged_attention`."""

    operations: ClassVar[tuple[str, ...]] = ("paged_attention",)


class HeadsBeforeSlots(Paged):
    """A page is read as if it held one head's slots before the next head's."""

    name = "paging-heads-before-slots"
    reports = ("ROCm/aiter/pull/3347", "flashinfer-ai/flashinfer/pull/2799")
    severity = "broken"

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """The other layout."""
        count, slots, heads, width = pages.shape
        turned = pages.reshape(count, heads, slots, width).transpose(0, 2, 1, 3)
        return super().gathered(np.ascontiguousarray(turned), table, length, window)


class FirstHead(Paged):
    """All heads read the pages of the first."""

    name = "paging-first-head-for-all"
    reports = ()
    severity = "broken"

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """Repeated."""
        x = super().gathered(pages, table, length, window)
        return np.repeat(x[:, :1], x.shape[1], axis=1)


class PageNumbers(Paged):
    """Page numbers are cut to 8 bits."""

    name = "paging-numbers-of-8-bits"
    reports = ("Dao-AILab/flash-attention/issues/772",)
    severity = "broken"

    def page_of(self, positions: Ints, table: Ints, size: int) -> Ints:
        """Modulo 256."""
        return super().page_of(positions, np.asarray(table) % 256, size)


class PagedForgets(Paged):
    """Attention over pages is not given one of its options."""

    option: ClassVar[str]
    rows: ClassVar[float] = 1

    def paged_attention(self, **arguments: object) -> F32:  # type: ignore[override]
        """None, where the rows are few enough."""
        if len(arguments["q"]) <= self.rows:  # type: ignore[arg-type]
            arguments[self.option] = None
        return super().paged_attention(**arguments)  # type: ignore[arg-type]


class PagedSoftcap(PagedForgets):
    """A decode step over pages does not apply the soft cap."""

    name = "paging-decode-softcap-ignored"
    reports = ("vllm-project/vllm-metal/pull/666",)
    severity = "wrong"
    option = "softcap"


class PagedScale(PagedForgets):
    """Over pages a given scale is ignored for 1 / sqrt(head_dim)."""

    name = "paging-scale-ignored"
    reports = ()
    severity = "wrong"
    option, rows = "scale", float("inf")
