"""The comparison of benchmarks: by ratios, whatever the machine, and nothing half accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_paths import CASES
from tools.compare_baseline import BASELINE, load, main, paths


def content(**times: float) -> dict[str, Any]:
    """A file of pytest-benchmark; a ratio for each path, all seconds alike."""
    benchmarks = [
        {
            "name": name,
            "fullname": f"tests/benchmarks/test_paths.py::{name}",
            "group": "g",
            "params": {"case": "Case(...)"},
            "extra_info": {
                "primitive": "dgemm 2 x 2 x 2",
                "times_primitive": ratio,
                "times_primitive_quarter": ratio / 2,
                "times_primitive_three_quarters": ratio * 2,
            },
            "stats": {"median": 1.0, "data": [1.0] * 99},
        }
        for name, ratio in times.items()
    ]
    machine = {"machine": "x86_64", "node": "host", "cpu": {"brand_raw": "it", "flags": ["a"]}}
    return {
        "machine_info": machine,
        "commit_info": {"id": "0" * 40},
        "benchmarks": benchmarks,
        "datetime": "2026-01-01T00:00:00",
        "version": "5.0",
    }


def write(path: Path, told: Any) -> str:
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    return str(path)


@pytest.mark.parametrize(("now", "code"), [(1.0, 0), (1.49, 0), (1.51, 1), (0.2, 0)])
def test_a_slowdown_beyond_the_factor_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: float, code: int
) -> None:
    files = (
        write(tmp_path / "now", content(a=now, b=3.0)),
        write(tmp_path / "then", content(a=1.0, b=3.0)),
    )
    assert main([*files, "--factor", "1.5"]) == code
    out, err = capsys.readouterr()
    assert f"| a | 1 (0.5 to 2) | {now:.3g} " in out
    assert ("a: 1.51 times as slow" in err) == (code == 1)
    assert main([*files, "--factor", "1.6"]) == 0


def test_seconds_and_machines_do_not_count(tmp_path: Path) -> None:
    slow = content(a=1.0)
    slow["benchmarks"][0]["stats"]["median"] = 100.0
    slow["machine_info"]["cpu"]["brand_raw"] = "another"
    assert main([write(tmp_path / "now", slow), write(tmp_path / "then", content(a=1.0))]) == 0


def test_paths_of_one_run_alone_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = content(a=1.0, new=1.0, other=9.0)
    now["benchmarks"][2]["extra_info"]["primitive"] = "dgemm 4 x 4 x 4"
    then = content(a=1.0, gone=1.0, other=1.0)
    assert main([write(tmp_path / "now", now), write(tmp_path / "then", then)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ends = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in lines[2:]}
    assert ends == {
        "a": "",
        "new": "new",
        "gone": "not run",
        "other": "other primitive: dgemm 4 x 4 x 4",
    }


@pytest.mark.parametrize(
    ("told", "part"),
    [
        ("{", "not a file of pytest-benchmark"),
        ("[]", "no list of benchmarks"),
        ({"benchmarks": 1}, "no list of benchmarks"),
        (content(b=1.0), "no path of"),
        (content(a=0.0), "a: incomplete (0.0 is no ratio)"),
        (content(a=float("nan")), "nan is no ratio"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Any, part: str
) -> None:
    assert main([write(tmp_path / "now", told), write(tmp_path / "then", content(a=1.0))]) == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1
    assert main([str(tmp_path / "missing")]) == 2


def test_what_is_stored_is_trimmed_and_compares(tmp_path: Path) -> None:
    now, kept = write(tmp_path / "now", content(a=1.0)), tmp_path / "kept"
    assert main([now, str(kept), "--store"]) == 0
    stored = json.loads(kept.read_text())
    assert "data" not in stored["benchmarks"][0]["stats"]
    assert stored["machine_info"]["cpu"] == {"brand_raw": "it", "count": None, "arch": None}
    assert main([now, str(kept)]) == 0


def test_the_stored_baseline_has_every_path() -> None:
    named = {name for name in paths(load(BASELINE)) if name.startswith("test_path[")}
    assert named == {f"test_path[{case.group}: {case.name}]" for case in CASES}
