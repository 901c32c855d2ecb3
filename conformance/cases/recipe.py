"""How a golden is made: inputs by the generator, outputs by the exact lane, a gauge (SPEC 15)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backends.reference import ReferenceBackend
from conformance.cases.contraction import Forms
from conformance.golden import Array, Golden
from conformance.operations import Sessions, call
from conformance.rules import mode_of
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32

BOTH = ("bits", "gauge")
"""The rules of a golden that bits and a bound can judge (SPEC 16)."""

EXACT = ReferenceBackend()
SESSIONS = Sessions(EXACT)

GaugeOf = Callable[[Mapping[str, Any], Mapping[str, Array]], Gauge]
FormsOf = Callable[[Mapping[str, Any]], Forms]


def array32(values: Sequence[Any]) -> F32:
    """Numbers written out as a float32 array."""
    return np.array(values, np.float32)


def packed(prompts: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """R prompts one behind the other, `tokens` (T,), and their `lengths` (R,), int64 (SPEC 17)."""
    return {
        "tokens": np.concatenate(prompts),
        "lengths": np.array([len(p) for p in prompts], np.int64),
    }


@dataclass(frozen=True)
class Recipe:
    """A golden before its outputs are computed.

    gauge: from the arguments of the call and its outputs to a Gauge; None where only bits count.
    forms: from the arguments to the other legal outputs, for the rule `either`.
    """

    id: str
    section: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Array]
    rules: tuple[str, ...] = ("bits",)
    gauge: GaugeOf | None = None
    note: str = ""
    operation: str = field(default="")
    forms: FormsOf | None = None

    def make(self, sessions: Sessions = SESSIONS) -> Golden:
        """Compute the golden on the exact lane; `sessions` finds the models."""
        operation = self.operation or self.id.split("/")[1]
        arguments = {**self.parameters, **self.inputs, **mode_of(operation, "bits")}
        outputs = call(EXACT, sessions, operation, arguments)
        gauge = Gauge() if self.gauge is None else self.gauge(arguments, outputs)
        return Golden(
            self.id,
            self.section,
            operation,
            self.parameters,
            {name: np.ascontiguousarray(array) for name, array in self.inputs.items()},
            outputs,
            self.rules,
            gauge.terms,
            gauge.models,
            gauge.distance,
            self.note,
            {} if self.forms is None else self.forms(arguments),
        )
