"""The command line: exit codes 0, 1 and 2, one line for what cannot run, and never a traceback."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from conformance import cli, paths
from conformance.cases.recipe import Recipe
from conformance.commands.common import count
from conformance.golden import MANIFEST, read_all, read_manifest
from conformance.making import goldens as making
from conformance.paths import data_folder

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "fixtures" / "tiny-draft")

RIGHT = """
from conformance.backends.reference import ReferenceBackend
class Backend(ReferenceBackend):
    pass
"""
EMPTY = 'class Backend:\n    numerics = {"accumulator": "float32"}\n'
SMALL = ("--case", "kernel/linear/k33_t*")

Files = Callable[[str], str]


class Run:
    """A command's exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(list(arguments))
        except SystemExit as left:  # argparse
            code = left.code if isinstance(left.code, int) else 1
        out, err = self.capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    def refused(self, *arguments: str) -> str:
        code, out, err = self(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("bitforbit: ")
        assert err.count("\n") == 1
        return err

    def json(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = self("check", *arguments, "--json", "-")
        told: dict[str, Any] = json.loads(out)
        return code, told


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture
def file(tmp_path: Path) -> Files:
    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


# check


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
        *("passed", "failed", "not_implemented", "cannot_evaluate", "expected", "not_asked"),
    ]
    for case in told["cases"]:
        assert list(case) == ["id", "level", "section", "rule", "outcome", "worst", "message"]
        assert case["outcome"] in ("pass", "fail", "not implemented", "cannot evaluate")
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
    ("arguments", "part"),
    [
        (("check", "nowhere.py"), "nowhere.py: no such file"),
        (("check", "numpy", "--level", "kernels"), "--level: 'kernels' is none of elementary"),
        (("check", "numpy", "--case", "kernel/none"), "--case 'kernel/none': no case matches"),
        (("check", "numpy", "--case", ""), "--case '': no case matches"),
        (("check", "--case", "kernel/linear/bias:ulp(4)"), "did you mean kernel/linear/bias or"),
        (("check", "--case", "kernel/linear/*", "--case", "kernel/rop/*"), "'kernel/rop/*': no"),
        (("check", "--level", "server"), "--level: 'server' is none of elementary"),
        (("check", "--level", "model", "--case", "kernel/*"), "model and --case 'kernel/*': no"),
        (("check", "numpy", "--device", "cuda"), "runs on the CPU alone"),
        (("goldens", "show", "kernel/none"), "kernel/none: no such golden"),
        (("goldens", "verify", "--folder", "/nowhere"), "/nowhere/MANIFEST.json: unreadable"),
        (("goldens", "show", "x", "--folder", "/nowhere"), "/nowhere/MANIFEST.json: unreadable"),
        (("goldens", "make", "--folder", "/dev/null/x"), "Not a directory"),
    ],
)
def test_what_cannot_run_is_one_line(run: Run, arguments: tuple[str, ...], part: str) -> None:
    assert part in run.refused(*arguments)


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
    from conformance import runner

    def never(*arguments: object) -> object:
        raise AssertionError("the run began")

    monkeypatch.setattr(runner, "run", never)
    assert target in run.refused("check", "numpy", *SMALL, "--json", target)


def test_a_device_is_written_to_and_stays_one(run: Run) -> None:
    code, _, _ = run("check", "numpy", *SMALL, "--json", os.devnull)
    assert code == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@pytest.fixture
def goldens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two goldens in place of the suite's."""
    from conformance import cases

    chosen = [r for r in cases.recipes() if r.id in ("kernel/linear/k1_t1", "kernel/linear/k33_t5")]

    def recipes() -> list[Recipe]:
        return chosen

    monkeypatch.setattr(making, "recipes", recipes)
    monkeypatch.setattr(cases, "recipes", recipes)
    folder = tmp_path / "goldens"
    list(making.make(folder))
    there = paths.data_folder
    monkeypatch.setattr(paths, "data_folder", lambda n: folder if n == "goldens" else there(n))
    return folder


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


# goldens


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


# generate


def generate(run: Run, *arguments: str) -> tuple[int, str, str]:
    return run("generate", "--model", MODEL, "--prompt", "In the beginning", *arguments)


