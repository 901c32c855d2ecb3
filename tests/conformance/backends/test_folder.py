"""Inputs out, answers back: what is exported, who can answer it, and what is wrong with answers."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from conformance import cli
from conformance.backends.folder import inputs_file
from conformance.backends.reference import ReferenceBackend
from conformance.golden import digest, read_all
from conformance.operations import Sessions, call
from conformance.paths import data_folder
from conformance.runner import selected_invariances
from conformance.selection import Selection

Arrays = dict[str, NDArray[Any]]
Judge = Callable[..., dict[str, Any]]

CASE = "kernel/linear/k33_t5"


def export(folder: Path, *options: str) -> Path:
    assert cli.main(["export", str(folder), *options]) == 0
    return folder


def manifest(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return told


def asked(path: Path) -> tuple[str, dict[str, Any], Arrays]:
    """Operation, parameters and tensors of an inputs file, by the header's own bytes."""
    blob = path.read_bytes()
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    about = json.loads(header["__metadata__"]["call"])
    return about["operation"], about["parameters"], load_file(path)


def answer_all(folder: Path, backend: object, numerics: dict[str, Any]) -> None:
    """Answer every call of a folder by a backend of this process."""
    sessions = Sessions(backend)
    for entry in manifest(folder)["calls"].values():
        operation, parameters, arrays = asked(folder / entry["inputs"])
        absent: dict[str, None] = {}
        if "model" in parameters:
            parameters["model"] = parameters["model"].removeprefix("models/")
        else:  # an argument that is None is left out, and some methods want it
            named = inspect.signature(getattr(backend, operation)).parameters.values()
            absent = {
                p.name: None for p in named if p.default is p.empty and p.kind is not p.VAR_KEYWORD
            }
        outputs = call(backend, sessions, operation, {**absent, **parameters, **arrays})
        path = folder / entry["answer"]
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: np.ascontiguousarray(a) for n, a in outputs.items()}, path)
    (folder / "answers" / "numerics.json").write_text(json.dumps(numerics))


@pytest.fixture
def judge(capsys: pytest.CaptureFixture[str]) -> Judge:
    """Judge a folder: the JSON report, and under `exit` the exit code."""

    def run(folder: Path, *options: str) -> dict[str, Any]:
        capsys.readouterr()
        code = cli.main(["judge", str(folder), "--no-diagnosis", "--json", "-", *options])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        told: dict[str, Any] = json.loads(out)
        return {**told, "exit": code}

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        capsys.readouterr()
        code = cli.main(list(arguments))
        out, err = capsys.readouterr()
        assert code == 2
        assert out == ""
        assert err.startswith("bitforbit: ")
        assert err.count("\n") == 1
        return err

    return run


