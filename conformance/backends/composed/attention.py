"""Exact attention in steps, head by head (SPEC 8)."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.backends.composed.arithmetic import ArithmeticSteps, Floats
from reference.arithmetic import F32, NAN, Bools, one_nan
from reference.attention import Scores, attention_fast, default_scale


class AttentionSteps(ArithmeticSteps):
    """`attention` one step at a time; `fast` is the reference's own."""

    def attention(
        self,
        q: F32,
        k: F32,
        v: F32,
        mode: str,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: F32 | None = None,
        **others: Any,
    ) -> F32:
        """SPEC 8.2, head by head."""
        if self.attends_fast(mode):
            return attention_fast(q, k, v, scale, window, softcap, sinks)
        about = Scores(
            default_scale(q.shape[2]) if scale is None else np.float32(scale),
            window,
            None if softcap is None else np.float32(softcap),
        )
        out = np.empty_like(q)
        with np.errstate(all="ignore"):
            for head in range(q.shape[1]):
                source = self.key_value_head(head, q.shape[1], k.shape[1])
                sink = np.float32(-np.inf) if sinks is None else sinks[head]
                out[:, head] = self.head(q[:, head], k[:, source], v[:, source], about, sink)
        return out

    def attends_fast(self, mode: str) -> bool:
        """Whether to hand over to the reference's fast attention (SPEC 8.3)."""
        return mode == "fast"

    def key_value_head(self, head: int, heads: int, kv_heads: int) -> int:
        """The key-value head that a query head reads (SPEC 1.2)."""
        return head // (heads // kv_heads)

    def head(self, q: F32, k: F32, v: F32, about: Scores, sink: np.float32) -> F32:
        """One head, q (T, D), k and v (S, D) -> (T, D) (SPEC 8.2)."""
        visible = self.visible(len(q), len(k), about.window)
        finite = np.asarray(np.isfinite(k).all(axis=-1) & np.isfinite(v).all(axis=-1))
        usable = np.asarray(np.isfinite(q).all(axis=-1))
        q, k, v = (
            np.where(good[:, None], x, np.float32(0))
            for x, good in ((q, usable), (k, finite), (v, finite))
        )
        t = self.scores(q, k, about.scale)
        no_sink = bool(np.isnan(sink) or sink == np.inf)
        broken = np.asarray(~usable | self.touched(visible, ~(np.isfinite(t) & finite)) | no_sink)
        t = np.where(broken[:, None], np.float32(0), t)
        sink = sink if np.isfinite(sink) else np.float32(-np.inf)
        u = np.where(visible, self.capped(t, about.softcap), np.float32(-np.inf))
        out = self.divide(*self.sums(u, v, sink))
        out[broken] = NAN
        return self.blinded(one_nan(out), visible, v)

    def visible(self, rows: int, keys: int, window: int | None) -> Bools:
        """Who sees whom, (T, S) (SPEC 8.1)."""
        back = np.arange(keys - rows, keys)[:, None] - np.arange(keys)
        return back >= 0 if window is None else (back >= 0) & (back < window)

    def touched(self, visible: Bools, broken: Bools) -> Bools:
        """The rows that see something broken, (T,) (SPEC 8.2)."""
        return np.asarray((visible & broken).any(axis=-1))

    def scores(self, q: F32, k: F32, scale: np.float32) -> F32:
        """t of SPEC 8.2, (T, S)."""
        t: F32 = self.product(q, k) * scale
        return t

    def capped(self, t: F32, softcap: np.float32 | None) -> F32:
        """u of SPEC 8.2."""
        return t if softcap is None else softcap * self.tanh(t / softcap)

    def sums(self, u: F32, v: F32, sink: np.float32) -> tuple[Floats, Floats]:
        """Numerator (T, D) and denominator (T, 1) from scores, -inf where not visible."""
        m = self.peak(u, sink)
        p = self.shares(u, m)
        num, den = self.weighted(p, v)
        return num, (den + self.sink_share(sink, m))[:, None]

    def peak(self, u: F32, sink: np.float32) -> F32:
        """m of SPEC 8.2, (T,); 0 where nothing counts."""
        m = np.maximum(u.max(axis=-1, initial=-np.inf), sink)
        return np.where(m == -np.inf, np.float32(0), m)

    def shares(self, u: F32, m: F32) -> F32:
        """p of SPEC 8.2."""
        return self.exp(u - m[:, None])

    def sink_share(self, sink: np.float32, m: F32) -> F32:
        """What a sink adds to the denominator, (T,) (SPEC 8.2)."""
        return self.exp(sink - m)

    def blinded(self, out: F32, visible: Bools, v: F32) -> F32:
        """A row that sees nothing is +0 (SPEC 8.2)."""
        out[~visible.any(axis=-1)] = 0
        return out
