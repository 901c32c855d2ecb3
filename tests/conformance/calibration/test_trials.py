"""What calibration counts, and that it sees a suite that is blind or unjust (SPEC 20)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.calibration import trials
from conformance.calibration.part import Part
from conformance.calibration.trials import (
    GATES,
    Calibration,
    FaultRow,
    Trial,
    VariantRow,
    as_json,
    by_area,
    exact_rules,
    judged,
    measure,
    rejected,
)
from conformance.cli import main
from conformance.errors import GoldenError
from conformance.faults import applied, fault, faults
from conformance.golden import Golden, read_all
from conformance.paths import data_folder
from conformance.reports.terminal import show_calibration
from conformance.rules import Verdict, bounded_rules
from conformance.variants import variants
from conformance.variants.storage import StoredBfloat16


def norms() -> list[Golden]:
    ids = {f"kernel/rms_norm/{n}" for n in ("k33", "k64", "eps_1e-6", "eps_1e-5", "zero_row")}
    return list(read_all(data_folder("goldens"), ids))


def softmax() -> list[Golden]:
    return list(read_all(data_folder("goldens"), {"elementary/softmax/k31"}))


def row(name: str) -> FaultRow:
    known = fault(name)
    bits = judged(applied(known, ComposedBackend), norms(), lambda g: ["bits"])
    plain = judged(applied(known, OwnOrderBackend), norms(), bounded_rules)
    return FaultRow(known, bits, plain, False, ())


def made(rows: list[FaultRow], others: list[VariantRow]) -> Calibration:
    return Calibration(
        tuple(rows), tuple(others), judged(OwnOrderBackend(), norms(), bounded_rules)
    )


def test_a_gate_sees_what_it_is_for() -> None:
    y = np.linspace(1, 2, 50, dtype=np.float32)
    for name, passes in GATES.items():
        assert passes(y, y.copy()), name
        assert not passes(y, -y), name
        assert not passes(y, np.full_like(y, np.nan)), name
        assert passes(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])), name
    assert not GATES["rtol 1e-2 (atol 1e-8)"](y, y * np.float32(1.011))
    assert GATES["rtol 1e-2 (atol 1e-8)"](y, y * np.float32(1.009))
    assert not GATES["NMSE 5e-4"](y, y * np.float32(1.023))
    assert GATES["NMSE 5e-4"](y, y * np.float32(1.022))
    assert GATES["cosine 0.999"](y, y * np.float32(7))


def test_zeros_pass_the_gates_against_zeros_alone() -> None:
    zero = np.zeros(4, np.float32)
    for name, passes in GATES.items():
        assert passes(zero, zero), name
        assert not passes(zero, np.ones(4, np.float32)), name


def test_the_gates_are_not_blamed_for_alignment() -> None:
    one = next(iter(read_all(data_folder("goldens"), {"kernel/linear/wide_block"})))
    assert rejected(one, {"y": np.ones((1, 1), np.float32)}) == set()


def test_no_answer_is_rejected_by_all() -> None:
    one = norms()[0]
    assert rejected(one, None) == set(GATES)
    assert rejected(one, {"y": np.zeros(3, np.float32)}) == set(GATES)
    assert rejected(one, dict(one.outputs)) == set()


def test_goldens_that_cannot_be_read_stop_it_at_once(tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="MANIFEST"):
        next(measure(tmp_path))


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


def test_a_subtle_fault_is_caught_and_passes_the_naive_gates_on_ordinary_data() -> None:
    found = row("norm-epsilon-1e-5")
    assert found.caught
    assert not found.bits_alone
    assert "kernel/rms_norm/eps_1e-6:gauge" in found.plain.failed
    ordinary = {"kernel/rms_norm/k33", "kernel/rms_norm/k64"}
    for ids in found.plain.rejects.values():
        assert not ids & ordinary


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
    for outcome in ("pass", "fail", "cannot evaluate", "not implemented"):
        trial.note(outcome, Verdict(outcome))
    assert (trial.passed, trial.failed) == (["pass"], ["fail"])
    assert trial.undecided == ["cannot evaluate"]
    assert trial.judged == 2
    tried = variants()[0]
    found = made([], [VariantRow(tried, Trial(["a", "b"], undecided=["c"]), False)])
    assert found.accused() == []
    assert found.undecided() == 1
    assert as_json(found)["summary"]["undecided"] == 1
    assert as_json(found)["variants"][0]["undecided"] == ["c"]
    show_calibration(Console(width=120), found, 1.0)
    assert f"no verdict at the precision of {tried.name}: 1 of 3 cases" in capsys.readouterr().out


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


def test_one_area_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert (
        main(["calibrate", "--area", "activations", "--workers", "1", "--json", str(target)]) == 0
    )
    report = json.loads(target.read_text())
    assert report["summary"]["missed"] == []
    assert report["summary"]["faults"] == report["summary"]["caught"] >= 10
    assert report["summary"]["diagnosis"]["first"] >= 0.9 * report["summary"]["diagnosis"]["asked"]
    assert "activations" in capsys.readouterr().out


def test_one_fault_is_a_part_and_claims_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    name = "norm-last-bit-cut"
    assert main(["calibrate", "--fault", name, "--workers", "1", "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert [fault["name"] for fault in report["faults"]] == [name]
    assert report["variants"] == []
    of = {"faults": len(faults()), "variants": len(variants())}
    assert report["part"] == {"area": None, "fault": [name], "variant": [], "of": of}
    out = capsys.readouterr().out
    assert f"a part: 1 of {len(faults())} faults, 0 of {len(variants())} variants" in out
    assert "variants" not in out.split("of the rest nothing is said")[1]


def test_one_variant_is_a_part_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--variant", "functions-bfloat16", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert f"a part: 0 of {len(faults())} faults, 1 of {len(variants())} variants" in out
    assert "accused of 1 variant" in out
    assert "caught" not in out


def test_a_part_is_what_its_globs_name_in_the_area() -> None:
    norms = Part("norms").chosen_faults()
    assert Part().whole
    assert Part(None, ("*",), ("*",)).whole
    assert not Part("norms").whole
    assert Part("norms").chosen_variants() == []
    assert Part("norms", ("norm-e*", "norm-l*")).chosen_faults() == [
        known for known in norms if known.name.startswith(("norm-e", "norm-l"))
    ]
    assert Part("rope", ("norm-*",)).chosen_faults() == []
    assert Part(variants=("tf32",)).chosen_faults() == []
    assert [v.name for v in Part("norms", variants=("tf32", "b*16")).chosen_variants()] == [
        v.name for v in variants() if v.name == "tf32" or v.name == "bfloat16"
    ]
    assert Part("norms", variants=("tf32",)).chosen_faults() == norms


def test_a_part_is_put_over_the_base_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the whole over all of it."""
    monkeypatch.setattr(trials, "_GOLDENS", [*norms(), *softmax()])
    tried = trials._base(frozenset({"rms_norm"}))
    assert tried.judged > 0
    assert all(case.startswith("kernel/rms_norm/") for case in tried.passed)
    assert trials._base(None).judged > tried.judged


