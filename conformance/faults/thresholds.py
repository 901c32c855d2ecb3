"""Mistakes where a hair decides: draws and thresholds, words, codes next to halves (SPEC 5, 13)."""

from __future__ import annotations

import math
import unicodedata
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from conformance.backends.composed.cache import CacheBackend
from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.composed.verification import VerifyBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault, bfloat16
from conformance.golden import Array
from reference.arithmetic import F32, F64, to_float32
from reference.experts import Router
from reference.sampling import Law, Sampling


class Sample(Fault):
    """A mistake in the operation `sample`."""

    operations: ClassVar[tuple[str, ...]] = ("sample",)


# What is drawn.


class DrawFloat32(Sample):
    """Shares are added in float32, and compared with 24 bits of the word."""

    name = "sampling-draw-float32"
    reports = ("guoqingbao/attention.rs/pull/9",)
    severity = "subtle"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """The first whose sum exceeds it, or the last."""
        kept = np.sort(kept)
        shares = (weights[kept] / weights[kept].sum()).astype(np.float32)
        u = np.float32((word >> 40) * 2.0**-24)
        place = int(np.searchsorted(np.cumsum(shares, dtype=np.float32), u, side="right"))
        return int(kept[min(place, len(kept) - 1)])


class DrawFloat64(Sample):
    """Shares are added in float64, and compared with 53 bits of the word."""

    name = "sampling-draw-float64"
    reports = ()
    severity = "subtle"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """The first whose sum exceeds it, or the last."""
        kept = np.sort(kept)
        sums = np.cumsum(weights[kept] / weights[kept].sum())
        place = int(np.searchsorted(sums, (word >> 11) * 2.0**-53, side="right"))
        return int(kept[min(place, len(kept) - 1)])


class DrawReaches(Sample):
    """The token drawn is the first whose sum reaches the random number, not exceeds it."""

    name = "sampling-draw-reaches"
    reports = ()
    severity = "subtle"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """At equality the one before."""
        kept = np.sort(kept)
        sums = np.cumsum(weights[kept])
        return int(kept[np.searchsorted(sums, word * int(sums[-1]) >> 64, side="left")])


class DrawOf32Bits(Sample):
    """The upper 32 bits of the word alone are used."""

    name = "sampling-word-of-32-bits"
    reports = ()
    severity = "subtle"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """The rest is zero."""
        return super().drawn(kept, weights, word >> 32 << 32)


class WeightsCut(Sample):
    """Weights are cut off to whole ones instead of rounded."""

    name = "sampling-weights-cut"
    reports = ()
    severity = "subtle"

    def weights(self, z: F32) -> Ints:
        """Towards zero."""
        return np.floor(self.exp(z).astype(np.float64) * 2.0**40).astype(np.int64)


class WeightsOf24Bits(Sample):
    """Weights are fractions of 2^24 instead of 2^40, and the tail has none."""

    name = "sampling-weights-of-24-bits"
    reports = ()
    severity = "subtle"

    def weights(self, z: F32) -> Ints:
        """Rounded to them."""
        return np.rint(self.exp(z).astype(np.float64) * 2.0**24).astype(np.int64) << 16


class ForbiddenWeighs(Sample):
    """A forbidden token has the least weight instead of none."""

    name = "sampling-forbidden-weighs"
    reports = ()
    severity = "subtle"

    def weights(self, z: F32) -> Ints:
        """1."""
        return np.maximum(super().weights(z), 1)


class IdsOf16Bits(Sample):
    """Token ids are held in 16 bits."""

    name = "sampling-ids-of-16-bits"
    reports = ()
    severity = "broken"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """Modulo 65,536."""
        return super().drawn(kept, weights, word) & 0xFFFF


class BestOf1024(Sample):
    """The greedy choice is of the first 1,024 logits: one for each thread."""

    name = "sampling-greedy-of-1024"
    reports = ()
    severity = "broken"

    def greedy(self, logits: F32) -> int:
        """The others are not looked at."""
        return super().greedy(logits[:1024])


class SampleCut(Sample):
    """A number that the word is made of is cut on its way to the sampler."""

    which: ClassVar[str]
    mask: ClassVar[int]

    def sample(self, **about: Any) -> Ints:  # type: ignore[override]
        """Its low bits."""
        return super().sample(**about | {self.which: about[self.which] & self.mask})


