"""The exact lane in steps: all operations together, and whole models made of them (SPEC 17)."""

from __future__ import annotations

from typing import Any

from conformance.backends.composed.attention import AttentionSteps
from conformance.backends.composed.layers import LayerSteps
from conformance.backends.composed.linear import LinearSteps
from conformance.backends.composed.sampling import SamplingSteps
from conformance.backends.composed.session import ComposedSession
from reference.weights import Mode


class ComposedBackend(LinearSteps, LayerSteps, AttentionSteps, SamplingSteps):
    """The exact lane in steps (SPEC 17). `fast` attention is the reference's own."""

    name = "composed"
    session: type[ComposedSession] = ComposedSession

    def load(self, model: str, weights: Mode) -> Any:
        """SPEC 10, by the operations above."""
        return self.session(self, model, weights)
