"""Mistakes of RMSNorm (SPEC 6)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import Floats
from conformance.faults.fault import Fault, bfloat16, cut_to_bfloat16, half
from reference.arithmetic import F32


class Norm(Fault):
    """A mistake in the operation `rms_norm`."""

    operations = ("rms_norm",)


class EpsilonTenfold(Norm):
    """eps is 1e-5, whatever the model says."""

    name = "norm-epsilon-1e-5"
    reports = ("apache/tvm/pull/15856",)
    severity = "subtle"

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """Hard-coded."""
        return super().inverse_root(mean_square, 1e-5)


class EpsilonTenth(Norm):
    """eps is 1e-6, whatever the model says."""

    name = "norm-epsilon-1e-6"
    reports = ("ggml-org/llama.cpp/issues/2373",)
    severity = "subtle"

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """Hard-coded."""
        return super().inverse_root(mean_square, 1e-6)


class EpsilonFloor(Norm):
    """eps is at least 1e-4, being held in float16."""

    name = "norm-epsilon-half-floor"
    reports = ("nntrainer/nntrainer/pull/4318",)
    severity = "wrong"

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """Raised."""
        return super().inverse_root(mean_square, max(eps, 1e-4))


class EpsilonFloat32(Norm):
    """eps is rounded to float32 before it is added to a float64 mean square."""

    name = "norm-epsilon-float32"
    reports = ()
    severity = "subtle"
    contract = True

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """Rounded."""
        return super().inverse_root(mean_square, float(np.float32(eps)))


class EpsilonOutside(Norm):
    """eps is added to the root instead of under it."""

    name = "norm-epsilon-outside-root"
    reports = ("EleutherAI/gpt-neox/pull/1342", "allenai/OLMo/issues/281")
    severity = "subtle"

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """1 / (sqrt(ms) + eps)."""
        kind = mean_square.dtype.type
        return self.divide(np.asarray(kind(1)), np.sqrt(mean_square) + kind(eps))


class EpsilonByPeak(Norm):
    """eps grows with the square of the row's largest element, being added after a rescale."""

    name = "norm-epsilon-scaled-by-peak"
    reports = ("apple/coremltools/issues/2821",)
    severity = "wrong"

    def mean_square(self, x: F32) -> Floats:
        """eps max|x|^2 under the root, less the eps that comes later."""
        peak = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=-1).astype(np.float64)
        mean = super().mean_square(x)
        moved: Floats = (mean + self._eps * (peak**2 - 1)).astype(mean.dtype)
        return moved

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Remember eps."""
        self._eps = eps
        return super().rms_norm(x, weight, eps)


class EpsilonDropped(Norm):
    """There is no eps."""

    name = "norm-epsilon-dropped"
    reports = ("tenstorrent/tt-metal/issues/55347",)
    severity = "subtle"

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """1 / sqrt(ms)."""
        return super().inverse_root(mean_square, 0.0)


class WidthPadded(Norm):
    """Squares are divided by the width of whole tiles of 32 instead of the row's own."""

    name = "norm-width-padded"
    reports = ()
    severity = "broken"

    def mean_square(self, x: F32) -> Floats:
        """Over the padded width."""
        width = x.shape[-1]
        mean = super().mean_square(x)
        return np.asarray(mean * mean.dtype.type(width / (width + -width % 32)))


class WidthLessOne(Norm):
    """Squares are divided by K - 1, as an unbiased variance is."""

    name = "norm-width-less-one"
    reports = ()
    severity = "subtle"

    def mean_square(self, x: F32) -> Floats:
        """K / (K - 1) too much, where there is more than one."""
        width = x.shape[-1]
        mean = super().mean_square(x)
        return np.asarray(mean * mean.dtype.type(width / max(width - 1, 1)))


class RootHalf(Norm):
    """The inverse root is rounded to float16."""

    name = "norm-root-half"
    reports = ("nntrainer/nntrainer/pull/2396", "amd/IRON/pull/139")
    severity = "subtle"

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """Rounded."""
        return half(super().inverse_root(mean_square, eps))


class RootBfloat16(Norm):
    """The inverse root is rounded to bfloat16."""

    name = "norm-root-bfloat16"
    reports = ("huggingface/transformers/pull/29402",)
    severity = "subtle"

    def inverse_root(self, mean_square: Floats, eps: float) -> F32:
        """Rounded."""
        return bfloat16(super().inverse_root(mean_square, eps))


class RoundedBeforeWeight(Norm):
    """The normalised row is rounded to bfloat16 before the weight."""

    name = "norm-rounded-before-weight"
    reports = ("huggingface/transformers/pull/29402",)
    severity = "subtle"

    def scaled_row(self, x: F32, r: F32, weight: F32) -> F32:
        """bf16(x r) w."""
        y: F32 = bfloat16(x * r[..., None]) * weight
        return y


