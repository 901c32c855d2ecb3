"""`goldens`: make, verify and show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from conformance.commands.goldens import _in_short
from conformance.golden import MANIFEST, read_all, read_manifest
from conformance.paths import data_folder
from tests.conformance.command_line import MODEL, Run


def test_make_and_verify(run: Run, goldens: Path) -> None:
    code, out, err = run("goldens", "verify")
    assert (code, err) == (0, "")
    assert out == "2 goldens made again with the same bytes, 0 differ\n"
    manifest = json.loads((goldens / MANIFEST).read_text())
    manifest["files"]["kernel/linear/k1_t1.safetensors"] = "0" * 64
    (goldens / MANIFEST).write_text(json.dumps(manifest))
    code, out, _ = run("goldens", "verify", "--folder", str(goldens))
    assert code == 1
    assert out.splitlines() == [
        "differs: kernel/linear/k1_t1",
        "1 goldens made again with the same bytes, 1 differ",
    ]
    new = goldens.parent / "new" / "folder"
    code, _, err = run("goldens", "make", "--folder", str(new))
    assert code == 0
    assert "2 goldens in" in err
    assert len(read_manifest(new)) == 2
    assert run("goldens", "verify", "--folder", str(new))[0] == 0


def test_some_are_made_and_verified(run: Run, goldens: Path) -> None:
    whole = {path: path.read_bytes() for path in goldens.rglob("*") if path.is_file()}
    spoiled = [goldens / f"kernel/linear/{name}.safetensors" for name in ("k1_t1", "k33_t5")]
    for path in spoiled:
        path.write_bytes(b"")
    code, _, err = run("goldens", "make", "--folder", str(goldens), "--case", "*/k33_*:bits")
    assert (code, err) == (0, f"1 made of the 2 goldens in {goldens}\n")
    whole[spoiled[0]] = b""
    assert {path: path.read_bytes() for path in goldens.rglob("*") if path.is_file()} == whole
    manifest = json.loads((goldens / MANIFEST).read_text())
    manifest["files"]["kernel/linear/k1_t1.safetensors"] = "0" * 64
    (goldens / MANIFEST).write_text(json.dumps(manifest))
    code, out, _ = run("goldens", "verify", "--case", "kernel/linear/k33_t5")
    assert (code, out) == (0, "1 goldens made again with the same bytes, 0 differ\n")
    code, out, _ = run("goldens", "verify", "--case", "*k33*", "--case", "kernel/linear/k1_t1")
    assert code == 1
    assert "differs: kernel/linear/k1_t1\n1 goldens made again" in out


@pytest.mark.parametrize("action", ["make", "verify"])
def test_a_golden_that_is_not_there_is_refused(run: Run, goldens: Path, action: str) -> None:
    before = (goldens / MANIFEST).read_bytes()
    there = ("goldens", action, "--folder", str(goldens), "--case", "*/k1_*")
    said = run.refused(*there, "--case", "kernel/linear/k33_t6")
    assert "'kernel/linear/k33_t6': no case matches; did you mean kernel/linear/k33_t5" in said
    assert (goldens / MANIFEST).read_bytes() == before


def test_goldens_of_a_model_are_made_all_at_once(run: Run, tmp_path: Path) -> None:
    own = ("--model", MODEL, "--prompts", "p.txt", "--out", str(tmp_path / "new"), "--case", "*")
    assert "--case: it is for the suite's own" in run.refused("goldens", "make", *own)


@pytest.mark.parametrize("case", ["kernel/linear/bias", "kernel/linear/bias:gauge"])
def test_show(run: Run, case: str) -> None:
    code, out, err = run("goldens", "show", case)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "kernel/linear/bias  SPEC 2.2  rules bits, gauge"
    assert "linear({})" in lines
    for line in (
        "in.x: float32 (3, 96)",
        "in.w: float32 (20, 96)",
        "out.y: float32 (3, 20)",
        "gauge.products: float32 (3, 20)  x dot(96)",
        "gauge.bias: float32 (3, 20)  x ops(2)",
    ):
        assert line in lines


def test_show_is_short_unless_all_is_asked_for(run: Run) -> None:
    short, full = (run("goldens", "show", "kernel/linear/bias", *o)[1] for o in ((), ("--full",)))
    assert len(short.splitlines()) == 2 + 2 * 6
    assert "..." not in full
    assert len(full) > 10 * len(short)
    golden = next(read_all(data_folder("goldens"), {"kernel/linear/bias"}))
    numbers = re.search(r"in\.w: float32 \(20, 96\)\n(.*?)in\.x", full, re.S)
    assert numbers is not None
    printed = re.findall(r"-?\d+\.\d*(?:e[-+]\d+)?", numbers[1])
    assert len(printed) == golden.inputs["w"].size
    low, high = golden.inputs["x"].min(), golden.inputs["x"].max()
    assert f"  from {low:.6g} to {high:.6g}; begins " in short


def test_a_signalling_nan_is_shown_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    array = np.array([0x7FA00000, 0x3F800000], np.uint32).view(np.float32)
    assert _in_short(array) == "  from 1 to 1; 1 not finite; begins nan 1.0"
    assert not list(recwarn)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("kernel/linear/bias:gaug", "kernel/linear/bias has no rule 'gaug', only bits, gauge"),
        ("kernel/linear/biass", "no such golden; did you mean kernel/linear/bias or "),
    ],
)
def test_show_knows_what_is_meant(run: Run, case: str, said: str) -> None:
    assert said in run.refused("goldens", "show", case)


def test_show_parameters_and_note(run: Run) -> None:
    _, out, _ = run("goldens", "show", "kernel/attention/window_1")
    assert '"window": 1' in out
    _, out, _ = run("goldens", "show", "kernel/attention/poison_future")
    assert "only the last two rows see it" in out


def test_the_suites_own_goldens_are_where_the_command_looks() -> None:
    assert (data_folder("goldens") / MANIFEST).is_file()