def cases(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case["id"]: case for case in told["cases"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything exported, and nothing answered."""
    return export(tmp_path_factory.mktemp("whole") / "questions")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two linear cases and a small model, answered by the reference."""
    folder = export(
        tmp_path_factory.mktemp("answered") / "questions", "--case", "kernel/linear/k33*"
    )
    answer_all(folder, ReferenceBackend(), {"accumulator": "exact"})
    return folder


@pytest.fixture
def mine(answered: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(answered, tmp_path / "mine"))


# What is exported.


def test_every_golden_travels_and_every_invariance_is_named(whole: Path) -> None:
    told = manifest(whole)
    there = {case for entry in told["calls"].values() for case in entry["cases"]}
    goldens = list(read_all(data_folder("goldens")))
    assert there == {f"{g.id}:{rule}" for g in goldens for rule in g.rules}
    left_out = {f"{i.id}:bits" for i in selected_invariances(Selection())}
    assert set(told["not_exportable"]) == left_out
    readme = (whole / "README.md").read_text()
    assert all(f"`{case}`" in readme for case in left_out)
    assert all(f"| {g.operation} | " in readme for g in goldens)


def test_the_manifest_says_what_is_there(whole: Path) -> None:
    told = manifest(whole)
    listed = {"README.md", "SPEC.md", "answer.py", "manifest.json", *told["models"]}
    for entry in told["calls"].values():
        assert digest((whole / entry["inputs"]).read_bytes()) == entry["sha256"]
        listed.add(entry["inputs"])
    for path, sha256 in told["models"].items():
        assert digest((whole / path).read_bytes()) == sha256
    files = {p.relative_to(whole).as_posix() for p in whole.rglob("*") if p.is_file()}
    assert files == listed
    assert (whole / "answers").is_dir()
    assert "models/tiny-dense/model.safetensors" in told["models"]


def test_inputs_hold_the_arguments_and_never_the_answer(whole: Path) -> None:
    goldens = {g.id: g for g in read_all(data_folder("goldens"))}
    for name, entry in manifest(whole)["calls"].items():
        golden = goldens.get(name) or goldens[name.rsplit(".", 1)[0]]
        operation, parameters, arrays = asked(whole / entry["inputs"])
        assert operation == golden.operation == entry["operation"]
        assert set(arrays) == set(golden.inputs)
        for key, array in arrays.items():
            assert array.tobytes() == golden.inputs[key].tobytes()
            assert array.dtype == golden.inputs[key].dtype
        more = set(parameters) - set(golden.parameters)
        assert more <= {"mode", "attention"}
        assert set(entry["results"]) == set(golden.outputs)


def test_attention_is_asked_for_twice(whole: Path) -> None:
    calls = manifest(whole)["calls"]
    assert calls["model/forward/short.exact"]["cases"] == ["model/forward/short:bits"]
    assert calls["model/forward/short.fast"]["cases"] == ["model/forward/short:gauge"]
    assert calls[CASE]["cases"] == [f"{CASE}:bits", f"{CASE}:gauge"]


def test_a_selection_is_exported_alone(tmp_path: Path, judge: Judge) -> None:
    folder = export(tmp_path / "q", "--level", "kernel", "--case", "*:gauge")
    told = manifest(folder)
    ids = {case for entry in told["calls"].values() for case in entry["cases"]}
    assert ids
    assert all(case.startswith("kernel/") and case.endswith(":gauge") for case in ids)
    assert told["models"] == {}
    assert told["not_exportable"] == []
    (folder / "answers" / "numerics.json").write_text('{"accumulator": "float32"}')
    assert set(cases(judge(folder))) == ids


def test_the_same_call_has_the_same_bytes_and_another_has_others() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    one = inputs_file("linear", {"x": x, "w": x, "bias": None})
    assert inputs_file("linear", {"w": x.copy(), "x": np.asfortranarray(x)}) == one
    other = x.copy()
    other[1, 2] = np.nextafter(other[1, 2], np.float32(9))
    assert inputs_file("linear", {"x": other, "w": x}) != one
    assert inputs_file("linear", {"x": x.reshape(3, 2), "w": x}) != one
    assert inputs_file("rms_norm", {"x": x, "w": x}) != one
    for eps, others in ((1e-6, 1e-5), (1, True)):
        assert inputs_file("f", {"eps": eps}) != inputs_file("f", {"eps": others})


# Who answers.


def test_an_answerer_without_numpy(tmp_path: Path, judge: Judge) -> None:
    """The script in the folder, by a Python that sees no package at all."""
    options = ("--level", "kernel", "--level", "elementary")
    folder = export(tmp_path / "questions", *options)
    alone = [sys.executable, "-S", "-I"]
    no_numpy = subprocess.run([*alone, "-c", "import numpy"], cwd=folder, capture_output=True)
    assert b"ModuleNotFoundError" in no_numpy.stderr
    done = subprocess.run([*alone, "answer.py"], cwd=folder, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    told = judge(folder)
    assert told["exit"] == 0
    assert told["summary"]["failed"] == told["summary"]["cannot_evaluate"] == 0
    passed = {case.split("/")[1] for case, r in cases(told).items() if r["outcome"] == "pass"}
    assert passed == {"sigmoid", "silu", "linear", "rms_norm"}
    wanted = [c for c in cases(told) if c.split("/")[1] in passed and not c.startswith("inv")]
    assert told["summary"]["passed"] == len(wanted)
    assert len(wanted) > 80


def test_the_reference_passes_all(tmp_path: Path, judge: Judge) -> None:
    folder = export(tmp_path / "questions", "--level", "elementary", "--level", "cache")
    more = export(tmp_path / "more", "--case", "*/short*")
    for each in (folder, more):
        answer_all(each, ReferenceBackend(), {"accumulator": "exact"})
        told = judge(each)
        assert told["exit"] == 0
        outcomes = {case: r["outcome"] for case, r in cases(told).items()}
        stay = set(manifest(each)["not_exportable"])
        assert {case for case, o in outcomes.items() if o != "pass"} == stay
    assert any(case.startswith("generation/") for case in outcomes)
    assert any(case.startswith("model/forward/short:gauge") for case in outcomes)


def test_what_is_not_answered_is_not_implemented(mine: Path, judge: Judge) -> None:
    (mine / "answers" / f"{CASE}.safetensors").unlink()
    told = judge(mine)
    assert told["exit"] == 0
    found = cases(told)[f"{CASE}:bits"]
    assert found["outcome"] == "not implemented"
    assert found["message"] == f"the backend has no answers/{CASE}.safetensors"
    shutil.rmtree(mine / "answers" / "kernel")
    told = judge(mine)
    assert told["exit"] == 1
    assert told["summary"]["passed"] == 0


def test_what_cannot_travel_is_in_the_report(whole: Path, judge: Judge, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "q"))
    (folder / "answers" / "numerics.json").write_text('{"accumulator": "float32"}')
    told = judge(folder, "--level", "invariance", "--contract", "exact")
    assert set(cases(told)) == set(manifest(folder)["not_exportable"])
    for case in told["cases"]:
        assert case["outcome"] == "not implemented"
        assert case["message"].startswith("it cannot travel as a file")


# What is wrong with answers.


def bent(name: str, y: NDArray[np.float32]) -> Arrays:
    other = y.copy()
    if name == "nan":
        other[1, 1] = np.nan
    if name == "infinite":
        other[0, 0] = np.inf
    if name == "one_bit":
        other.view(np.uint32)[2, 3] ^= 1 << 30
    bent_as: dict[str, Arrays] = {
        "shape": {"y": y.T.copy()},
        "flat": {"y": y.reshape(-1)},
        "dtype": {"y": y.astype(np.float64)},
        "integers": {"y": y.astype(np.int32)},
        "name": {"out": y},
        "empty": {},
        "extra": {"y": y, "z": y},
        "no_elements": {"y": y[:0]},
    }
    return bent_as.get(name, {"y": other})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("shape", "expected float32"),
        ("flat", "expected float32"),
        ("dtype", "got float64"),
        ("integers", "got int32"),
        ("name", "it must hold y, not 'out'"),
        ("empty", "it must hold y; it has no tensor"),
        ("extra", "it must hold y, not 'y', 'z'"),
        ("no_elements", "expected float32"),
        ("nan", "nan"),
        ("infinite", "inf"),
        ("one_bit", "got"),
    ],
)
def test_a_wrong_answer_fails_its_case_alone(
    mine: Path, judge: Judge, name: str, part: str
) -> None:
    path = mine / "answers" / f"{CASE}.safetensors"
    y = load_file(path)["y"]
    path.unlink()
    save_file(bent(name, y), path)
    told = judge(mine)
    assert told["exit"] == 1
    for case, result in cases(told).items():
        expected = "fail" if case.startswith(CASE) else "pass"
        assert result["outcome"] == expected, case
        assert expected == "pass" or part in result["message"]


