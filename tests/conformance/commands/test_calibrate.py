"""`bitforbit calibrate` and `bitforbit faults`: parts, lists, reports, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.calibration import trials
from conformance.calibration.findings import (
    Calibration,
    FaultRow,
    Trial,
)
from conformance.cli import main
from conformance.faults import fault, faults
from conformance.variants import variants


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
