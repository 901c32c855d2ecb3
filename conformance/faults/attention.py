"""Mistakes of attention (SPEC 8)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.fault import Fault, bfloat16, cut_to_bfloat16, half
from reference.arithmetic import F32, Bools
from reference.attention import Scores


class Attention(Fault):
    """A mistake in the operation `attention`."""

    operations = ("attention",)


class CausalTopLeft(Attention):
    """The causal limit counts from the chunk's first row instead of its place in the sequence."""

    name = "attention-causal-top-left"
    reports = ("gittensor-ai-lab/sparkinfer/issues/3", "onnx/onnx/issues/8054")
    severity = "broken"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Rows are taken for the first of the sequence."""
        return super().visible(max(rows, keys), keys, window)[:rows]


class NotCausal(Attention):
    """No causal mask: every row sees the whole sequence."""

    name = "attention-not-causal"
    reports = ("huggingface/transformers/pull/48760",)
    severity = "broken"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """The window's lower end alone."""
        back = np.arange(keys - rows, keys)[:, None] - np.arange(keys)
        return back < keys if window is None else back < window


class MaskEndsAt512(Attention):
    """The causal mask is not applied to keys from position 512 on."""

    name = "attention-mask-ends-at-512"
    reports = ("vllm-project/vllm-ascend/issues/15503",)
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Keys from 512 on are seen by all."""
        return super().visible(rows, keys, window) | (np.arange(keys) >= 512)


class WindowOneMore(Attention):
    """A sliding window holds one key too many."""

    name = "attention-window-one-more"
    reports = ("huggingface/transformers/issues/39408", "huggingface/transformers/pull/26792")
    severity = "subtle"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """W + 1 keys."""
        return super().visible(rows, keys, None if window is None else window + 1)


class WideWindowOneMore(Attention):
    """A window of 2,048 keys or more holds one too many; narrower ones are right."""

    name = "attention-wide-window-one-more"
    reports = ("vllm-project/vllm/issues/3385",)
    severity = "subtle"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """W + 1 keys where W is large."""
        return super().visible(rows, keys, window + (window >= 2048) if window else window)


class WindowOneLess(Attention):
    """A sliding window holds one key too few."""

    name = "attention-window-one-less"
    reports = ()
    severity = "subtle"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """W - 1 keys."""
        return super().visible(rows, keys, None if window is None else window - 1)


class MissesNewest(Attention):
    """A row sees what came before it and not its own key, with a window or without."""

    name = "attention-misses-newest"
    reports = ()
    severity = "broken"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """j < t instead of j <= t."""
        own = np.arange(keys - rows, keys)[:, None] == np.arange(keys)
        return np.asarray(super().visible(rows, keys, window) & ~own)


class LastBlockOfOne(Attention):
    """A last block of 32 keys that holds one key alone is left out."""

    name = "attention-last-block-of-one"
    reports = ()
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Where a row is the first of its block, but for the first row of all, not its own key."""
        seen = super().visible(rows, keys, window)
        place = np.arange(keys - rows, keys)[:, None]
        dropped = (place == np.arange(keys)) & (place % 32 == 0) & (place > 0)
        return np.asarray(seen & ~dropped)


class WindowMissesNewest(Attention):
    """A sliding window leaves out the row's own key."""

    name = "attention-window-misses-newest"
    reports = ("microsoft/onnxruntime/pull/25927",)
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Not the diagonal, where there is a window."""
        seen = super().visible(rows, keys, window)
        own = np.arange(keys - rows, keys)[:, None] == np.arange(keys)
        return seen if window is None else seen & ~own


class WindowIgnored(Attention):
    """The sliding window is not applied."""

    name = "attention-window-ignored"
    reports = ("EricLBuehler/mistral.rs/issues/246",)
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """All that came before."""
        return super().visible(rows, keys, None)


class WindowFromChunk(Attention):
    """The window's lower end counts from the chunk's first row instead of its place."""

    name = "attention-window-from-chunk"
    reports = ("huggingface/transformers/pull/41228",)
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """The lower end is too far back by the length of the cache."""
        low = 0 if window is None else window + max(0, keys - rows)
        return super().visible(rows, keys, None if window is None else low)


class RingOverwritten(Attention):
    """A prompt longer than the window overwrites the ring of keys before its rows have read it."""

    name = "attention-ring-overwritten"
    reports = ("Lightning-AI/litgpt/issues/2182",)
    severity = "broken"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Only the last W keys are left, at slots that are taken for positions."""
        if window is None or rows <= window:
            return super().visible(rows, keys, window)
        index = np.arange(keys)
        slot = index % max(window, 1)
        return (index >= keys - window) & (slot <= np.arange(keys - rows, keys)[:, None])