class SeedOf32Bits(SampleCut):
    """The seed is cut to 32 bits on its way to the sampler."""

    name = "sampling-seed-of-32-bits"
    reports = ("NVIDIA/TensorRT-LLM/pull/17172",)
    severity = "wrong"
    which, mask = "seed", 0xFFFFFFFF


class RequestOf8Bits(SampleCut):
    """A request's number is cut to 8 bits, as the number of a slot."""

    name = "sampling-request-of-8-bits"
    reports = ()
    severity = "wrong"
    which, mask = "request", 0xFF


class PositionOf16Bits(SampleCut):
    """The position is cut to 16 bits, and random numbers repeat."""

    name = "sampling-position-of-16-bits"
    reports = ()
    severity = "wrong"
    which, mask = "position", 0xFFFF


# What is kept.


class TopPExceeds(Sample):
    """top_p keeps tokens until their weight exceeds the threshold, not reaches it."""

    name = "sampling-top-p-exceeds"
    reports = ("huggingface/transformers/issues/18976", "BlinkDL/ChatRWKV/pull/170")
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """One more at equality."""
        sums = np.cumsum(weights[ranked])
        limit = math.floor(Fraction(top_p) * int(sums[-1]))
        return ranked[: int(np.searchsorted(sums, limit, side="right")) + 1]


class TopPFloat32(Sample):
    """top_p is held in float32."""

    name = "sampling-top-p-float32"
    reports = ()
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Rounded."""
        return super().keep_top_p(ranked, weights, float(np.float32(top_p)))


class TopPSums(Sample):
    """Shares are added in float32, so that a top_p of 1 is reached before the tail."""

    name = "sampling-top-p-float32-sums"
    reports = ("guoqingbao/attention.rs/pull/9",)
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Until the sum reaches it."""
        shares = (weights[ranked] / weights[ranked].sum()).astype(np.float32)
        sums = np.cumsum(shares, dtype=np.float32)
        return ranked[: int(np.searchsorted(sums, np.float32(top_p))) + 1]


