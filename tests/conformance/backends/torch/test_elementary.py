"""Elementary functions and softmax, bit for bit (SPEC 4)."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.conformance.backends.torch.side_by_side import (
    FIXTURES,
    SPECIALS,
    both,
    nasty,
)

ELEMENTWISE = ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh")


def hard_inputs(name: str) -> list[int]:
    table = json.loads((FIXTURES.parent / "reference" / "hard_cases.json").read_text())
    return [int(x, 16) for x in table.get(name, {})]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    tame = (rng.standard_normal(200_000) * 8).astype(np.float32)
    near = (tame * 2.0 ** -rng.integers(0, 26, tame.shape)).astype(np.float32)
    special = SPECIALS.astype(np.float32)
    both(name, x=np.concatenate([anything.view(np.float32), tame, near, 1 + near, special]))


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "tanh"])
def test_hard_inputs(name: str) -> None:
    x = np.array(hard_inputs(name), dtype=np.uint32)
    assert len(x) > 50
    both(name, x=x.view(np.float32))


def test_softmax() -> None:
    rng = np.random.default_rng(2)
    for width in (1, 2, 31, 32, 33, 100, 257):
        both("softmax", x=nasty(rng, 40, width))
        both("softmax", x=nasty(rng, 40, width, specials=0.5 / width))
    x = (rng.standard_normal((60, 70)) * 30).astype(np.float32)
    x[rng.random(x.shape) < 0.5] = -np.inf
    x[0] = -np.inf
    both("softmax", x=x)