class SoftcapDropped(Attention):
    """The soft cap on scores is not applied."""

    name = "attention-softcap-dropped"
    reports = ("kekzl/imp/pull/688", "sgl-project/sgl-kernel-xpu/pull/491")
    severity = "wrong"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """Scores as they are."""
        return t


class SoftcapUncapped(Attention):
    """The soft cap multiplies the score by its tanh instead of the cap."""

    name = "attention-softcap-uncapped"
    reports = ("unslothai/unsloth-zoo/pull/593",)
    severity = "wrong"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """t tanh(t / c)."""
        return t if softcap is None else t * self.tanh(t / softcap)


class SoftcapNotDivided(Attention):
    """The score is not divided by the soft cap before its tanh."""

    name = "attention-softcap-not-divided"
    reports = ()
    severity = "broken"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """c tanh(t)."""
        return t if softcap is None else softcap * self.tanh(t)


class SoftcapHidesOverflow(Attention):
    """Scores are tested for overflow after the soft cap, which makes them the cap itself."""

    name = "attention-softcap-hides-overflow"
    reports = ()
    severity = "wrong"

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """Remember the cap."""
        self._softcap = about.softcap
        return super().head(q, k, v, about, sink)

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Of a cap's scores none is infinite: the largest number gives the same tanh."""
        t, most = super().scores(q, k, scale), np.finfo(np.float32).max
        return t if self._softcap is None else np.clip(t, -most, most)


class SoftcapBeforeScale(Attention):
    """The soft cap comes before the scale."""

    name = "attention-softcap-before-scale"
    reports = ("huggingface/trl/pull/5691",)
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Remember the scale."""
        self._scale = scale
        return super().scores(q, k, scale)

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """The scale undone, and done again after the cap."""
        return t if softcap is None else super().capped(t / self._scale, softcap) * self._scale


class SinksIgnored(Attention):
    """Sinks are not in the denominator."""

    name = "attention-sinks-ignored"
    reports = ("vllm-project/vllm-metal/pull/550", "kekzl/imp/issues/1345")
    severity = "broken"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """No sink."""
        return super().sums(u, v, np.float32(-np.inf))


class SinkTwice(Attention):
    """A sink is counted twice."""

    name = "attention-sink-counted-twice"
    reports = ("ROCm/rocm-libraries/issues/12227",)
    severity = "subtle"

    def sink_share(self, sink: np.float32, m: F32) -> F32:
        """Doubled."""
        return super().sink_share(sink, m) * np.float32(2)


class SinkScaled(Attention):
    """A sink is multiplied by the scale of scores."""

    name = "attention-sink-scaled"
    reports = ("ROCm/rocm-libraries/issues/12227",)
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Remember the scale."""
        self._scale = scale
        return super().scores(q, k, scale)

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """A scaled sink."""
        return super().sums(u, v, np.float32(sink * self._scale))


class SinkNotCapped(Attention):
    """With a soft cap, the sink is capped too, as if it were a score."""

    name = "attention-sink-capped"
    reports = ("ROCm/rocm-libraries/pull/12229",)
    severity = "subtle"

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """Remember the cap."""
        self._softcap = softcap
        return super().capped(t, softcap)

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """A capped sink."""
        low = np.array([sink], np.float32)
        capped = super().capped(low, self._softcap) if np.isfinite(sink) else low
        return super().sums(u, v, capped[0])


class MaximumWithoutSink(Attention):
    """The sink takes no part in the maximum, and a large one overflows the denominator.

    In float32 that is a right way to compute as long as no sink lies 88 above all scores; then the
    weights of the others are subnormal anyway. What shows is an infinite sink: 0 instead of NaN.
    """

    name = "attention-maximum-without-sink"
    reports = ()
    severity = "subtle"

    def peak(self, u: F32, sink: np.float32) -> F32:
        """Of the scores alone."""
        return super().peak(u, np.float32(-np.inf))

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """Divided by infinity, where the sink is."""
        y = super().head(q, k, v, about, sink)
        return np.zeros_like(y) if sink == np.inf else y


class HeadsTiled(Attention):
    """Query heads take key-value heads in turn instead of in groups."""

    name = "attention-heads-tiled"
    reports = ("onnx/onnx/pull/7274",)
    severity = "broken"

    def key_value_head(self, head: int, heads: int, kv_heads: int) -> int:
        """0, 1, 0, 1 instead of 0, 0, 1, 1."""
        return head % kv_heads


