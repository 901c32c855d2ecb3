"""How faults and variants are tried: bases, rules, and tensors of bfloat16 (SPEC 20)."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.calibration import trials
from conformance.calibration.trials import exact_rules, measure
from conformance.errors import GoldenError
from conformance.faults import faults
from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from conformance.variants.storage import StoredBfloat16
from tests.conformance.calibration.rows import norms, row


def softmax() -> list[Golden]:
    return list(read_all(data_folder("goldens"), {"elementary/softmax/k31"}))


def test_goldens_that_cannot_be_read_stop_it_at_once(tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="MANIFEST"):
        next(measure(tmp_path))


def test_a_subtle_fault_is_caught_and_passes_the_naive_gates_on_ordinary_data() -> None:
    found = row("norm-epsilon-1e-5")
    assert found.caught
    assert not found.bits_alone
    assert "kernel/rms_norm/eps_1e-6:gauge" in found.plain.failed
    ordinary = {"kernel/rms_norm/k33", "kernel/rms_norm/k64"}
    for ids in found.plain.rejects.values():
        assert not ids & ordinary


def test_a_fault_over_the_exact_lane_is_judged_by_one_rule_of_bits() -> None:
    one = next(iter(read_all(data_folder("goldens"), {"kernel/rope/half"})))
    assert exact_rules(one) == ["bits"]
    assert exact_rules(one, fma=True) == ["either"]
    assert exact_rules(norms()[0], fma=True) == ["bits"]


def test_a_fault_of_positions_is_caught_where_tensors_are_bfloat16() -> None:
    """Declaring it does not hide that positions, inverse frequencies or angles are so too."""
    trials._GOLDENS[:] = read_all(
        data_folder("goldens"), {"kernel/rope/half", "kernel/rope/interleaved", "kernel/rope/gap"}
    )
    asks = [known for known in faults() if known.stored]
    assert {"rope-positions-bfloat16", "rope-angle-bfloat16"} <= {known.name for known in asks}
    for known in asks:
        trial = trials._stored(known)
        assert any(case.endswith(":gauge") for case in trial.failed), known.name
    harmless = type("Harmless", (asks[0],), {"angles": StoredBfloat16.angles})
    assert not trials._stored(harmless).failed
    trials._GOLDENS.clear()


def test_a_part_is_put_over_the_base_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the whole over all of it."""
    monkeypatch.setattr(trials, "_GOLDENS", [*norms(), *softmax()])
    tried = trials._base(frozenset({"rms_norm"}))
    assert tried.judged > 0
    assert all(case.startswith("kernel/rms_norm/") for case in tried.passed)
    assert trials._base(None).judged > tried.judged