class TopPSumsFloat64(Sample):
    """Shares are added in float64, where two of ten tenths reach what is above 0.2."""

    name = "sampling-top-p-float64-sums"
    reports = ()
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Until the sum reaches it."""
        sums = np.cumsum(weights[ranked] / weights[ranked].sum())
        return ranked[: int(np.searchsorted(sums, top_p)) + 1]


class TopPKeepsTies(Sample):
    """top_p keeps every token that ties with the one that crosses."""

    name = "sampling-top-p-keeps-ties"
    reports = ("flashinfer-ai/flashinfer/pull/3774",)
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """By weight alone."""
        kept = super().keep_top_p(ranked, weights, top_p)
        return np.asarray(ranked[weights[ranked] >= weights[kept[-1]]])


class TinyTopPOff(Sample):
    """A top_p that is nearly zero masks all tokens, and all may be drawn."""

    name = "sampling-top-p-tiny-keeps-all"
    reports = ("ml-explore/mlx-lm/pull/1912",)
    severity = "broken"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """1 - top_p is 1 in float32."""
        off = np.float32(1) - np.float32(top_p) == 1
        return ranked if off else super().keep_top_p(ranked, weights, top_p)


class TopKOf64(Sample):
    """top_k is at most 64."""

    name = "sampling-top-k-at-most-64"
    reports = ("NVIDIA/FasterTransformer/issues/109",)
    severity = "wrong"

    def keep_top_k(self, ranked: Ints, weights: Ints, top_k: int) -> Ints:
        """What the kernel has room for."""
        return super().keep_top_k(ranked, weights, min(top_k, 64))


class TopKBeyond(Sample):
    """A top_k beyond the vocabulary becomes one less than it."""

    name = "sampling-top-k-beyond-the-vocabulary"
    reports = ()
    severity = "subtle"

    def keep_top_k(self, ranked: Ints, weights: Ints, top_k: int) -> Ints:
        """All but the last."""
        return ranked[:-1] if top_k > len(ranked) else super().keep_top_k(ranked, weights, top_k)


class RankedBfloat16(Sample):
    """Tokens are ranked by weights in bfloat16, where near ones are equal."""

    name = "sampling-ranked-in-bfloat16"
    reports = ()
    severity = "subtle"

    def ranked(self, weights: Ints) -> Ints:
        """The lower id first."""
        return np.argsort(-bfloat16(weights.astype(np.float32)), kind="stable")


class MinPStrict(Sample):
    """min_p keeps what is above the threshold, and not what is equal to it."""

    name = "sampling-min-p-strict"
    reports = ()
    severity = "subtle"

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """But always the first."""
        limit = math.floor(Fraction(min_p) * int(weights[ranked[0]]))
        above = weights[ranked] > limit if min_p > 0 else np.full(len(ranked), True)
        above[0] = True
        return np.asarray(ranked[above])


class MinPFloat32(Sample):
    """min_p is held in float32."""

    name = "sampling-min-p-float32"
    reports = ()
    severity = "subtle"

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """Rounded."""
        return super().keep_min_p(ranked, weights, float(np.float32(min_p)))


class MinPFirst(Sample):
    """min_p comes before top_p, which then measures less."""

    name = "sampling-min-p-before-top-p"
    reports = ("SciSharp/LLamaSharp/issues/928",)
    severity = "subtle"

    def keep_top_p(self, ranked: Ints, weights: Ints, top_p: float) -> Ints:
        """Later."""
        self._top_p = top_p
        return ranked

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """And now."""
        kept = super().keep_min_p(ranked, weights, min_p)
        return super().keep_top_p(kept, weights, self._top_p)


class MinPOneOff(Sample):
    """A min_p of 1 is taken for none."""

    name = "sampling-min-p-one-is-off"
    reports = ()
    severity = "wrong"

    def keep_min_p(self, ranked: Ints, weights: Ints, min_p: float) -> Ints:
        """All."""
        return ranked if min_p >= 1 else super().keep_min_p(ranked, weights, min_p)


# Penalty and temperature.


class PenaltyOf64(Sample):
    """The repetition penalty looks at the last 64 tokens alone."""

    name = "sampling-penalty-of-64-tokens"
    reports = ("ohdearquant/lattice/issues/387",)
    severity = "wrong"

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """What came before is forgotten."""
        return super().penalised(logits, previous[-64:], penalty)


class PenaltyOfPadding(Sample):
    """The repetition penalty counts the padding behind the tokens, which is token 0."""

    name = "sampling-penalty-of-padding"
    reports = ("huggingface/text-generation-inference/pull/1765",)
    severity = "wrong"

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """One more token."""
        return super().penalised(logits, np.append(previous, 0), penalty)


class PenaltyBelowOne(Sample):
    """A repetition penalty below 1 is taken for none."""

    name = "sampling-penalty-below-one-ignored"
    reports = ()
    severity = "wrong"

    def penalised(self, logits: F32, previous: Ints, penalty: np.float32) -> F32:
        """At least 1."""
        return super().penalised(logits, previous, max(penalty, np.float32(1)))


class TemperatureFloor(Sample):
    """Temperatures are at least 0.01."""

    name = "sampling-temperature-at-least-0.01"
    reports = ()
    severity = "subtle"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """Raised."""
        return super().tempered(logits, max(temperature, np.float32(0.01)))


class ColdIsGreedy(Sample):
    """A temperature below 10^-5 is taken for greedy, also between equal logits."""

    name = "sampling-cold-is-greedy"
    reports = ("turboderp/exllama/issues/226",)
    severity = "subtle"

    def tempered(self, logits: F32, temperature: np.float32) -> F32:
        """All but the first of the largest are forbidden."""
        z = super().tempered(logits, temperature)
        if temperature >= 1e-5:
            return z
        return np.where(np.arange(len(z)) == logits.argmax(), np.float32(0), np.float32(-np.inf))


# Verification.


class Verify(Fault, VerifyBackend):
    """A mistake in the operation `verify_draft`."""

    operations: ClassVar[tuple[str, ...]] = ("verify_draft",)


class AcceptsEqual(Verify):
    """A drafted token is accepted where the test is equal, too."""

    name = "speculation-accepts-at-equality"
    reports = ()
    severity = "subtle"

    def accepts(self, target: Law, drafted: Law, token: int, place: int) -> bool:
        """<= for <."""
        share, of = self.ratio(target, drafted, token)
        return self.acceptance_word(place) * of <= share << 64


class RatioFloat32(Verify):
    """A drafted token is accepted by a float32 ratio and 24 bits of the word."""

    name = "speculation-ratio-float32"
    reports = ("vllm-project/vllm/pull/46665",)
    severity = "subtle"

    def accepts(self, target: Law, drafted: Law, token: int, place: int) -> bool:
        """Rounded."""
        share, of = self.ratio(target, drafted, token)
        u = np.float32((self.acceptance_word(place) >> 40) * 2.0**-24)
        return bool(u < np.float32(share / of))


class RatioFloat64(Verify):
    """A drafted token is accepted by a float64 ratio and 53 bits of the word."""

    name = "speculation-ratio-float64"
    reports = ()
    severity = "subtle"

    def accepts(self, target: Law, drafted: Law, token: int, place: int) -> bool:
        """Rounded."""
        share, of = self.ratio(target, drafted, token)
        return (self.acceptance_word(place) >> 11) * 2.0**-53 < share / of


class EightDrafted(Verify):
    """Of a draft the first eight tokens are verified."""

    name = "speculation-eight-drafted-at-most"
    reports = ()
    severity = "wrong"

    def verify_draft(self, *, draft: Ints, draft_weights: Ints, **about: Any) -> Ints:  # type: ignore[override]
        """The rest is dropped."""
        return super().verify_draft(draft=draft[:8], draft_weights=draft_weights[:8], **about)


class WordsOf(Verify):
    """A number that the words of a pass are made of is cut."""

    which: ClassVar[str]
    mask: ClassVar[int]

    def verify_draft(self, **about: Any) -> Ints:  # type: ignore[override]
        """Its low bits."""
        return super().verify_draft(**about | {self.which: about[self.which] & self.mask})


class VerifySeed(WordsOf):
    """The seed is cut to 32 bits where drafts are verified."""

    name = "speculation-seed-of-32-bits"
    reports = ()
    severity = "wrong"
    which, mask = "seed", 0xFFFFFFFF


class VerifyRequest(WordsOf):
    """A request's number is cut to 8 bits where drafts are verified."""

    name = "speculation-request-of-8-bits"
    reports = ()
    severity = "wrong"
    which, mask = "request", 0xFF


