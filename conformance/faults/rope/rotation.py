"""Mistakes of angles and of the turn (SPEC 7.3, 7.4)."""

from __future__ import annotations

import numpy as np

from conformance.backends.reference import Ints
from conformance.faults.fault import Fault, bfloat16, half
from reference.arithmetic import F32, multiply_add


class Rotation(Fault):
    """A mistake in the operation `rope`."""

    operations = ("rope",)


class PairsInterleaved(Rotation):
    """Pairs are taken interleaved where they are halves, and the reverse."""

    name = "rope-pairs-interleaved"
    reports = ("ggml-org/llama.cpp/issues/3018", "ikawrakow/ik_llama.cpp/pull/2290")
    severity = "broken"

    def pairs(self, head_dim: int, half: int, interleaved: bool) -> tuple[slice, slice]:
        """The other pairing."""
        return super().pairs(head_dim, half, not interleaved)


class AlwaysHalves(Rotation):
    """Pairs are halves even where the model interleaves them."""

    name = "rope-interleaving-ignored"
    reports = ("vllm-project/vllm/pull/941", "vllm-project/vllm-ascend/issues/12765")
    severity = "broken"

    def pairs(self, head_dim: int, half: int, interleaved: bool) -> tuple[slice, slice]:
        """Never interleaved."""
        return super().pairs(head_dim, half, False)


class TurnedBackwards(Rotation):
    """Heads are turned the wrong way round."""

    name = "rope-turned-backwards"
    reports = ("karpathy/nanochat/pull/489",)
    severity = "broken"

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """The transpose."""
        cos, sin = super().turns(angle, factor)
        return cos, -sin


