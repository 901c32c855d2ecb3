"""Faults of prefixes, drafts and batches: their base is right, and each is caught (SPEC 20)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conformance.backends.composed import ComposedBackend
from conformance.backends.composed.cache import CacheBackend
from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.composed.serving import ServingSession
from conformance.backends.composed.verification import VerifyBackend
from conformance.calibration.trials import judged
from conformance.cases.invariances import invariances
from conformance.faults import AnyFault, applied, faults
from conformance.golden import Golden
from conformance.paths import model_folder
from tests.conformance.faults.catching import bits, goldens, is_caught

SERVED = [f for f in faults() if issubclass(f, ServingSession)]
SHORT = {
    "turns": ("short", "answered", "same", "two_users"),
    "speculate": ("longer_than_left", "prose"),
    "serve": ("small", "drafted"),
}


class Serving(ComposedBackend):
    """The exact lane in steps, serving included."""

    session = ServingSession


def short(operation: str) -> list[Golden]:
    names = SHORT.get(operation, ())
    return [g for g in goldens() if g.operation == operation and g.id.split("/")[2] in names]


@pytest.mark.parametrize(
    ("base", "operations"),
    [
        (ExpertsBackend, ("route", "moe")),
        (CacheBackend, ("paged_attention", "store_kv", "paging", "page_hashes", "prefix_reuse")),
        (VerifyBackend, ("verify_draft",)),
    ],
)
def test_the_steps_of_operations_give_the_bits_of_the_reference(
    base: type[ComposedBackend], operations: tuple[str, ...]
) -> None:
    own = [g for g in goldens() if g.operation in operations]
    checks = [c for c in invariances() if c.id.split("/")[1] in operations]
    trial = judged(base(), own, bits, checks)
    assert not trial.failed
    assert {case.split("/")[1] for case in trial.passed} == set(operations)


@pytest.mark.parametrize("operation", ["turns", "speculate", "serve", "resume"])
def test_the_steps_of_serving_give_the_bits_of_the_reference(operation: str) -> None:
    checks = [c for c in invariances() if c.id.split("/")[1] == "resume" == operation]
    trial = judged(Serving(), short(operation), bits, checks)
    assert trial.passed
    assert not trial.failed


@pytest.mark.parametrize("known", SERVED, ids=lambda f: f.name)
def test_a_fault_in_serving_fails_a_short_case(known: AnyFault) -> None:
    (operation,) = known.operations
    checks = [c for c in invariances() if c.id.split("/")[1] == "resume" == operation]
    assert is_caught(applied(known, ComposedBackend), short(operation), checks)


def test_going_back_leaves_what_was_never_computed() -> None:
    session = Serving().load(str(model_folder("fixtures/tiny-dense")), "float32")
    session.forward(np.arange(5))
    before = session.state()
    row = session.forward(np.array([7]))
    session.forward(np.array([8, 9]))
    session.cut(5)
    assert np.array_equal(session.forward(np.array([7])), row)
    session.enter(before)
    assert np.array_equal(session.forward(np.array([7])), row)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    session = Serving().load(str(model_folder("fixtures/tiny-dense")), "float32")
    session.kept = []
    session.turn(np.arange(6), 2)
    session.save(tmp_path / "cache", session.kept[0])
    back = session.restored(tmp_path / "cache")
    assert back.tokens.tolist() == session.kept[0].tokens.tolist()
    assert back.state[0] == session.kept[0].state[0] == 7
