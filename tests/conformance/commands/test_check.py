"""`check`: what it prints, its JSON, its choice of cases, and what it refuses."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import get_args

import pytest

from conformance import runner
from conformance.golden import MANIFEST
from conformance.rules import Outcome
from tests.conformance.command_line import EMPTY, RIGHT, ROOT, SMALL, Files, Run


def test_a_right_backend(run: Run, file: Files) -> None:
    code, out, _ = run("check", file(RIGHT), *SMALL)
    assert code == 0
    assert "kernel/linear" in out
    assert "4 passed, 0 failed" in out


def test_a_wrong_backend_is_told_where(run: Run, file: Files) -> None:
    wrong = RIGHT.replace("pass", "def linear(self, x, w, bias=None): return (x @ w.T) * 2")
    code, out, _ = run("check", file(wrong), "--case", "kernel/linear/k33_t5")
    assert code == 1
    assert "FAIL kernel/linear/k33_t5:bits" in out
    repeat = f"     bitforbit check {file(wrong)} --case 'kernel/linear/k33_t5:bits'"
    assert repeat in out.splitlines()
    assert "0 passed, 2 failed" in out


def test_nothing_implemented_is_not_a_pass(run: Run, file: Files) -> None:
    code, told = run.json(file(EMPTY), *SMALL, "--contract", "exact")
    assert told["summary"]["not_implemented"] == 4
    assert told["summary"]["passed"] == told["summary"]["failed"] == 0
    assert code == 1


def test_something_missing_beside_passes_is_none_either(run: Run, file: Files) -> None:
    part = f"import numpy as np\n{EMPTY}    exp = staticmethod(lambda x: np.exp(x))\n"
    linear = RIGHT + "    rms_norm = None\n"
    code, told = run.json(file(linear), "--case", "kernel/*/k33*", "--level", "kernel")
    assert told["summary"]["failed"] == 0
    assert told["summary"]["not_implemented"] == 2
    assert code == 0
    code, told = run.json(file(part), "--case", "elementary/exp/all", "--contract", "exact")
    assert code == 1


def test_what_declared_float16_does_not_hold_is_not_judged_and_fails_no_run(
    run: Run, file: Files
) -> None:
    half = """import numpy as np
class Backend:
    numerics = {"operands": "float16", "accumulator": "float32"}
    def linear(self, x, w, bias=None): return x @ w.T if bias is None else x @ w.T + bias
"""
    code, told = run.json(file(half), "--case", "kernel/linear/*:gauge")
    assert (code, told["summary"]["not_judged"], told["summary"]["failed"]) == (0, 1, 0)
    code, told = run.json(file(half), "--case", "kernel/linear/wide_block:gauge")
    assert (code, told["summary"]["not_judged"]) == (1, 1)


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(0)",
        "import sys; sys.exit('bye')",
        "raise BaseException('odd')",
        "return None",
        "return x[:1, :1]",
        "x[:] = 0; w[:] = 0; return x @ w.T",
        "return self.linear(x, w)",
    ],
)
def test_whatever_a_backend_does_the_run_goes_on(run: Run, file: Files, body: str) -> None:
    text = f"{RIGHT}    def linear(self, x, w, bias=None):\n        {body}\n"
    cases = ("--case", "kernel/*/k33*", "--level", "kernel")
    code, told = run.json(file(text), *cases)
    assert code == 1
    assert told["summary"]["failed"] == 4
    assert told["summary"]["passed"] >= 4


def test_the_json_has_the_documented_keys(run: Run, tmp_path: Path, file: Files) -> None:
    target = tmp_path / "report.json"
    code, out, _ = run("check", file(RIGHT), *SMALL, "--json", str(target))
    assert code == 0
    assert "4 passed" in out
    told = json.loads(target.read_text())
    assert {"format", "spec", "backend", "machine", "summary", "cases"} <= set(told)
    assert list(told["summary"]) == [
        *("passed", "failed", "not_implemented", "not_judged", "cannot_evaluate"),
        *("expected", "not_asked"),
    ]
    for case in told["cases"]:
        assert list(case) == ["id", "level", "section", "rule", "outcome", "worst", "message"]
        assert case["outcome"] in get_args(Outcome)
    assert [case["id"] for case in told["cases"]] == [
        f"kernel/linear/k33_t{n}:{rule}" for n in (1, 5) for rule in ("bits", "gauge")
    ]
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__"} == {"mine.py", "report.json"}
    _, same = run.json(file(RIGHT), *SMALL)
    assert [same[key] for key in ("summary", "cases")] == [told["summary"], told["cases"]]


def test_json_on_standard_output_is_nothing_but_json(run: Run, file: Files) -> None:
    wrong = RIGHT.replace("pass", "def linear(self, x, w, bias=None): return x @ w.T + np.inf")
    code, told = run.json(file("import numpy as np\n" + wrong), *SMALL)
    assert code == 1
    assert {case["worst"] for case in told["cases"] if case["rule"] == "gauge"} == {None}


def test_cases_and_levels(run: Run) -> None:
    def ids(*arguments: str) -> set[str]:
        return {case["id"] for case in run.json("numpy", *arguments)[1]["cases"]}

    both = ids("--case", "kernel/linear/k33_t5")
    assert both == {"kernel/linear/k33_t5:bits", "kernel/linear/k33_t5:gauge"}
    assert ids("--case", "kernel/linear/k33_t5:gauge") == {"kernel/linear/k33_t5:gauge"}
    assert ids("--case", "*exp/all:ulp*") == {"elementary/exp/all:ulp(4)"}
    levels = ids("--level", "invariance", "--level", "elementary", "--case", "*softmax*")
    assert {name.split("/")[0] for name in levels} == {"invariance", "elementary"}
    assert {name.split("/")[1] for name in levels} == {"softmax"}


@pytest.mark.parametrize(
    "text", ["", "def f(:", "import no_such_module", "raise SystemExit(0)", "class Backend: pass"]
)
def test_a_file_that_gives_no_backend(run: Run, file: Files, text: str) -> None:
    run.refused("check", file(text), *SMALL)


@pytest.mark.parametrize(
    "target", ["/nowhere/report.json", str(ROOT), "/dev/null/report.json", "/proc/report.json"]
)
def test_an_unwritable_target_is_refused_before_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    def never(*arguments: object) -> object:
        raise AssertionError("the run began")

    monkeypatch.setattr(runner, "run", never)
    assert target in run.refused("check", "numpy", *SMALL, "--json", target)


def test_a_device_is_written_to_and_stays_one(run: Run) -> None:
    code, _, _ = run("check", "numpy", *SMALL, "--json", os.devnull)
    assert code == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_corrupt_golden_cannot_run(run: Run, goldens: Path, tmp_path: Path) -> None:
    kernel = ("--level", "kernel")
    assert run("check", "numpy", *kernel)[0] == 0
    path = goldens / "kernel/linear/k33_t5.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    report = tmp_path / "report.json"
    code, out, err = run("check", "numpy", *kernel, "--json", str(report))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "k33_t5.safetensors: its sha256 differs" in err
    assert not report.exists()
    path.unlink()
    assert "missing" in run.refused("check", "numpy", *kernel)
    (goldens / MANIFEST).write_text("{")
    assert "MANIFEST.json: unreadable" in run.refused("check", "numpy", *kernel)


def test_an_interrupt_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert run.refused("check", "numpy", *SMALL) == "bitforbit: interrupted\n"