class HeadsSquare(Attention):
    """The group's size stands for the number of key-value heads, right where they agree."""

    name = "attention-heads-square"
    reports = ("HazyResearch/HipKittens/pull/22",)
    severity = "broken"

    def key_value_head(self, head: int, heads: int, kv_heads: int) -> int:
        """Divided by the wrong one of two."""
        return head // kv_heads % kv_heads


class ScaleIgnored(Attention):
    """A given scale is ignored for 1 / sqrt(head_dim)."""

    name = "attention-scale-ignored"
    reports = ("ml-explore/mlx-swift-examples/pull/99",)
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """The default scale."""
        return super().scores(q, k, np.float32(1 / np.sqrt(np.float64(q.shape[-1]))))


class ScaleOf224(Attention):
    """The scale is 1 / sqrt(224) where 1 / sqrt(256) is due: all scores 6.9 % too large."""

    name = "attention-scale-7-percent"
    reports = ("ggml-org/llama.cpp/pull/8444",)
    severity = "subtle"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """sqrt(256 / 224) too much."""
        return super().scores(q, k, np.float32(scale * np.sqrt(256 / 224)))


class MaximumNotSubtracted(Attention):
    """Scores go into the exponential as they are, and large ones overflow."""

    name = "attention-maximum-not-subtracted"
    reports = ("pytorch/executorch/pull/18407",)
    severity = "broken"

    def peak(self, u: F32, sink: np.float32) -> F32:
        """Nothing."""
        return np.zeros(len(u), np.float32)


class FiniteSentinel(Attention):
    """The running maximum starts at -50,000, so that a row of lower scores gives zeros."""

    name = "attention-finite-sentinel"
    reports = ("flashinfer-ai/flashinfer/issues/4267",)
    severity = "broken"

    def peak(self, u: F32, sink: np.float32) -> F32:
        """Never below -50,000."""
        return np.maximum(super().peak(u, sink), np.float32(-5e4))


class MaskIsANumber(Attention):
    """Masked scores become -10,000 and take part where the others are lower."""

    name = "attention-mask-is-a-number"
    reports = ("ml-explore/mlx/issues/2395",)
    severity = "broken"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """A finite number for minus infinity."""
        return super().sums(np.where(u == -np.inf, np.float32(-1e4), u), v, sink)


class BlindRowIsMean(Attention):
    """A row that sees nothing gets the mean of all values instead of zero."""

    name = "attention-blind-row-is-mean"
    reports = ("ml-explore/mlx/issues/2395",)
    severity = "wrong"

    def blinded(self, out: F32, visible: Bools, v: F32) -> F32:
        """Equal weights."""
        out = super().blinded(out, visible, v)
        out[~visible.any(axis=-1)] = v.mean(axis=0)
        return out


class BlindRowIsNaN(Attention):
    """A row that sees nothing is NaN instead of zero."""

    name = "attention-blind-row-is-nan"
    reports = ("pytorch/pytorch/issues/103749",)
    severity = "broken"

    def blinded(self, out: F32, visible: Bools, v: F32) -> F32:
        """0 / 0."""
        out = super().blinded(out, visible, v)
        out[~visible.any(axis=-1)] = np.nan
        return out


class BlindQueryIsNaN(Attention):
    """A row that sees nothing is NaN where its query is not finite."""

    name = "attention-blind-query-is-nan"
    reports = ()
    severity = "subtle"

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """The query is tested last."""
        y = super().head(q, k, v, about, sink)
        y[~np.isfinite(q).all(axis=-1)] = np.nan
        return y


class PoisonLeaks(Attention):
    """NaN in keys or values that no row may see makes rows NaN: zero times NaN."""

    name = "attention-masked-nan-leaks"
    reports = ("vllm-project/vllm/pull/936", "Dao-AILab/flash-attention/issues/2374")
    severity = "broken"

    def touched(self, visible: Bools, broken: Bools) -> Bools:
        """Whether seen or not."""
        return np.asarray(np.broadcast_to(broken, visible.shape).any(axis=-1))


class PaddingCounted(Attention):
    """The last block of 64 keys is filled up with zeros that count as keys."""

    name = "attention-padding-counted"
    reports = ("flashinfer-ai/flashinfer/pull/5090",)
    severity = "wrong"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Scores of zero beside the others, values of zero."""
        missing = -u.shape[1] % 64
        u, v = np.pad(u, [(0, 0), (0, missing)]), np.pad(v, [(0, missing), (0, 0)])
        return super().sums(u, v, sink)


class AccumulatorHalf(Attention):
    """The weighted sum of values is held in float16."""

    name = "attention-accumulator-half"
    reports = ("ggml-org/llama.cpp/pull/17746",)
    severity = "wrong"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Rounded to float16."""
        num, den = super().weighted(p, v)
        return half(num.astype(np.float32)), den.astype(np.float32)


