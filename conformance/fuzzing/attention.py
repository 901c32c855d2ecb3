"""Draws for attention, whole and over pages (SPEC 8, 11.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.fuzzing.draw import Draw, to_power, within
from conformance.fuzzing.drawn import Drawer, Drawn
from conformance.fuzzing.kernels import LARGE, opposite
from reference.arithmetic import BLOCK, F32

WORK, EACH = 1 << 20, 32
"""Products of queries with keys over all heads, at most; a score costs as much as so many more."""

REACH = 8.0
"""The largest element of a query or key where a bound is asked: it is of first order in a score."""

SCORED = (
    "normal",
    "whole-numbers",
    "zeros",
    "one-hot",
    "one-sign",
    "outlier-channels",
    "subnormal",
)
VALUES = (*SCORED, "heavy-tails", "cancelling", "tiny")
SINKS = {"large": 10, "far": 95}
"""How much larger than scores a sink is: the second so far that what is left is subnormal."""

CAPS = (None, None, 30.0, 5.0, 0.5)


@dataclass(frozen=True)
class Heads:
    """Sizes of one call: rows of queries, keys, key-value heads, heads a group, head_dim."""

    rows: int
    keys: int
    kv_heads: int
    group: int
    width: int

    @classmethod
    def draw(cls, draw: Draw) -> Heads:
        """Rows are the last of the keys; one time in eight there are more rows than keys."""
        width = draw.size("head_dim", 128)
        kv_heads, group = draw.pick("kv_heads", (1, 2, 3)), draw.pick("group", (1, 2, 3, 4, 8))
        scores = WORK // ((width + EACH) * kv_heads * group)
        rows = draw.size("rows", min(520, math.isqrt(scores)))
        past = draw.size("past", min(4100, scores // rows), 0) if draw.flag("warm") else 0
        blind = draw.pick("blind", (0, 0, 0, 0, 0, 0, 0, 1))
        keys = max(1, rows // 2) if blind else rows + past
        return cls(rows, keys, kv_heads, group, width)

    def queries(self, draw: Draw) -> F32:
        """q (T, Hq, D)."""
        return self._scored(draw, "q", self.rows, self.kv_heads * self.group, self.width)

    def keys_and_values(self, draw: Draw) -> tuple[F32, F32]:
        """k and v (S, Hkv, D)."""
        shape = self.keys, self.kv_heads, self.width
        k, v = self._scored(draw, "k", *shape), draw.data("v", *shape, kinds=VALUES)
        if draw.asked.exact and self.keys >= 3 * BLOCK and opposite(draw):
            v[:BLOCK] = to_power(v[:BLOCK], LARGE)
            k[2 * BLOCK : 3 * BLOCK], v[2 * BLOCK : 3 * BLOCK] = k[:BLOCK], -v[:BLOCK]
        return k, v

    def _scored(self, draw: Draw, name: str, *shape: int) -> F32:
        """Queries or keys, within reach where they are of no extreme kind."""
        before, draw.extreme = draw.extreme, False
        x = draw.data(name, *shape, kinds=SCORED)
        x = x if draw.extreme else within(x, REACH)
        draw.extreme |= before
        return x

    def options(self, draw: Draw) -> dict[str, Any]:
        """Scale, window and softcap."""
        windowed = draw.flag("windowed")
        return {
            "scale": draw.pick("scale", (0.125, 0.25, 0.0625, float(np.float32(0.3)))),
            "window": draw.size("window", self.keys + 2) if windowed else None,
            "softcap": draw.pick("softcap", CAPS),
        }


def poison(draw: Draw, q: F32, k: F32, v: F32, window: int | None) -> None:
    """NaN and infinities: in one query, ahead of some rows, behind the window of all (SPEC 8.2).

    Put into q (T, Hq, D), k and v (S, Hkv, D), in place.
    """
    where = draw.pick("poison", ("none", "none", "none", "ahead", "behind", "query"))
    rows, keys = len(q), len(k)
    if where == "ahead" and rows > 1:
        first = keys - int(draw.integers("ahead", min(rows, keys), 1)[0]) - 1
        k[first:], v[first:] = np.inf, np.nan
    if where == "behind" and window is not None:
        unseen = max(0, keys - rows - window + 1)
        k[:unseen], v[:unseen] = np.nan, np.inf
    if where == "query":
        q[int(draw.integers("query", rows, 1)[0]), 0, -1] = np.nan


def attention(draw: Draw) -> Drawn:
    """Warm and cold, windows, softcap, sinks, groups of heads (SPEC 8.2)."""
    heads = Heads.draw(draw)
    q = heads.queries(draw)
    k, v = heads.keys_and_values(draw)
    about = heads.options(draw)
    if draw.pick("own-scale", (False, False, False, True)):
        about["scale"] = None
    poison(draw, q, k, v, about["window"])
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v}
    kind = draw.pick("sinks", ("none", "none", "normal", "large", "far", "some"))
    if kind != "none":
        sinks = draw.normal("sinks", q.shape[1]) + np.float32(SINKS.get(kind, 0))
        if kind == "some":
            sinks[::2] = -np.inf
        inputs["sinks"] = sinks
    return Drawn(about, inputs, not draw.extreme)


def paged_attention(draw: Draw) -> Drawn:
    """Pages of any size in any order; what is no position of the sequence is poison (SPEC 11.1)."""
    heads = Heads.draw(draw)
    size = draw.pick("page_size", (16, 1, 2, 4, 8, 32, 64, 128, 256))
    rows, length = min(heads.rows, heads.keys), heads.keys
    q = heads.queries(draw)[-rows:]
    k, v = heads.keys_and_values(draw)
    about = heads.options(draw)
    poison(draw, q, k, v, about["window"])
    count = -(-length // size)
    table = draw.permutation("table", count + 3)[:count]
    if draw.flag("in-order"):
        table = np.arange(count)
    slots = (table[:, None] * size + np.arange(size)).ravel()[:length]
    paged = []
    for x, filler in ((k, np.nan), (v, np.inf)):
        pages = np.full(((count + 3) * size, *x.shape[1:]), filler, np.float32)
        pages[slots] = x
        paged.append(pages.reshape(count + 3, size, *x.shape[1:]))
    inputs = {"q": q, "k_pages": paged[0], "v_pages": paged[1], "block_table": table}
    return Drawn({"length": length, **about}, inputs, not draw.extreme)


ATTENTION: Mapping[str, Drawer] = {"attention": attention}
PAGED: Mapping[str, Drawer] = {"paged_attention": paged_attention}
