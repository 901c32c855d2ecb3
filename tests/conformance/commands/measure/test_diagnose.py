"""`bitforbit diagnose`: an answer from a bench, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.command_line import MODEL, Run


def test_a_bench_is_diagnosed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    small = ("-p", "8", "-n", "4", "-r", "2", "-t", "1", "-d", "0,3", "-o", "json")
    path.write_text(run("bench", "-m", MODEL, *small)[1])
    bench = json.loads(path.read_text())
    code, out, _ = run("diagnose", str(path), "-o", "json", "-n", "100000")
    assert code == 0
    told = json.loads(out)
    assert [(row["n_depth"], row["problem"]) for row in told] == [(0, "decode"), (3, "decode")]
    for row, prompt, decode in zip(told, bench[::2], bench[1::2], strict=True):
        assert row["prefill_seconds"] == prompt["ttft_median"]
        assert row["decode_seconds"] == 100000 / decode["rate_median"]
        assert row["digest"] == prompt["digest"]
    code, out, _ = run("diagnose", str(path), "-n", "100000")
    assert code == 0
    assert out.count("Decode is the problem: of a prompt of 8") == 2
    assert "| would help |" in out


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[]", "there is no row in it"),
        ('{"format": "bitforbit-bench", "version": 0}', "row 1 is of version 0"),
        ('{"format": "bitforbit-bench", "version": 1}', "row 1 is incomplete or wrong"),
    ],
)
def test_what_is_no_bench_is_refused(run: Run, tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "bench"
    path.write_text(text)
    assert part in run.refused("diagnose", str(path))
    assert "it is no bench file" in run.refused("diagnose", str(tmp_path / "missing"))