class WeightIgnored(Norm):
    """The weight is not applied."""

    name = "norm-weight-ignored"
    reports = ()
    severity = "broken"

    def scaled_row(self, x: F32, r: F32, weight: F32) -> F32:
        """1 for it."""
        return super().scaled_row(x, r, np.ones_like(weight))


class WeightPlusOne(Norm):
    """The weight is taken for an offset from one."""

    name = "norm-weight-plus-one"
    reports = ("huggingface/transformers/pull/29402",)
    severity = "broken"

    def scaled_row(self, x: F32, r: F32, weight: F32) -> F32:
        """1 + w."""
        return super().scaled_row(x, r, np.float32(1) + weight)


class MeanSubtracted(Norm):
    """The mean is subtracted, as LayerNorm does."""

    name = "norm-subtracts-mean"
    reports = ("ggml-org/llama.cpp/issues/173", "mit-han-lab/omniserve/issues/32")
    severity = "wrong"

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Of the centred row."""
        with np.errstate(all="ignore"):
            centred = x - x.mean(axis=-1, keepdims=True)
        return super().rms_norm(centred.astype(np.float32), weight, eps)


class Variance(Norm):
    """The variance stands for the mean square."""

    name = "norm-variance-for-mean-square"
    reports = (
        "huggingface/pytorch-image-models/issues/2380",
        "keras-team/keras/pull/22393",
    )
    severity = "subtle"

    def mean_square(self, x: F32) -> Floats:
        """Less the square of the mean."""
        mean = super().mean_square(x)
        variance: Floats = np.maximum(mean - (x.mean(axis=-1) ** 2).astype(mean.dtype), 0)
        return variance


class StoreCut(Norm):
    """The result is cut off to bfloat16 instead of rounded: it shrinks at every call."""

    name = "norm-store-cut-to-bfloat16"
    reports = ("ROCm/aiter/issues/5151",)
    severity = "wrong"

    def scaled_row(self, x: F32, r: F32, weight: F32) -> F32:
        """Towards zero."""
        return cut_to_bfloat16(super().scaled_row(x, r, weight))


class LastBitCut(Norm):
    """The last rounding, to float32, goes towards zero."""

    name = "norm-last-bit-cut"
    reports = ("mmastrac/diffgemma/pull/18",)
    severity = "subtle"

    def scaled_row(self, x: F32, r: F32, weight: F32) -> F32:
        """The float32 that is not beyond the product."""
        first: F32 = x * r[..., None]
        exact = first.astype(np.float64) * weight
        y = exact.astype(np.float32)
        return np.where(np.abs(y) > np.abs(exact), np.nextafter(y, np.float32(0)), y)


class OrderByRows(Norm):
    """The order of the sum of squares depends on the number of rows in the call."""

    name = "norm-order-by-rows"
    reports = ("vllm-project/vllm/issues/48271",)
    severity = "subtle"
    contract = True

    def mean_square(self, x: F32) -> Floats:
        """Several rows are summed in two halves."""
        middle = x.shape[-1] // 2
        if len(x) < 2 or middle == 0:
            return super().mean_square(x)
        parts = (x[..., :middle], x[..., middle:])
        first, second = (super(OrderByRows, self).mean_square(p) * p.shape[-1] for p in parts)
        mean: Floats = (first + second) / first.dtype.type(x.shape[-1])
        return mean


class NormOf1024(Norm):
    """Squares beyond the first 1,024 of a row are left out: one for each thread."""

    name = "norm-squares-of-1024"
    reports = ()
    severity = "wrong"

    def mean_square(self, x: F32) -> Floats:
        """Divided by the whole width."""
        width = x.shape[-1]
        if width <= 1024:
            return super().mean_square(x)
        part = np.asarray(super().mean_square(x[..., :1024].copy()))
        return part * part.dtype.type(1024 / width)


class SquaresNotDivided(Norm):
    """Squares are summed and not divided by their number."""

    name = "norm-sum-for-mean-square"
    reports = ("tenstorrent/tt-mlir/pull/8798",)
    severity = "broken"

    def mean_square(self, x: F32) -> Floats:
        """K times too much."""
        mean = super().mean_square(x)
        return np.asarray(mean * mean.dtype.type(x.shape[-1]))


class SquaresHalf(Norm):
    """Squares are added in float16, where large ones overflow."""

    name = "norm-squares-half"
    reports = (
        "nntrainer/nntrainer/issues/3935",
        "ROCm/AMDMIGraphX/issues/2556",
        "pytorch/pytorch/pull/134106",
    )
    severity = "broken"

    def mean_square(self, x: F32) -> Floats:
        """One by one."""
        kind = super().mean_square(x).dtype
        with np.errstate(all="ignore"):
            squares = x.astype(np.float16) ** 2
            total = np.add.accumulate(squares, axis=-1, dtype=np.float16)[..., -1]
            mean: Floats = total.astype(kind) / kind.type(x.shape[-1])
        return mean
