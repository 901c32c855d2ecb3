"""The KV cache: the rotated keys and the values of every position so far (SPEC 11)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import BLOCK, F32, Aligned, AlignedRows, align, align_rows
from reference.attention import AlignedKeyValues, KeyValues


class LayerCache:
    """One layer's keys and values, kept as they came, and aligned when exact attention asks.

    Arrays have room for a multiple of 32 positions and at least double when they grow.
    """

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        shape = (kv_heads, 0, head_dim)
        self._k, self._v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._finite = np.zeros((kv_heads, 0), np.bool_)
        blocks = -(-head_dim // BLOCK)
        self._keys = Aligned(np.zeros((blocks, kv_heads, 0, BLOCK)), self._finite)
        self._values = AlignedRows(np.zeros(shape), np.zeros((kv_heads, 0)), self._finite)
        self._aligned = 0

    def write(self, k: F32, v: F32, start: int) -> None:
        """Store k and v, (T, Hkv, D) float32, at positions start, start + 1, ..."""
        stop = start + len(k)
        if stop > self._k.shape[1]:
            room = -(-max(stop, 2 * self._k.shape[1], 8 * BLOCK) // BLOCK) * BLOCK
            self._k, self._v = (_grown(x, room, 1) for x in (self._k, self._v))
            self._finite = _grown(self._finite, room, 1)
        here = slice(start, stop)
        self._k[:, here], self._v[:, here] = k.swapaxes(0, 1), v.swapaxes(0, 1)
        self._finite[:, here] = (np.isfinite(k).all(-1) & np.isfinite(v).all(-1)).T
        self._aligned = min(self._aligned, start)

    def plain(self, length: int) -> KeyValues:
        """The first `length` positions as they came."""
        return KeyValues(self._k[:, :length], self._v[:, :length], self._finite[:, :length])

    def aligned(self, length: int) -> AlignedKeyValues:
        """The same aligned, filled up to a multiple of 32 positions; each is aligned once."""
        room = self._k.shape[1]
        if self._keys.values.shape[2] < room:
            finite = _grown(self._keys.finite, room, 1)
            self._keys = Aligned(_grown(self._keys.values, room, 2), finite)
            digits, scale = (
                _grown(self._values.digits, room, 1),
                _grown(self._values.scale, room, 1),
            )
            self._values = AlignedRows(digits, scale, _grown(self._values.finite, room, 1))
        if self._aligned < length:
            self._align(slice(self._aligned, length))
        stop = -(-length // BLOCK) * BLOCK
        return AlignedKeyValues(
            Aligned(self._keys.values[:, :, :stop], self._keys.finite[:, :stop]),
            AlignedRows(
                self._values.digits[:, :stop],
                self._values.scale[:, :stop],
                self._values.finite[:, :stop],
            ),
        )

    def _align(self, here: slice) -> None:
        keys, values = align(self._k[:, here]), align_rows(self._v[:, here])
        self._keys.values[:, :, here], self._keys.finite[:, here] = keys.values, keys.finite
        self._values.digits[:, here], self._values.scale[:, here] = values.digits, values.scale
        self._values.finite[:, here] = values.finite
        self._aligned = here.stop


def _grown(x: NDArray[Any], room: int, axis: int) -> NDArray[Any]:
    """A copy of x with `room` positions along an axis, the new ones zero."""
    shape = list(x.shape)
    shape[axis] = room - shape[axis]
    return np.concatenate([x, np.zeros(shape, x.dtype)], axis=axis)


class KVCache:
    """What a sequence leaves behind for its next token: one LayerCache a layer (SPEC 11).

    length: positions that count. A forward pass raises it once every layer has been written, so a
    pass that fails leaves the cache as it was.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self.layers = tuple(LayerCache(kv_heads, head_dim) for _ in range(layers))
        self.length = 0

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        self.length = min(self.length, length)
