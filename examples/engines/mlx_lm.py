"""mlx-lm as it is: whole models in float32 on the CPU, from folders of Hugging Face.

    pip install 'mlx[cpu]' mlx-lm
    bitforbit check examples/engines/mlx_lm.py --case 'model/*:gauge'

It is given the folder and nothing else. What it cannot load is not implemented, for its own reason.
"""

# ruff: noqa: D102

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from conformance.operations import NotImplementedByBackendError

mx.set_default_device(mx.cpu)


class Backend:
    """Float32 weights, activations and cache."""

    numerics = {"accumulator": "float32"}  # noqa: RUF012

    def load(self, model: Any, weights: str = "float32") -> Session:
        if weights != "float32":
            raise NotImplementedByBackendError(f"weights as {weights}")
        try:
            session = Session(load_model(Path(model))[0])
            session.forward(np.zeros(1, np.int64))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise NotImplementedByBackendError(f"{Path(model).name} ({reason})") from error
        return session


class Session:
    """A model, and the sequence fed to it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model.update(tree_map(lambda x: x.astype(mx.float32), model.parameters()))
        self.reset()

    def reset(self) -> None:
        self.cache = make_prompt_cache(self.model)

    def forward(self, tokens: Any, attention: str = "exact") -> Any:
        return np.array(self.model(mx.array(tokens)[None], cache=self.cache)[0])
