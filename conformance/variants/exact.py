"""Other ways to the exact contract's bits (SPEC 2): orders, tiles, slices, threads, layouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from conformance.backends.composed import ComposedSession, Floats
from conformance.backends.reference import Ints, ReferenceBackend
from conformance.golden import Array
from conformance.variants.variant import Exact, Variant
from reference import arithmetic, attention
from reference.arithmetic import BLOCK, F32, F64, align, to_float32
from reference.model import AttentionKind


class Reference(Variant, ReferenceBackend):
    """The reference itself: fused q, k and v, tiles, a cache that keeps aligned rows."""

    name, exact = "reference", True


class Steps(Exact):
    """Every operation step by step, head by head."""

    name = "head-by-head"


class Blocks(Exact):
    """A matrix product block by block, in some exact way."""

    def product(self, x: F32, w: F32) -> F32:
        """Block sums, added ascending (SPEC 2.2)."""
        a, b = align(x), align(w)
        total = np.zeros((len(x), len(w)))
        for left, right in zip(a.values, b.values, strict=True):
            total += self.block(left, right)
        y = to_float32(total)
        y[~(a.finite[:, None] & b.finite[None, :])] = np.nan
        return arithmetic.one_nan(y)

    def block(self, left: F64, right: F64) -> F64:
        """S_b of rows (T, 32) and (N, 32)."""
        raise NotImplementedError


class Int64(Blocks):
    """Block sums as 64-bit integers."""

    name, kernels_only = "int64", True

    def block(self, left: F64, right: F64) -> F64:
        """A_i B_i, summed as integers and scaled back."""
        (a, ea), (b, eb) = _digits(left), _digits(right)
        sums = a.astype(np.int64) @ b.astype(np.int64).T
        return np.asarray(np.ldexp(sums.astype(np.float64), ea[:, None] + eb[None, :] - 48))


class Slices(Blocks):
    """Block sums of three slices of 8 bits each, as tensor cores take them."""

    name, kernels_only = "slices-of-8-bits", True

    def block(self, left: F64, right: F64) -> F64:
        """Nine small products; the largest shift first."""
        (a, ea), (b, eb) = _digits(left), _digits(right)
        sums = np.zeros((len(a), len(b)))
        for i, high in enumerate(_sliced(a)):
            for j, low in enumerate(_sliced(b)):
                part = high.astype(np.float32) @ low.astype(np.float32).T
                sums += np.ldexp(part.astype(np.float64), 8 * (i + j))
        return np.asarray(np.ldexp(sums, ea[:, None] + eb[None, :] - 48))


class Descending(Blocks):
    """The terms of a block from the last to the first."""

    name, kernels_only = "blocks-descending", True

    def block(self, left: F64, right: F64) -> F64:
        """One after the other in float64."""
        sums = np.zeros((len(left), len(right)))
        for i in reversed(range(BLOCK)):
            sums = left[:, i, None] * right[None, :, i] + sums
        return sums


class Tree(Blocks):
    """The terms of a block added in a tree, as lanes do."""

    name, kernels_only = "blocks-in-a-tree", True

    def block(self, left: F64, right: F64) -> F64:
        """Halves onto each other."""
        terms = left[:, None] * right[None]
        while terms.shape[-1] > 1:
            middle = terms.shape[-1] // 2
            terms = terms[..., :middle] + terms[..., middle:]
        return terms[..., 0]


def _digits(values: F64) -> tuple[F64, Array]:
    """The integers A_i of aligned rows, and the E of each (SPEC 2.1)."""
    exponent = np.frexp(np.abs(values).max(axis=1))[1]
    return np.rint(np.ldexp(values, 24 - exponent[:, None])), exponent


def _sliced(digits: F64) -> Iterator[F64]:
    """24 bits as three signed slices of 8, the lowest first."""
    for _ in range(2):
        low = digits - 256 * np.rint(digits / 256)
        yield low
        digits = (digits - low) / 256
    yield digits


class WeightsByPosition(Exact):
    """The weighted sum of values position by position."""

    name, kernels_only = "weighted-sum-by-position", True

    def weighted(self, p: F32, v: F32) -> tuple[Floats, Floats]:
        """Block sums of W_j V_j and P_j, j descending within the block."""
        rows = arithmetic.align_rows(v)
        num, den = np.zeros((len(p), v.shape[1])), np.zeros(len(p))
        for first in range(0, len(v), BLOCK):
            here = slice(first, first + BLOCK)
            w = _on_grid(p[:, here] * rows.scale[here])
            q = _on_grid(p[:, here].astype(np.float64))
            block, size = np.zeros_like(num), np.zeros_like(den)
            for j in reversed(range(w.shape[1])):
                block += w[:, j, None] * rows.digits[first + j]
                size += q[:, j]
            num, den = num + block, den + size
        return num, den


def _on_grid(w: F64) -> F64:
    """Rounded to 24 bits of the row's largest (SPEC 2.5)."""
    unit = np.ldexp(1.0, np.frexp(w.max(axis=1, keepdims=True))[1] - 24)
    return np.asarray(np.rint(w / unit) * unit)


