"""Cases as pytest items: outcomes, skip and xfail files, xdist, and no cost without the option."""

from __future__ import annotations

import importlib.metadata
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conformance.cases.invariances import invariances
from conformance.cli import main
from conformance.golden import read_all
from conformance.paths import data_folder

pytest_plugins = "pytester"

ROOT = Path(__file__).parents[3]
MISBEHAVING = Path(__file__).parents[1] / "programs" / "misbehaving.py"

BACKEND = """
import numpy as np


class Backend:
    numerics = {"accumulator": "float32"}

    def rms_norm(self, x, weight, eps):
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(eps)) * weight

    def linear(self, x, w, bias=None):
        raise ValueError("no linear yet")
"""
"""rms_norm is right within its bound and wrong in bits; linear raises; the rest is missing."""


def installed() -> bool:
    """Whether this environment's metadata knows the plugin, which a checkout's may not."""
    found = importlib.metadata.entry_points(group="pytest11")
    return any(one.value == "conformance.pytest_plugin" for one in found)


@pytest.fixture(autouse=True)
def here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (pytester.path / "mine.py").write_text(BACKEND)
    return pytester.path


def pytest_run(
    pytester: pytest.Pytester, *words: str, subprocess: bool = False
) -> pytest.RunResult:
    plugin = () if installed() else ("-p", "conformance.pytest_plugin")
    run = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
    return run(*plugin, "-p", "no:benchmark", *words)


def judged(pytester: pytest.Pytester, case: str, *words: str) -> pytest.RunResult:
    asked = () if any("contract" in word for word in words) else ("--bitforbit-contract=exact",)
    given = ("--bitforbit-backend=mine.py", f"--bitforbit-case={case}", *asked, *words)
    return pytest_run(pytester, *given, subprocess="-n" in words)


def ids(result: pytest.RunResult) -> list[str]:
    prefix = "bitforbit::"
    return [line.removeprefix(prefix) for line in result.outlines if line.startswith(prefix)]


def test_every_case_is_an_item_of_its_id(pytester: pytest.Pytester) -> None:
    goldens = read_all(data_folder("goldens"))
    expected = [f"{golden.id}:{rule}" for golden in goldens for rule in golden.rules]
    expected += [f"{one.id}:bits" for one in invariances()]
    words = ("--bitforbit-backend=mine.py", "--collect-only", "-q")
    assert ids(pytest_run(pytester, *words)) == expected


def test_what_passes_fails_and_is_missing(pytester: pytest.Pytester) -> None:
    result = judged(pytester, "kernel/r*[me]*/k33*", "-rA")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["PASSED bitforbit::kernel/rms_norm/k33:gauge"])
    result = judged(pytester, "elementary/*", "-rs")
    assert set(result.parseoutcomes()) == {"skipped"}
    result.stdout.fnmatch_lines(["SKIPPED*not implemented: the backend has no exp*"])


def test_what_the_declared_precision_leaves_no_verdict_of_is_skipped(
    pytester: pytest.Pytester,
) -> None:
    half = BACKEND.replace('"float32"}', '"float32", "operands": "float16"}')
    half = half.replace('raise ValueError("no linear yet")', "return x @ w.T")
    (pytester.path / "half.py").write_text(half)
    words = ("--bitforbit-backend", "half.py", "--bitforbit-case", "kernel/linear/wide_block:gauge")
    result = pytest_run(pytester, *words, "-rs")
    assert set(result.parseoutcomes()) == {"skipped"}
    result.stdout.fnmatch_lines(["SKIPPED*not judged: an operand is beyond 65504"])