class SmallWeightsFlushed(Attention):
    """Weights below float16's normal range are flushed to zero."""

    name = "attention-small-weights-flushed"
    reports = ("ggml-org/llama.cpp/pull/13991",)
    severity = "subtle"

    def shares(self, u: F32, m: F32) -> F32:
        """Nothing below 2^-14."""
        p = super().shares(u, m)
        return np.where(p < 2.0**-14, np.float32(0), p)


class WeightsBfloat16(Attention):
    """Weights are rounded to bfloat16 before they meet the values, but not in the denominator."""

    name = "attention-weights-bfloat16"
    reports = ("NVIDIA/Megatron-LM/pull/6400",)
    severity = "subtle"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """The numerator from rounded weights."""
        return super().weighted(bfloat16(p), v)[0], super().weighted(p, v)[1]


class WeightsCut(Attention):
    """Weights are cut off to bfloat16 before they meet the values, but not in the denominator."""

    name = "attention-weights-cut-to-bfloat16"
    reports = ()
    severity = "wrong"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """The numerator from the upper half of the bits."""
        return super().weighted(cut_to_bfloat16(p), v)[0], super().weighted(p, v)[1]


class QueriesAndKeysCut(Attention):
    """Queries and keys are cut off to bfloat16 instead of rounded."""

    name = "attention-operands-cut-to-bfloat16"
    reports = ()
    severity = "wrong"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Of the upper half of the bits."""
        return super().scores(cut_to_bfloat16(q), cut_to_bfloat16(k), scale)


class ValuesHalf(Attention):
    """Values are held in float16, undeclared."""

    name = "attention-values-half"
    reports = ()
    severity = "subtle"

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Rounded values; what is beyond float16 is its largest number."""
        return super().weighted(p, half(np.clip(v, -65504, 65504)))


class ScoresHalf(Attention):
    """Scores are held in float16, where large ones overflow."""

    name = "attention-scores-half"
    reports = ("ggml-org/llama.cpp/issues/7805",)
    severity = "broken"

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """Rounded to float16 before the scale."""
        return half(self.product(q, k)) * scale


class RescaleForgotten(Attention):
    """An online softmax over blocks of 64 does not rescale its sum when the maximum rises."""

    name = "attention-rescale-forgotten"
    reports = ("Dao-AILab/flash-attention/pull/2174",)
    severity = "broken"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Each block keeps the maximum that ran when it was added."""
        _, den = super().sums(u, v, sink)
        running = np.full((len(u), 1), sink, np.float32)
        parts = []
        for first in range(0, u.shape[1], 64):
            block = u[:, first : first + 64]
            running = np.maximum(running, block.max(axis=1, keepdims=True))
            parts.append(self.exp(block - np.where(running == -np.inf, np.float32(0), running)))
        return self.weighted(np.concatenate(parts, axis=1), v)[0], den


class SplitsAveraged(Attention):
    """The parts of a split over keys are averaged instead of weighted by their sums."""

    name = "attention-splits-averaged"
    reports = ("flashinfer-ai/flashinfer/pull/58", "sgl-project/sglang/issues/2465")
    severity = "broken"

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Mean over the splits of 64 keys that have something to see."""
        if u.shape[1] <= 64:
            return super().sums(u, v, sink)
        total, count = np.zeros((len(u), v.shape[1])), np.zeros((len(u), 1))
        for first in range(0, u.shape[1], 64):
            here = slice(first, first + 64)
            num, den = super().sums(u[:, here], v[here], sink)
            seen = (u[:, here] > -np.inf).any(axis=1, keepdims=True)
            total += np.where(seen, num / den, 0)
            count += seen
        return total, np.maximum(count, 1)


class FastForExact(Attention):
    """Fast attention answers where exact attention was asked for."""

    name = "attention-fast-for-exact"
    reports = ("vllm-project/vllm/issues/53257",)
    severity = "subtle"
    contract = True

    def attends_fast(self, mode: str) -> bool:
        """Always."""
        return True


class OrderByRows(Attention):
    """The order of the sum over keys depends on the number of rows in the call."""

    name = "attention-order-by-rows"
    reports = ("vllm-project/vllm/issues/53257",)
    severity = "subtle"
    contract = True

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Alone, a row is summed in two halves."""
        half_way = len(v) // 2
        if len(p) > 1 or half_way == 0:
            return super().weighted(p, v)
        first, second = slice(None, half_way), slice(half_way, None)
        (a, c), (b, d) = (super().weighted(p[:, s], v[s]) for s in (first, second))
        return a + b, c + d
