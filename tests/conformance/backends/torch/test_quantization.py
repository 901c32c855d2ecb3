"""int4, int8 and blocks of GGUF, bit for bit (SPEC 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conformance.backends.torch.quantization import pack, quantize_by_search
from reference.quantization import quantize_int4_row
from tests.conformance.backends.torch.side_by_side import (
    TORCH,
    both,
    nasty,
    same,
    weights,
)


def test_quantize_int4() -> None:
    rng = np.random.default_rng(4)
    for k in (1, 2, 31, 32, 33, 77, 128):
        both("quantize_int4", w=weights(rng, 60, k), group=32)
        both("quantize_int4", w=weights(rng, 60, k), group=0)


def test_quantize_int4_search() -> None:
    rng = np.random.default_rng(5)
    for k in (1, 2, 33, 77, 128):
        w = weights(rng, 60, k)
        ours, theirs = quantize_by_search(torch.tensor(w)), quantize_int4_row(w, search=True)
        same(ours.scales.numpy().astype(np.float16), theirs.scales, k)
        same(pack(ours.codes).numpy(), theirs.packed, k)


@pytest.mark.parametrize("value", [np.inf, np.nan, 7 * 65520.0])
def test_unquantizable_weights_are_refused(value: float) -> None:
    w = np.zeros((2, 40), np.float32)
    w[1, 35] = value
    for group in (0, 32):
        with pytest.raises(ValueError, match=r"float16|finite"):
            TORCH.quantize_int4(w=w, group=group)


def test_quantize_int8() -> None:
    rng = np.random.default_rng(6)
    for k in (1, 31, 96):
        both("quantize_int8", x=nasty(rng, 200, k))
        both("quantize_int8", x=nasty(rng, 200, k, specials=0.2 / k))
    ties = (rng.integers(-127, 128, (50, 40)) + 0.5).astype(np.float32)
    ties[:, 0] = 127
    both("quantize_int8", x=ties)


def test_linear_int4() -> None:
    rng = np.random.default_rng(7)
    for k in (1, 2, 33, 100, 130):
        x = nasty(rng, 30, k, specials=0.05 / k)
        for group in (0, 32):
            packed, scales = TORCH.quantize_int4(w=weights(rng, 40, k), group=group)
            both("linear_int4", x=x, packed=packed, scales=scales, group=group)


def test_linear_w4a16() -> None:
    rng = np.random.default_rng(8)
    for k, group in ((1, 32), (33, 32), (130, 64), (256, 128), (100, 0)):
        groups = -(-k // group) if group else 1
        given: dict[str, Any] = {
            "x": nasty(rng, 30, k, specials=0.05 / k),
            "packed": rng.integers(0, 256, (40, (k + 1) // 2), np.uint8),
            "scales": np.ldexp(
                rng.uniform(-1, 1, (40, groups)), rng.integers(-26, 7, (40, groups))
            ).astype(np.float16),
            "group": group,
        }
        both("linear_w4a16", **given)
        both("linear_w4a16", **given, zeros=rng.integers(0, 16, (40, groups), np.uint8))
    with pytest.raises(ValueError, match="do not fit groups of 64"):
        TORCH.linear_w4a16(**{**given, "group": 64})


@pytest.mark.parametrize(("operation", "size"), [("linear_q4_0", 18), ("linear_q8_0", 34)])
def test_linear_on_blocks(operation: str, size: int) -> None:
    rng = np.random.default_rng(9)
    for groups in (1, 2, 5):
        x = nasty(rng, 30, 32 * groups, specials=0.05 / groups)
        blocks = rng.integers(0, 256, (40, groups, size), np.uint8)
        scales = np.ldexp(rng.uniform(-1, 1, (40, groups)), rng.integers(-26, 7, (40, groups)))
        blocks[:, :, :2] = scales.astype("<f2")[:, :, None].view(np.uint8)
        both(operation, x=x, blocks=blocks)
    with pytest.raises(ValueError, match="do not fit"):
        getattr(TORCH, operation)(x=x[:, :-1], blocks=blocks)
