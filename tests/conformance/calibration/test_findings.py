"""What calibration counts, and that it sees a suite that is blind or unjust (SPEC 20)."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from conformance.calibration.findings import (
    Calibration,
    Diagnosed,
    FaultRow,
    Trial,
    VariantRow,
    as_json,
    by_area,
)
from conformance.calibration.part import Part
from conformance.faults import fault, faults
from conformance.reports.terminal import show_calibration
from conformance.rules import Verdict
from conformance.variants import variants
from tests.conformance.calibration.rows import made, row


def test_a_fault_that_no_case_shows_is_missed() -> None:
    blind = FaultRow(fault("linear-bias-dropped"), Trial(["a"]), Trial(["b"]), True, ())
    found = made([row("norm-epsilon-1e-5"), blind], [])
    assert found.missed() == ["linear-bias-dropped"]


def test_a_variant_that_fails_or_is_not_tried_is_accused() -> None:
    first, second, third = variants()[:3]
    rows = [
        VariantRow(first, Trial(["a"]), False),
        VariantRow(second, Trial(["a"], ["b"]), False),
        VariantRow(third, Trial(), False),
    ]
    assert made([], rows).accused() == [second.name, third.name]


def test_a_case_without_a_verdict_is_counted_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """It neither passes nor accuses; and what a backend lacks is no case."""
    trial = Trial()
    for outcome in ("pass", "fail", "not judged", "not implemented"):
        trial.note(outcome, Verdict(outcome))
    assert (trial.passed, trial.failed) == (["pass"], ["fail"])
    assert trial.undecided == ["not judged"]
    assert trial.judged == 2
    tried = variants()[0]
    found = made([], [VariantRow(tried, Trial(["a", "b"], undecided=["c"]), False)])
    assert found.accused() == []
    assert found.undecided() == 1
    assert as_json(found)["summary"]["undecided"] == 1
    assert as_json(found)["variants"][0]["undecided"] == ["c"]
    show_calibration(Console(width=120), found, 1.0)
    assert f"no verdict at the precision of {tried.name}: 1 of 3 cases" in capsys.readouterr().out


def test_a_fault_that_bfloat16_hides_is_missed() -> None:
    known, seen = fault("rope-positions-bfloat16"), Trial([], ["a:gauge"])
    assert not FaultRow(known, seen, seen, True, (), Trial(["a:gauge"])).caught
    assert FaultRow(known, seen, seen, True, (), seen).caught
    report = as_json(made([FaultRow(known, seen, seen, True, (), seen)], []))["faults"][0]
    assert report["bfloat16"] == {"failed": ["a:gauge"], "judged": 1}
    assert as_json(made([row("norm-epsilon-1e-5")], []))["faults"][0]["bfloat16"] is None


def test_a_gate_has_no_credit_for_what_it_rejects_without_the_fault() -> None:
    known = row("norm-epsilon-1e-5")
    gate = "NMSE 5e-4"
    known.plain.rejects[gate] = {"kernel/rms_norm/k33"}
    base = Trial(rejects={gate: {"kernel/rms_norm/k33"}})
    assert Calibration((known,), (), base).gates()[gate] == (0, 0)
    assert Calibration((known,), (), Trial()).gates()[gate] == (1, 0)


def test_the_report_and_the_table_agree() -> None:
    found = made([row("norm-epsilon-1e-5"), row("norm-last-bit-cut")], [])
    report = as_json(found)
    assert json.loads(json.dumps(report)) == report
    assert report["summary"]["caught"] == 2
    assert by_area(found)["norms"]["caught"] == 2
    assert report["summary"]["bits_alone"] == by_area(found)["norms"]["bits alone"]


def test_what_is_told_of_each_fault_and_each_area() -> None:
    name, seen = "norm-epsilon-1e-5", Trial([], ["a:gauge"])
    places = [Diagnosed(name, case, place) for case, place in (("a", 0), ("b", 2), ("c", None))]
    first = FaultRow(fault(name), seen, seen, True, tuple(places))
    second = FaultRow(fault("norm-last-bit-cut"), seen, Trial(["a:gauge"]), False, ())
    found = made([first, second], [])
    report = as_json(found)
    assert report["summary"]["diagnosis"] == {"first": 1, "among_three": 2, "asked": 3}
    assert [told["not_named_first"] for told in report["faults"]] == [["b", "c"], []]
    counts = {"faults": 2, "caught": 2, "exact": 2, "float32": 1, "bits alone": 1}
    assert by_area(found) == {"norms": counts}


def test_a_report_says_of_which_part_it_is() -> None:
    assert as_json(Calibration((), (), Trial()))["part"] is None
    part = Part("norms", ("norm-e*",), ("tf32",))
    whole = {"faults": len(faults()), "variants": len(variants())}
    told = as_json(Calibration((), (), Trial(), part))["part"]
    assert told == {"area": "norms", "fault": ("norm-e*",), "variant": ("tf32",), "of": whole}
