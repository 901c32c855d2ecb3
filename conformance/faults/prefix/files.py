"""Mistakes of saved caches (SPEC 11.4)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from conformance.backends.composed.serving import Kept, ServingSession
from conformance.backends.reference import Ints
from conformance.faults.fault import SessionFault, half


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
