"""Sampling and the verification of drafts, bit for bit (SPEC 13)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.conformance.backends.torch.side_by_side import (
    REFERENCE,
    TORCH,
    both,
)


def test_philox() -> None:
    rng = np.random.default_rng(15)
    positions = np.concatenate([[0, 1, 2**31, 2**32 - 1], rng.integers(0, 2**32, 100)])
    for seed, request in ((0, 0), (2**64 - 1, 2**32 - 1), (0x123456789ABCDEF0, 7)):
        both("philox", seed=seed, request=request, positions=positions)
        both("philox", seed=seed, request=request, positions=positions, stream=3)


def test_philox_known_answer() -> None:
    """Known answers of Random123 for zero input: 6627e8d5 e169c58d."""
    word = TORCH.philox(seed=0, request=0, positions=np.zeros(1, np.int64))
    assert int(word[0]) == 0xE169C58D_6627E8D5


def test_sample() -> None:
    rng = np.random.default_rng(16)
    for i in range(600):
        size = int(rng.integers(1, 80))
        logits = (rng.standard_normal(size) * rng.choice([0.1, 2, 30])).astype(np.float32)
        if i % 4 == 0:
            logits = np.round(logits)
        logits[1:][rng.random(size - 1) < 0.2] = -np.inf
        both(
            "sample",
            logits=logits,
            temperature=float(rng.choice([0.0, 0.7, 1.0, 3.0])),
            top_k=int(rng.choice([0, 1, 5, 200])),
            top_p=float(rng.choice([1.0, 0.9, 0.3, 0.01])),
            min_p=float(rng.choice([0.0, 0.05, 0.5, 1.0])),
            repetition_penalty=float(rng.choice([1.0, 1.1, 0.7])),
            previous=rng.integers(0, size, int(rng.integers(0, 9))),
            seed=int(rng.integers(0, 2**63)),
            request=int(rng.integers(0, 2**32)),
            position=i,
        )


def test_verify_draft() -> None:
    rng = np.random.default_rng(17)
    lengths = set()
    for i in range(400):
        size, n = int(rng.integers(1, 30)), int(rng.integers(0, 5))
        logits = (rng.standard_normal((n + 1, size)) * rng.choice([0.1, 2, 30])).astype(np.float32)
        logits[:, 1:][rng.random((n + 1, size - 1)) < 0.2] = -np.inf
        weights = rng.integers(0, rng.choice([3, 2**40]), (n, size)) * (rng.random((n, size)) < 0.7)
        draft = logits[:n].argmax(axis=1) if i % 3 else rng.integers(0, size, n)
        weights[np.arange(n), draft] += 1
        arguments: dict[str, Any] = {
            "logits": logits,
            "draft": draft,
            "draft_weights": weights,
            "temperature": float(rng.choice([0.0, 0.7, 1.0, 3.0])),
            "top_k": int(rng.choice([0, 1, 5, 200])),
            "top_p": float(rng.choice([1.0, 0.9, 0.3])),
            "min_p": float(rng.choice([0.0, 0.05, 0.5])),
            "repetition_penalty": float(rng.choice([1.0, 1.1, 0.7])),
            "previous": rng.integers(0, size, int(rng.integers(0, 9))),
            "seed": int(rng.integers(0, 2**63)),
            "request": int(rng.integers(0, 2**32)),
            "position": i,
        }
        both("verify_draft", **arguments)
        lengths.add((n, len(REFERENCE.verify_draft(**arguments))))
    assert len(lengths) == 1 + 2 + 3 + 4 + 5
