"""Mistakes of prompts that come one after the other (SPEC 11.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from conformance.backends.composed.serving import Kept, ServingSession
from conformance.backends.reference import Ints
from conformance.faults.fault import SessionFault, half
from reference.cache import PAGE_SIZE
from reference.cache.sequence import first_seen
from reference.model import AttentionKind


class Turns(SessionFault, ServingSession):
    """A mistake in prompts that come one after the other."""

    operations: ClassVar[tuple[str, ...]] = ("turns",)


class OnePositionTooMany(Turns):
    """The first token that differs from what is kept is taken from it too."""

    name = "prefix-one-token-too-many"
    reports = ()
    severity = "subtle"

    def common(self, kept: Ints, prompt: Ints) -> int:
        """One more, where there is one."""
        return min(super().common(kept, prompt) + 1, len(kept), len(prompt) - 1)


class EditIgnored(Turns):
    """A kept sequence is used as far as it goes if its beginning is the prompt's."""

    name = "prefix-tokens-not-compared"
    reports = ("openvinotoolkit/openvino.genai/issues/3722",)
    severity = "broken"

    def common(self, kept: Ints, prompt: Ints) -> int:
        """Eight tokens decide for all."""
        if super().common(kept, prompt) < 8:
            return super().common(kept, prompt)
        return min(len(kept), len(prompt) - 1)


class NotCut(Turns):
    """What is kept is not cut back to the prefix, and the rest of the prompt comes after all."""

    name = "prefix-kept-sequence-not-cut"
    reports = ("nicedreamzapp/claude-code-local/issues/46",)
    severity = "broken"

    def reuse(self, prompt: Ints) -> int:
        """The whole sequence stays."""
        self._whole = True
        found = super().reuse(prompt)
        self._whole = False
        return found

    def cut(self, length: int) -> None:
        """Not while a prefix is taken."""
        if not getattr(self, "_whole", False):
            super().cut(length)


class SuffixFromZero(Turns):
    """The tokens after a reused prefix are placed from position 0 on."""

    name = "prefix-suffix-placed-from-zero"
    reports = ("nod-ai/amd-shark-ai/issues/2235",)
    severity = "broken"

    def turn(self, prompt: Ints, max_new_tokens: int) -> Any:
        """Note that a prompt comes."""
        self._prompt = True
        return super().turn(prompt, max_new_tokens)

    def positions(self, count: int) -> Ints:
        """The first call of a turn forgets the prefix."""
        first, self._prompt = self._prompt, False
        return np.arange(count) if first else super().positions(count)


class ReusedInHalf(Turns):
    """What is kept for later prompts is kept in float16."""

    name = "prefix-kept-in-float16"
    reports = ()
    severity = "subtle"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Rounded."""
        self.keys, self.values = (
            [[half(x) for x in layer] for layer in part] for part in (self.keys, self.values)
        )
        super().retain(prompt, tokens)


class ChosenCounted(Turns):
    """The last token chosen counts as computed, and the kept tokens are one more than the keys."""

    name = "prefix-last-chosen-counts"
    reports = ("waybarrios/vllm-mlx/pull/311",)
    severity = "subtle"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """All tokens."""
        self.kept.append(Kept(np.append(prompt, tokens).astype(np.int64), self.state(), self.exact))


class WindowKeptInHalf(Turns):
    """What layers with a window hold of a kept sequence is kept in float16, the rest as it is."""

    name = "prefix-window-kept-in-float16"
    reports = ()
    severity = "subtle"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Rounded."""
        self.keys, self.values = (
            [
                layer if window is None else [half(x) for x in layer]
                for layer, window in zip(part, self.config.windows, strict=True)
            ]
            for part in (self.keys, self.values)
        )
        super().retain(prompt, tokens)


class NeverTrimmed(Turns):
    """Pages behind a window are held for ever, and found."""

    name = "prefix-window-never-trimmed"
    reports = ()
    severity = "subtle"
    contract = True

    def dropped(self, length: int, window: int | None) -> int:
        """Nothing."""
        return 0


class TrimmedByPosition(Turns):
    """What is behind a window counts as dropped although its page is held."""

    name = "prefix-window-trimmed-by-position"
    reports = ()
    severity = "subtle"

    def dropped(self, length: int, window: int | None) -> int:
        """Not whole pages."""
        return first_seen(length, window)


