"""JUnit, badges, and how reports are asked for and written."""

from __future__ import annotations

import builtins
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped

from conformance import cli
from conformance.reports import badge
from conformance.reports.files import text_writer
from conformance.reports.junit import junit
from conformance.reports.record import as_text, record
from reference.errors import RequestError
from tests.conformance.reports.runs import FAULT, HOSTILE, RUN, everything, of, outcomes, result
from tests.conformance.signals import heeding_interrupts

# JUnit, read by another's parser.


def test_junit_has_every_case_with_its_outcome() -> None:
    data = everything()
    suites = JUnitXml.fromstring(junit(data).encode())
    kinds = {Failure: "fail", Error: "cannot evaluate", Skipped: "skipped"}
    found = {}
    for suite in suites:
        for case in suite:
            kind = kinds[type(case.result[0])] if case.result else "pass"
            found[f"{case.classname.replace('.', '/')}/{case.name}"] = kind
    unheard = dict.fromkeys(("not implemented", "not judged"), "skipped")
    assert found == {case: unheard.get(kind, kind) for case, kind in outcomes(data).items()}
    assert (suites.tests, suites.failures, suites.errors, suites.skipped) == (28, 3, 1, 2)
    for suite in suites:
        cases = list(suite)
        results = [type(case.result[0]) for case in cases if case.result]
        counts = (len(cases), *(results.count(kind) for kind in kinds))
        assert (suite.tests, suite.failures, suite.errors, suite.skipped) == counts


def test_junit_tells_a_failure_in_full() -> None:
    top = ElementTree.fromstring(junit(everything()))
    (case,) = top.findall(".//testcase[@name='half:gauge']")
    (failure,) = case
    assert failure.get("message") == "at [0]: far"
    assert failure.get("type") == "gauge"
    assert failure.text is not None
    lines = failure.text.splitlines()
    assert lines[0] == "kernel/rope/half:gauge  (SPEC 2.2)"
    assert lines[2].startswith("worst y[3, 0, 0]")
    assert lines[3:] == [FAULT, "bitforbit check mine.py --case 'kernel/rope/half:gauge'"]
    (hostile,) = top.findall(".//testcase[@name='all:ulp(4)']/failure")
    assert hostile.get("message") == f"the backend raised E: {HOSTILE}"


def test_junit_with_what_xml_cannot_say() -> None:
    data = of([result("a/b/c:bits", "fail", None, "\x00\x1b\ufffe\udc80 ]]>")])
    (failure,) = ElementTree.fromstring(junit(data).encode()).iter("failure")
    assert failure.get("message") == "\\x00\\x1b\\ufffe\\udc80 ]]>"


def test_what_failed_as_expected_is_skipped_and_green_no_more() -> None:
    results = [result("a/b/c:bits"), result("a/b/d:gauge", "fail", 2.0, "far")]
    data = record(RUN, results, expected={"a/b/d:gauge": "no sinks yet"})
    suites = JUnitXml.fromstring(junit(data).encode())
    assert (suites.tests, suites.failures, suites.skipped) == (2, 0, 1)
    (skipped,) = ElementTree.fromstring(junit(data)).iter("skipped")
    assert skipped.get("message") == "failed as expected: no sinks yet"
    assert badge.verdict(data) == ("1 passed, 1 known failure", badge.YELLOW)
    alone = record(RUN, results[1:], expected={"a/b/d:gauge": "no sinks yet"})
    assert badge.verdict(alone) == ("0 passed, 1 known failure", badge.YELLOW)


def test_an_interrupted_run_is_an_error() -> None:
    whole = JUnitXml.fromstring(junit(of([result("a/b/c:bits")])).encode())
    assert (whole.tests, whole.errors) == (1, 0)
    cut = JUnitXml.fromstring(junit(of([result("a/b/c:bits")], interrupted=True)).encode())
    assert (cut.tests, cut.errors) == (2, 1)


# Badges.

ONE, OTHER = result("a/b/c:bits"), result("a/b/d:bits", "not implemented", None)
WRONG, LOST = result("a/b/e:bits", "fail", 1.0), result("a/b/f:bits", "cannot evaluate", None)


@pytest.mark.parametrize(
    ("results", "interrupted", "words", "color"),
    [
        ([ONE, ONE], False, "2 passed", badge.GREEN),
        ([ONE, OTHER], False, "1 passed, 1 not implemented", badge.YELLOW),
        ([OTHER], False, "nothing passed", badge.RED),
        ([], False, "nothing passed", badge.RED),
        ([ONE, WRONG, OTHER], False, "1 of 3 failed", badge.RED),
        ([ONE, LOST], False, "1 of 2 failed", badge.RED),
        ([ONE], True, "interrupted", badge.GREY),
        ([ONE, WRONG], True, "1 of 2 failed", badge.RED),
        ([ONE] * 1234, False, "1,234 passed", badge.GREEN),
    ],
)
def test_a_badge(results: list[Any], interrupted: bool, words: str, color: str) -> None:
    data = of(results, interrupted=interrupted)
    told = json.loads(badge.endpoint(data))
    assert told.pop("isError") == (color == badge.RED)
    assert told == {"schemaVersion": 1, "label": "bitforbit", "message": words, "color": color}
    picture = ElementTree.fromstring(badge.svg(data))
    space = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in picture.iter(f"{space}text")] == ["bitforbit", words]
    assert picture.get("aria-label") == f"bitforbit: {words}"
    assert [path.get("fill") for path in picture.iter(f"{space}path")] == [color]
    assert (color == badge.GREEN) == (
        not interrupted and bool(results) and {r.outcome for r in results} == {"pass"}
    )


