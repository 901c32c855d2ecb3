"""Faults of prefixes, drafts and batches: each is caught by a short case (SPEC 20)."""

from __future__ import annotations

import pytest

from conformance.backends.composed import ComposedBackend
from conformance.backends.composed.serving import ServingSession
from conformance.cases.invariances import invariances
from conformance.faults import AnyFault, applied, faults
from conformance.faults.ending import Ending
from tests.conformance.faults.catching import is_caught, short

SERVED = [f for f in faults() if issubclass(f, (ServingSession, Ending))]


@pytest.mark.parametrize("known", SERVED, ids=lambda f: f.name)
def test_a_fault_in_serving_fails_a_short_case(known: AnyFault) -> None:
    (operation,) = known.operations
    longer = {
        "resume": "invariance/resume/",
        "turns": "invariance/turns/floor",
        "serve": "invariance/serve/alike",
    }
    checks = [c for c in invariances() if c.id.startswith(longer.get(operation, "none"))]
    assert is_caught(applied(known, ComposedBackend), short(operation), checks)