def test_a_failure_is_the_reports_with_the_line_that_repeats_it(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    result = judged(pytester, "kernel/rms_norm/k33:bits")
    result.assert_outcomes(failed=1)
    repeat = "bitforbit check mine.py --contract exact --case kernel/rms_norm/k33:bits"
    result.stdout.fnmatch_lines(
        ["*elements differ, first at*(SPEC 6)", "     worst y*", "*" + repeat]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    assert main(shlex.split(repeat)[1:]) == 1
    said = " ".join(capsys.readouterr().out.split())
    for line in ("elements differ", "worst y"):
        whole = next(text for text in result.outlines if line in text).split("  (SPEC")[0]
        assert " ".join(whole.split()) in said


ONE_ELEMENT = """
import numpy as np

from conformance.backends.reference import ReferenceBackend


class Backend(ReferenceBackend):
    def rms_norm(self, x, weight, eps):
        y = super().rms_norm(x, weight, eps)
        y[0, 0] = np.nextafter(y[0, 0], np.float32(np.inf))
        return y
"""


def test_of_the_worst_element_is_said_what_check_says(
    pytester: pytest.Pytester, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has both values of the one element that is wrong, and they are not said twice."""
    (here / "mine.py").write_text(ONE_ELEMENT)
    result = judged(pytester, "kernel/rms_norm/k33:bits")
    (line,) = (text.strip() for text in result.outlines if "worst y" in text)
    assert line.startswith("worst y[0, 0]: error ")
    capsys.readouterr()
    assert main(["check", "mine.py", "--case", "kernel/rms_norm/k33:bits"]) == 1
    assert line in [text.strip() for text in capsys.readouterr().out.splitlines()]


def test_diagnosis_is_asked_for(pytester: pytest.Pytester) -> None:
    result = judged(pytester, "kernel/rms_norm/k33:bits", "--bitforbit-diagnose")
    result.stdout.fnmatch_lines(["*within the bound of float32*"])
    result = judged(pytester, "kernel/rms_norm/k33:bits")
    result.stdout.no_fnmatch_line("*within the bound of float32*")


def test_what_raises_fails_its_case_alone(pytester: pytest.Pytester) -> None:
    result = judged(pytester, "kernel/[lr][im][ns]*/k33*:gauge")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == 1
    assert outcomes["failed"] >= 1
    result.stdout.fnmatch_lines(["the backend raised ValueError: no linear yet*"])


def test_invariances_are_cases_too(pytester: pytest.Pytester) -> None:
    judged(pytester, "invariance/rms_norm/rows_alone").assert_outcomes(passed=1)


def test_skip_and_xfail_files(pytester: pytest.Pytester, here: Path) -> None:
    (here / "skip.txt").write_text("\n# norms\nkernel/rms_norm/k1   # too small\n")
    (here / "xfail.txt").write_text(
        "kernel/rms_norm/k33:bits  # sums in another order\nkernel/rms_norm/k31:bits\n"
    )
    files = ("--bitforbit-skip=skip.txt", "--bitforbit-xfail=xfail.txt")
    result = judged(pytester, "kernel/rms_norm/k[13]*", *files, "-rsx")
    outcomes = result.parseoutcomes()
    assert (outcomes["skipped"], outcomes["xfailed"]) == (2, 2)
    result.stdout.fnmatch_lines(["SKIPPED*too small"])
    result.stdout.fnmatch_lines(["XFAIL*k33:bits - sums in another order"])
    result.stdout.fnmatch_lines(["XFAIL*k31:bits - xfail.txt:2"])


def test_what_should_fail_and_passes_is_a_failure(pytester: pytest.Pytester, here: Path) -> None:
    (here / "xfail.txt").write_text("kernel/rms_norm/k33  # all of it\n")
    result = judged(pytester, "kernel/rms_norm/k33", "--bitforbit-xfail=xfail.txt")
    result.assert_outcomes(xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*all of it*"])


def test_what_may_fail_may_pass_too(pytester: pytest.Pytester, here: Path) -> None:
    (here / "known.txt").write_text("kernel/rms_norm/k33  # another order\nkernel/linear/*\n")
    known = "--bitforbit-expect=known.txt"
    result = judged(pytester, "kernel/rms_norm/k3[13]*", known, "-rx")
    result.assert_outcomes(xfailed=1, xpassed=1, failed=1, passed=1)
    result.stdout.fnmatch_lines(["XFAIL*k33:bits - another order"])


def test_globs_add_up_and_each_must_match(pytester: pytest.Pytester) -> None:
    more = ("--bitforbit-case=kernel/rms_norm/k31:bits", "--collect-only", "-q")
    result = judged(pytester, "kernel/rms_norm/k33:gauge", *more)
    assert set(ids(result)) == {"kernel/rms_norm/k33:gauge", "kernel/rms_norm/k31:bits"}
    result = judged(pytester, "kernel/rms_norm/k33", "--bitforbit-case=kernel/rmsnorm/*")
    assert "no case matches --bitforbit-case 'kernel/rmsnorm/*'" in result.stderr.str()


def test_what_a_backend_declares_says_what_is_asked(pytester: pytest.Pytester, here: Path) -> None:
    words = ("--bitforbit-backend=mine.py", "--bitforbit-case=*/rms_norm/[kr][3o]*", "-rs")
    result = pytest_run(pytester, *words)
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == sum(n.endswith("gauge") for n in ids(collected(pytester, *words)))
    assert "failed" not in outcomes
    result.stdout.fnmatch_lines(["*not asked of float32 (contract bounds, SPEC 18)"])
    (here / "mine.py").write_text(BACKEND.replace('"float32"', '"exact"'))
    assert pytest_run(pytester, *words).parseoutcomes()["failed"] >= 3


def collected(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytest_run(pytester, *words, "--collect-only", "-q")


def test_what_is_missing_does_not_fail_as_expected(pytester: pytest.Pytester, here: Path) -> None:
    (here / "xfail.txt").write_text("elementary/exp/*\n")
    result = judged(pytester, "elementary/exp/*", "--bitforbit-xfail=xfail.txt")
    assert set(result.parseoutcomes()) == {"skipped"}


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_pattern_that_matches_nothing_is_warned_of_once(
    workers: tuple[str, ...], pytester: pytest.Pytester, here: Path
) -> None:
    (here / "skip.txt").write_text("kernel/linear/*\nkernel/nothing/*  # renamed\n")
    result = judged(pytester, "kernel/rms_norm/k1", "--bitforbit-skip=skip.txt", *workers)
    told = [line for line in result.outlines if "PytestWarning:" in line]
    assert len(told) == 1
    assert told[0].endswith("skip.txt:2: no case matches 'kernel/nothing/*'")


def test_with_xdist_every_worker_has_a_backend_of_its_own(
    pytester: pytest.Pytester, here: Path
) -> None:
    """Both workers collect the same, or xdist would stop; each opens the backend once."""
    opened = 'import os\n\nopen(f"opened-{os.getpid()}", "a").write("x")\n'
    (here / "mine.py").write_text(opened + BACKEND)
    result = judged(pytester, "kernel/*_norm/*:gauge", "-n", "2")
    assert set(result.parseoutcomes()) - {"warnings"} == {"passed"}
    assert [path.read_text() for path in here.glob("opened-*")] == ["x", "x"]


def test_collecting_opens_nothing(pytester: pytest.Pytester, here: Path) -> None:
    """And a backend that cannot be opened is tried once, though each of its cases says so."""
    (here / "mine.py").write_text('open("opened", "a").write("x")\nraise SystemExit("opened")\n')
    assert len(ids(judged(pytester, "kernel/rms_norm/k33", "--collect-only", "-q"))) == 2
    assert not (here / "opened").exists()
    result = judged(pytester, "kernel/rms_norm/k33")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["mine.py: does not import (SystemExit: opened)*"])
    assert (here / "opened").read_text() == "x"


def test_a_program_is_judged_and_ended(pytester: pytest.Pytester) -> None:
    program = shlex.join([sys.executable, str(ROOT / "tests/conformance/programs/answering.py")])
    result = pytest_run(
        pytester,
        f"--bitforbit-backend=process:{program}",
        "--bitforbit-case=kernel/linear/k3*",
        "--bitforbit-timeout=50",
    )
    assert set(result.parseoutcomes()) == {"passed"}


def test_a_program_that_fails_says_how_to_repeat_it(pytester: pytest.Pytester) -> None:
    program = shlex.join([sys.executable, "-I", "-S", str(MISBEHAVING), "exit_3"])
    case = "--bitforbit-case=elementary/exp/*"
    result = pytest_run(
        pytester, f"--bitforbit-backend=process:{program}", case, "--bitforbit-timeout=7"
    )
    words = f"bitforbit check --process {shlex.quote(program)} --timeout 7 --case"
    assert any(words in line for line in result.outlines)


def test_k_and_last_failed_choose_among_the_cases(pytester: pytest.Pytester) -> None:
    result = judged(pytester, "kernel/rms_norm/*", "-k", "k33 and bits")
    result.assert_outcomes(failed=1, deselected=_count("kernel/rms_norm/") - 1)
    judged(pytester, "kernel/rms_norm/k33").assert_outcomes(failed=1, passed=1)
    judged(pytester, "kernel/rms_norm/k33", "--lf").assert_outcomes(failed=1, deselected=1)


def _count(prefix: str) -> int:
    wanted = {
        file.relative_to(data_folder("goldens")).with_suffix("").as_posix()
        for file in (data_folder("goldens") / prefix).glob("*.safetensors")
    }
    return sum(len(golden.rules) for golden in read_all(data_folder("goldens"), wanted))


def test_junit_has_the_margin(pytester: pytest.Pytester, here: Path) -> None:
    judged(pytester, "kernel/rms_norm/k33:gauge", "--junitxml=junit.xml")
    text = (here / "junit.xml").read_text()
    assert 'classname="bitforbit" name="kernel/rms_norm/k33:gauge"' in text
    assert '<property name="worst" value="0.' in text
    assert '<property name="section" value="6"' in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bitforbit-backend=gone.py"], "gone.py is neither a Python file"),
        (["--bitforbit-backend=mine.py", "--bitforbit-case=no/*"], "no case matches"),
        (["--bitforbit-backend=mine.py", "--bitforbit-level=no"], "'no' is none of elementary"),
        (["--bitforbit-backend=mine.py", "--bitforbit-skip=no.txt"], "no.txt: cannot be read"),
        (["--bitforbit-backend=mine.py", "--bitforbit-timeout=-1"], "seconds above 0"),
        (["--bitforbit-xfail=mine.py"], "--bitforbit-xfail: it needs --bitforbit-backend"),
        (["--bitforbit-backend=mine.py", "--bitforbit-skip=mine.py"], "mine.py:2: 'import numpy"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(
    words: list[str], said: str, pytester: pytest.Pytester
) -> None:
    result = pytest_run(pytester, *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


def test_without_the_option_nothing_of_the_suite_is_imported(
    pytester: pytest.Pytester, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "test_own.py").write_text(
        "import sys\n\n\ndef test_light():\n"
        "    assert 'conformance.pytest_plugin' in sys.modules\n"
        "    names = {name.split('.')[0] for name in sys.modules}\n"
        "    assert not names & {'numpy', 'reference', 'safetensors', 'rich'}\n"
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others may import numpy
    result = pytester.runpytest_subprocess("-p", "conformance.pytest_plugin")
    result.assert_outcomes(passed=1)


def test_the_plugin_imports_pytest_alone() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import conformance.pytest_plugin\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [
        "conformance",
        "conformance.pytest_plugin",
        "conformance.pytest_plugin.hooks",
    ]


def test_the_entry_point_is_declared() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["entry-points"]["pytest11"] == {"bitforbit": "conformance.pytest_plugin"}
    assert "pytest" in about["optional-dependencies"]


def test_a_backend_that_contracts_is_asked_for_either_in_place_of_bits(
    pytester: pytest.Pytester,
) -> None:
    code = "from conformance.variants.contracted import RopeSine as Backend\n"
    (pytester.path / "contracts.py").write_text(code)
    result = pytest_run(
        pytester, "--bitforbit-backend=contracts.py", "-k", "kernel/rope/half", "-rs"
    )
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*not asked: `either` stands for it*"])