class VerifyPosition(WordsOf):
    """The position is cut to 16 bits where drafts are verified."""

    name = "speculation-position-of-16-bits"
    reports = ()
    severity = "wrong"
    which, mask = "position", 0xFFFF


class VerifyPenalty(Verify):
    """Where drafts are verified the repetition penalty looks at the last 64 tokens alone."""

    name = "speculation-penalty-of-64-tokens"
    reports = ("ohdearquant/lattice/issues/387",)
    severity = "wrong"

    def target_law(self, row: F32, sampling: Sampling, previous: Ints, drafted: Any) -> Law:
        """What came before is forgotten."""
        return super().target_law(row, sampling, previous[-64:], drafted)


# Routers.


class Routing(Fault, ExpertsBackend):
    """A mistake in the operation `route`."""

    operations: ClassVar[tuple[str, ...]] = ("route",)


class ForbiddenInGroups(Routing):
    """A forbidden expert counts as zero in its group's score, which beats negative ones."""

    name = "experts-forbidden-scores-zero-in-its-group"
    reports = ("huggingface/transformers/issues/45440",)
    severity = "wrong"

    def group_scores(self, groups: F32, router: Router) -> F32:
        """0 for -inf."""
        return super().group_scores(np.where(groups == -np.inf, np.float32(0), groups), router)


class EpsilonForAll(Routing):
    """Gates are renormalised with 10^-6 added to their sum, whatever the model says."""

    name = "experts-renormalise-with-1e-6"
    reports = ()
    severity = "subtle"

    def renormalised(self, gates: F32, router: Router) -> F32:
        """Another epsilon."""
        if not router.renormalise:
            return gates
        total = np.cumsum(gates, axis=1, dtype=np.float64)[:, -1:] + 1e-6
        return to_float32(np.asarray(gates / total))


