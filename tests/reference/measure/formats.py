"""What tests of the formats of weights have in common."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from conformance.generator import integers
from reference.loading import load_checkpoint
from reference.measure.formats import FORMATS
from reference.measure.quantization import Experiment

FIXTURES = Path(__file__).parents[3] / "fixtures"


@cache
def experiment(name: str = "tiny-draft", **options: Any) -> Experiment:
    tokens = integers("quantization", 1024, 200)
    wanted: dict[str, Any] = {"formats": tuple(FORMATS), "positions": 40, "context": 32} | options
    return Experiment(load_checkpoint(FIXTURES / name), tokens, **wanted)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
