"""The catalogue of faults is complete, each entry a real change, and each is caught (SPEC 20)."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.backends.composed.serving import ServingSession
from conformance.calibration.trials import judged
from conformance.cases.invariances import invariances
from conformance.errors import BackendError
from conformance.faults import AnyFault, applied, area, areas, description, fault, faults
from conformance.faults.ending import Ending
from conformance.faults.fault import SessionFault
from tests.conformance.faults.catching import bits, goldens, is_caught

KERNELS = [f for f in faults() if not issubclass(f, SessionFault)]
SERVED = (ServingSession, Ending)
MODELS = [f for f in faults() if issubclass(f, SessionFault) and not issubclass(f, SERVED)]


def test_there_are_many_in_every_area() -> None:
    assert len(faults()) >= 120
    counts = {name: sum(area(f) == name for f in faults()) for name in areas()}
    assert min(counts.values()) >= 10, counts


@pytest.mark.parametrize("known", faults(), ids=lambda f: f.name)
def test_an_entry_says_all_that_it_must(known: AnyFault) -> None:
    assert known.name == known.name.lower()
    assert description(known).endswith(".")
    assert known.severity in ("subtle", "wrong", "broken")
    assert known.operations
    for thread in known.reports:
        owner, repository, kind, number = thread.split("/")
        assert owner
        assert repository
        assert kind in ("issues", "pull")
        assert number.isdigit()


def test_most_have_a_public_report() -> None:
    assert sum(bool(f.reports) for f in faults()) >= 150


def test_names_are_unique() -> None:
    names = [f.name for f in faults()]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_refused() -> None:
    assert fault("norm-epsilon-1e-5").name == "norm-epsilon-1e-5"
    with pytest.raises(BackendError, match="no-such-fault"):
        fault("no-such-fault")


def test_a_fault_changes_its_own_operations_alone() -> None:
    """Over the exact lane: every operation that it does not name keeps its bits."""
    for known in KERNELS:
        others = [g for g in goldens() if g.operation not in (*known.operations, "attention")]
        small = [g for g in others if not set(IMPLIED.get(g.operation, ())) & set(known.operations)]
        small = [g for g in small if g.level in ("elementary", "kernel")][::9]
        trial = judged(applied(known, ComposedBackend), small, bits)
        assert not trial.failed, (known.name, trial.failed)


IMPLIED = {
    "linear_int4": ("quantize_int8",),
    "linear_w4a16": ("linear",),
    "linear_q4_0": ("quantize_int8",),
    "linear_q8_0": ("quantize_int8",),
    "gated_mlp": ("linear", "silu", "gelu_tanh", "exp", "tanh"),
    "sample": ("philox", "exp", "softmax"),
    "silu": ("exp",),
    "sigmoid": ("exp",),
    "softmax": ("exp",),
    "rope": ("sin", "cos"),
    "verify_draft": ("sample", "philox", "exp"),
    "route": ("softmax", "linear", "exp"),
    "moe": ("linear", "gated_mlp", "silu", "gelu_tanh", "exp"),
}
"""Operations that may call others."""


@pytest.mark.parametrize("known", KERNELS, ids=lambda f: f.name)
def test_a_fault_in_an_operation_fails_a_case(known: AnyFault) -> None:
    own = [g for g in goldens() if g.operation in known.operations]
    own = [g for g in own if g.level != "model"]
    checks = [c for c in invariances() if c.id.split("/")[1] in known.operations]
    assert is_caught(applied(known, ComposedBackend), own, checks)


@pytest.mark.parametrize("known", MODELS, ids=lambda f: f.name)
def test_a_fault_in_a_model_fails_a_case(known: AnyFault) -> None:
    """By a short prompt, a small random model, one of near ties, a short text, or two chunks.

    What is about the floor of fast attention takes as many tokens as that.
    """
    quick = ["short", "mistral", "mistral_chunked", "qwen2", "llama", "row_search", "to_the_end"]
    quick += ["below_the_floor", "exact_prefill"] if known.contract else []
    own = [g for g in goldens() if g.operation in known.operations]
    own = [g for g in own if g.id.split("/")[2] in quick]
    checks = [c for c in invariances() if c.id.endswith("float32_chunks_of_7")]
    checks = [c for c in checks if c.id.split("/")[1] in known.operations]
    assert is_caught(applied(known, ComposedBackend), own, checks)


@pytest.mark.parametrize("base", [ComposedBackend, OwnOrderBackend])
def test_a_fault_keeps_the_base_it_is_put_over(base: type[ComposedBackend]) -> None:
    known = fault("linear-bias-dropped")
    x, w = np.ones((2, 40), np.float32), np.full((3, 40), 0.1, np.float32)
    made = applied(known, base)
    assert made.numerics == base.numerics
    assert np.array_equal(made.linear(x, w, np.ones(3, np.float32)), base().linear(x, w))
