"""Mistakes of linear layers in floating point (SPEC 2, 10.1)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conformance.faults.fault import Fault, bfloat16, cut_to_bfloat16, half
from reference.arithmetic import F32
from reference.weights import add


class Linear(Fault):
    """A mistake in the operation `linear`."""

    operations: ClassVar[tuple[str, ...]] = ("linear",)


class Product(Fault):
    """A mistake in the product of floats, whatever its weights are stored as."""

    operations = ("linear", "linear_w4a16")


class TermsDropped(Product):
    """A mistake that leaves the last terms of every sum out."""

    def kept(self, width: int) -> int:
        """How many of so many terms are summed."""
        return width

    def product(self, x: F32, w: F32) -> F32:
        """Of the first terms alone."""
        whole = self.kept(x.shape[1])
        return super().product(x[:, :whole], w[:, :whole])


class OperandsChanged(Product):
    """A mistake that makes something else of every operand."""

    def operand(self, x: F32) -> F32:
        """What is multiplied in place of x."""
        return x

    def product(self, x: F32, w: F32) -> F32:
        """Of both operands, changed."""
        return super().product(self.operand(x), self.operand(w))


class BiasDropped(Linear):
    """The bias is not added."""

    name = "linear-bias-dropped"
    reports = ("sbryngelson/ANEForge/pull/253", "OminiX-ai/OminiX-MLX/pull/7")
    severity = "broken"

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """The product alone."""
        return super().linear(x, w, None)


class BiasTwice(Linear):
    """The bias is added twice."""

    name = "linear-bias-added-twice"
    reports = ("Wenyueh/MinivLLM/issues/80", "awslabs/slapo/issues/10")
    severity = "broken"

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """By the product, and after it."""
        return add(super().linear(x, w, bias), bias)


class RowsOfTheFirst(Product):
    """All rows get the result of the first one."""

    name = "linear-rows-of-the-first"
    reports = ("torch-spyre/torch-spyre/pull/4373",)
    severity = "broken"

    def product(self, x: F32, w: F32) -> F32:
        """Row 0, again and again."""
        y = super().product(x, w)
        return np.ascontiguousarray(np.broadcast_to(y[:1], y.shape))


class SquareNotTransposed(Linear):
    """A weight with as many rows as columns is taken for its transpose."""

    name = "linear-square-weight-not-transposed"
    reports = ("vllm-project/vllm/pull/44113",)
    severity = "broken"

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """x w instead of x w^T, where both have the same shape."""
        square = w.shape[0] == w.shape[1]
        return super().linear(x, np.ascontiguousarray(w.T) if square else w, bias)


class TailDropped(TermsDropped):
    """Features beyond the last whole tile of 32 are left out."""

    name = "linear-tail-dropped"
    reports = ("ml-explore/mlx/pull/3912",)
    severity = "wrong"

    def kept(self, width: int) -> int:
        """Whole tiles, where there is one."""
        return width - width % 32 or width


class SplitRemainder(TermsDropped):
    """Of a sum split in four, the terms that do not divide by four are left out."""

    name = "linear-split-remainder"
    reports = ("ml-explore/mlx/pull/3854",)
    severity = "wrong"

    def kept(self, width: int) -> int:
        """Four parts of equal length."""
        return width - width % 4 or width


class LastTerm(TermsDropped):
    """The last of 4,096 terms or more is left out."""

    name = "linear-last-term-of-4096"
    reports = ("ml-explore/mlx/pull/3912",)
    severity = "subtle"

    def kept(self, width: int) -> int:
        """One less, where there are many."""
        return width - (width >= 4096)


class ColumnsUnwritten(Product):
    """Output columns beyond the last whole tile of 16 are never written."""

    name = "linear-columns-unwritten"
    reports = ("ml-explore/mlx/issues/4250",)
    severity = "broken"

    def product(self, x: F32, w: F32) -> F32:
        """They stay zero."""
        y = super().product(x, w)
        y[:, len(w) - len(w) % 16 :] = 0
        return y


class AccumulatorHalf(Product):
    """Sums are held in float16, where large ones overflow."""

    name = "linear-accumulator-half"
    reports = ("ggml-org/llama.cpp/pull/19697", "ROCm/AMDMIGraphX/issues/1029")
    severity = "broken"

    def product(self, x: F32, w: F32) -> F32:
        """Rounded to float16."""
        return half(super().product(x, w))


class SumsHalf(Product):
    """Products are added one by one in float16."""

    name = "linear-sums-half"
    reports = ("iree-org/iree/issues/19347", "ggml-org/llama.cpp/pull/13607")
    severity = "broken"

    def product(self, x: F32, w: F32) -> F32:
        """Each product and each sum rounded to float16; what is not finite as before."""
        y = super().product(x, w)
        total = np.zeros_like(y)
        with np.errstate(all="ignore"):
            for k in range(x.shape[1]):
                total = half(total + half(x[:, k, None] * w[:, k]))
        return np.where(np.isfinite(y), total, y)


class OperandsTf32(OperandsChanged):
    """float32 operands are rounded to the 11 bits of tf32, undeclared."""

    name = "linear-operands-tf32"
    reports = ("ml-explore/mlx/issues/3860", "CanReader/FastNN/issues/10")
    severity = "subtle"

    def operand(self, x: F32) -> F32:
        """Rounded."""
        return tf32(x)


class OperandsBfloat16(OperandsChanged):
    """float32 operands are rounded to bfloat16, undeclared."""

    name = "linear-operands-bfloat16"
    reports = ("pytorch/pytorch/pull/130919",)
    severity = "subtle"

    def operand(self, x: F32) -> F32:
        """Rounded."""
        return bfloat16(x)


class ActivationsCut(Product):
    """Activations are cut off to bfloat16 instead of rounded."""

    name = "linear-activations-cut-to-bfloat16"
    reports = ("mmastrac/diffgemma/pull/18",)
    severity = "wrong"

    def product(self, x: F32, w: F32) -> F32:
        """The upper half of the bits."""
        return super().product(cut_to_bfloat16(x), w)


class StoreCut(Product):
    """Results are cut off to bfloat16 instead of rounded."""

    name = "linear-store-cut-to-bfloat16"
    reports = ("ROCm/aiter/issues/5151", "mmastrac/diffgemma/pull/18")
    severity = "wrong"

    def product(self, x: F32, w: F32) -> F32:
        """Towards zero."""
        return cut_to_bfloat16(super().product(x, w))


class NanBecomesInfinity(Product):
    """NaN comes out as infinity: its payload was cut off."""

    name = "linear-nan-becomes-infinity"
    reports = ("groonga/groonga/pull/2961",)
    severity = "wrong"

    def product(self, x: F32, w: F32) -> F32:
        """Infinity for NaN."""
        y = super().product(x, w)
        return np.where(np.isnan(y), np.float32(np.inf), y)


class SubnormalsFlushed(OperandsChanged):
    """Subnormal operands are flushed to zero, undeclared."""

    name = "linear-subnormals-flushed"
    reports = ("ggml-org/llama.cpp/pull/13991",)
    severity = "subtle"

    def operand(self, x: F32) -> F32:
        """Zero for what is subnormal."""
        return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


class OrderByRows(Product):
    """The order of a sum depends on the number of rows in the call."""

    name = "linear-order-by-rows"
    reports = ("vllm-project/vllm/issues/48271", "ggml-org/llama.cpp/issues/95")
    severity = "subtle"
    contract = True

    def product(self, x: F32, w: F32) -> F32:
        """Several rows are summed in two halves."""
        middle = x.shape[1] // 2
        if len(x) < 2 or middle == 0:
            return super().product(x, w)
        first = super().product(x[:, :middle], w[:, :middle])
        return add(first, super().product(x[:, middle:], w[:, middle:]))


class SumsTowardsZero(Product):
    """Running sums are cut off instead of rounded, as some matrix units add."""

    name = "linear-sums-towards-zero"
    reports = ("deepseek-ai/DeepGEMM/issues/37",)
    severity = "subtle"

    def product(self, x: F32, w: F32) -> F32:
        """Term by term, each sum cut to float32; what is not finite as before."""
        y = super().product(x, w)
        total = np.zeros_like(y)
        with np.errstate(all="ignore"):
            for k in range(x.shape[1]):
                exact = total + x[:, k, None].astype(np.float64) * w[:, k].astype(np.float64)
                nearest = exact.astype(np.float32)
                inside = np.nextafter(nearest, np.float32(0))
                total = np.where(np.abs(nearest) > np.abs(exact), inside, nearest)
        return np.where(np.isfinite(y), total, y)


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


class ZeroRowSkipped(Linear):
    """A row of zeros is skipped, and its bias with it."""

    name = "linear-bias-dropped-of-zero-rows"
    reports = ()
    severity = "wrong"

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """Zero."""
        y = super().linear(x, w, bias).copy()
        y[~x.any(axis=1)] = 0
        return y


def tf32(x: F32) -> F32:
    """Rounded to 11 significant bits, the exponent of float32."""
    with np.errstate(all="ignore"):
        fraction, exponent = np.frexp(x)
        rounded = np.ldexp(np.rint(fraction * np.float32(2048)), exponent - 11)
    return np.where(np.isfinite(x), rounded, x).astype(np.float32)
