"""Plain float32 by torch: near the reference, and not exact (SPEC 17)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.conformance.backends.torch.side_by_side import (
    FIXTURES,
    FLOAT32,
    MODES,
    REFERENCE,
    TOKENS,
    TORCH,
)


def test_float32_is_near_and_not_exact() -> None:
    rng = np.random.default_rng(19)
    x, w = (rng.standard_normal((30, 200)).astype(np.float32) for _ in range(2))
    plain, exact = (backend.linear(x, w) for backend in (FLOAT32, TORCH))
    np.testing.assert_allclose(plain, exact, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(plain, exact)
    q, k, v = (rng.standard_normal((70, 2, 16)).astype(np.float32) for _ in range(3))
    plain, exact = (backend.attention(q, k, v) for backend in (FLOAT32, TORCH))
    np.testing.assert_allclose(plain, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_float32_session_is_near(mode: str) -> None:
    plain, exact = (b.load(str(FIXTURES / "tiny-dense"), mode) for b in (FLOAT32, TORCH))
    difference = np.abs(plain.forward(TOKENS, "fast") - exact.forward(TOKENS, "exact"))
    assert np.median(difference) < (1e-4 if mode == "float32" else 0.2)


def test_float32_experts_are_near_the_reference() -> None:
    folder, tokens = str(FIXTURES / "tiny-moe"), TOKENS[:40] % 48
    near, exact = (b.load(folder, "float32").forward(tokens, "exact") for b in (FLOAT32, REFERENCE))
    assert not np.array_equal(near, exact)
    np.testing.assert_allclose(near, exact, rtol=1e-3, atol=1e-3)
