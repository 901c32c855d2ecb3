"""The measure of fuzzing: it counts what is found, and would tell of a variant that is accused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from conformance.fuzzing.case import OPERATIONS
from conformance.variants.orders import Blas
from reference.arithmetic import F32
from tools import measure_fuzz
from tools.measure_fuzz import Found, counted, measured, suspects, table


@contextmanager
def only(variant: type[Blas], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing but one variant is tried."""
    with patch.context() as patched:
        patched.setattr(measure_fuzz, "variants", lambda: (variant,))
        patched.setattr(measure_fuzz, "runs", lambda variant, operation: True)
        yield


def test_faults_are_found_and_a_variant_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    with only(Blas, monkeypatch):
        found = measured(("linear", 1, 0, 8))
    assert {"linear-tail-dropped", "linear-bias-dropped"} <= set(found.caught)
    assert set(found.caught) <= set(suspects("linear"))
    assert all(0 <= index < 8 for index in found.caught.values())
    assert (found.judged, found.accused) == (8, {})
    assert 0 < found.worst[0] <= 1


class Wrong(Blas):
    """Not legitimate at all."""

    name = "wrong"

    def product(self, x: F32, w: F32) -> F32:
        """One thousandth too much."""
        return super().product(x, w) * np.float32(1.001)


def test_a_variant_that_fails_is_named_with_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    with only(Wrong, monkeypatch):
        found = measured(("linear", 1, 0, 3))
    case, message = found.accused["wrong"]
    assert case.startswith("linear/1/")
    assert "bound" in message
    assert "Accused: `wrong`." in table([found], 3, 1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_variant_is_accused_of_what_is_drawn(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_fuzz, "suspects", lambda operation: [])
    found = measured((operation, 1, 0, 5))
    assert found.judged >= 5
    assert found.accused == {}


def test_the_first_of_a_fault_s_draws_counts() -> None:
    parts = [Found("exp", {"a": 30}), Found("exp", {"a": 60, "b": 55}), Found("log", {"b": 0})]
    assert counted(parts) == {"a": 31, "b": 1}


def test_the_table_counts_faults_of_what_was_drawn_alone() -> None:
    page = table([Found("quantize_int8", {"int8-halves-away": 4}, judged=7)], 100, 1)
    total = len(suspects("quantize_int8"))
    assert f"| all | {total} | 0 | 1 | 1 | {total - 1} |" in page
    assert "attention-" not in page
    assert "Accused: none." in page
