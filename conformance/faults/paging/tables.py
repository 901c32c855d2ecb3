"""Mistakes of block tables: who holds a page, and when it is copied (SPEC 11.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from conformance.backends.composed.cache import Book, CacheBackend, Held
from conformance.faults.fault import Fault


class Tables(Fault, CacheBackend):
    """A mistake in the operation `paging`."""

    operations: ClassVar[tuple[str, ...]] = ("paging",)


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
    reports = ("apache/tvm/pull/16666",)
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
