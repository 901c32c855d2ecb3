"""Mistakes in reading pages (SPEC 11.1)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conformance.backends.composed.cache import CacheBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault
from reference.arithmetic import F32


class Reading(Fault, CacheBackend):
    """A mistake in the operation `paged_attention`."""

    operations: ClassVar[tuple[str, ...]] = ("paged_attention",)


class TableIgnored(Reading):
    """Pages are taken to lie one behind the other, from the first of the table on."""

    name = "paging-table-ignored"
    reports = ("tanishqkumar/ssd/issues/23", "golang-design/accel/issues/10")
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


class PageAheadRead(Reading):
    """At a page's edge the page taken for what comes next, which is zeros, is read as well."""

    name = "paging-page-ahead-read"
    reports = ("pegainfer-project/pegainfer/issues/291",)
    severity = "wrong"

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """One page more."""
        x = super().gathered(pages, table, length, window)
        size = pages.shape[1]
        ahead = size if length % size == 0 else 0
        return np.concatenate([x, np.zeros((ahead, *x.shape[1:]), np.float32)])


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


class HeadsBeforeSlots(Reading):
    """A page is read as if it held one head's slots before the next head's."""

    name = "paging-heads-before-slots"
    reports = ("ROCm/aiter/pull/3347", "flashinfer-ai/flashinfer/pull/2799")
    severity = "broken"

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """The other layout."""
        count, slots, heads, width = pages.shape
        turned = pages.reshape(count, heads, slots, width).transpose(0, 2, 1, 3)
        return super().gathered(np.ascontiguousarray(turned), table, length, window)


class FirstHead(Reading):
    """All heads read the pages of the first."""

    name = "paging-first-head-for-all"
    reports = ()
    severity = "broken"

    def gathered(self, pages: F32, table: Ints, length: int, window: int | None) -> F32:
        """Repeated."""
        x = super().gathered(pages, table, length, window)
        return np.repeat(x[:, :1], x.shape[1], axis=1)


class PageNumbers(Reading):
    """Page numbers are cut to 8 bits."""

    name = "paging-numbers-of-8-bits"
    reports = ("Dao-AILab/flash-attention/issues/772",)
    severity = "broken"

    def page_of(self, positions: Ints, table: Ints, size: int) -> Ints:
        """Modulo 256."""
        return super().page_of(positions, np.asarray(table) % 256, size)


class PagedForgets(Reading):
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
