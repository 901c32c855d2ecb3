"""What making layers one at a time costs, beside the same model whole in memory (SPEC 12.3).

pytest tests/benchmarks/test_memory.py --benchmark-only -s
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.model import Model, Part, load_model
from reference.weights import Arithmetic
from tests.benchmarks.test_speed import compare

PROMPT = np.random.default_rng(0).integers(0, 32000, 512)


def forgetful(path: Path, arithmetic: Arithmetic) -> Model:
    """A model that makes every piece in every pass, from files that are in the page cache."""
    model = load_model(path, arithmetic=arithmetic, memory="8GiB")
    assert model.memory is not None
    model.memory.keep = lambda pieces, index, piece: None  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_layers_one_at_a_time_against_all(
    benchmark: Any, llama: Path, arithmetic: Arithmetic
) -> None:
    whole, parts = load_model(llama, arithmetic=arithmetic), forgetful(llama, arithmetic)

    def prefill(model: Model) -> None:
        model.forward_batch([Part(PROMPT, None, "fast", 1)])

    name = f"{arithmetic} prefill of 512 tokens, no layer kept, against all in memory"
    compare(benchmark, name, lambda: prefill(parts), lambda: prefill(whole), "0.67")
