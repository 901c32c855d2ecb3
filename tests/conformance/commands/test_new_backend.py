"""A new backend runs at once, names every operation, and overwrites nothing."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.backends import resolve, resolve_process
from conformance.backends.process import ProgramError
from conformance.backends.reference import ReferenceBackend, ReferenceSession
from conformance.cli import main
from conformance.golden import read_all, read_manifest
from conformance.paths import data_folder
from conformance.rules import bounded_rules
from conformance.skeletons import signatures

needs_c = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("make") is None, reason="no C compiler"
)
LANGUAGES = ["python", "process", pytest.param("c", marks=needs_c)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Run the command; what it says to do next."""
    assert main(["new-backend", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.strip() for line in lines[lines.index("next:") + 1 :]]


def follow(steps: list[str]) -> str:
    """Do what was said, in a shell; what the last step printed."""
    program = shlex.join([sys.executable, "-m", "conformance.cli"])
    out = ""
    for step in steps:
        command = step.replace("bitforbit", program, 1) if step.startswith("bitforbit") else step
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, (step, done.stdout, done.stderr)
        assert "warning" not in done.stderr, done.stderr
        out = done.stdout
    return out


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ["mine", "some folder/my-backend"])
def test_what_is_said_to_come_next_runs(
    language: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = follow(new(capsys, name, "--language", language))
    passed = re.search(r"(\d+) passed, 0 failed", out)
    assert passed is not None, out
    folder = data_folder("goldens")
    names = {name.removesuffix(".safetensors") for name in read_manifest(folder)}
    wanted = {name for name in names if name.startswith("kernel/rms_norm/")}
    count = sum(len(bounded_rules(golden)) for golden in read_all(folder, wanted))
    assert int(passed[1]) == count


@pytest.mark.parametrize("language", LANGUAGES)
def test_nothing_is_overwritten(
    language: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new(capsys, "mine", "--language", language)
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert main(["new-backend", "mine", "--language", language]) == 2
    assert "exists already, and nothing is overwritten" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}


def test_a_folder_with_one_of_the_files_is_left_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "Makefile").write_text("mine")
    assert main(["new-backend", "mine", "--language", "c"]) == 2
    assert [path.name for path in (here / "mine").iterdir()] == ["Makefile"]
    assert "mine/Makefile: exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "x/", "3d", "a'b", "ä", "mine.c", "a/.py"])
