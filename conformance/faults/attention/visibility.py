"""Mistakes of who sees whom (SPEC 8.1)."""

from __future__ import annotations

import numpy as np

from conformance.faults.attention.mistake import Attention
from reference.arithmetic import Bools


class CausalTopLeft(Attention):
    """The causal limit counts from the chunk's first row instead of its place in the sequence."""

    name = "attention-causal-top-left"
    reports = ("gittensor-ai-lab/sparkinfer/issues/3", "onnx/onnx/issues/8054")
    severity = "broken"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Rows are taken for the first of the sequence."""
        return super().visible(max(rows, keys), keys, window)[:rows]


class NotCausal(Attention):
    """No causal mask: every row sees the whole sequence."""

    name = "attention-not-causal"
    reports = ("huggingface/transformers/pull/48760",)
    severity = "broken"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """The window's lower end alone."""
        back = np.arange(keys - rows, keys)[:, None] - np.arange(keys)
        return back < keys if window is None else back < window


class MaskEndsAt512(Attention):
    """The causal mask is not applied to keys from position 512 on."""

    name = "attention-mask-ends-at-512"
    reports = ("vllm-project/vllm-ascend/issues/15503",)
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Keys from 512 on are seen by all."""
        return super().visible(rows, keys, window) | (np.arange(keys) >= 512)


class WindowOneMore(Attention):
    """A sliding window holds one key too many."""

    name = "attention-window-one-more"
    reports = ("huggingface/transformers/issues/39408", "huggingface/transformers/pull/26792")
    severity = "subtle"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """W + 1 keys."""
        return super().visible(rows, keys, None if window is None else window + 1)


class WideWindowOneMore(Attention):
    """A window of 2,048 keys or more holds one too many; narrower ones are right."""

    name = "attention-wide-window-one-more"
    reports = ("vllm-project/vllm/issues/3385",)
    severity = "subtle"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """W + 1 keys where W is large."""
        return super().visible(rows, keys, window + (window >= 2048) if window else window)


class WindowOneLess(Attention):
    """A sliding window holds one key too few."""

    name = "attention-window-one-less"
    reports = ("lightseekorg/tokenspeed/pull/578",)
    severity = "subtle"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """W - 1 keys."""
        return super().visible(rows, keys, None if window is None else window - 1)


class MissesNewest(Attention):
    """A row sees what came before it and not its own key, with a window or without."""

    name = "attention-misses-newest"
    reports = ()
    severity = "broken"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """j < t instead of j <= t."""
        own = np.arange(keys - rows, keys)[:, None] == np.arange(keys)
        return np.asarray(super().visible(rows, keys, window) & ~own)


class LastBlockOfOne(Attention):
    """A last block of 32 keys that holds one key alone is left out."""

    name = "attention-last-block-of-one"
    reports = ()
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Where a row is the first of its block, but for the first row of all, not its own key."""
        seen = super().visible(rows, keys, window)
        place = np.arange(keys - rows, keys)[:, None]
        dropped = (place == np.arange(keys)) & (place % 32 == 0) & (place > 0)
        return np.asarray(seen & ~dropped)


class WindowMissesNewest(Attention):
    """A sliding window leaves out the row's own key."""

    name = "attention-window-misses-newest"
    reports = ("microsoft/onnxruntime/pull/25927",)
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Not the diagonal, where there is a window."""
        seen = super().visible(rows, keys, window)
        own = np.arange(keys - rows, keys)[:, None] == np.arange(keys)
        return seen if window is None else seen & ~own


class WindowIgnored(Attention):
    """The sliding window is not applied."""

    name = "attention-window-ignored"
    reports = ("EricLBuehler/mistral.rs/issues/246",)
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """All that came before."""
        return super().visible(rows, keys, None)


class WindowFromChunk(Attention):
    """The window's lower end counts from the chunk's first row instead of its place."""

    name = "attention-window-from-chunk"
    reports = ("huggingface/transformers/pull/41228",)
    severity = "wrong"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """The lower end is too far back by the length of the cache."""
        low = 0 if window is None else window + max(0, keys - rows)
        return super().visible(rows, keys, None if window is None else low)


class RingOverwritten(Attention):
    """A prompt longer than the window overwrites the ring of keys before its rows have read it."""

    name = "attention-ring-overwritten"
    reports = ("Lightning-AI/litgpt/issues/2182",)
    severity = "broken"

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Only the last W keys are left, at slots that are taken for positions."""
        if window is None or rows <= window:
            return super().visible(rows, keys, window)
        index = np.arange(keys)
        slot = index % max(window, 1)
        return (index >= keys - window) & (slot <= np.arange(keys - rows, keys)[:, None])
