"""Mistakes of pages, block tables and the types of the cache (SPEC 11.1, 11.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from conformance.backends.composed.cache import Book, CacheBackend, Held
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault, cut_to_bfloat16
from reference.arithmetic import F32


class Reading(Fault, CacheBackend):
    """A mistake in the operation `paged_attention`."""

    operations: ClassVar[tuple[str, ...]] = ("paged_attention",)


class Storing(Fault, CacheBackend):
    """A mistake in the operation `store_kv`."""

    operations: ClassVar[tuple[str, ...]] = ("store_kv",)


class Tables(Fault, CacheBackend):
    """A mistake in the operation `paging`."""

    operations: ClassVar[tuple[str, ...]] = ("paging",)


class TableIgnored(Reading):
    """Pages are taken to lie one behind the other, from the first of the table on."""

    name = "paging-table-ignored"
    reports = ()
    severity = "broken"

    def page_of(self, positions: Ints, table: Ints, size: int) -> Ints:
        """The first page, and those after it."""
        return np.asarray(table[0] + positions // size)


class EdgeInPageBefore(Reading):
    """A page's first position is looked for in the page before."""

    name = "paging-edge-in-page-before"
    reports = ()
    severity = "wrong"

    def page_of(self, positions: Ints, table: Ints, size: int) -> Ints:
        """Off by one at the edge."""
        return super().page_of(np.maximum(positions - 1, 0), table, size)


class LastPageStale(Reading):
    """The table's last entry was not updated, and its page is that of the entry before."""

    name = "paging-last-entry-stale"
    reports = ("gittensor-ai-lab/sparkinfer/pull/185",)
    severity = "wrong"

    def page_of(self, positions: Ints, table: Ints, size: int) -> Ints:
        """The entry before the last, twice."""
        old = np.asarray(table).copy()
        old[-1:] = old[-2:-1] if len(old) > 1 else old
        return super().page_of(positions, old, size)


class LastPageWhole(Reading):
    """The last page is read to its end, behind the last position."""

    name = "paging-last-page-read-whole"
    reports = ("vllm-project/vllm/pull/936",)
    severity = "broken"

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """Whole pages."""
        size = pages.shape[1]
        return super().gathered(pages, table, -(-length // size) * size, window)


class LastPageLost(Reading):
    """Of the last page, where it is partly filled, all but the newest position is skipped."""

    name = "paging-partial-page-skipped"
    reports = ()
    severity = "wrong"

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """Zeros from the last edge on."""
        x = super().gathered(pages, table, length, window)
        x[length - length % pages.shape[1] : -1] = 0
        return x


class WindowPageEarly(Reading):
    """The page in which the window begins is dropped one too early."""

    name = "paging-window-page-dropped-early"
    reports = ("kekzl/imp/pull/967",)
    severity = "wrong"

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """Only pages that lie within the window as a whole are left."""
        x = super().gathered(pages, table, length, window)
        if window is not None:
            size = pages.shape[1]
            x[: -(-max(0, length - window) // size) * size] = 0
        return x


class OtherHalfOfPage(Reading):
    """Tables in units of 32 positions address pages of 16, and two tables share slots."""

    name = "paging-page-size-of-another-group"
    reports = ("vllm-project/vllm/pull/41657",)
    severity = "broken"

    def slot_of(self, positions: Ints, size: int) -> Ints:
        """Slots of half a page."""
        return positions % max(1, size // 2)


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


class HalfSaturates(Storing):
    """Values beyond float16 become its largest instead of infinity."""

    name = "paging-float16-saturates"
    reports = ()
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


class CopyForgotten(Tables):
    """A shared page that is partly filled is written without being copied."""

    name = "paging-copy-on-write-forgotten"
    reports = ("xLLM-AI/xllm/pull/1984",)
    severity = "broken"

    def must_copy(self, book: Book, table: Held, size: int) -> bool:
        """Never."""
        return False


class CopyAtEdge(Tables):
    """A shared page is copied although it is full and nothing is written to it."""

    name = "paging-full-page-copied"
    reports = ()
    severity = "subtle"

    def must_copy(self, book: Book, table: Held, size: int) -> bool:
        """Whenever it is shared."""
        return table.length > 0 and book.owners[table.pages[-1]] > 1


class CopyForAll(Tables):
    """The last table of a page that was shared copies it too, though it alone holds it now."""

    name = "paging-sole-owner-copies"
    reports = ()
    severity = "subtle"

    def release(self, book: Book, pages: Sequence[int]) -> None:
        """What was shared stays so."""
        book.owners.subtract(p for p in pages if book.owners[p] != 2)


class ForkNotCounted(Tables):
    """A fork does not count as an owner of the pages that it shares."""

    name = "paging-fork-not-counted"
    reports = ()
    severity = "broken"

    def fork(self, book: Book, table: Held) -> Held:
        """The table alone."""
        return Held(list(table.pages), table.length)


class FreedWhileShared(Tables):
    """Releasing a page frees it, though another sequence still holds it."""

    name = "paging-shared-page-freed"
    reports = ("Avarok-Cybersecurity/atlas/pull/373",)
    severity = "broken"

    def release(self, book: Book, pages: Sequence[int]) -> None:
        """No owner is left."""
        for page in pages:
            book.owners[page] = 0


class PageAtEdgeEarly(Tables):
    """A sequence that fills its last page takes another one at once."""

    name = "paging-page-taken-at-the-edge"
    reports = ()
    severity = "subtle"

    def missing(self, table: Held, count: int, size: int) -> int:
        """Room for one more position, always."""
        return super().missing(table, count + (count > 0), size)


class GrownFromNothing(Tables):
    """Growing takes all the pages that the sequence needs, beside those that it has."""

    name = "paging-pages-taken-twice"
    reports = ("gittensor-ai-lab/sparkinfer/pull/146",)
    severity = "wrong"

    def missing(self, table: Held, count: int, size: int) -> int:
        """Those that are there are forgotten."""
        return -(-(table.length + count) // size) if count else 0


class PartialPageDropped(Tables):
    """Going back drops the page that the new end lies in."""

    name = "paging-truncation-drops-partial-page"
    reports = ()
    severity = "broken"

    def kept_pages(self, length: int, size: int) -> int:
        """Whole pages alone."""
        return length // size


class EdgePageKept(Tables):
    """Going back to a page's first position keeps that page, which holds nothing any more."""

    name = "paging-stale-page-kept"
    reports = ()
    severity = "subtle"

    def kept_pages(self, length: int, size: int) -> int:
        """The page of position `length`."""
        return length // size + 1


class NothingDropped(Tables):
    """Going back drops no page: the length alone is changed."""

    name = "paging-truncation-drops-nothing"
    reports = ("huggingface/transformers/issues/30312",)
    severity = "wrong"

    def truncate(self, book: Book, table: Held, length: int, size: int) -> None:
        """The pages stay."""
        table.length = min(table.length, length)
