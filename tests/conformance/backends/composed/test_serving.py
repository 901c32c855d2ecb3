"""Serving in steps gives the bits of the reference, going back and forth too (SPEC 17)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conformance.backends.composed import ComposedBackend
from conformance.backends.composed.serving import ServingSession
from conformance.calibration.trials import judged
from conformance.paths import model_folder
from tests.conformance.faults.catching import bits, short


class Serving(ComposedBackend):
    """The exact lane in steps, serving included."""

    session = ServingSession


@pytest.mark.parametrize("operation", ["complete", "turns", "speculate", "serve", "resume"])
def test_the_steps_of_serving_give_the_bits_of_the_reference(operation: str) -> None:
    trial = judged(Serving(), short(operation), bits)
    assert trial.passed
    assert not trial.failed


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
