"""Rotary embedding, bit for bit (SPEC 7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.conformance.backends.torch.side_by_side import (
    both,
    nasty,
)

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 2048},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.1,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 1.0,
        "mscale": 0.0,
        "mscale_all_dim": 1.0,
    },
)


def longrope(head_dim: int, **more: Any) -> dict[str, Any]:
    """Longrope from position 1,000 on; its lists have an element for each pair."""
    steps = np.arange(head_dim // 2)
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1000,
        "short_factor": (1 + steps / 64).tolist(),
        "long_factor": (1.1 + steps / 3).tolist(),
        **more,
    }


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"factor": 0.5}, {"attention_factor": 1.1}])
def test_longrope_constants(more: dict[str, Any]) -> None:
    for head_dim in (16, 64):
        given = longrope(head_dim, **more) | {"rope_theta": 10000.0, "head_dim": head_dim}
        for position in (0, 999, 1000, 4000):
            full = given | {"max_position_embeddings": 4096}
            both("rope_constants", parameters=full, position=position)


@pytest.mark.parametrize("parameters", ROPES)
def test_rope_constants(parameters: dict[str, Any]) -> None:
    for head_dim in (16, 64, 128):
        for theta in (10000.0, 500000.0, 1e6, 1000.5):
            given = parameters | {"rope_theta": theta, "head_dim": head_dim}
            for position in (0, 4095, 4096, 5000):
                full = given | {"max_position_embeddings": 4096}
                both("rope_constants", parameters=full, position=position)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    rng = np.random.default_rng(10)
    for half in (1, 8, 16):
        positions = np.array([0, 1, 2, 1000, 65535, 2**24 - 1, *rng.integers(0, 2**24, 30)])
        inv_freq = (10000.0 ** -rng.random(half)).astype(np.float32)
        x = nasty(rng, len(positions), 3, 32, specials=0.02)
        for factor in (1.0, 1.2):
            both(
                "rope",
                x=x,
                positions=positions,
                inv_freq=inv_freq,
                factor=factor,
                interleaved=interleaved,
            )
