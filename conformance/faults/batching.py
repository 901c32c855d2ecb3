"""Mistakes of requests that share passes, and of prompts in chunks (SPEC 14.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from conformance.backends.composed.serving import Part, Run, ServingSession
from conformance.backends.reference import Ints
from conformance.faults.fault import SessionFault
from reference.arithmetic import F32


class Batching(SessionFault, ServingSession):
    """A mistake in the operation `serve`."""

    operations: ClassVar[tuple[str, ...]] = ("serve",)


class LogitsSwapped(Batching):
    """Requests of a pass get each other's logits: rows lie in another order than requests."""

    name = "batching-logits-swapped"
    reports = ("ProjectDMX/DMI/issues/67",)
    severity = "broken"

    def handed(self, computed: list[F32]) -> list[F32]:
        """Those of equal length change places."""
        lengths = [len(rows) for rows in computed]
        order = sorted(range(len(computed)), key=lambda i: (lengths[i], -i))
        plain = sorted(range(len(computed)), key=lambda i: (lengths[i], i))
        out = list(computed)
        for here, there in zip(plain, order, strict=True):
            out[here] = computed[there]
        return out


class LastRowOfLongest(Batching):
    """In a pass with a longer part, a prompt's token is chosen from the last row but one."""

    name = "batching-last-row-of-padded"
    reports = ("huggingface/transformers/issues/29029",)
    severity = "broken"

    def last_rows(self, part: Part, logits: F32) -> F32:
        """One row early wherever the part was padded."""
        longest = max(len(p.tokens) for p in self.parts)
        early = len(part.tokens) < longest and len(logits) > 1 and not part.drafted
        return logits[-2:-1] if early else super().last_rows(part, logits)


class RowByTotal(Batching):
    """The last row of a prompt's last chunk is looked for at the prompt's length."""

    name = "batching-last-row-by-total-length"
    reports = ("mlx-node/mlx-node/pull/47",)
    severity = "broken"

    def last_rows(self, part: Part, logits: F32) -> F32:
        """Wrapped round, where there was a chunk before."""
        total = len(part.run.tokens)
        if part.run.decodes or total == len(logits):
            return super().last_rows(part, logits)
        return np.asarray(logits[(total - 1) % len(logits)][None])


class ChunkFromZero(Batching):
    """Every chunk of a prompt starts again at position 0."""

    name = "batching-chunk-placed-from-zero"
    reports = ("huggingface/transformers/issues/43082",)
    severity = "broken"

    def positions(self, count: int) -> Ints:
        """Of the chunk."""
        return super().positions(count) if self.part.run.decodes else np.arange(count)


class LeastStartForAll(Batching):
    """All requests of a pass start at the position of the one that has least behind it."""

    name = "batching-one-start-for-all"
    reports = ("tenstorrent/tt-xla/pull/4190",)
    severity = "broken"

    def positions(self, count: int) -> Ints:
        """The minimum."""
        start = min(self._starts)
        return np.arange(start, start + count)

    def plan(
        self, runs: Sequence[Run], budget: int, draft_tokens: int, max_new_tokens: int
    ) -> list[Part]:
        """Note where they start."""
        parts = super().plan(runs, budget, draft_tokens, max_new_tokens)
        self._starts = [part.run.length for part in parts]
        return parts


class PaddingShifts(Batching):
    """Prompts are padded on the left to the longest of a pass, and positions count the padding."""

    name = "batching-padding-counted-in-positions"
    reports = ("huggingface/transformers/issues/29029",)
    severity = "subtle"

    def computed(self, part: Part, parts: Sequence[Part]) -> F32:
        """The padding is decided when the prompt comes."""
        if part.run.length == 0:
            longest = max(len(p.tokens) for p in parts)
            self._shift = {**getattr(self, "_shift", {}), id(part.run): longest - len(part.tokens)}
        return super().computed(part, parts)

    def positions(self, count: int) -> Ints:
        """Later by the padding: distances are right, angles are others."""
        shift: int = self._shift[id(self.part.run)]
        return super().positions(count) + shift


class PaddingSeen(Batching):
    """A shorter request of a pass sees the padding that fills its cache up, as a key of zeros."""

    name = "batching-padding-seen"
    reports = ("huggingface/transformers/issues/29029",)
    severity = "wrong"

    def recalled(self, index: int) -> tuple[F32, F32]:
        """One key of zeros before all others."""
        k, v = super().recalled(index)
        longest = max(part.run.length + len(part.tokens) for part in self.parts)
        if len(k) == longest:
            return k, v
        return np.concatenate([k[:1] * 0, k]), np.concatenate([v[:1] * 0, v])


