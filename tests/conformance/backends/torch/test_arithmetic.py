"""Linear layers, norms and the feed-forward layer, bit for bit (SPEC 2, 6, 9)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.conformance.backends.torch.side_by_side import (
    both,
    nasty,
)


def test_linear() -> None:
    rng = np.random.default_rng(3)
    for k in (1, 2, 31, 32, 33, 64, 95, 200):
        x, w, bias = nasty(rng, 30, k), nasty(rng, 25, k), nasty(rng, 25, specials=0.2)
        both("linear", x=x, w=w, bias=None)
        both("linear", x=x, w=w, bias=bias)
        x, w = nasty(rng, 30, k, specials=0.1 / k), nasty(rng, 25, k, specials=0.1 / k)
        both("linear", x=x, w=w, bias=None)
    x = rng.standard_normal((20, 64)).astype(np.float32)
    x[:, 32:] = -x[:, :32]
    both("linear", x=x, w=np.ones((3, 64), np.float32), bias=None)


def test_rms_norm() -> None:
    rng = np.random.default_rng(8)
    for k in (1, 31, 32, 64, 100, 192):
        for eps in (1e-6, 1e-5, 0.0, 1e-300):
            weight = nasty(rng, k, specials=0.1)
            both("rms_norm", x=nasty(rng, 50, k, specials=0.1 / k), weight=weight, eps=eps)


def test_gated_mlp() -> None:
    rng = np.random.default_rng(9)
    for activation in ("silu", "gelu_tanh"):
        for k, inner in ((33, 70), (64, 96)):
            x, gate, up = nasty(rng, 20, k), nasty(rng, inner, k), nasty(rng, inner, k)
            down = nasty(rng, k, inner)
            both("gated_mlp", x=x, gate=gate, up=up, down=down, activation=activation)
            scaled = {"x": x, "gate": gate, "up": up, "down": down}
            tame = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in scaled.items()}
            both("gated_mlp", **tame, activation=activation)