class GroupByGroup(Exact):
    """int4 sums as integers group by group, the last group first."""

    name = "int4-group-by-group"

    def linear_int4(self, x: F32, packed: Array, scales: Array, group: int) -> F32:
        """Integer dots, each scaled in float64, added descending."""
        codes, scale = self.quantize_int8(x)
        width = x.shape[1]
        ones = np.ones_like(scales)
        q = self.int4_weights(packed, ones, width, group or width).astype(np.int64)
        total = np.zeros((len(x), len(packed)))
        for g in reversed(range(scales.shape[1])):
            here = slice(g * (group or width), (g + 1) * (group or width))
            dots = codes[:, here].astype(np.int64) @ q[:, here].T
            total += dots * scales[:, g].astype(np.float64)
        return self.scaled(total, scale)

    def on_blocks(self, x: F32, codes: F32, scales: F32) -> F32:
        """The same on blocks."""
        xq, scale = self.quantize_int8(x)
        q, d = codes.astype(np.int64), scales.astype(np.float64)
        total = np.zeros((len(x), len(codes)))
        for g in reversed(range(scales.shape[1])):
            total += xq[:, 32 * g : 32 * g + 32].astype(np.int64) @ q[:, g].T * d[:, g]
        return self.scaled(total, scale)

    def scaled(self, total: F64, scale: F32) -> F32:
        """RN32(RN64(sum * s))."""
        with np.errstate(invalid="ignore"):
            y = to_float32((total + 0.0) * scale[:, None].astype(np.float64))
        return arithmetic.one_nan(y)


class Patched(Variant, ReferenceBackend):
    """The reference with another choice of tiles, which is no part of the contract."""

    exact, kernels_only = True, True
    settings: tuple[tuple[Any, str, int], ...] = ()

    @contextmanager
    def _set(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, name, value in self.settings:
                stack.enter_context(patch.object(module, name, value))
            yield

    def attention(self, q: F32, k: F32, v: F32, mode: str, **options: Any) -> F32:
        """Under the other settings."""
        with self._set():
            return super().attention(q, k, v, mode, **options)

    def linear(self, x: F32, w: F32, bias: F32 | None = None) -> F32:
        """Under the other settings."""
        with self._set():
            return super().linear(x, w, bias)


class OneRowTiles(Patched):
    """Attention tiles of one row each, product tiles of a few elements."""

    name = "tiles-of-one-row"
    settings = ((attention, "EXACT_TILE", 1), (arithmetic, "_TILE", 256))


class OneTile(Patched):
    """One tile for everything."""

    name = "one-tile"
    settings = ((attention, "EXACT_TILE", 1 << 30), (arithmetic, "_TILE", 1 << 30))


class Threads(Patched):
    """Work shared out to threads however little it is."""

    name = "threads"
    settings = ((arithmetic, "_SHARED", 1), (attention, "EXACT_TILE", 1 << 8))


class RowByRow(Exact):
    """Every row of every call by itself."""

    name, kernels_only = "exact-row-by-row", True

    def product(self, x: F32, w: F32) -> F32:
        """One row at a time."""
        return np.concatenate(
            [super(RowByRow, self).product(x[i : i + 1], w) for i in range(len(x))]
        )

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """One row at a time."""
        rows = [super(RowByRow, self).rms_norm(x[i : i + 1], weight, eps) for i in range(len(x))]
        return np.concatenate(rows)


class Paged(ComposedSession):
    """Keys and values in pages of 16 positions, handed out from both ends of a pool."""

    def reset(self) -> None:
        """An empty pool, poisoned, and an empty table."""
        super().reset()
        self.pool: list[dict[int, tuple[F32, F32]]] = [{} for _ in range(self.config.layers)]
        self.filled = [0] * self.config.layers

    def remember(self, index: int, k: F32, v: F32) -> None:
        """Into pages, each allocated where no other is."""
        pages = self.pool[index]
        for row in range(len(k)):
            page, slot = divmod(self.filled[index], 16)
            if slot == 0:
                shape = (16, *k.shape[1:])
                pages[page ^ 5] = (
                    np.full(shape, np.nan, np.float32),
                    np.full(shape, np.nan, np.float32),
                )
            keys, values = pages[page ^ 5]
            keys[slot], values[slot] = k[row], v[row]
            self.filled[index] += 1

    def recalled(self, index: int) -> tuple[F32, F32]:
        """Gathered by the table."""
        count = self.filled[index]
        pages = [self.pool[index][page ^ 5] for page in range(-(-count // 16))]
        keys, values = (np.concatenate(part)[:count] for part in zip(*pages, strict=True))
        return keys, values


class PagedCache(Exact):
    """A model whose cache lies in pages of 16 positions."""

    name = "paged-cache"
    session = Paged


class Chunked(ComposedSession):
    """Every call cut into chunks of 7 tokens."""

    def forward(self, tokens: Ints, attention: AttentionKind = "exact") -> F32:  # type: ignore[override]
        """Chunk by chunk."""
        parts = [tokens[first : first + 7] for first in range(0, len(tokens), 7)]
        return np.concatenate([super(Chunked, self).forward(part, attention) for part in parts])


class ChunkedPrefill(Exact):
    """A model that computes everything in chunks of 7 tokens."""

    name = "chunks-of-7"
    session = Chunked