class ChunkAlone(Batching):
    """A chunk of a prompt does not see the chunks before it."""

    name = "batching-chunk-sees-itself-alone"
    reports = ("kekzl/imp/pull/117",)
    severity = "broken"

    def recalled(self, index: int) -> tuple[F32, F32]:
        """The newest keys."""
        if self.part.run.decodes:
            return super().recalled(index)
        return self.keys[index][-1], self.values[index][-1]


class NeighbourOverwritten(Batching):
    """The padding behind a short request is written over the first position of the next one."""

    name = "batching-padding-overwrites-neighbour"
    reports = ("tenstorrent/tt-metal/issues/56324",)
    severity = "broken"

    def handed(self, computed: list[F32]) -> list[F32]:
        """Zeros, at the start of every later part of a pass with a longer one before it."""
        for before, after in zip(self.parts, self.parts[1:], strict=False):
            if len(before.tokens) < max(len(part.tokens) for part in self.parts):
                for store in after.run.state[1:]:
                    for layer in store:
                        layer[0] = layer[0].copy()
                        layer[0][0] = 0
        return super().handed(computed)


class SampledTooEarly(Batching):
    """The first token is chosen after the first chunk, before the prompt is computed to its end."""

    name = "batching-chosen-after-first-chunk"
    reports = ()
    severity = "broken"

    def prompt_done(self, run: Run) -> bool:
        """At once; the rest of the prompt is forgotten."""
        if not run.decodes:
            del run.tokens[run.length :]
        return True


class ChunkOverlaps(Batching):
    """A chunk begins with the last token of the one before."""

    name = "batching-chunks-overlap"
    reports = ()
    severity = "wrong"

    def chunk(self, run: Run, budget: int) -> list[int]:
        """One back."""
        rest = super().chunk(run, budget)
        return rest if run.length == 0 else [run.tokens[run.length - 1], *rest][:budget]


class ChunkSkips(Batching):
    """The token at the border of two chunks is skipped."""

    name = "batching-token-lost-between-chunks"
    reports = ("tinygrad/tinygrad/pull/15182",)
    severity = "wrong"

    def computed(self, part: Part, parts: Sequence[Part]) -> F32:
        """Its place holds the token after it."""
        if not part.run.decodes and part.run.length > 0 and len(part.tokens) > 1:
            part.tokens[0] = part.tokens[1]
        return super().computed(part, parts)


class MixedPassAhead(Batching):
    """In a pass with prompts, what decodes is one position ahead."""

    name = "batching-decode-ahead-beside-prompts"
    reports = ()
    severity = "subtle"

    def positions(self, count: int) -> Ints:
        """Where both are there."""
        mixed = any(not part.run.decodes for part in self.parts)
        return super().positions(count) + (mixed and self.part.run.decodes)


class RewoundAlike(Batching):
    """All requests of a pass forget as many drafted tokens as the first."""

    name = "batching-one-rewind-for-all"
    reports = ("Blaizzy/mlx-vlm/pull/1155",)
    severity = "broken"

    def rewind_of(self, part: Part, drafted: int, taken: int) -> None:
        """The first one's count, as far as there are drafts."""
        if part is self.parts[0]:
            self._rejected = drafted - taken
        self.cut(self.length - min(drafted, self._rejected))


class DraftsCut(Batching):
    """The cache of a request whose draft was rejected as a whole is not rewound."""

    name = "batching-rejected-as-a-whole-stays"
    reports = ()
    severity = "wrong"

    def rewind_of(self, part: Part, drafted: int, taken: int) -> None:
        """Zero accepted is taken for nothing drafted."""
        super().rewind_of(part, drafted if taken else 0, taken)


class OrderByCompany(Batching):
    """A part that shares a pass with others is computed by fast attention."""

    name = "batching-fast-in-company"
    reports = ("vllm-project/vllm/issues/53257",)
    severity = "subtle"
    contract = True

    def computed(self, part: Part, parts: Sequence[Part]) -> F32:
        """Only what is alone is exact."""
        self.part, self.parts = part, parts
        self.enter(part.run.state)
        logits = self.forward(part.tokens, "fast" if len(parts) > 1 else "exact")
        part.run.state = self.state()
        return logits


class EqualLengthsSwapped(Batching):
    """Decoding requests are sorted by length, and two of one length get each other's logits."""

    name = "batching-equal-lengths-swapped"
    reports = ()
    severity = "broken"

    def handed(self, computed: list[F32]) -> list[F32]:
        """Turned round among those of one length; ties come back in another order."""
        lengths = [part.run.length if part.run.decodes else -i for i, part in enumerate(self.parts)]
        out = list(computed)
        for length in set(lengths):
            alike = [i for i, other in enumerate(lengths) if other == length]
            if len({len(computed[i]) for i in alike}) == 1:
                for here, there in zip(alike, alike[::-1], strict=True):
                    out[here] = computed[there]
        return out