def test_generate_prints_text_and_then_times(run: Run) -> None:
    code, out, err = generate(run, "-n", "5")
    assert code == 0
    assert out.endswith("\n")
    assert out.strip()
    assert err.count("\n") == 1
    assert "prompt tokens, first token after" in err
    told = json.loads(generate(run, "-n", "5", "--json")[1])
    assert out == told["text"] + "\n"


def test_generate_takes_token_ids(run: Run) -> None:
    """A model without a tokenizer is spoken to, and speaks, in ids."""
    said = json.loads(generate(run, "-n", "5", "--json")[1])
    ids = tokenizers.Tokenizer.from_file(f"{MODEL}/tokenizer.json").encode("In the beginning").ids
    command = ("generate", "--model", MODEL, "-n", "5", "--prompt-ids", ",".join(map(str, ids)))
    code, out, _ = run(*command)
    assert (code, out) == (0, said["text"] + "\n")
    assert json.loads(run(*command, "--json")[1])["tokens"] == said["tokens"]
    bare = ("generate", "--model", "fixtures/random-llama", "-n", "4", "--prompt-ids", "1,2")
    code, out, _ = run(*bare)
    tokens = json.loads(run(*bare, "--json")[1])["tokens"]
    assert (code, list(map(int, out.split()))) == (0, tokens)
    assert "outside the vocabulary" in run.refused(*bare[:-1], "123456789")


def test_generate_says_what_ended_it(run: Run) -> None:
    assert "ended" not in generate(run, "-n", "5")[2]
    assert "ended by a stop text" in generate(run, "-n", "99", "--stop", " ")[2]
    bare = ("generate", "--model", "fixtures/random-llama", "-n", "99999", "--prompt-ids", "1")
    assert "ended where the model's context does" in run(*bare)[2]


