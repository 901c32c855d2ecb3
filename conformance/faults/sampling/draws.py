"""Mistakes of what is drawn, and by which words (SPEC 13.1, 13.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.backends.reference import Ints, Source
from conformance.faults.sampling.mistake import Sampling
from reference.arithmetic import F32
from reference.sampling import WEIGHT_ONE, Words

LOG2_E = np.float32(float.fromhex("0x1.715476p+0"))


class SeedIgnored(Sampling):
    """The seed of a request is ignored."""

    name = "sampling-seed-ignored"
    reports = ("vllm-project/vllm/issues/51226",)
    severity = "wrong"
    operations = ("philox", "sample")

    def key(self, seed: int) -> tuple[int, int]:
        """One seed for all."""
        return super().key(0)


class RequestIgnored(Sampling):
    """Requests share one stream of random numbers."""

    name = "sampling-request-ignored"
    reports = ("vllm-project/vllm/issues/51226",)
    severity = "wrong"
    operations = ("philox", "sample")

    def counter(self, request: int, positions: Ints, stream: int) -> list[Words]:
        """Request 0 for all."""
        return super().counter(0, positions, stream)


class WordsRepeat(Sampling):
    """Random numbers repeat: the counter takes only the low eight bits of the position."""

    name = "sampling-random-words-repeat"
    reports = ("ROCm/composable_kernel/pull/574",)
    severity = "wrong"
    operations = ("philox",)

    def counter(self, request: int, positions: Ints, stream: int) -> list[Words]:
        """Positions modulo 256."""
        return super().counter(request, positions % 256, stream)


class PositionIgnored(Sampling):
    """Every token of a request is drawn with the word of its first position."""

    name = "sampling-position-ignored"
    reports = ("NVIDIA/TensorRT-Edge-LLM/issues/211",)
    severity = "wrong"

    def drawn_by(self, source: Source) -> Source:
        """Position 0 for all."""
        seed, request, _ = super().drawn_by(source)
        return seed, request, 0


class DrawnByRank(Sampling):
    """Shares are added in order of rank, where a filter has sorted them, instead of by id."""

    name = "sampling-drawn-in-order-of-rank"
    reports = ("sgl-project/sglang/pull/35697",)
    severity = "wrong"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """The likeliest first."""
        sums = np.cumsum(weights[kept])
        return int(kept[np.searchsorted(sums, word * int(sums[-1]) >> 64, side="right")])


class TieToHighest(Sampling):
    """Greedy choice takes the last of equal logits."""

    name = "sampling-greedy-takes-last-tie"
    reports = ("vllm-project/vllm/issues/7627", "Pushkinist/rMLX/issues/373")
    severity = "subtle"

    def greedy(self, logits: F32) -> int:
        """From the end."""
        return len(logits) - 1 - int(logits[::-1].argmax())


class GreedyOnProbabilities(Sampling):
    """Greedy choice looks at probabilities, where neighbouring logits are equal."""

    name = "sampling-greedy-on-probabilities"
    reports = ("vllm-project/vllm/pull/13312",)
    severity = "subtle"

    def greedy(self, logits: F32) -> int:
        """After softmax."""
        return int(self.softmax(logits[None])[0].argmax())


class LastTileLost(Sampling):
    """Greedy choice fills the last tile of 64 up with zeros, which beat a tile of negative logits.

    The filling is no token, and what it has beaten is lost with it.
    """

    name = "sampling-greedy-last-tile-lost"
    reports = ("mirage-project/mirage/issues/752",)
    severity = "wrong"

    def greedy(self, logits: F32) -> int:
        """Of whole tiles, where the rest is negative."""
        whole = len(logits) // 64 * 64
        lost = 0 < whole < len(logits) and logits[whole:].max() < 0
        return super().greedy(logits[:whole] if lost else logits)


class DrawFloat32(Sampling):
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


class DrawFloat64(Sampling):
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


class DrawReaches(Sampling):
    """The token drawn is the first whose sum reaches the random number, not exceeds it."""

    name = "sampling-draw-reaches"
    reports = ("pytorch/pytorch/pull/9960",)
    severity = "subtle"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """At equality the one before."""
        kept = np.sort(kept)
        sums = np.cumsum(weights[kept])
        return int(kept[np.searchsorted(sums, word * int(sums[-1]) >> 64, side="left")])


class DrawOf32Bits(Sampling):
    """The upper 32 bits of the word alone are used."""

    name = "sampling-word-of-32-bits"
    reports = ()
    severity = "subtle"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """The rest is zero."""
        return super().drawn(kept, weights, word >> 32 << 32)


class WeightsCut(Sampling):
    """Weights are cut off to whole ones instead of rounded."""

    name = "sampling-weights-cut"
    reports = ()
    severity = "subtle"

    def weights(self, z: F32) -> Ints:
        """Towards zero."""
        return np.floor(self.exp(z).astype(np.float64) * 2.0**40).astype(np.int64)


class WeightsOf24Bits(Sampling):
    """Weights are fractions of 2^24 instead of 2^40, and the tail has none."""

    name = "sampling-weights-of-24-bits"
    reports = ()
    severity = "subtle"

    def weights(self, z: F32) -> Ints:
        """Rounded to them."""
        return np.rint(self.exp(z).astype(np.float64) * 2.0**24).astype(np.int64) << 16


class ForbiddenWeighs(Sampling):
    """A forbidden token has the least weight instead of none."""

    name = "sampling-forbidden-weighs"
    reports = ()
    severity = "subtle"

    def weights(self, z: F32) -> Ints:
        """1."""
        return np.maximum(super().weights(z), 1)


class IdsOf16Bits(Sampling):
    """Token ids are held in 16 bits."""

    name = "sampling-ids-of-16-bits"
    reports = ("cryscan/web-rwkv/pull/54",)
    severity = "broken"

    def drawn(self, kept: Ints, weights: Ints, word: int) -> int:
        """Modulo 65,536."""
        return super().drawn(kept, weights, word) & 0xFFFF


class BestOf1024(Sampling):
    """The greedy choice is of the first 1,024 logits: one for each thread."""

    name = "sampling-greedy-of-1024"
    reports = ("CanReader/FastNN/issues/9",)
    severity = "broken"

    def greedy(self, logits: F32) -> int:
        """The others are not looked at."""
        return super().greedy(logits[:1024])


class SeedOf32Bits(Sampling):
    """The seed is cut to 32 bits on its way to the sampler."""

    name = "sampling-seed-of-32-bits"
    reports = ("NVIDIA/TensorRT-LLM/pull/17172",)
    severity = "wrong"

    def drawn_by(self, source: Source) -> Source:
        """The lower half."""
        seed, request, position = source
        return seed & 0xFFFFFFFF, request, position


class RequestOf8Bits(Sampling):
    """A request's number is cut to 8 bits, as the number of a slot."""

    name = "sampling-request-of-8-bits"
    reports = ()
    severity = "wrong"

    def drawn_by(self, source: Source) -> Source:
        """Modulo 256."""
        seed, request, position = source
        return seed, request & 0xFF, position


