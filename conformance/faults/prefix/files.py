"""Mistakes of saved caches (SPEC 11.4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from conformance.backends.composed.serving import Kept, ServingSession, State
from conformance.backends.reference import Ints
from conformance.faults.fault import SessionFault, half
from reference.cache import PAGE_SIZE
from reference.cache.sequence import first_seen


class Files(SessionFault, ServingSession):
    """A mistake in saving a sequence and going on from it."""

    operations: ClassVar[tuple[str, ...]] = ("resume",)


class RestoreDoesNothing(Files):
    """Restoring reads the file, and nothing of it is found afterwards."""

    name = "prefix-restore-does-nothing"
    reports = ("ggml-org/llama.cpp/issues/26676",)
    severity = "subtle"

    def restored(self, path: Path) -> Kept:
        """No tokens."""
        return Kept(np.zeros(0, np.int64), super().restored(path).state)


class RestoredInHalf(Files):
    """Keys and values are saved in float16."""

    name = "prefix-saved-in-float16"
    reports = ("ggml-org/llama.cpp/issues/1257",)
    severity = "subtle"

    def save(self, path: Path, kept: Kept) -> None:
        """Rounded."""
        length, keys, values = kept.state
        rounded = [[[half(x) for x in layer] for layer in part] for part in (keys, values)]
        super().save(path, Kept(kept.tokens, (length, rounded[0], rounded[1])))


class KeysForValues(Files):
    """Values are restored from the keys' place in the file."""

    name = "prefix-values-restored-from-keys"
    reports = ()
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """One for both."""
        kept = super().restored(path)
        return Kept(kept.tokens, (kept.state[0], kept.state[1], kept.state[1]))


class PositionsNotRestored(Files):
    """The count of positions is not restored: what follows is placed from 0 on."""

    name = "prefix-positions-not-restored"
    reports = ("vllm-project/vllm-metal/pull/144",)
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """Remember that it was."""
        self._offset = super().restored(path).state[0]
        return super().restored(path)

    def positions(self, count: int) -> Ints:
        """Less by the restored ones."""
        return super().positions(count) - getattr(self, "_offset", 0)


class LayersShifted(Files):
    """Each layer is restored from the one before it."""

    name = "prefix-layers-restored-one-off"
    reports = ()
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """Rolled by one."""
        kept = super().restored(path)
        length, keys, values = kept.state
        return Kept(kept.tokens, (length, keys[-1:] + keys[:-1], values[-1:] + values[:-1]))


class LastPageLost(Files):
    """Whole pages alone are saved, and the positions behind them are restored as zeros."""

    name = "prefix-last-page-not-saved"
    reports = ()
    severity = "wrong"

    def restored(self, path: Path) -> Kept:
        """Nothing behind the last whole page."""
        kept = super().restored(path)
        for part in kept.state[1:]:
            for layer in part:
                layer[0][kept.state[0] // PAGE_SIZE * PAGE_SIZE :] = 0
        return kept


class RowsShifted(Files):
    """Every position is restored from the one before it."""

    name = "prefix-positions-restored-one-off"
    reports = ()
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """Rolled by one."""
        kept = super().restored(path)
        length, *parts = kept.state
        keys, values = ([[np.roll(x[0], 1, axis=0)] for x in part] for part in parts)
        return Kept(kept.tokens, (length, keys, values))


class HeadsMixed(Files):
    """Keys and values are saved head by head and restored position by position."""

    name = "prefix-heads-restored-as-positions"
    reports = ()
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """The same numbers in the other order."""
        kept = super().restored(path)
        length, *parts = kept.state
        keys, values = ([[x[0].swapaxes(0, 1).reshape(x[0].shape)] for x in part] for part in parts)
        return Kept(kept.tokens, (length, keys, values))


class WindowStartLost(Files):
    """Of a layer with a window the file lacks the first position that the next token sees."""

    name = "prefix-window-saved-one-short"
    reports = ()
    severity = "subtle"

    def restored(self, path: Path) -> Kept:
        """Zeros up to it."""
        kept = super().restored(path)
        for part in kept.state[1:]:
            for layer, window in zip(part, self.config.windows, strict=True):
                if window is not None:
                    layer[0][: first_seen(kept.state[0], window) + 1] = 0
        return kept


class TokensNotRestored(Files):
    """Keys and values are restored and tokens are not: all of a prompt is computed behind them."""

    name = "prefix-restored-before-the-whole-prompt"
    reports = ()
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """Remember what was there."""
        kept = super().restored(path)
        self._held: State | None = kept.state
        return Kept(kept.tokens[:0], kept.state)

    def reuse(self, prompt: Ints) -> int:
        """Nothing is found, and nothing forgotten."""
        found = super().reuse(prompt)
        if getattr(self, "_held", None) is not None:
            self.enter(self._held)  # type: ignore[arg-type]
            self._held = None
        return found


class ChosenSaved(Files):
    """The token that was chosen is saved with those that were computed, and has no key."""

    name = "prefix-saves-the-token-chosen"
    reports = ()
    severity = "subtle"

    def save(self, path: Path, kept: Kept) -> None:
        """One more, of zeros."""
        length, keys, values = kept.state
        rows = [[np.concatenate(x) for x in part] for part in (keys, values)]
        more = [[[np.append(x, 0 * x[-1:], axis=0)] for x in part] for part in rows]
        tokens = np.append(kept.tokens, self._chosen)
        super().save(path, Kept(tokens, (length + 1, more[0], more[1])))

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Note it."""
        self._chosen = tokens[-1]
        super().retain(prompt, tokens)


class FileTailLost(Files):
    """The last position of the file is restored as zeros."""

    name = "prefix-last-position-restored-empty"
    reports = ()
    severity = "subtle"

    def restored(self, path: Path) -> Kept:
        """Nothing there."""
        kept = super().restored(path)
        for part in kept.state[1:]:
            for layer in part:
                layer[0][-1] = 0
        return kept