def replaced(content: bytes) -> dict[str, bytes]:
    return {
        "nothing": b"",
        "text": b"42\n",
        "truncated": content[:-5],
        "header_alone": content[: 8 + int.from_bytes(content[:8], "little")],
        "length_2_60": (1 << 60).to_bytes(8, "little") + content[8:],
        "longer": content + b"\0\0\0\0",
        "no_json": content.replace(b'{"', b'["', 1),
        "overlap": content.replace(b"[0,", b"[4,"),
        "deep": (9 * 10**4 + 2).to_bytes(8, "little") + b'{"' + b"[" * 9 * 10**4,
        "bfloat16": content.replace(b'"F32"', b'"F4 "'),
    }


@pytest.mark.parametrize("name", replaced(b'{"x": 1}'))
def test_an_answer_that_is_no_file_of_tensors(mine: Path, judge: Judge, name: str) -> None:
    path = mine / "answers" / f"{CASE}.safetensors"
    content = replaced(path.read_bytes())[name]
    assert content != path.read_bytes()
    path.write_bytes(content)
    told = judge(mine)
    for case, result in cases(told).items():
        expected = "fail" if case.startswith(CASE) else "pass"
        assert result["outcome"] == expected, case
        if expected == "fail":
            assert result["message"].startswith(f"answers/{CASE}.safetensors: its answer ")
            assert len(result["message"]) < 500


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling", "sparse"])
def test_an_answer_that_is_no_file(mine: Path, judge: Judge, kind: str) -> None:
    path = mine / "answers" / f"{CASE}.safetensors"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    else:
        with path.open("wb") as file:
            file.truncate((1 << 30) + 1)
    told = cases(judge(mine))[f"{CASE}:bits"]
    expected = {
        "folder": ("fail", "this is no file"),
        "pipe": ("fail", "this is no file"),
        "dangling": ("not implemented", "the backend has no"),
        "sparse": ("fail", "1073741825 bytes are more than"),
    }[kind]
    assert told["outcome"] == expected[0]
    assert expected[1] in told["message"]


# What is wrong with the folder.


def test_one_bit_of_the_inputs(mine: Path, judge: Judge) -> None:
    path = mine / "inputs" / f"{CASE}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    told = judge(mine)
    assert told["exit"] == 1
    for case, result in cases(told).items():
        altered = case.startswith(CASE)
        assert result["outcome"] == ("cannot evaluate" if altered else "pass")
        assert not altered or "altered since it was exported" in result["message"]
    path.unlink()
    found = cases(judge(mine))[f"{CASE}:bits"]
    assert found["outcome"] == "cannot evaluate"
    assert "missing" in found["message"]


