"""Mistakes in what a cache of a type keeps (SPEC 11.2)."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np

from conformance.backends.composed.cache import CacheBackend
from conformance.faults.fault import Fault, cut_to_bfloat16
from reference.arithmetic import F32


class Storing(Fault, CacheBackend):
    """A mistake in the operation `store_kv`."""

    operations: ClassVar[tuple[str, ...]] = ("store_kv",)


class CutToBfloat16(Storing):
    """Values are cut off to bfloat16 instead of rounded."""

    name = "paging-bfloat16-by-cutting"
    reports = ("ROCm/aiter/issues/5151",)
    severity = "subtle"

    def narrowed(self, x: F32, dtype: str) -> F32:
        """Towards zero."""
        return cut_to_bfloat16(x) if dtype == "bfloat16" else super().narrowed(x, dtype)


class HalfByBfloat16(Storing):
    """Values reach float16 by way of bfloat16: the model's own type."""

    name = "paging-float16-by-way-of-bfloat16"
    reports = ()
    severity = "subtle"

    def narrowed(self, x: F32, dtype: str) -> F32:
        """Rounded twice."""
        if dtype == "float16":
            x = super().narrowed(x, "bfloat16")
        return super().narrowed(x, dtype)


class BitsOfBfloat16(Storing):
    """A float16 cache holds the bits of bfloat16, the model's type, and is read as float16."""

    name = "paging-float16-holds-bits-of-bfloat16"
    reports = ("vllm-project/vllm/pull/54338",)
    severity = "broken"

    def narrowed(self, x: F32, dtype: str) -> F32:
        """The same 16 bits."""
        if dtype != "float16":
            return super().narrowed(x, dtype)
        return x.astype(ml_dtypes.bfloat16).view(np.float16).astype(np.float32)


class HalfSaturates(Storing):
    """Values beyond float16 become its largest instead of infinity."""

    name = "paging-float16-saturates"
    reports = ("ROCm/MIOpen/issues/2496",)
    severity = "subtle"

    def narrowed(self, x: F32, dtype: str) -> F32:
        """Clipped first."""
        largest = np.float32(65504)
        return super().narrowed(np.clip(x, -largest, largest) if dtype == "float16" else x, dtype)


class HalfFlushed(Storing):
    """Subnormal values of float16 are flushed to zero."""

    name = "paging-float16-flushes"
    reports = ("ggml-org/llama.cpp/pull/13991",)
    severity = "subtle"

    def narrowed(self, x: F32, dtype: str) -> F32:
        """Nothing below 2^-14."""
        y = super().narrowed(x, dtype)
        small = (np.abs(y) < 2.0**-14) & (dtype == "float16")
        return np.where(small, np.float32(0), y)


class ScalePerPage(Storing):
    """int8 has one scale a page and head instead of one a token and head."""

    name = "paging-int8-scale-per-page"
    reports = ()
    severity = "subtle"

    def kept_int8(self, x: F32) -> F32:
        """The largest of 16 tokens."""
        out = np.empty_like(x)
        for first in range(0, len(x), 16):
            page = x[first : first + 16]
            rows = page.swapaxes(0, 1).reshape(page.shape[1], -1)
            codes, scale = self.quantize_int8(np.ascontiguousarray(rows))
            back = (codes.astype(np.float32) * scale[:, None]).reshape(page.shape[1], len(page), -1)
            out[first : first + 16] = back.swapaxes(0, 1)
        return out


class ScalePerToken(Storing):
    """int8 has one scale a token, which all heads share."""

    name = "paging-int8-scale-shared-by-heads"
    reports = ()
    severity = "subtle"

    def kept_int8(self, x: F32) -> F32:
        """The largest of all heads."""
        return super().kept_int8(x.reshape(len(x), 1, -1)).reshape(x.shape)


class ScaleFixed(Storing):
    """int8 has one fixed scale for all that is stored."""

    name = "paging-int8-scale-fixed"
    reports = ("InfiniTensor/InfiniLM/pull/553",)
    severity = "wrong"

    def kept_int8(self, x: F32) -> F32:
        """0.05, whatever comes."""
        scale = np.float32(0.05)
        return self.int8_codes(x / scale) * scale


class ScaleAtLeastOne(Storing):
    """int8 scales are at least 1, and what is smaller is rounded to whole numbers."""

    name = "paging-int8-scale-at-least-one"
    reports = ("lablup/mlxcel/pull/717",)
    severity = "wrong"

    def kept_int8(self, x: F32) -> F32:
        """Raised, where only that of zeros should be 1."""
        rows = x.reshape(-1, x.shape[-1])
        scale: F32 = np.maximum(self.quantize_int8(rows)[1], np.float32(1))[:, None]
        y: F32 = self.int8_codes(rows / scale) * scale
        return y.reshape(x.shape)


class CodesCut(Storing):
    """int8 codes are cut off towards zero on their way to the cache, which the store does alone."""

    name = "paging-int8-codes-cut"
    reports = ("vllm-project/vllm/pull/45361",)
    severity = "wrong"

    def kept_int8(self, x: F32) -> F32:
        """Towards zero."""
        rows = x.reshape(-1, x.shape[-1])
        scale = self.quantize_int8(rows)[1][:, None]
        codes = np.clip(np.trunc(rows / np.where(scale == 0, np.float32(1), scale)), -127, 127)
        y: F32 = codes * scale
        return y.reshape(x.shape)


class ScaleOfBlockBefore(Storing):
    """int8 scales of a page's tokens are those of the token before."""

    name = "paging-int8-scale-of-token-before"
    reports = ("vllm-project/vllm/issues/49716",)
    severity = "broken"

    def kept_int8(self, x: F32) -> F32:
        """Codes are right, their scales lie one slot off."""
        codes, scale = self.quantize_int8(x.reshape(-1, x.shape[-1]))
        moved = np.roll(scale.reshape(x.shape[:2]), 1, axis=0)
        y: F32 = codes.reshape(x.shape).astype(np.float32) * moved[..., None]
        return y


class NanKeptAsZero(Storing):
    """NaN is kept as zero, and what spoilt a key is not seen."""

    name = "paging-nan-becomes-zero"
    reports = ("tinygrad/tinygrad/pull/15552",)
    severity = "wrong"

    def narrowed(self, x: F32, dtype: str) -> F32:
        """Infinities stay."""
        kept = super().narrowed(x, dtype)
        return np.where(np.isnan(kept), np.float32(0), kept)