class PairsByHeadWidth(Rotation):
    """With a partial rotation, pair i is (i, i + head_dim / 2) instead of (i, i + d / 2)."""

    name = "rope-partial-pairs-by-head-width"
    reports = ("pie-project/pie/pull/603",)
    severity = "broken"

    def pairs(self, head_dim: int, half: int, interleaved: bool) -> tuple[slice, slice]:
        """The second of a pair from the middle of the head."""
        if interleaved:
            return super().pairs(head_dim, half, interleaved)
        return slice(0, half), slice(head_dim // 2, head_dim // 2 + half)


class PartialAtTheEnd(Rotation):
    """With a partial rotation, the last elements of a head are turned instead of the first."""

    name = "rope-partial-at-the-end"
    reports = ()
    severity = "broken"

    def pairs(self, head_dim: int, half: int, interleaved: bool) -> tuple[slice, slice]:
        """The same pairs, of the last d elements."""
        first, second = super().pairs(2 * half, half, interleaved)
        left = head_dim - 2 * half
        return (
            slice(first.start + left, first.stop + left, first.step),
            slice(second.start + left, second.stop + left, second.step),
        )


class PartialIgnored(Rotation):
    """All of a head is rotated where only a part should be."""

    name = "rope-partial-ignored"
    reports = ("ml-explore/mlx-lm/pull/1698",)
    severity = "broken"

    def rope(self, x: F32, positions: Ints, inv_freq: F32, factor: float, interleaved: bool) -> F32:
        """The frequencies again for the rest."""
        inv_freq = np.resize(inv_freq, x.shape[-1] // 2)
        return super().rope(x, positions, inv_freq, factor, interleaved)


class RestCorrupted(Rotation):
    """The elements that do not rotate are mixed, their sine being filled up with 1."""

    name = "rope-partial-rest-corrupted"
    reports = ("vllm-project/vllm/issues/55204",)
    severity = "broken"

    def rope(self, x: F32, positions: Ints, inv_freq: F32, factor: float, interleaved: bool) -> F32:
        """Pairs of the rest by cosine 1 and sine 1."""
        out = super().rope(x, positions, inv_freq, factor, interleaved)
        first = 2 * len(inv_freq)
        middle = (first + x.shape[-1]) // 2
        a, b = x[..., first:middle], x[..., middle:]
        out[..., first:middle], out[..., middle:] = a - b, b + a
        return out


class PositionsDoubled(Rotation):
    """Positions are multiplied by two."""

    name = "rope-positions-doubled"
    reports = ("ml-explore/mlx-lm/pull/1553",)
    severity = "broken"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """Twice the angle."""
        return super().angles(2 * positions, inv_freq)


class PositionsFromOne(Rotation):
    """Positions count from one."""

    name = "rope-positions-from-one"
    reports = ("microsoft/onnxruntime-genai/pull/2354",)
    severity = "subtle"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """One too far."""
        return super().angles(positions + 1, inv_freq)


class PositionsIgnored(Rotation):
    """Rows are rotated by their place in the call instead of their position."""

    name = "rope-positions-ignored"
    reports = ("Blaizzy/mlx-vlm/issues/1983",)
    severity = "broken"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """0, 1, 2, ..."""
        return super().angles(np.arange(len(positions)), inv_freq)


class PositionsFromTheFirst(Rotation):
    """A call's positions are counted from its first one, so that every call begins at 0."""

    name = "rope-positions-from-the-first"
    reports = ("Blaizzy/mlx-vlm/issues/1983", "pytorch/executorch/pull/2010")
    severity = "broken"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """The distance to the first row's position."""
        return super().angles(positions - positions[:1], inv_freq)


class PositionOfTheFirst(Rotation):
    """All rows of a call are turned by the position of the first."""

    name = "rope-one-position-a-call"
    reports = ("jundot/omlx/pull/2363",)
    severity = "broken"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """It does not advance."""
        return super().angles(np.full_like(positions, positions[0]), inv_freq)


class TableEnds(Rotation):
    """The table of angles ends at 2,048 positions, and later ones take its last row."""

    name = "rope-table-ends-at-2048"
    reports = ("pegainfer-project/pegainfer/issues/220", "mit-han-lab/llm-awq/pull/332")
    severity = "broken"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """Clamped."""
        return super().angles(np.minimum(positions, 2047), inv_freq)


class LongTableEnds(Rotation):
    """The table of angles ends at 131,072 positions, and later ones take its last row."""

    name = "rope-table-ends-at-131072"
    reports = ("pegainfer-project/pegainfer/issues/220",)
    severity = "broken"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """Clamped."""
        return super().angles(np.minimum(positions, 131_071), inv_freq)


class TableKept(Rotation):
    """The table of a call's angles is kept, and serves the next call of as many positions."""

    name = "rope-table-of-another-call"
    reports = ("lucidrains/rotary-embedding-torch/issues/11",)
    severity = "broken"

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """The first call's of that shape and factor."""
        kept: dict[object, tuple[F32, F32]] = vars(self).setdefault("_tables", {})
        return kept.setdefault((angle.shape, factor), super().turns(angle, factor))


class InverseFrequencyBfloat16(Rotation):
    """inv_freq is rounded to bfloat16 before it meets the position."""

    name = "rope-inverse-frequency-bfloat16"
    reports = ("sgl-project/sglang-jax/issues/1472",)
    severity = "wrong"
    stored = True

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """Rounded first."""
        return super().angles(positions, bfloat16(inv_freq))


class AngleBfloat16(Rotation):
    """Angles are rounded to bfloat16."""

    name = "rope-angle-bfloat16"
    reports = ("huggingface/transformers/pull/29285",)
    severity = "broken"
    stored = True

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """Rounded after."""
        return bfloat16(super().angles(positions, inv_freq))


class AngleHalf(Rotation):
    """Angles are rounded to float16."""

    name = "rope-angle-half"
    reports = ()
    severity = "broken"

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """Rounded after; what is beyond float16 is its largest number."""
        return half(np.clip(super().angles(positions, inv_freq), -65504, 65504))


class PositionsBfloat16(Rotation):
    """Positions are held in bfloat16, so that 257 is 256."""

    name = "rope-positions-bfloat16"
    reports = ("huggingface/transformers/pull/29285",)
    severity = "wrong"
    stored = True

    def angles(self, positions: Ints, inv_freq: F32) -> F32:
        """Rounded positions."""
        rounded = bfloat16(positions.astype(np.float32)).astype(np.int64)
        return super().angles(rounded, inv_freq)


class TableHalf(Rotation):
    """Cosines and sines are held in float16."""

    name = "rope-table-half"
    reports = ("flashinfer-ai/flashinfer/pull/585",)
    severity = "subtle"

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """Rounded."""
        cos, sin = super().turns(angle, factor)
        return half(cos), half(sin)


class FactorIgnored(Rotation):
    """The factor on cosines and sines is not applied."""

    name = "rope-factor-ignored"
    reports = ("ml-explore/mlx-lm/pull/1507",)
    severity = "wrong"

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """1 for it."""
        return super().turns(angle, 1.0)


class FactorSquared(Rotation):
    """The factor on cosines and sines is applied twice."""

    name = "rope-factor-squared"
    reports = ("sgl-project/sglang/pull/33558",)
    severity = "wrong"

    def turns(self, angle: F32, factor: float) -> tuple[F32, F32]:
        """By the table, and after it."""
        return super().turns(angle, factor * factor)


class SineOfLargeAngles(Fault):
    """Large angles are reduced with a single float32 for 2 pi."""

    name = "trigonometry-reduced-in-float32"
    reports = ("tenstorrent/tt-metal/issues/33971", "raspberrypi/pico-sdk/issues/1255")
    severity = "wrong"
    operations = ("sin", "cos", "rope")

    def sin(self, x: F32) -> F32:
        """Of the reduced angle."""
        return super().sin(_reduced(x))

    def cos(self, x: F32) -> F32:
        """Of the reduced angle."""
        return super().cos(_reduced(x))


def _reduced(x: F32) -> F32:
    turn = np.float32(2 * np.pi)
    with np.errstate(all="ignore"):
        return np.where(np.abs(x) > np.pi, x - np.rint(x / turn) * turn, x)


class SignLost(Rotation):
    """Contracted: the fused multiply-add takes the sine's product with the wrong sign."""

    name = "rope-fma-sign-lost"
    reports = ()
    severity = "broken"
    fma = True

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """fma(a, cos, b sin) in the first line."""
        return multiply_add(a, cos, b * sin, True), multiply_add(b, cos, a * sin, True)


class WrongPair(Rotation):
    """Contracted: the second line's fused multiply-add takes the first line's result."""

    name = "rope-fma-of-the-turned-pair"
    reports = ()
    severity = "broken"
    fma = True

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """a was overwritten in place."""
        a = multiply_add(a, cos, -b * sin, True)
        return a, multiply_add(b, cos, a * sin, True)


class ContractedByPlace(Rotation):
    """Contracted in a vectorized loop and not in what it leaves over: bits depend on the place."""

    name = "rope-fma-not-in-the-remainder"
    reports = ()
    severity = "subtle"
    fma = contract = True

    def rotated(self, a: F32, b: F32, cos: F32, sin: F32) -> tuple[F32, F32]:
        """The last pairs of a head, beyond a multiple of twelve, are not contracted."""
        plain = super().rotated(a, b, cos, sin)
        fused = multiply_add(a, cos, -b * sin, True), multiply_add(b, cos, a * sin, True)
        body = np.arange(a.shape[-1]) < a.shape[-1] // 12 * 12
        return np.where(body, fused[0], plain[0]), np.where(body, fused[1], plain[1])