def test_one_bit_of_a_model(tmp_path: Path, judge: Judge) -> None:
    folder = export(tmp_path / "q", "--case", "model/forward/llama:bits")
    answer_all(folder, ReferenceBackend(), {"accumulator": "exact"})
    assert judge(folder)["exit"] == 0
    path = folder / "models" / "random-llama" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (found,) = judge(folder)["cases"]
    assert found["outcome"] == "cannot evaluate"
    assert found["message"].startswith("models/random-llama/model.safetensors: altered")


def altered(folder: Path, **keys: Any) -> Path:
    about = {**manifest(folder), **keys}
    (folder / "manifest.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"goldens": "0" * 64}, "exported from the goldens '000000000000'"),
        ({"goldens": None}, "exported from the goldens 'None'"),
        ({"format": "bitforbit-folder-2"}, "format 'bitforbit-folder-2'"),
        ({"spec": "2"}, "specification '2'"),
        ({"calls": []}, "not what `bitforbit export` writes"),
        ({"calls": {"a": {}}}, "not what `bitforbit export` writes"),
        ({"models": {"a": 1}}, "not what `bitforbit export` writes"),
        ({"not_exportable": 1}, "not what `bitforbit export` writes"),
    ],
)
def test_a_folder_of_another_version(
    mine: Path, refused: Callable[..., str], keys: dict[str, Any], part: str
) -> None:
    assert part in refused("judge", str(altered(mine, **keys)))


def test_a_path_that_leads_out(mine: Path, refused: Callable[..., str]) -> None:
    calls = manifest(mine)["calls"]
    calls[CASE]["answer"] = "answers/../../../etc/passwd"
    assert "leads out of the folder" in refused("judge", str(altered(mine, calls=calls)))


@pytest.mark.parametrize(
    ("numerics", "part"),
    [
        (None, "numerics.json: there is no such file"),
        ("", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"accumulator": "float8"}', "accumulator 'float8' is none of"),
        ('{"accumulator": 1}', "accumulator 1 is none of"),
    ],
)
def test_what_is_declared(
    mine: Path, refused: Callable[..., str], numerics: str | None, part: str
) -> None:
    path = mine / "answers" / "numerics.json"
    path.unlink()
    if numerics is not None:
        path.write_text(numerics)
    assert part in refused("judge", str(mine))


def test_the_declared_precision_sets_the_bound(mine: Path, judge: Judge) -> None:
    path = mine / "answers" / f"{CASE}.safetensors"
    y = load_file(path)["y"]
    path.unlink()
    save_file({"y": y * np.float32(1 + 1e-4)}, path)
    gauge = f"{CASE}:gauge"
    assert cases(judge(mine))[gauge]["outcome"] == "fail"
    (mine / "answers" / "numerics.json").write_text('{"accumulator": "bfloat16"}')
    assert cases(judge(mine))[gauge]["outcome"] == "pass"


def test_what_cannot_be_exported_or_judged(
    tmp_path: Path, answered: Path, refused: Callable[..., str]
) -> None:
    assert "not an empty folder" in refused("export", str(answered))
    assert "not an empty folder" in refused("export", str(answered / "manifest.json"))
    assert "no case matches" in refused("export", str(tmp_path / "q"), "--case", "nothing")
    assert "--level" in refused("export", str(tmp_path / "q"), "--level", "kernels")
    assert "there is no such file" in refused("judge", str(tmp_path / "nowhere"))
    assert "there is no such file" in refused("judge", str(tmp_path))
    assert "no case matches" in refused("judge", str(answered), "--case", "cache/*")
    assert not (tmp_path / "q").exists()


def test_an_unfinished_export_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    from conformance import exporting as module

    def interrupted(*arguments: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_readme", interrupted)
    target = str(tmp_path / "q")
    assert "interrupted" in refused("export", target, "--case", f"{CASE}")
    assert "manifest.json: there is no such file" in refused("judge", target)


def test_an_interrupted_judgement_keeps_its_report(
    mine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from conformance.backends import folder as module

    read = module._read

    def interrupting(path: Path, name: str) -> Any:
        if CASE in name:
            raise KeyboardInterrupt
        return read(path, name)

    monkeypatch.setattr(module, "_read", interrupting)
    target = tmp_path / "report.json"
    assert cli.main(["judge", str(mine), "--json", str(target)]) == 2
    told = json.loads(target.read_text())
    assert told["interrupted"] is True
    assert {case["outcome"] for case in told["cases"]} == {"pass"}


def test_a_failure_says_how_to_repeat_it(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mine / "answers" / f"{CASE}.safetensors"
    y = load_file(path)["y"]
    path.unlink()
    save_file({"y": -y}, path)
    assert cli.main(["judge", str(mine)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"bitforbit judge {mine} --case '{CASE}:bits'" in out.replace("- ", "-")
