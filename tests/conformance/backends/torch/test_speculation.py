"""Drafts by n-gram lookup (SPEC 13.3)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from conformance.backends.torch.speculation import propose
from reference.sampling import Sampling
from reference.speculation import NgramDraft
from tests.oracle import serving


def test_drafts() -> None:
    """Sizes from 3 down, the latest occurrence, over and over (13.3)."""
    assert propose([7, 8, 9, 5, 7, 8], 3) == [9, 5, 7]
    assert propose([1, 2, 3, 4, 2, 3, 5, 2, 3], 4) == [5, 2, 3, 5]
    assert propose([4, 4, 4], 5) == [4] * 5
    assert propose([1, 2, 3], 5) == []
    assert propose([1], 5) == []
    rng = np.random.default_rng(28)
    for _ in range(300):
        context = rng.integers(0, 4, int(rng.integers(1, 30))).tolist()
        count = int(rng.integers(0, 9))
        proposed = NgramDraft().propose(np.array(context), count, Sampling()).tokens
        assert propose(context, count) == list(proposed)
        assert serving.draft(context, count) == list(proposed)