def test_generate_json(run: Run) -> None:
    code, out, err = generate(run, "-n", "6", "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    told = json.loads(out)
    assert list(told) == ["text", "tokens", "stop", "prompt_n", "cache_n", "draft", "timings"]
    assert told["draft"]["drafted"] == 0
    assert list(told["timings"]) == [
        *("time_to_first_token", "decode", "prefill_rate", "decode_rate"),
    ]
    assert len(told["tokens"]) == 6
    assert told["stop"] == "length"
    assert told["cache_n"] == 0
    assert told["prompt_n"] > 0


def test_generate_says_its_text_and_writes_json_to_a_file(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "said.json"
    code, out, err = generate(run, "-n", "6", "--json", str(target))
    told = json.loads(target.read_text())
    assert (code, out) == (0, told["text"] + "\n")
    assert "prompt tokens, first token after" in err
    alone = json.loads(generate(run, "--json", "-", "-n", "6")[1])
    assert alone["tokens"] == told["tokens"]
    refused = ("--model", MODEL, "--prompt", "a", "--json", "no/such/said.json")
    assert "--json: cannot write no/such/said.json" in run.refused("generate", *refused)


def test_generate_gives_the_same_tokens_from_any_pages_drafts_and_files(
    run: Run, tmp_path: Path
) -> None:
    def told(*arguments: str) -> Any:
        code, out, err = generate(run, "-n", "10", "--json", *arguments)
        assert (code, err) == (0, "")
        return json.loads(out)

    plain = told()
    assert told("--page-size", "2")["tokens"] == plain["tokens"]
    drafted = told("--draft", "tiny-draft", "--draft-tokens", "3")
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["draft"]["drafted"] > 0
    assert told("--draft", "ngram")["tokens"] == plain["tokens"]
    file = tmp_path / "prompt.cache"
    assert told("--prompt-cache", str(file))["cache_n"] == 0
    again = told("--prompt-cache", str(file))
    assert again["tokens"] == plain["tokens"]
    assert (again["prompt_n"], again["cache_n"]) == (1, plain["prompt_n"] - 1)
    assert told("--kv-dtype", "int8")["tokens"]
    kept = file.read_bytes()
    code, _, err = generate(run, "--prompt-cache", str(file), "--kv-dtype", "int8")
    assert code == 2
    assert err.startswith(f"bitforbit: {file}: kv_dtype")
    assert file.read_bytes() == kept


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--page-size", "3"), "page_size"),
        (("--draft-tokens", "0"), "draft_tokens"),
        (("--draft", "random-llama"), "draft model"),
        (("--draft", "nowhere"), "nowhere"),
    ],
)
def test_generate_refuses_what_cannot_be(run: Run, options: tuple[str, ...], named: str) -> None:
    code, out, err = generate(run, *options)
    assert (code, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1


def test_generate_is_repeatable_and_follows_its_options(run: Run) -> None:
    def tokens(*arguments: str) -> Any:
        return json.loads(generate(run, "-n", "8", "--json", *arguments)[1])["tokens"]

    hot = ("--temperature", "1.5", "--seed", "7")
    assert tokens() == tokens()
    assert tokens(*hot) == tokens(*hot)
    assert tokens(*hot) != tokens("--temperature", "1.5", "--seed", "8")
    assert tokens(*hot, "--top-k", "1") == tokens()
    assert len(tokens("--weights", "int4")) == 8
    assert len(tokens("--arithmetic", "float32", "--exact-prefill")) == 8


def test_generate_reads_a_prompt_from_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("In the beginning", encoding="utf-8")
    there = run("generate", "--model", MODEL, "--prompt", f"@{path}", "-n", "4")[1]
    assert there == generate(run, "-n", "4")[1]
    path.write_bytes(b"\xff\xfe\xfd")
    assert "cannot read" in run.refused("generate", "--model", MODEL, "--prompt", f"@{path}")
    assert "cannot read" in run.refused("generate", "--model", MODEL, "--prompt", "@/nowhere")
    assert "cannot read" in run.refused("generate", "--model", MODEL, "--prompt", f"@{tmp_path}")


def test_generate_stops_before_a_stop_text(run: Run) -> None:
    whole = json.loads(generate(run, "-n", "12", "--json")[1])["text"]
    stop = whole[3:6]
    told = json.loads(generate(run, "-n", "12", "--json", "--stop", stop)[1])
    assert told["stop"] == "string"
    assert told["text"] == whole[: whole.index(stop)]
    assert generate(run, "-n", "12", "--stop", stop)[1] == told["text"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-n", "0"), "max_new_tokens: 0 is out of range"),
        (("-n", "-3"), "max_new_tokens"),
        (("--temperature", "-1"), "temperature: -1.0 is out of range"),
        (("--temperature", "nan"), "temperature"),
        (("--temperature", "inf"), "temperature"),
        (("--top-k", "-1"), "top_k"),
        (("--top-p", "0"), "top_p"),
        (("--top-p", "1.5"), "top_p"),
        (("--min-p", "-0.1"), "min_p"),
        (("--repetition-penalty", "0"), "repetition_penalty"),
        (("--prompt", ""), "token"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--model", str(ROOT / "tests")), "config.json"),
    ],
)
def test_generate_refuses_bad_values(run: Run, arguments: tuple[str, ...], part: str) -> None:
    code, out, err = generate(run, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("bitforbit: ")
    assert err.count("\n") == 1
    assert part in err


# The grammar.


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("unknown",),
        ("check", "--unknown"),
        ("goldens", "show", "x", "--unknown"),
        ("check", "a", "b"),
        ("check", "--device", "tpu"),
        ("goldens",),
        ("goldens", "show"),
        ("generate", "--model", "x"),
        ("generate", "--model", "x", "--prompt", "y", "-n", "many"),
        ("generate", "--model", "x", "--prompt-ids", "1,a"),
        ("generate", "--model", "x", "--prompt-ids", "1", "--prompt", "y"),
        ("generate", "--model", "x", "--prompt", "y", "--weights", "int2"),
        ("generate", "--model", "x", "--prompt", "y", "--seed", "1.5"),
    ],
)
def test_what_the_grammar_lacks(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    known = [word for word in arguments[:2] if word in ("check", "goldens", "generate", "show")]
    assert err.startswith(" ".join(["usage: bitforbit", *known]) + " ")
    assert "error: " in err


@pytest.mark.parametrize(
    "command", [(), ("check",), ("goldens",), ("goldens", "make"), ("generate",)]
)
def test_help(run: Run, command: tuple[str, ...]) -> None:
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: bitforbit")


def test_an_interrupt_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance import runner

    def interrupted(*arguments: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert run.refused("check", "numpy", *SMALL) == "bitforbit: interrupted\n"


# In a process of its own.


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "conformance.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        **options,
    )


def test_the_module_runs_as_the_command_does() -> None:
    done = process("check", "numpy", *SMALL, "--json", "-")
    assert done.returncode == 0
    assert done.stderr == b""
    assert json.loads(done.stdout)["summary"]["passed"] == 4
    assert process("check", "nowhere.py").returncode == 2


def test_generate_streams_its_text() -> None:
    """The text comes in several writes, before the end."""
    arguments = ("generate", "--model", MODEL, "--prompt", "In the beginning", "-n", "200")
    child = subprocess.Popen(
        [sys.executable, "-m", "conformance.cli", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    first = os.read(child.stdout.fileno(), 1 << 16)
    pieces = [first]
    while piece := os.read(child.stdout.fileno(), 1 << 16):
        pieces.append(piece)
    errors = child.stderr.read()
    child.stdout.close()
    child.stderr.close()
    assert child.wait() == 0
    assert len(pieces) > 5
    assert b"Traceback" not in errors
    b"".join(pieces).decode()


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m conformance.cli goldens show kernel/attention/rows_512 | head -1',
        shell=True,
        cwd=ROOT,
        capture_output=True,
    )
    assert b"Traceback" not in done.stderr
    assert b"kernel/attention/rows_512" in done.stdout


def test_the_suites_own_goldens_are_where_the_command_looks() -> None:
    assert (data_folder("goldens") / MANIFEST).is_file()


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


COMMANDS = list(commands(cli.parser()))


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_help_teaches_with_examples_that_parse(parser: argparse.ArgumentParser) -> None:
    examples = re.findall(r"^  (bitforbit .+)$", parser.description or "", re.MULTILINE)
    mine = [line for line in examples if line.startswith(parser.prog)]
    assert mine, "its help has no example"
    for line in examples:
        command = re.split(r"   +| > ", line)[0]  # what follows says what it does
        cli.parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_every_option_has_help(parser: argparse.ArgumentParser) -> None:
    for part in (parser, *commands(parser)):
        bare = [a.option_strings for a in part._actions if a.option_strings and not a.help]
        assert not bare


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_options_have_the_same_letters_everywhere(parser: argparse.ArgumentParser) -> None:
    """`check --model` says what a server has, and is no model to be loaded."""
    letters = {"--model": "-m", "--threads": "-t", "--file": "-f", "--output": "-o"}
    for action in parser._actions:
        for name, letter in letters.items():
            if name in action.option_strings and parser.prog != "bitforbit check":
                assert letter in action.option_strings, f"{name} has no {letter}"


def options_named(name: str) -> dict[str, argparse.Action]:
    """What each command, or action of one, has under a name."""
    parts = [part for parser in COMMANDS for part in (parser, *commands(parser))]
    return {
        part.prog.removeprefix("bitforbit "): action
        for part in parts
        for action in part._actions
        if name in action.option_strings
    }


def test_json_goes_to_a_file_or_to_standard_output_everywhere() -> None:
    """Its value may be left out, but not where a BACKEND or a folder could be taken for it."""
    found = options_named("--json")
    assert {"check", "judge", "generate", "calibrate", "gate", "schedule", "prefix"} <= set(found)
    for command, action in found.items():
        assert action.metavar == "FILE|-"
        assert action.const == (None if command in ("check", "judge") else "-"), command


def test_processes_are_workers_everywhere() -> None:
    found = options_named("--workers")
    assert {"check", "goldens make", "goldens verify", "calibrate", "gate"} <= set(found)
    for action in found.values():
        assert str(action.help).startswith("share out to N processes here (default: ")
        assert action.type is count
    assert not options_named("--jobs")


def test_a_path_that_cannot_be_is_named_in_one_line(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("")
    told = run.refused("export", str(target / "within"), "--case", "kernel/linear/k33_t5")
    assert told.startswith(f"bitforbit: {target}/within")
    assert "Not a directory; check the path" in told