class OneNotRenormalised(Routing):
    """The gate of a single expert is not renormalised."""

    name = "experts-one-not-renormalised"
    reports = ("pytorch/torchtitan/issues/1448",)
    severity = "wrong"

    def renormalised(self, gates: F32, router: Router) -> F32:
        """As it is."""
        return gates if router.top_k == 1 else super().renormalised(gates, router)


# Codes, hashes and values that are kept.


class Int8Reciprocal(Fault):
    """Activations are multiplied by the scale's reciprocal, and halves fall the other way."""

    name = "int8-codes-by-reciprocal"
    reports = ()
    severity = "subtle"
    operations = ("quantize_int8",)

    def quantize_int8(self, x: F32) -> tuple[Array, Array]:
        """Where the reciprocal does not overflow."""
        codes, scale = super().quantize_int8(x)
        usable = np.isfinite(x).all(axis=-1) & (scale > 2.0**-120)
        inverse = np.float32(1) / np.where(usable, scale, np.float32(1))
        product = np.where(usable[:, None], x, np.float32(0)) * inverse[:, None]
        wrong = self.int8_codes(product.astype(np.float32)).astype(np.int8)
        return np.where(usable[:, None], wrong, codes), scale


class Int8Float64(Fault):
    """Activations are divided by their peak in float64, and halves fall the other way."""

    name = "int8-codes-in-float64"
    reports = ()
    severity = "subtle"
    operations = ("quantize_int8",)

    def quantize_int8(self, x: F32) -> tuple[Array, Array]:
        """By max|x| / 127, which is not rounded."""
        codes, scale = super().quantize_int8(x)
        usable = np.isfinite(x).all(axis=-1) & (scale > 2.0**-120)
        wide = np.where(usable[:, None], x, np.float32(0)).astype(np.float64)
        peak = np.abs(wide).max(axis=1, initial=0) / 127
        wrong = np.rint(wide / np.where(usable, peak, 1)[:, None]).astype(np.int8)
        return np.where(usable[:, None], wrong, codes), scale


class Int4Reciprocal(Fault):
    """Weights are multiplied by the scale's reciprocal, and halves fall to the other side."""

    name = "int4-codes-by-reciprocal"
    reports = ()
    severity = "subtle"
    operations = ("quantize_int4",)

    def codes(self, w: F32, scales: F64) -> F64:
        """The product, times the scale again, so that dividing gives it."""
        product = w * (np.float32(1) / scales.astype(np.float32))
        return super().codes((product.astype(np.float64) * scales).astype(np.float64), scales)


class Int4Eight(Fault):
    """Codes go down to -8, which shows where a scale was rounded to a much smaller one."""

    name = "int4-codes-down-to-minus-8"
    reports = ()
    severity = "subtle"
    operations = ("quantize_int4",)

    def codes(self, w: F32, scales: F64) -> F64:
        """-8 to 7."""
        ratio = w.astype(np.float64) / scales
        largest = np.where(ratio < 0, 8, 7)
        codes: F64 = np.copysign(np.minimum(np.floor(np.abs(ratio) + 0.5), largest), ratio)
        return codes


class Hashing(Fault, CacheBackend):
    """A mistake in the operation `page_hashes`."""

    operations: ClassVar[tuple[str, ...]] = ("page_hashes",)


class HashedIdsOf16Bits(Hashing):
    """Token ids are hashed by 16 bits."""

    name = "prefix-ids-of-16-bits"
    reports = ()
    severity = "broken"

    def token_bytes(self, page: Ints) -> bytes:
        """Modulo 65,536."""
        return super().token_bytes(page & 0xFFFF)


class SaltNormalised(Hashing):
    """A salt is normalised, stripped and put in lower case: two tenants may be one."""

    name = "prefix-salt-normalised"
    reports = ()
    severity = "wrong"

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """NFKC."""
        return super().root(digest, dtype, unicodedata.normalize("NFKC", salt).strip().lower())


class NanKeptAsZero(Fault, CacheBackend):
    """NaN is kept as zero, and what spoilt a key is not seen."""

    name = "paging-nan-becomes-zero"
    reports = ("tinygrad/tinygrad/pull/15552",)
    severity = "wrong"
    operations = ("store_kv",)

    def narrowed(self, x: F32, dtype: str) -> F32:
        """Infinities stay."""
        kept = super().narrowed(x, dtype)
        return np.where(np.isnan(kept), np.float32(0), kept)
