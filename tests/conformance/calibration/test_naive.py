"""The naive gates see what they are for, and are not blamed for what they are not for (SPEC 20)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.calibration.naive import GATES, rejected
from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from tests.conformance.calibration.rows import norms


def test_a_gate_sees_what_it_is_for() -> None:
    y = np.linspace(1, 2, 50, dtype=np.float32)
    for name, passes in GATES.items():
        assert passes(y, y.copy()), name
        assert not passes(y, -y), name
        assert not passes(y, np.full_like(y, np.nan)), name
        assert passes(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])), name
    assert not GATES["rtol 1e-2 (atol 1e-8)"](y, y * np.float32(1.011))
    assert GATES["rtol 1e-2 (atol 1e-8)"](y, y * np.float32(1.009))
    assert not GATES["rtol 1e-2 (atol 1e-8)"](y, y * np.float32(1.01005))  # of what is expected
    assert not GATES["NMSE 5e-4"](y, y * np.float32(1.023))
    assert not GATES["NMSE 5e-4"](y, y * np.float32(1.0226))  # of the squares that are expected
    assert GATES["NMSE 5e-4"](y, y * np.float32(1.022))
    assert not GATES["rtol 1e-2, atol 1e-2"](y * 0, y * 0 + np.float32(0.0101))
    assert GATES["rtol 1e-2, atol 1e-2"](y * 0, y * 0 + np.float32(0.0099))
    assert GATES["cosine 0.999"](y, y * np.float32(7))


def test_zeros_pass_the_gates_against_zeros_alone() -> None:
    zero = np.zeros(4, np.float32)
    for name, passes in GATES.items():
        assert passes(zero, zero), name
        assert not passes(zero, np.ones(4, np.float32)), name


def test_the_gates_are_not_blamed_for_alignment() -> None:
    one = next(iter(read_all(data_folder("goldens"), {"kernel/linear/wide_block"})))
    assert rejected(one, {"y": np.ones((1, 1), np.float32)}) == set()


@pytest.mark.parametrize(("distance", "blamed"), [(0.0049, True), (0.0051, False)])
def test_a_golden_is_put_to_the_gates_where_it_is_near_the_real_value(
    distance: float, blamed: bool
) -> None:
    """Within half a percent of its largest value."""
    y = np.array([1, -2], np.float32)
    one = replace(norms()[0], outputs={"y": y}, distance=np.array([0, 2 * distance]))
    assert rejected(one, {"y": -y}) == (set(GATES) if blamed else set())


def test_no_answer_is_rejected_by_all() -> None:
    one = norms()[0]
    assert rejected(one, None) == set(GATES)
    assert rejected(one, {"y": np.zeros(3, np.float32)}) == set(GATES)
    assert rejected(one, dict(one.outputs)) == set()


def test_the_gates_see_logits_up_to_where_a_text_parts() -> None:
    outputs = {
        "tokens": np.array([[1, 0]]),
        "logits": np.array([[[0, 2], [1, 0.999]]], np.float32),
        "cache_n": np.array([16]),
    }
    text = Golden("generation/turns/x", "11.3", "turns", {}, {}, outputs, ("bits",))
    assert rejected(text, {**outputs, "cache_n": np.array([0])}) == set()
    tied = {**outputs, "tokens": np.array([[1, 1]])}
    assert rejected(text, tied) == set()
    parted = {**outputs, "tokens": np.array([[0, 1]]), "logits": outputs["logits"].copy()}
    parted["logits"][0, 1] = [7, -7]
    assert rejected(text, parted) == set()
    parted["logits"][0, 0] = [7, -7]
    assert rejected(text, parted) == set(GATES)