class TrimmedTooFar(Turns):
    """The page in which a window begins is dropped with those behind it."""

    name = "prefix-window-page-too-many-trimmed"
    reports = ()
    severity = "wrong"

    def dropped(self, length: int, window: int | None) -> int:
        """Rounded up."""
        return -(-first_seen(length, window) // PAGE_SIZE) * PAGE_SIZE


class ExtendedGivenUp(Turns):
    """A sequence is given up for one that extends it, though that cannot be cut back so far."""

    name = "prefix-extended-sequence-given-up"
    reports = ()
    severity = "subtle"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Whatever the windows hold."""
        filled = np.append(prompt, tokens)[:-1]
        self.kept = [
            kept for kept in self.kept if self.common(kept.tokens, filled) < len(kept.tokens)
        ]
        super().retain(prompt, tokens)


class LastComputedTwice(Turns):
    """The last token of a known prompt is computed again behind itself."""

    name = "prefix-last-token-twice"
    reports = ("lablup/mlxcel/issues/1760",)
    severity = "subtle"

    def reuse(self, prompt: Ints) -> int:
        """The kept copy of it stays."""
        found = super().reuse(prompt)
        if found and found == len(prompt) - 1:
            self.forward(prompt[-1:])
        return found


class SharedWritten(Turns):
    """What is computed after a reused prefix is written over what is kept."""

    name = "prefix-kept-sequence-overwritten"
    reports = ("tenstorrent/tt-xla/pull/4190",)
    severity = "wrong"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """The newest keys land in the older sequences too."""
        super().retain(prompt, tokens)
        self.cut(self.length)
        for kept in self.kept[:-1]:
            length, keys, values = kept.state
            for old, new in ((keys, self.keys), (values, self.values)):
                for layer, row in zip(old, new, strict=True):
                    layer[:] = [_over(np.concatenate(layer), row[0])]
            assert length == len(keys[0][0])


def _over(old: Any, new: Any) -> Any:
    """The first eight positions of what is new, over what is old."""
    return np.concatenate([new[: min(8, len(old))], old[min(8, len(old)) :]])


class FastServesAll(Turns):
    """A sequence that fast attention computed serves every prompt."""

    name = "prefix-fast-serves-exact"
    reports = ()
    severity = "subtle"
    contract = True

    def exact_ones(self) -> list[Kept]:
        """All."""
        return self.kept


class FastServesNone(Turns):
    """A sequence that fast attention computed serves no prompt."""

    name = "prefix-fast-never-reused"
    reports = ()
    severity = "subtle"
    contract = True

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Exact ones alone are kept."""
        if self.exact:
            super().retain(prompt, tokens)


class AttentionMode(Turns):
    """A prompt's suffix after a reused prefix is computed by fast attention."""

    name = "prefix-suffix-computed-fast"
    reports = ()
    severity = "subtle"
    contract = True

    def forward(self, tokens: Ints, attention: AttentionKind = "exact") -> Any:  # type: ignore[override]
        """Several tokens behind others."""
        several = len(tokens) > 1 and self.length > 0
        return super().forward(tokens, "fast" if several else attention)


class FloorOneLate(Turns):
    """Fast attention begins at 513 tokens: what 512 computed is kept as exact."""

    name = "prefix-floor-one-late"
    reports = ()
    severity = "subtle"
    contract = True

    def prefill(self, prompt_n: int, exact_prefill: bool) -> AttentionKind:
        """More than the floor, not as many."""
        return super().prefill(prompt_n - 1, exact_prefill)


class FloorOfWholePrompt(Turns):
    """Whether attention is fast is decided by the whole prompt, with what is reused of it."""

    name = "prefix-floor-of-the-whole-prompt"
    reports = ()
    severity = "subtle"
    contract = True

    def turn(self, prompt: Ints, max_new_tokens: int) -> Any:
        """Note its length."""
        self._length = len(prompt)
        return super().turn(prompt, max_new_tokens)

    def prefill(self, prompt_n: int, exact_prefill: bool) -> AttentionKind:
        """All of it."""
        return super().prefill(self._length, exact_prefill)
