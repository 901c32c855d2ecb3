"""Mistakes of passes that speculate, and what becomes of their cache (SPEC 13.3, 13.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from conformance.backends.composed.serving import Run, ServingSession
from conformance.faults.fault import SessionFault
from reference.arithmetic import F32
from reference.cache import PAGE_SIZE
from reference.speculation import NgramDraft


class Passes(SessionFault, ServingSession):
    """A mistake in the operation `speculate`."""

    operations: ClassVar[tuple[str, ...]] = ("speculate",)


class RewindForgotten(Passes):
    """Rejected tokens stay in the cache, and what follows comes after them."""

    name = "speculation-rejected-stay"
    reports = ("huggingface/transformers/issues/30312", "ml-explore/mlx-lm/pull/1427")
    severity = "broken"

    def rewind(self, drafted: int, taken: int) -> None:
        """Nothing is forgotten."""


class RewindShort(Passes):
    """One rejected token stays in the cache."""

    name = "speculation-one-rejected-stays"
    reports = ("openvinotoolkit/openvino.genai/issues/4190",)
    severity = "subtle"

    def rewind(self, drafted: int, taken: int) -> None:
        """One less, where any was rejected."""
        super().rewind(drafted, min(drafted, taken + 1))


class RewindStale(Passes):
    """The length goes back, and the rejected keys stay in their place: what comes is put behind."""

    name = "speculation-stale-keys-kept"
    reports = ("ml-explore/mlx-lm/pull/1486",)
    severity = "wrong"

    def rewind(self, drafted: int, taken: int) -> None:
        """The length alone."""
        self.length -= drafted - taken


class RewindZeroed(Passes):
    """Rejected keys and values become zeros, which still weigh in the softmax."""

    name = "speculation-rejected-zeroed"
    reports = ("Blaizzy/mlx-vlm/issues/1962",)
    severity = "wrong"

    def rewind(self, drafted: int, taken: int) -> None:
        """They stay in their place, and what comes is put behind."""
        rejected = drafted - taken
        self.length -= rejected
        for store in (self.keys, self.values):
            for layer in store:
                x = np.concatenate(layer)
                x[len(x) - rejected :] = 0
                layer[:] = [x]


class RewindFar(Passes):
    """An accepted token is forgotten with the rejected ones."""

    name = "speculation-accepted-forgotten"
    reports = ("lablup/mlxcel/issues/994",)
    severity = "wrong"

    def rewind(self, drafted: int, taken: int) -> None:
        """One more, where any was rejected."""
        super().rewind(drafted, taken - (drafted > taken))


class PositionsAssumeAll(Passes):
    """The next position is counted as if every drafted token had been accepted."""

    name = "speculation-positions-count-rejected"
    reports = ("huggingface/transformers/issues/30413",)
    severity = "wrong"

    def rewind(self, drafted: int, taken: int) -> None:
        """Keys are forgotten, the count is not."""
        length = self.length
        super().rewind(drafted, taken)
        self.length = length


class FirstNotVerified(Passes):
    """The first drafted token is accepted unseen."""

    name = "speculation-first-token-not-verified"
    reports = ("ohdearquant/lattice/issues/243",)
    severity = "wrong"

    def agreed(self, logits: F32, drafted: Sequence[int]) -> int:
        """One at least."""
        return max(min(1, len(drafted)), super().agreed(logits, drafted))


class LookupUpToTwo(Passes):
    """The last two tokens are the longest that is looked up."""

    name = "speculation-lookup-up-to-two"
    reports = ()
    severity = "subtle"

    def lookup(self) -> NgramDraft:
        """2 for 3."""
        return NgramDraft(longest=2)


class LookupUpToFour(Passes):
    """The last four tokens are looked up before the last three."""

    name = "speculation-lookup-up-to-four"
    reports = ()
    severity = "subtle"

    def lookup(self) -> NgramDraft:
        """4 for 3."""
        return NgramDraft(longest=4)


class LookupFromTwo(Passes):
    """The last token alone is not looked up."""

    name = "speculation-lookup-from-two"
    reports = ()
    severity = "subtle"

    def lookup(self) -> NgramDraft:
        """2 for 1."""
        return NgramDraft(shortest=2)


class LastTokensSearched(Passes):
    """The n-gram is looked up in the last 64 tokens alone."""

    name = "speculation-lookup-in-the-last-64"
    reports = ()
    severity = "subtle"

    def drafted(self, run: Run, max_new_tokens: int, draft_tokens: int) -> list[int]:
        """The context begins there."""
        whole, run.tokens = run.tokens, run.tokens[-64:]
        proposed = super().drafted(run, max_new_tokens, draft_tokens)
        run.tokens = whole
        return proposed


class CorrectionRowLate(Passes):
    """The token after a rejection is chosen from the row of the rejected one."""

    name = "speculation-correction-one-row-late"
    reports = ("openvinotoolkit/openvino.genai/issues/4190",)
    severity = "wrong"

    def given(self, logits: F32, drafted: Sequence[int], taken: int) -> list[int]:
        """As if it had been accepted."""
        row = min(taken + 1, len(logits) - 1)
        return [*drafted[:taken], self.choose(logits[row])]


class PageNotEntered(Passes):
    """Where an accepted draft enters a new page, the page's first position is not written."""

    name = "speculation-page-not-entered"
    reports = ("ggml-org/llama.cpp/issues/26478",)
    severity = "wrong"

    def rewind(self, drafted: int, taken: int) -> None:
        """It holds what the position before it does."""
        entered = -(-(self.length - drafted) // PAGE_SIZE) * PAGE_SIZE
        super().rewind(drafted, taken)
        if drafted and entered < self.length:
            for store in (self.keys, self.values):
                for layer in store:
                    x = np.concatenate(layer)
                    x[entered] = x[entered - 1]
                    layer[:] = [x]
