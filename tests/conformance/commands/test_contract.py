"""What is asked of whom, known failures, the list of cases, and what the terminal puts first."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import cli
from conformance.cases.invariances import invariances
from conformance.faults import area, description, faults
from conformance.golden import read_all
from conformance.paths import data_folder
from conformance.reports.record import FAILED
from conformance.rules import BITS_FOR_ALL, bounded_rules, contract_of
from conformance.rules.contract import EITHER_INSTEAD, NO_BITS, NO_EITHER
from conformance.selection import Selection

Check = Callable[..., tuple[int, str, str]]

FLOAT32 = """
import numpy as np


class Backend:
    numerics = {"accumulator": "float32"}

    def rms_norm(self, x, weight, eps):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight

    def linear(self, x, w, bias=None):
        return x @ w.T * np.float32(1 if len(x) > 1 else 1.01)
"""
"""rms_norm is right within its bound; linear is wrong where there is one row."""


@pytest.fixture
def check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Check:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FLOAT32)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["check", *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def record(check: Check, *words: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(check(*words, "--json", "-")[1])
    return told


NORMS = ("--case", "kernel/rms_norm/k3*")
LINES = ("--case", "kernel/linear/k33_*")


# What is asked.


@pytest.mark.parametrize(
    ("declared", "contract"), [("exact", "exact"), ("float32", "bounds"), ("bfloat16", "bounds")]
)
def test_what_is_declared_says_what_is_asked(declared: str, contract: str) -> None:
    assert contract_of({"accumulator": declared}) == contract
    assert contract_of({}) == "bounds"


def test_a_backend_that_rounds_is_asked_the_bounds(check: Check) -> None:
    code, out, _ = check("mine.py", *NORMS)
    assert code == 0
    assert "3 passed, 0 failed, 3 not asked" in out
    told = record(check, "mine.py", *NORMS)
    assert told["contract"] == "bounds"
    assert told["summary"]["not_asked"] == 3
    assert {case["rule"] for case in told["cases"]} == {"gauge"}
    told = record(check, "mine.py", *NORMS, "--contract", "exact")
    assert (told["contract"], told["summary"]["not_asked"]) == ("exact", 0)
    assert {case["rule"] for case in told["cases"]} == {"bits", "gauge"}
    assert told["summary"]["failed"] > 0


def test_an_exact_one_is_asked_everything_but_either(check: Check) -> None:
    told = record(check, "numpy", "--case", "kernel/rope/half", *NORMS)
    assert told["contract"] == "exact"
    assert [c["rule"] for c in told["cases"] if "rope" in c["id"]] == ["bits", "gauge"]
    told = record(check, "numpy", "--case", "kernel/rope/half", "--contract", "bounds")
    assert [c["rule"] for c in told["cases"]] == ["gauge"]


def test_codes_constants_and_tokens_are_asked_of_everyone() -> None:
    """Every operation has a rule that float32 is asked, or is known not to."""
    bits_alone: set[str] = set()
    for golden in read_all(data_folder("goldens")):
        rules = bounded_rules(golden)
        if golden.operation in BITS_FOR_ALL:
            assert rules == list(golden.rules)
        else:
            assert "bits" not in rules
            assert "either" not in rules
        bits_alone |= set() if rules else {golden.operation}
    assert "sample" not in bits_alone
    assert "quantize_int4" not in bits_alone


def test_the_reference_in_float32_passes_what_it_is_asked(check: Check) -> None:
    told = record(check, "numpy-float32", "--level", "elementary", "--level", "cache")
    assert told["summary"]["failed"] == 0
    assert {"paging", "prefix_reuse"} <= {c["id"].split("/")[1] for c in told["cases"]}


def test_what_is_chosen_and_not_asked_cannot_run(check: Check) -> None:
    code, out, err = check("mine.py", "--case", "kernel/rms_norm/k33:bits")
    assert (code, out) == (2, "")
    assert "not asked of what declares float32 (1 cases); --contract exact asks for it" in err
    code, _, err = check("mine.py", "--case", "invariance/attention/*")
    count = sum(one.id.startswith("invariance/attention/") for one in invariances())
    assert f"({count} cases)" in err


def test_a_server_shows_no_bits(check: Check) -> None:
    pytest.importorskip("httpx")
    code, _, err = check("--server", "http://127.0.0.1:1", "--contract", "exact")
    assert (code, "HTTP shows no bits" in err) == (2, True)


def test_a_folder_holds_what_a_contract_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("--case", "kernel/attention/window_*", "--case", "invariance/attention/*")

    def exported(name: str, *words: str) -> dict[str, Any]:
        assert cli.main(["export", str(tmp_path / name), *chosen, *words]) == 0
        capsys.readouterr()
        told: dict[str, Any] = json.loads((tmp_path / name / "manifest.json").read_text())
        return told

    whole, bounded = exported("whole"), exported("bounded", "--contract", "bounds")
    assert {name.rsplit(".", 1)[1] for name in whole["calls"]} == {"exact", "fast"}
    assert {name.rsplit(".", 1)[1] for name in bounded["calls"]} == {"fast"}
    assert whole["not_exportable"]
    assert not bounded["not_exportable"]
    (tmp_path / "whole/answers/numerics.json").write_text('{"accumulator": "float32"}')
    cli.main(["judge", str(tmp_path / "whole"), "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    exact = sum(
        case.endswith(":bits") for call in whole["calls"].values() for case in call["cases"]
    )
    assert {case["rule"] for case in told["cases"]} == {"gauge"}
    assert told["summary"]["not_asked"] == exact + len(whole["not_exportable"])


# Globs.


def test_globs_add_up(check: Check) -> None:
    both = {c["id"] for c in record(check, "mine.py", *NORMS, *LINES)["cases"]}
    parts = [{c["id"] for c in record(check, "mine.py", *one)["cases"]} for one in (NORMS, LINES)]
    assert both == parts[0] | parts[1]
    assert all(parts)


# The list.


SILENT = """
class Backend:
    numerics = NUMERICS

    def __getattr__(self, name):
        raise SystemExit(f"{name} is called")