class PositionOf16Bits(Sampling):
    """The position is cut to 16 bits, and random numbers repeat."""

    name = "sampling-position-of-16-bits"
    reports = ()
    severity = "wrong"

    def drawn_by(self, source: Source) -> Source:
        """Modulo 65,536."""
        seed, request, position = source
        return seed, request, position & 0xFFFF


class HalvesSwapped(Sampling):
    """The two halves of a random word are in each other's place."""

    name = "sampling-halves-of-the-word-swapped"
    reports = ()
    severity = "subtle"
    operations = ("philox", "sample")

    def word(self, out: Sequence[Words]) -> Words:
        """The first is the upper one."""
        return super().word([out[1], out[0]])


class PositionOneOff(Sampling):
    """A token is drawn by the word of the position before it, the last one computed."""

    name = "sampling-position-one-off"
    reports = ()
    severity = "subtle"

    def drawn_by(self, source: Source) -> Source:
        """One less."""
        seed, request, position = source
        return seed, request, position - 1


class SeedOfRequest(Sampling):
    """The number of a request is added to its seed, and two seeds share their words."""

    name = "sampling-request-added-to-the-seed"
    reports = ()
    severity = "subtle"

    def drawn_by(self, source: Source) -> Source:
        """One number of both."""
        seed, request, position = source
        return (seed + request) % 2**64, 0, position


class WeightsFloat64(Sampling):
    """Weights are made of a float64 exponential, and not of one rounded to float32."""

    name = "sampling-weights-of-a-float64-exponential"
    reports = ()
    severity = "subtle"

    def weights(self, z: F32) -> Ints:
        """Not rounded before."""
        return np.rint(np.exp(z.astype(np.float64)) * WEIGHT_ONE).astype(np.int64)


class WeightsOfPowersOfTwo(Sampling):
    """Weights are powers of two, whose exponent is a float32 product of the logit."""

    name = "sampling-weights-by-exp2"
    reports = ()
    severity = "subtle"
    contract = True

    def weights(self, z: F32) -> Ints:
        """An ulp off, and more where the logit is small."""
        power: F32 = np.exp2((z * LOG2_E).astype(np.float64)).astype(np.float32)
        return np.rint(power.astype(np.float64) * WEIGHT_ONE).astype(np.int64)
