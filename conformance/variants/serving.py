"""What engines do that changes no result: reuse less or more, draft otherwise (SPEC 16.7)."""

from __future__ import annotations

from conformance.backends.composed.serving import Kept, ServingSession
from conformance.backends.reference import Ints
from conformance.operations import NotImplementedByBackendError
from conformance.variants.variant import Bounded
from reference.arithmetic import F32
from reference.cache import PAGE_SIZE
from reference.speculation import NgramDraft


class WholePagesReused(Bounded):
    """Of a common prefix only whole pages are reused."""

    name = "whole-pages-reused"

    class session(ServingSession):  # noqa: N801
        """Pages of 16."""

        def usable(self, kept: Kept, shared: int) -> int:
            """Less of it."""
            return super().usable(kept, shared // PAGE_SIZE * PAGE_SIZE)


class NothingReused(Bounded):
    """Every prompt is computed from its beginning."""

    name = "nothing-reused"

    class session(ServingSession):  # noqa: N801
        """Without a prefix cache, and so without a file of one."""

        def usable(self, kept: Kept, shared: int) -> int:
            """Nothing."""
            return 0

        def resume(
            self, prompt: Ints, longer: Ints, max_new_tokens: int, path: str
        ) -> tuple[Ints, F32, Ints]:
            """There is nothing to save."""
            raise NotImplementedByBackendError("resume")


class NothingTrimmed(Bounded):
    """What lies behind a window is held, and so more is found again."""

    name = "nothing-trimmed"

    class session(ServingSession):  # noqa: N801
        """Room for all of it."""

        def dropped(self, length: int, window: int | None) -> int:
            """Nothing."""
            return 0


class OtherDrafts(Bounded):
    """Drafts follow n-grams of two to four tokens."""

    name = "other-drafts"

    class session(ServingSession):  # noqa: N801
        """Prompt lookup by other sizes."""

        def lookup(self) -> NgramDraft:
            """4 for 3, and 2 for 1."""
            return NgramDraft(longest=4, shortest=2)