"""
"""It is opened, and no operation of it may be called."""


def lists(check: Check, *words: str) -> tuple[list[str], list[str]]:
    """The ids that a list says are asked, and those that it says are not."""
    code, out, _ = check(*words, "--list")
    assert code == 0
    lines = [line for line in out.splitlines() if " SPEC " in line]
    named = [[line.split()[0] for line in lines if line.startswith(" ") == left] for left in (0, 1)]
    return named[0], named[1]


@pytest.mark.parametrize(
    "numerics",
    [
        {"accumulator": "exact"},
        {"accumulator": "exact", "fma": True},
        {"accumulator": "float32", "fma": True},
        {},
        {"operations": {"rms_norm": {"accumulator": "exact"}}},
        {
            "accumulator": "exact",
            "operations": {"rope": {"fma": True}, "moe": {"operands": "tf32"}},
        },
    ],
)
@pytest.mark.parametrize("contract", [(), ("--contract", "exact"), ("--contract", "bounds")])
def test_the_list_is_what_a_run_asks(
    check: Check, numerics: dict[str, Any], contract: tuple[str, ...]
) -> None:
    """A run of a backend without operations says of every case that it is not implemented."""
    Path("mine.py").write_text(f"class Backend:\n    numerics = {numerics}\n")
    globs = ("kernel/rms_norm/k3*", "kernel/r*/h*", "kernel/moe/*", "*philox*", "*/rope/*")
    words = ["mine.py", *(w for glob in globs for w in ("--case", glob)), *contract]
    asked, left = lists(check, *words)
    ran = [case["id"] for case in record(check, *words)["cases"]]
    assert asked == ran
    every = [*(f"{g.id}:{rule}" for g in read_all(data_folder("goldens")) for rule in g.rules)]
    every += [f"{one.id}:bits" for one in invariances()]
    taken = [i for i in every if Selection(patterns=globs).takes(i)]
    assert sorted(asked + left) == sorted(taken)


def test_the_list_calls_no_operation(check: Check) -> None:
    Path("mine.py").write_text(SILENT.replace("NUMERICS", '{"accumulator": "float32"}'))
    asked, left = lists(check, "mine.py", *NORMS)
    assert asked == [f"kernel/rms_norm/k3{i}:gauge" for i in (1, 2, 3)]
    assert left == [f"kernel/rms_norm/k3{i}:bits" for i in (1, 2, 3)]
    every = [f"{g.id}:{rule}" for g in read_all(data_folder("goldens")) for rule in g.rules]
    every += [f"{one.id}:bits" for one in invariances()]
    asked, left = lists(check)
    assert asked == [case for case in every if not case.endswith(":either")]
    assert left == [case for case in every if case.endswith(":either")]
    assert check("--list", "--level", "kernal")[2].count("did you mean kernel?") == 1


def test_the_list_says_why(check: Check) -> None:
    out = check("--list", "--case", "kernel/rope/half")[1]
    assert "2 asked of numpy, which declares exact, under the contract exact" in out
    assert f"1 not asked: {NO_EITHER}\n  kernel/rope/half:either  SPEC 7.4\n" in out
    out = check("mine.py", "--list", *NORMS)[1]
    assert "3 asked of mine.py, which declares float32, under the contract bounds" in out
    assert f"3 not asked: {NO_BITS}\n  kernel/rms_norm/k31:bits" in out
    Path("fused.py").write_text(SILENT.replace("NUMERICS", '{"accumulator": "exact", "fma": True}'))
    out = check("fused.py", "--list", "--case", "kernel/rope/half")[1]
    assert f"1 not asked: {EITHER_INSTEAD}\n  kernel/rope/half:bits" in out


def test_the_list_is_data_too(check: Check) -> None:
    told = record(check, "mine.py", "--list", "--case", "kernel/rms_norm/k33")
    assert told["backend"] == {"name": "mine.py", "numerics": {"accumulator": "float32"}}
    assert told["contract"] == "bounds"
    case = {"id": "kernel/rms_norm/k33:bits", "level": "kernel", "section": "6", "rule": "bits"}
    bounded = {**case, "id": "kernel/rms_norm/k33:gauge", "rule": "gauge", "asked": True}
    assert told["cases"] == [{**case, "asked": False, "why": NO_BITS}, bounded]
    assert "asked of mine.py" in check("mine.py", "--list", *NORMS, "--json", "list.json")[1]
    assert len(json.loads(Path("list.json").read_text())["cases"]) == 6


def test_the_list_is_no_run(check: Check) -> None:
    code, out, err = check("--list", "--html", "page.html")
    assert (code, out) == (2, "")
    assert "--html: it tells of a run, and --list runs nothing" in err
    Path("mine.py").write_text("raise ValueError('no')")
    assert check("mine.py", "--list")[0] == 2


# Known failures.


def test_known_failures_fail_no_run(check: Check) -> None:
    assert check("mine.py", *NORMS, *LINES)[0] == 1
    Path("known.txt").write_text("kernel/linear/k33_t1  # one row is scaled\n")
    code, out, err = check("mine.py", *NORMS, *LINES, "--expect", "known.txt")
    assert (code, err) == (0, "")
    assert "4 passed, 0 failed, 1 failed as expected, 5 not asked" in out
    assert "FAIL " not in out
    told = record(check, "mine.py", *LINES, "--expect", "known.txt")
    (expected,) = [case for case in told["cases"] if "expected" in case]
    assert (expected["outcome"], expected["expected"]) == ("fail", "one row is scaled")
    assert told["now_passing"] == []
    code, out, _ = check("mine.py", *LINES, "--contract", "exact", "--expect", "known.txt")
    assert code == 1  # bits of the other rows fail beside it
    assert "FAIL " not in out
    assert "kernel/linear: bits of 1 case differ" in out


def test_what_does_not_fail_any_more_is_told(check: Check) -> None:
    Path("known.txt").write_text(
        "kernel/linear/k33_*\n\nkernel/rms_norm/k3*  # fixed\nkernel/rope/*\nkernel/ropes/*\n"
    )
    code, out, err = check("mine.py", *NORMS, *LINES, "--expect", "known.txt")
    assert code == 0
    assert "known.txt:3: none of the 3 cases of kernel/rms_norm/k3* fails any more" in out
    assert "known.txt:1" not in out  # one of its cases fails
    assert err == "bitforbit: known.txt:5: no case matches 'kernel/ropes/*'\n"


@pytest.mark.parametrize("text", ["a b\n", "# only\nkernel/linear *\n"])
def test_a_file_that_says_nothing_is_refused(check: Check, text: str) -> None:
    Path("known.txt").write_text(text)
    code, out, err = check("mine.py", *NORMS, "--expect", "known.txt")
    assert (code, out) == (2, "")
    assert "is not one glob" in err
    assert "cannot be read" in check("mine.py", *NORMS, "--expect", "gone.txt")[2]


# What is told of a run.


def test_the_command_has_every_word_and_what_repeats_a_case_runs(check: Check) -> None:
    words = ["mine.py", *LINES, "--no-diagnosis"]
    told = record(check, *words)
    assert shlex.split(told["command"]) == ["check", *words, "--json", "-"]
    assert told["again"] == "check mine.py"
    told = record(check, *words, "--contract", "bounds")
    failed = next(case["id"] for case in told["cases"] if case["outcome"] in FAILED)
    again = record(check, *shlex.split(told["again"])[1:], "--case", failed)
    assert [case["id"] for case in again["cases"]] == [failed]


def test_bounds_come_first_and_fair_bits_in_a_line_an_operation(check: Check) -> None:
    _, out, _ = check("mine.py", *NORMS, *LINES, "--contract", "exact")
    failed = [line.split()[1] for line in out.splitlines() if line.startswith("FAIL ")]
    assert failed == ["kernel/linear/k33_t1:gauge", "kernel/linear/k33_t1:bits"]
    lines = [line.strip() for line in out.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("within the bound of float32"))
    told = record(check, "mine.py", *NORMS, *LINES, "--contract", "exact")
    count = sum("rms_norm" in c["id"] and c["outcome"] == "fail" for c in told["cases"])
    assert f"kernel/rms_norm: bits of {count} cases differ" in lines[at:]


def test_what_claims_exact_and_is_float32_is_told_so(check: Check) -> None:
    Path("mine.py").write_text(FLOAT32.replace('"float32"', '"exact"'))
    told = record(check, "mine.py", *NORMS)
    hints = [case["diagnosis"] for case in told["cases"] if case["outcome"] == "fail"]
    assert hints
    for lines in hints:
        assert lines[-1].endswith("you claim exact; this looks like float32 accumulation")
    wrong = record(check, "mine.py", "--case", "kernel/linear/k33_t1:bits")["cases"][0]
    assert not any("you claim exact" in line for line in wrong["diagnosis"])


def test_what_is_piped_is_not_broken(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = check("mine.py", *LINES)
    assert "     bitforbit check mine.py --case 'kernel/linear/k33_t1:gauge'" in out.splitlines()
    assert any(line.startswith("     at [") and "bound" in line for line in out.splitlines())


def test_a_list_that_is_piped_has_a_line_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["faults", "list", "--area", "norms"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    known = [fault for fault in faults() if area(fault) == "norms"]
    assert len(lines) == len(known)
    for line, fault in zip(lines, known, strict=True):
        assert fault.name in line
        assert description(fault) in line


def test_a_glob_that_is_nearly_right_is_told(check: Check) -> None:
    code, _, err = check("mine.py", "--case", "kernel/rmsnorm/*")
    assert (code, "did you mean kernel/rms_norm/* or " in err) == (2, True)


def test_a_method_that_is_no_operation_is_warned_of(check: Check) -> None:
    Path("mine.py").write_text(FLOAT32.replace("def rms_norm(", "def rmsnorm("))
    code, _, err = check("mine.py", *NORMS, "--case", "kernel/linear/k33_t5")
    assert code == 0
    assert err.startswith("bitforbit: mine.py: `rmsnorm` is no operation, and is never called; ")


def test_the_specification_names_what_has_one_answer() -> None:
    text = (Path(__file__).parents[3] / "SPEC.md").read_text()
    sentence = text[text.index("Which cases are asked is a *contract*") :].split("\n\n")[0]
    named = re.search(r"any arithmetic \(([^)]*)\)", " ".join(sentence.split()))
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) == BITS_FOR_ALL