def test_what_would_be_tried_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = ["calibrate", "--list", "--fault", "norm-last-*", "--variant", "tf32"]
    assert main(listed) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["fault", "norm-last-bit-cut"],
        ["variant", "tf32"],
    ]
    assert main(["calibrate", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(faults()) + len(variants())


def test_a_missed_fault_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = FaultRow(fault("linear-bias-dropped"), Trial(["a"]), Trial(["b"]), True, ())
    monkeypatch.setattr(
        trials, "measure", lambda *a: iter([blind, Calibration((blind,), (), Trial())])
    )
    assert main(["calibrate"]) == 1
    assert "MISSED linear-bias-dropped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["calibrate", "--area", "nowhere"], "--area: 'nowhere' is none of"),
        (
            ["calibrate", "--fault", "norm-*", "--fault", "norm-last-bit-cuts"],
            "--fault: no fault matches 'norm-last-bit-cuts'; did you mean norm-last-bit-cut?",
        ),
        (
            ["calibrate", "--area", "rope", "--fault", "norm-*"],
            "--fault: no fault in the area rope matches 'norm-*'; `bitforbit calibrate --list`",
        ),
        (["calibrate", "--variant", "tf31"], "--variant: no variant matches 'tf31'; did you mean"),
        (["calibrate", "--json", "no/such/folder.json"], "--json: cannot write"),
        (["faults", "list", "--area", "nowhere"], "--area: 'nowhere' is none of"),
        (["faults", "show", "no-such-fault"], "no-such-fault: no such fault"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert what in told
    assert told.count("\n") == 1


def test_faults_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "list", "--area", "norms"]) == 0
    assert "norm-epsilon-1e-5" in capsys.readouterr().out
    assert main(["faults", "show", "norm-epsilon-1e-5"]) == 0
    shown = capsys.readouterr().out
    assert "https://github.com/apache/tvm/pull/15856" in shown
    assert "super().inverse_root(mean_square, 1e-5)" in shown
