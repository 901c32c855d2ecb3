"""`bitforbit fuzz`: exit codes, lines that repeat a case, files, and bad options in one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from conformance.cli import main

RIGHT = """
import numpy as np


class Backend:
    numerics = {"accumulator": "float32"}

    def rms_norm(self, x, weight, eps):
        print("a line of its own")
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
"""
WRONG = RIGHT.replace(
    "np.mean(x * x, axis=-1, keepdims=True)", "(x * x).sum(-1, keepdims=True) / 64"
)


@pytest.fixture
def backend(tmp_path: Path) -> Any:
    def write(source: str) -> str:
        path = tmp_path / "my backend.py"
        path.write_text(source)
        return str(path)

    return write


def test_what_is_right_passes(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", backend(RIGHT), "-n", "15", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "15 passed, 0 failed; seed 3" in out
    assert "a line of its own" not in out
    assert "not implemented: exp, log" in out.replace("\n", " ")


def test_what_is_wrong_fails_and_its_line_repeats_it(
    backend: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, report = backend(WRONG), str(tmp_path / "r.json")
    assert main(["fuzz", path, "-n", "15", "--seed", "3", "--json", report]) == 1
    out = capsys.readouterr().out
    (found,) = [o for o in json.loads(Path(report).read_text())["operations"] if o["offered"]]
    assert found["failed"] == 1 + len(found["repeats"])
    (failure,) = found["failures"]
    for line in (failure["least"]["command"], failure["drawn"]["command"], found["repeats"][0]):
        first, *words = shlex.split(line)
        assert first == "bitforbit"
        assert main(words) == 1
        again = capsys.readouterr().out
        assert "0 passed, 1 failed" in again
    assert failure["least"]["command"] in out
    for line in (failure["least"]["message"], failure["where"]):
        assert line in out  # no line is broken where no one looks
    # It is wrong for every width but 64: the least is that of one element.
    assert failure["least"]["choices"]["width"] == 1
    assert failure["least"]["choices"]["rows"] == 1


@pytest.mark.filterwarnings("ignore:(over|inv):RuntimeWarning")
def test_of_the_worst_element_is_said_what_check_says(
    backend: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where the message says it all, as that of a bound does, nothing."""
    rounds, claims = backend(WRONG), tmp_path / "claims.py"
    claims.write_text(WRONG.replace('"float32"', '"exact"'))
    where, found = {}, str(tmp_path / "found")
    for path in (rounds, str(claims)):
        main(["fuzz", path, "-n", "9", "--seed", "3", "--save", found, "--json"])
        (failed,) = [
            failure
            for operation in json.loads(capsys.readouterr().out)["operations"]
            for failure in operation.get("failures", ())
            if failure["drawn"]["id"].endswith(":bits" if path == str(claims) else ":gauge")
        ]
        where[path] = failed
    assert "worst" not in where[rounds]["where"]
    told = where[str(claims)]
    wrong, line = told["where"].split("; worst ")
    assert wrong.startswith("wrong in y: ")
    assert main(["check", str(claims), "--goldens", found, "--case", told["least"]["id"]]) == 1
    lines = [text.strip() for text in capsys.readouterr().out.splitlines()]
    assert f"worst {line}" in lines


def test_another_seed_every_time(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = set()
    for _ in range(2):
        assert main(["fuzz", backend(RIGHT), "-n", "1", "--json"]) == 0
        seeds.add(json.loads(capsys.readouterr().out)["seed"])
    assert len(seeds) == 2


def test_a_time_limit_ends_it(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", backend(RIGHT), "--time", "0.3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "bitforbit-fuzz-1"
    assert told["numerics"] == {"accumulator": "float32"}
    assert sum(operation["passed"] for operation in told["operations"]) > 0


def test_saved_cases_are_goldens(
    backend: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, folder = backend(WRONG), str(tmp_path / "found")
    for more in ([], ["--no-shrink"]):
        command = ["fuzz", path, "-n", "5", "--seed", "3", "--op", "rms_norm", "--save", folder]
        assert main([*command, *more]) == 1
    assert len(list(Path(folder).rglob("*.safetensors"))) == 2
    capsys.readouterr()
    for source, code in ((WRONG, 1), (RIGHT, 0)):
        asked = ["check", backend(source), "--goldens", folder, "--case", "*fuzz*"]
        assert main(asked) == code
        out = capsys.readouterr().out
        assert ("2 passed" if code == 0 else "2 failed") in out
    name = next(Path(folder).rglob("*.safetensors")).relative_to(folder).with_suffix("")
    assert main(["goldens", "show", name.as_posix(), "--folder", folder]) == 0
    assert "drawn: rms_norm/3/" in capsys.readouterr().out


def test_nothing_passed_is_no_pass(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", backend(RIGHT), "--op", "linear", "-n", "3"]) == 1
    assert "0 passed, 0 failed" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_was_found(
    backend: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = WRONG.replace(
        "        print(", "        self.n = getattr(self, 'n', 0) + 1\n        print("
    )
    source = source.replace(
        "        return",
        "        if self.n > 400:\n            raise KeyboardInterrupt\n        return",
        1,
    )
    report = tmp_path / "r.json"
    assert main(["fuzz", backend(source), "-n", "9999", "--json", str(report)]) == 2
    told = json.loads(report.read_text())
    assert told["interrupted"]
    assert any(operation["failures"] for operation in told["operations"])
    assert capsys.readouterr().err.endswith("bitforbit: interrupted\n")


BAD = [
    ["--op", "nothing"],
    ["--case", "nothing/1/2"],
    ["--case", "rms_norm/1"],
    ["--case", "rms_norm/1/2 colour=red"],
    ["--case", "rms_norm/1/2 rows=0"],
    ["--case", "rms_norm/1/2", "-n", "3"],
    ["--case", "rms_norm/1/2", "--seed", "0"],
    ["--timeout", "3"],
    ["--process", "true"],
    ["--save", "pyproject.toml"],
    ["--json", "/no/such/folder/x.json"],
]


@pytest.mark.parametrize("options", BAD, ids=" ".join)
def test_bad_options_are_one_line(
    backend: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", backend(RIGHT), *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("bitforbit: ")
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    "options", [["-n", "0"], ["-n", "x"], ["--seed", "-1"], ["--seed", str(2**64)], ["--time", "0"]]
)
def test_bad_numbers_are_refused(
    backend: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fuzz", backend(RIGHT), *options])
    assert stopped.value.code == 2
    assert "is not a " in capsys.readouterr().err