def test_a_name_that_is_none(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "x/":  # a folder's name is its own without the slash
        assert new(capsys, name) == ["bitforbit check x.py --case 'kernel/rms_norm/*'"]
        return
    assert main(["new-backend", name]) == 2
    assert capsys.readouterr().err.startswith("bitforbit: NAME: ")
    assert list(here.iterdir()) == []


def test_a_folder_that_cannot_be(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")
    assert main(["new-backend", "file/mine"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_suffix_may_be_given(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(capsys, "mine.py")
    assert [path.name for path in here.iterdir()] == ["mine.py"]


# The Python one.


def uncommented(text: str) -> str:
    """The file with all that stands in comments of its last level as code."""
    text = re.sub(r"^    # (?=def |    |\):)", "    ", text, flags=re.M)
    return re.sub(r"^# ?(?=class |    |$)", "", text, flags=re.M)


def methods(text: str) -> dict[str, dict[str, list[str]]]:
    """By class: its methods and their arguments."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                f.name: [a.arg for a in f.args.args[1:]]
                for f in node.body
                if isinstance(f, ast.FunctionDef)
            }
    return found


def test_every_operation_is_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(capsys, "mine")
    text = (here / "mine.py").read_text()
    assert set(methods(text)) == {"Backend"}
    assert set(methods(text)["Backend"]) == {"rms_norm", "linear"}
    whole = methods(uncommented(text))

    def public(owner: type[Any]) -> set[str]:
        own = {n for c in owner.__mro__[:-1] for n in vars(c) if not n.startswith("_")}
        return {name for name in own if callable(getattr(owner, name))}

    assert set(whole["Backend"]) == public(ReferenceBackend)
    assert set(whole["Session"]) == public(ReferenceSession)
    assert max(map(len, text.splitlines())) <= 100


def test_arguments_are_those_of_the_goldens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(capsys, "mine")
    whole = methods(uncommented((here / "mine.py").read_text()))
    for golden in read_all(data_folder("goldens")):
        owner = whole["Session" if "model" in golden.parameters else "Backend"]
        given = {*golden.inputs, *golden.parameters} - set(signatures.OF_THE_SUITE)
        if golden.operation != "forced":  # made of forward
            assert given <= set(owner[golden.operation]), golden.id


def test_operations_come_as_a_backend_grows(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(capsys, "mine")
    names = re.findall(r"# +def (\w+)\(", (here / "mine.py").read_text())
    assert names.index("exp") < names.index("softmax") < names.index("attention")
    assert names.index("rope") < names.index("verify_draft") < names.index("paged_attention")
    assert names.index("page_hashes") < names.index("load") < names.index("generate")


def test_sizes_and_types_of_arguments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(capsys, "mine")
    text = (here / "mine.py").read_text()
    block = text[text.index("def attention(") :].split("\n\n")[0]
    shapes = dict(re.findall(r"# (?:-> )?(\w+) (float32 \(.*\))", block))
    assert shapes["k"] == shapes["v"] == "float32 (S, Hkv, D)"
    assert shapes["q"] == shapes["y"] == "float32 (T, Hq, D)"
    assert shapes["sinks"] == "float32 (Hq,)"
    assert "mode: 'exact', 'fast'" in block


def test_axes_are_named_as_the_specification_names_them() -> None:
    """In the table's words; an array that it does not describe shares the letters it can."""
    stated = signatures.stated()
    assert stated["linear_int4"]["in.packed"] == ("N", "ceil(K/2)")
    assert stated["route"]["in.logits"] == ("T", "E")
    assert stated["turns"]["out.logits"] == ("R", "n", "V")
    lines = {stub[0]: stub for stub in (*signatures.operations(), *signatures.sessions())}
    of = {"packed": ("uint8", "(N, ceil(K/2))"), "x": ("float32", "(T, K)")}
    stub = next(stub for first, stub in lines.items() if "linear_int4" in first)
    assert {f"    # {name} {kind} {axes}" for name, (kind, axes) in of.items()} <= set(stub)
    generate = next(stub for first, stub in lines.items() if "def generate" in first)
    assert "    # -> logits float32 (B, C)" in generate


def test_the_python_one_is_a_backend(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(capsys, "mine")
    backend = resolve(str(here / "mine.py"))
    assert backend.numerics["accumulator"] == "float32"
    x, w = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
    assert backend.linear(x=x, w=w).tolist() == [[3.0] * 4] * 2


# The programs.


def program(language: str, here: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    steps = new(capsys, "mine", "--language", language)
    if language == "c":
        follow(steps[:1])
        return resolve_process(str(here / "mine" / "backend"), 20)
    return resolve_process(str(here / "mine.py"), 20)


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_a_program_names_itself_and_outlives_an_error(
    language: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = program(language, here, capsys)
    try:
        assert backend.name == "mine"
        x = np.array([[1, -2, 3]], np.float32)
        for _ in range(3):
            with pytest.raises(ProgramError, match="answered with an error"):
                backend.rms_norm(x=x, eps=1e-6)
            y = backend.rms_norm(x=x, weight=np.ones(3, np.float32), eps=0.0)
            assert np.allclose(y, x / np.sqrt(np.mean(x * x)), rtol=1e-6)
        empty = backend.rms_norm(x=x[:0], weight=np.ones(3, np.float32), eps=1e-6)
        assert empty.shape == (0, 3)
        with pytest.raises(AttributeError):
            backend.linear(x=x, w=x)
    finally:
        backend.close()


def test_the_process_one_needs_no_library(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(capsys, "mine", "--language", "process")
    text = (here / "mine.py").read_text()
    imported = {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported <= set(sys.stdlib_module_names)
    assert not re.search(r"^from ", text, re.M)
    assert os.access(here / "mine.py", os.X_OK)


LINEAR = """
static void linear(Call *call) {
    const Tensor *x = tensor(call, "x", "F32", 2), *w = tensor(call, "w", "F32", 2);
    const Tensor *bias = optional(call, "bias");
    if (call->error)
        return;
    size_t rows = x->shape[0], width = x->shape[1], columns = w->shape[0];
    const float *a = x->data, *b = w->data;
    float *y = answer(call, "y", "F32", 2, (size_t[]){rows, columns});
    for (size_t t = 0; t < rows; t++)
        for (size_t n = 0; n < columns; n++) {
            for (size_t k = 0; k < width; k++)
                y[t * columns + n] += a[t * width + k] * b[n * width + k];
            if (bias)
                y[t * columns + n] += ((const float *)bias->data)[n];
        }
}
"""


@needs_c
def test_the_next_operation_in_c_is_a_few_lines(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of another shape than its argument, and an argument that may be left out."""
    steps = new(capsys, "mine", "--language", "c")
    source = here / "mine" / "backend.c"
    table = "static const struct {\n    const char *name;\n    void (*compute)"
    text = source.read_text()
    assert text.count(table) == 1
    text = text.replace(table, LINEAR + table)
    source.write_text(text.replace("rms_norm}}", 'rms_norm}, {"linear", linear}}'))
    follow(steps[:1])
    backend = resolve_process(str(here / "mine" / "backend"), 20)
    try:
        x, w = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
        assert backend.linear(x=x, w=w).tolist() == [[3.0] * 4] * 2
        bias = np.arange(4, dtype=np.float32)
        assert backend.linear(x=x, w=w, bias=bias).tolist() == [[3.0, 4.0, 5.0, 6.0]] * 2
    finally:
        backend.close()
