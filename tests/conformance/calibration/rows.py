"""Rows of faults tried on a few goldens."""

from __future__ import annotations

from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.calibration.findings import (
    Calibration,
    FaultRow,
    VariantRow,
)
from conformance.calibration.trials import judged
from conformance.faults import applied, fault
from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from conformance.rules import bounded_rules


def norms() -> list[Golden]:
    ids = {f"kernel/rms_norm/{n}" for n in ("k33", "k64", "eps_1e-6", "eps_1e-5", "zero_row")}
    return list(read_all(data_folder("goldens"), ids))


def row(name: str) -> FaultRow:
    known = fault(name)
    bits = judged(applied(known, ComposedBackend), norms(), lambda g: ["bits"])
    plain = judged(applied(known, OwnOrderBackend), norms(), bounded_rules)
    return FaultRow(known, bits, plain, False, ())


def made(rows: list[FaultRow], others: list[VariantRow]) -> Calibration:
    return Calibration(
        tuple(rows), tuple(others), judged(OwnOrderBackend(), norms(), bounded_rules)
    )