# Writing.


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report"
    write = text_writer(str(target), "--html")
    write("ü\n")
    assert target.read_text(encoding="utf-8") == "ü\n"

    def full(self: Path, text: str, encoding: str) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RequestError, match=r"--html: cannot write .*No space left"):
        write("more")
    assert target.read_bytes() == "ü\n".encode()
    assert os.listdir(tmp_path) == ["report"]


BACKEND = "class Backend:\n    numerics = {'accumulator': 'float32'}\n"


@pytest.fixture
def check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    file = tmp_path / "mine.py"
    file.write_text(
        f"{BACKEND}    def linear(self, x, w, bias=None):\n        return 2 * (x @ w.T)\n"
    )

    def run(*options: str) -> tuple[int, str, str]:
        code = cli.main(["check", str(file), "--case", "kernel/linear/k33_*", *options])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_all_reports_at_once(check: Any, tmp_path: Path) -> None:
    names = {"--json": "a.json", "--html": "a.html", "--junit": "a.xml", "--badge": "a.svg"}
    options = [word for o, n in names.items() for word in (o, str(tmp_path / n))]
    options += ["--contract", "exact"]
    code, out, err = check(*options)
    assert (code, err) == (1, "")
    assert "0 passed, 4 failed" in out
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["summary"]["failed"] == 4
    assert data["again"] == f"check {tmp_path / 'mine.py'} --contract exact"
    words = shlex.split(data["command"])
    assert words[:2] == ["check", str(tmp_path / "mine.py")]
    assert words[-len(options) :] == options
    assert all(case["outputs"][0]["differing"] > 0 for case in data["cases"])
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert JUnitXml.fromfile(str(tmp_path / "a.xml")).failures == 4
    assert "4 of 4 failed" in (tmp_path / "a.svg").read_text()
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith(".")) == []
    before = ["--track", str(tmp_path / "a.json"), "--contract", "exact"]
    code, out, _ = check(*before, "--json", str(tmp_path / "a.json"))
    assert "nothing changed" in out
    assert json.loads((tmp_path / "a.json").read_text())["track"]["newly_failing"] == []


def test_only_what_was_asked_for_is_compared(check: Any, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    results = [result("kernel/linear/k33_t1:bits"), result("kernel/rope/half:bits")]
    gone = result("kernel/linear/k33_t9:bits")
    old.write_text(as_text(of([*results, gone])), encoding="utf-8")
    _, out, _ = check("--track", str(old), "--json", "-", "--contract", "exact")
    track = json.loads(out)["track"]
    assert track["newly_failing"] == ["kernel/linear/k33_t1:bits"]
    assert track["gone"] == ["kernel/linear/k33_t9:bits"]
    _, out, _ = check("--track", str(old), "--json", "-")  # bits are not asked
    track = json.loads(out)["track"]
    assert (track["newly_failing"], track["gone"]) == ([], ["kernel/linear/k33_t9:bits"])


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--badge", "a.png"), "--badge: a.png must end in .svg or .json"),
        (("--badge", "-"), "--badge: - must end in"),
        (("--json", "-", "--junit", "-"), "--junit: --json goes to standard output already"),
        (("--html", "/nowhere/a.html"), "--html: cannot write /nowhere/a.html"),
        (("--junit", "/nowhere/a.xml"), "--junit: cannot write /nowhere/a.xml"),
        (("--track", "/nowhere/old.json"), "--track: /nowhere/old.json: no such file"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_run(
    check: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], part: str
) -> None:
    from conformance import runner

    def never(*arguments: object) -> object:
        raise AssertionError("the run began")

    monkeypatch.setattr(runner, "run", never)
    code, out, err = check(*options)
    assert (code, out) == (2, "")
    assert part in err
    assert err.count("\n") == 1


def test_without_jinja_only_the_page_is_refused(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "jinja2":
            raise ImportError("No module named 'jinja2'")
        return there(name, *rest)

    monkeypatch.delitem(sys.modules, "conformance.reports.html", raising=False)
    monkeypatch.setattr(builtins, "__import__", absent)
    code, _, err = check("--html", str(tmp_path / "a.html"))
    assert code == 2
    assert err.strip() == (
        "bitforbit: --html: No module named 'jinja2'; pip install 'bitforbit[html]'"
    )
    assert check("--junit", str(tmp_path / "a.xml"))[0] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_report_of_an_interrupted_run_is_written(number: int, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    file = tmp_path / "mine.py"
    file.write_text(
        f"import pathlib, time\n{BACKEND}    def exp(self, x):\n        return x\n"
        "    def log(self, x):\n"
        f"        pathlib.Path({str(sign)!r}).touch()\n        time.sleep(60)\n"
    )
    names = {"--json": "a.json", "--html": "a.html", "--junit": "a.xml", "--badge": "a.json.json"}
    words = [sys.executable, "-m", "conformance.cli", "check", str(file), "--level", "elementary"]
    words += [word for o, n in names.items() for word in (o, str(tmp_path / n))]
    with subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heeding_interrupts,
    ) as run:
        for _ in range(1200):
            if sign.exists():
                break
            time.sleep(0.05)
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (2, "", "bitforbit: interrupted\n")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["interrupted"] is True
    failed = [case for case in data["cases"] if case["outcome"] == "fail"]
    assert {case["id"].split("/")[1] for case in failed} == {"exp"}
    assert all(case["outputs"] for case in failed)
    assert "Interrupted." in (tmp_path / "a.html").read_text()
    assert JUnitXml.fromfile(str(tmp_path / "a.xml")).errors == 1
    assert json.loads((tmp_path / "a.json.json").read_text())["message"].endswith("failed")
