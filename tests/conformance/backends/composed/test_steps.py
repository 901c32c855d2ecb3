"""The steps of each operation give the bits of the reference (SPEC 17)."""

from __future__ import annotations

import pytest

from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.backends.composed.cache import CacheBackend
from conformance.backends.composed.experts import ExpertsBackend
from conformance.backends.composed.verification import VerifyBackend
from conformance.calibration.trials import judged
from conformance.cases.invariances import invariances
from conformance.rules import bounded_rules
from tests.conformance.faults.catching import bits, goldens


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


def test_the_bases_pass_what_faults_are_judged_by() -> None:
    """So that a fault's failure is its own, and not that of the steps that it was put over."""
    short = [g for g in goldens() if g.id not in ("model/forward/above_the_floor",)]
    short = [g for g in short if g.operation != "generate"]
    assert not judged(ComposedBackend(), short, bits).failed
    failed = judged(OwnOrderBackend(), short, bounded_rules).failed
    assert all(case.endswith(":bits") for case in failed)
