"""Random computations of a whole model: a backend whose steps a machine takes."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import OwnOrderBackend
from conformance.paths import model_folder
from conformance.rules.gauges import Gauge
from conformance.rules.noise import MODEL as NOISE
from conformance.rules.noise import spread
from reference.model import load_model
from tools.error_models.data import Computed
from tools.error_models.machine import F32, Machine, Rng


class MachineBackend(OwnOrderBackend):
    """Whole models whose sums a machine computes, and whose results it stores."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def product(self, x: F32, w: F32) -> F32:
        """A linear layer, or the scores of attention."""
        return self.machine.store(self.machine.dot(x, w)).astype(np.float32)

    def total(self, p: F32) -> F32:
        """The denominator of a softmax."""
        return self.machine.total(p.astype(np.float64)).astype(np.float32)

    def mean_square(self, x: F32) -> F32:
        """That of a norm."""
        fma, squares = self.machine.fma, np.square(self.machine.store(x))
        total = self.machine.total(squares if fma else self.machine.rn(squares), fma)
        return self.machine.rn(total / x.shape[-1]).astype(np.float32)


def whole(rng: Rng, m: Machine) -> Computed:
    """Logits of a model of random weights (SPEC 16.5)."""
    folder = model_folder(str(rng.choice(("random-mistral", "random-qwen2", "random-llama"))))
    model = load_model(folder)
    tokens = rng.integers(0, model.config.vocab_size, 12)
    noise = spread(model, f"prove/{rng.integers(2**40)}", tokens, len(tokens))
    session = MachineBackend(m).load(model=str(folder), weights="float32")
    session.reset()
    answer = session.forward(tokens, "fast").astype(np.float64)
    gauge = Gauge({"noise": noise}, {"noise": NOISE})
    return Computed("forward", {"tokens": tokens}, {}, model.forward(tokens), gauge, answer)
