"""The process door: what a program answers, and every way in which it can fail its case alone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cli
from conformance.backends import process, resolve_process
from conformance.backends.frames import FrameError, decode, encode, quoted
from conformance.backends.process import ProcessBackend
from conformance.errors import BackendError, GoldenError
from conformance.golden import MANIFEST, Golden, digest, file_of, manifest_text
from conformance.paths import data_folder
from conformance.results import Result
from conformance.runner import run
from conformance.selection import Selection
from tests.conformance.signals import heeding_interrupts

MISBEHAVING = Path(__file__).parents[1] / "programs" / "misbehaving.py"
X = np.arange(4, dtype=np.float32)

Start = Callable[..., ProcessBackend]


def command(mode: str, *more: object) -> str:
    words = [sys.executable, "-I", "-S", str(MISBEHAVING), mode, *map(str, more)]
    return shlex.join(words)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts misbehaving backends and ends them."""
    started: list[ProcessBackend] = []

    def begin(mode: str, *more: object, seconds: float = 30.0) -> ProcessBackend:
        started.append(resolve_process(command(mode, *more), seconds))
        return started[-1]

    yield begin
    for backend in started:
        backend.close()


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Goldens of three operations that double their input, in the order cos, exp, log."""
    folder, digests = tmp_path / "goldens", {}
    for operation in ("cos", "exp", "log"):
        case = f"kernel/{operation}/small"
        golden = Golden(case, "2", operation, {}, {"x": X}, {"y": 2 * X}, ("bits",))
        file = folder / file_of(case)
        file.parent.mkdir(parents=True)
        file.write_bytes(golden.to_bytes())
        digests[file_of(case)] = digest(golden.to_bytes())
    (folder / MANIFEST).write_text(manifest_text(digests))
    return folder


def check(backend: ProcessBackend, folder: Path) -> list[Result]:
    return list(run(backend, folder, Selection(("kernel",))))


def gone(pid: int) -> bool:
    """Whether a process has ended, soon."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


# Faults of one case: it fails, and those before and after it pass.

FAULTS = {
    "crash": "was killed by SIGSEGV before it answered; last on its standard error: 'about to fall",
    "exit_0": "exited with status 0 before it answered; it wrote nothing on standard error",
    "exit_3": "exited with status 3 before it answered; last on its standard error: 'cannot go on'",
    "raise": "last on its standard error: 'ValueError: a traceback of several lines'",
    "half_then_exit": "exited with status 0 after 61 of the 131 bytes of its answer",
    "half_a_length": "exited with status 0 after 5 bytes of its answer's length",
    "length_2_60": f"announced a frame of {1 << 60} bytes, at most {1 << 30} are allowed",
    "length_2_64": f"announced a frame of {(1 << 64) - 1} bytes",
    "flood_stdout": "its output began with 'spam spam spam",
    "print_first": "its output began with 'computing exp now",
    "longer_than_announced": "wrote more than the 131 bytes that its frame announced",
    "no_blob": "broke the protocol: its answer is no safetensors blob",
    "empty": "broke the protocol: its answer is no safetensors blob",
    "header_lies": "broke the protocol: its answer is no safetensors blob",
    "offsets_lie": "broke the protocol: its answer is no safetensors blob",
    "no_json": "broke the protocol: its answer is no safetensors blob",
    "no_metadata": "broke the protocol: its answer is to call None, not 3",
    "wrong_id": "broke the protocol: its answer is to call '1', not 3",
    "odd_dtype": "broke the protocol: its answer has a tensor of 'BF16', which",
    "wrong_status": "the status ok, error or not implemented, not 'fine'",
    "wrong_name": "exp must answer with y, not with 'out'",
    "no_tensor": "exp must answer with y; its answer has no tensor",
    "extra_tensor": "exp must answer with y, not with 'y', 'z'",
    "wrong_shape": "y: expected float32 (4,), got float32 (2, 2)",
    "too_many": "y: expected float32 (4,), got float32 (8,)",
    "wrong_dtype": "y: expected float32 (4,), got int32 (4,)",
    "nan": "got",
    "error": "answered with an error: 'no memory  [31m'",
    "error_mute": "answered with an error: ''",
    "error_long": "xxx...'",
}
BREAKS_NO_RULE = {
    "wrong_status", "wrong_name", "no_tensor", "extra_tensor", "wrong_shape", "too_many",
    "wrong_dtype", "nan", "error", "error_mute", "error_long",
}  # fmt: skip
"""Answers that are wrong, but answers: the program goes on."""


@pytest.mark.parametrize("mode", FAULTS)
def test_a_fault_fails_its_case_alone(mode: str, start: Start, three: Path) -> None:
    backend = start(mode)
    before, case, after = check(backend, three)
    assert (before.outcome, case.outcome, after.outcome) == ("pass", "fail", "pass")
    assert FAULTS[mode] in case.message
    assert case.message.isprintable()
    assert len(case.message) < 600
    assert backend._client.starts == (1 if mode in BREAKS_NO_RULE else 2)


LATE = {
    "hang": "did not answer within 1 s and was stopped before it answered",
    "half_then_hang": "was stopped after 61 of the 131 bytes of its answer",
    "flood_stderr": "was stopped before it answered; last on its standard error: 's",
    "close_stdout": "closed its standard output before it answered",
}


@pytest.mark.parametrize("mode", LATE)
def test_a_late_answer_fails_its_case_alone(mode: str, start: Start, three: Path) -> None:
    before, case, after = check(start(mode, seconds=1), three)
    assert (before.outcome, case.outcome, after.outcome) == ("pass", "fail", "pass")
    assert LATE[mode] in case.message


@pytest.mark.parametrize("mode", ["right", "one_by_one", "much_stderr"])
def test_odd_manners_are_no_fault(mode: str, start: Start, three: Path) -> None:
    backend = start(mode)
    assert [r.message for r in check(backend, three) if r.outcome != "pass"] == []
    assert backend._client.starts == 1


def test_what_is_not_implemented_is_no_failure(start: Start, three: Path) -> None:
    backend = start("not_implemented")
    outcomes = [r.outcome for r in check(backend, three)]
    assert outcomes == ["pass", "not implemented", "pass"]
    assert not hasattr(backend, "linear")  # not declared
    assert not hasattr(backend, "load")
    assert not hasattr(backend, "_anything")


@pytest.mark.parametrize(
    ("mode", "part"),
    [
        ("exit_after", "exited with status 7 before it answered"),
        ("write_after", "wrote 'done' to its standard output unasked"),
    ],
)
def test_a_fault_after_an_answer_fails_the_next_case(
    mode: str, part: str, start: Start, three: Path
) -> None:
    backend = start(mode)
    results = run(backend, three, Selection(("kernel",)))
    assert [next(results).outcome, next(results).outcome] == ["pass", "pass"]
    time.sleep(0.5)
    last = next(results)
    assert last.outcome == "fail"
    assert part in last.message
    assert list(backend.log(x=X)) == [0, 2, 4, 6]


def test_a_program_that_stops_reading_is_late(start: Start) -> None:
    backend = start("stop_reading", seconds=1)
    with pytest.raises(process.ProgramError, match="did not answer within 1 s"):
        backend.cos(x=np.zeros(1 << 20, np.float32))


def test_what_a_program_started_ends_with_it(start: Start, three: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    results = check(start("child", pid_file, seconds=1), three)
    assert [r.outcome for r in results] == ["pass", "fail", "pass"]
    assert gone(int(pid_file.read_text()))


def test_the_program_ends_with_the_backend(start: Start) -> None:
    backend = start("right")
    program = backend._client._program
    assert program is not None
    pid = program._process.pid
    backend.close()
    assert gone(pid)
    assert program._process.returncode == 0  # by itself, for its input ended
    backend.close()


# Starting.


@pytest.mark.parametrize(
    ("mode", "part"),
    [
        ("hello_none", "hello must be a JSON object, not null"),
        ("hello_text", "hello must be a JSON object, not a text"),
        ("hello_list", "hello must be a JSON object, not a list"),
        ("hello_not_json", "hello is not the text of a JSON object (JSONDecodeError"),
        ("hello_deep", "hello is not the text of a JSON object (RecursionError"),
        ("hello_nested", "'hello' in its answer's metadata must be a text, not an object; a value"),
        ("hello_missing", "the metadata of the program's answer has no 'hello'"),
        ("hello_no_numerics", "hello lacks 'numerics'; it has protocol, name, operations and"),
        ("hello_numerics_list", "'numerics' in the program's hello must be an object, not a list"),
        ("hello_name", "'name' in the program's hello must be a text, not a whole number"),
        ("hello_operations", "'operations' in the program's hello must be a list, not a text"),
        ("hello_operation", "hello must list its 'operations' by name"),
        ("hello_2", "the program speaks protocol 2, this suite 1"),
        ("hello_text_1", "'protocol' in the program's hello must be a whole number, not a text"),
        ("hello_precision", "accumulator 'fp8' is none of"),
        ("deaf", "no hello: the program did not answer within 1 s"),
    ],
)
def test_without_a_right_hello_there_is_no_run(mode: str, part: str) -> None:
    with pytest.raises(BackendError) as caught:
        resolve_process(command(mode), 1 if mode == "deaf" else 30)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("", "the command is empty"),
        ("'", "No closing quotation"),
        ("/no/such/program", "cannot be started (No such file or directory)"),
        ("/", "cannot be started (Permission denied)"),
        ("false", "no hello: the program exited with status 1"),
        ("true", "no hello: the program exited with status 0"),
        ("cat", "must have the status ok, error or not implemented, not 'None'"),
        ("yes", "only answers may go there"),
    ],
)
def test_a_command_that_is_no_backend(line: str, part: str) -> None:
    with pytest.raises(BackendError) as caught:
        resolve_process(line, 30)
    assert str(caught.value).startswith("--process: ")
    # What `yes` wrote may be seen before the call, or as a length after it.
    assert part in str(caught.value) or (line == "yes" and "announced" in str(caught.value))


def test_a_program_that_does_not_start_again_is_given_up(start: Start, tmp_path: Path) -> None:
    backend = start("only_once", tmp_path / "started")
    messages = []
    for _ in range(6):
        with pytest.raises(process.ProgramError) as caught:
            backend.exp(x=X)
        messages.append(str(caught.value))
    assert "exited with status 1 before it answered" in messages[0]
    assert all("no hello: the program exited with status 9" in m for m in messages[1:4])
    assert messages[4:] == ["the program failed to start 3 times and is given up"] * 2


def test_a_program_that_changes_its_hello_is_not_trusted(start: Start, tmp_path: Path) -> None:
    backend = start("other_hello", tmp_path / "started")
    with pytest.raises(process.ProgramError, match="exited with status 1"):
        backend.exp(x=X)
    with pytest.raises(process.ProgramError, match="differs from the one of its first start"):
        backend.cos(x=X)


# Models.

SESSIONS = r"""
import json, os, struct, sys

def read(count):
    data = sys.stdin.buffer.read(count)
    if len(data) < count:
        sys.exit(0)
    return data

fed = {}
while True:
    body = read(struct.unpack("<Q", read(8))[0])
    size = struct.unpack("<Q", body[:8])[0]
    header = json.loads(body[8 : 8 + size])
    about = header["__metadata__"]
    given = json.loads(about["parameters"])
    answer, y = {"id": about["id"], "status": "ok"}, None
    if about["operation"] == "hello":
        answer["hello"] = json.dumps({"protocol": 1, "name": "s", "numerics": {},
                                      "operations": ["load", "forward"]})
    elif about["operation"] == "load":
        answer["session"] = given["model"][-1:] + given["weights"]
        fed[answer["session"]] = None
    elif about["operation"] == "reset" and given["session"] in fed:
        fed[given["session"]] = 0
    elif about["operation"] == "forward" and fed[given["session"]] is not None:
        begin, end = header["tokens"]["data_offsets"]
        tokens = struct.unpack(f"<{(end - begin) // 8}q", body[8 + size + begin : 8 + size + end])
        if 99 in tokens:
            os._exit(1)
        fed[given["session"]] += sum(tokens)
        y = struct.pack("<f", fed[given["session"]])
    else:
        answer |= {"status": "error", "message": "no such session"}
    header = {"__metadata__": answer}
    if y is not None:
        header["y"] = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
    text = json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text + (y or b"")
    sys.stdout.buffer.write(struct.pack("<Q", len(body)) + body)
    sys.stdout.buffer.flush()
"""


def test_sessions_travel_and_outlive_a_restart(tmp_path: Path) -> None:
    program = tmp_path / "sessions.py"
    program.write_text(SESSIONS)
    backend = resolve_process(shlex.join([sys.executable, "-I", "-S", str(program)]), 30)

    def feed(session: Any, *tokens: int) -> float:
        return float(session.forward(tokens=np.array(tokens), attention="exact").item())

    try:
        a, b = backend.load(model="a", weights="int4"), backend.load(model="b", weights="int4")
        a.reset(), b.reset()
        assert [feed(a, 1, 2), feed(b, 10), feed(a, 3)] == [3, 10, 6]
        a.reset()
        assert [feed(a, 5), feed(b, 1)] == [5, 11]
        assert not hasattr(a, "generate")
        with pytest.raises(process.ProgramError, match="exited with status 1"):
            feed(a, 99)
        b.reset(), a.reset()  # both are loaded anew
        assert [feed(b, 7), feed(a, 8)] == [7, 8]
    finally:
        backend.close()


def test_whole_models_pass_through_the_door() -> None:
    program = MISBEHAVING.with_name("answering.py")
    backend = resolve_process(shlex.join([sys.executable, str(program)]), 60)
    folder = data_folder("goldens")
    try:
        for pattern in ("model/forward/*", "generation/generate/short", "kernel/linear/k33_*"):
            results = list(run(backend, folder, Selection((), (pattern,))))
            assert len(results) > 0
            assert [(r.id, r.message) for r in results if r.outcome != "pass"] == []
    finally:
        backend.close()


# Frames.

KINDS = ("?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")


@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.sampled_from(KINDS), max_size=4),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 2**64 - 1),
)
def test_what_is_encoded_is_decoded(kinds: dict[str, str], shape: list[int], seed: int) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for name, kind in kinds.items():
        dtype = np.dtype(kind)
        raw = rng.integers(0, 2 if kind == "?" else 256, (*shape, dtype.itemsize), np.uint8)
        arrays[name] = raw.view(dtype).reshape(shape)
    arrays.pop("__metadata__", None)
    frame = encode("op", "5", {**arrays, "seed-": seed, "none-": None})
    assert int.from_bytes(frame[:8], "little") == len(frame) - 8
    message = decode(frame[8:])
    assert message.text["id"] == "5"
    assert json.loads(message.text["parameters"]) == {"seed-": seed}
    assert message.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        got = message.arrays[name]
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()


def test_the_layout_is_the_documented_one() -> None:
    frame = encode("rms_norm", "7", {"x": np.ones((2, 33), np.float32), "eps": 1e-6, "bias": None})
    size = int.from_bytes(frame[8:16], "little")
    header = json.loads(frame[16 : 16 + size])
    assert size % 8 == 0
    assert header == {
        "__metadata__": {"id": "7", "operation": "rms_norm", "parameters": '{"eps": 1e-06}'},
        "x": {"dtype": "F32", "shape": [2, 33], "data_offsets": [0, 264]},
    }
    assert frame[16 + size :] == np.ones((2, 33), "<f4").tobytes()


@given(st.binary(max_size=64), st.data())
def test_no_bytes_raise_anything_else(noise: bytes, data: st.DataObject) -> None:
    blob = bytearray(encode("op", "1", {"x": X, "y": X.astype(np.int64)})[8:])
    for byte in noise:
        blob[data.draw(st.integers(0, len(blob) - 1))] = byte
    for candidate in (noise, bytes(blob), bytes(blob[: len(noise) * 2])):
        with contextlib.suppress(FrameError):
            decode(candidate)


@pytest.mark.parametrize("argument", [float("nan"), float("inf"), object(), {1, 2}])
def test_arguments_that_cannot_travel_are_the_suites_fault(argument: object) -> None:
    with pytest.raises(GoldenError, match="arguments of op cannot be sent"):
        encode("op", "1", {"a": argument})


def test_quoted_words_fit_a_line() -> None:
    assert quoted("a\n\tb\x1b[0m ") == "'a b [0m'"
    assert len(quoted("x" * 10_000)) == 302


# The command line.


def test_the_command_line_judges_a_program(
    three: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("conformance.commands.check.data_folder", lambda name: three)
    line = command("exit_3")
    arguments = ["check", "--contract", "exact", "--level", "kernel", "--process"]
    assert cli.main([*arguments, command("right"), "--timeout", "30"]) == 0
    assert "3 passed, 0 failed" in capsys.readouterr().out
    assert cli.main([*arguments, line, "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [case["outcome"] for case in report["cases"]] == ["pass", "fail", "pass"]
    assert report["interrupted"] is False
    assert cli.main([*arguments, line]) == 1
    shown = capsys.readouterr().out
    assert f"--process {shlex.quote(line)} --contract exact --case" in shown


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--process", "true", "numpy"], "goes neither with a BACKEND nor with --device"),
        (["--process", "true", "--device", "cpu"], "goes neither with a BACKEND"),
        (["--timeout", "3"], "it is for --process"),
        (["numpy", "--timeout", "3"], "it is for --process"),
        (["--process", "/no/such"], "cannot be started"),
        (["--process", "true", "--timeout", "0"], "'0' is not a number of seconds above 0"),
        (["--process", "true", "--timeout", "-1"], "'-1' is not a number of seconds above 0"),
        (["--process", "true", "--timeout", "nan"], "'nan' is not a number of seconds above 0"),
        (["--process", "true", "--timeout", "inf"], "'inf' is not a number of seconds above 0"),
        (["--process", "true", "--timeout", "soon"], "'soon' is not a number of seconds above 0"),
    ],
)
def test_options_that_do_not_fit(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["check", *arguments])
    except SystemExit as left:  # argparse
        code = left.code  # type: ignore[assignment]
    assert code == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_its_report(number: int, tmp_path: Path) -> None:
    pid_file, report = tmp_path / "pid", tmp_path / "report.json"
    words = [sys.executable, "-m", "conformance.cli", "check", "--level", "elementary"]
    words += ["--process", command("child", pid_file), "--json", str(report)]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, preexec_fn=heeding_interrupts
    ) as running:
        for _ in range(400):
            if pid_file.exists() and pid_file.read_text():
                break
            time.sleep(0.05)
        running.send_signal(number)
        _, told = running.communicate(timeout=30)
    assert running.returncode == 2
    assert told.strip() == "bitforbit: interrupted"
    written = json.loads(report.read_text())
    assert written["interrupted"] is True
    assert {case["id"].split("/")[1] for case in written["cases"]} == {"cos"}
    assert gone(int(pid_file.read_text()))


def test_a_failed_start_leaves_no_pipe_open() -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(BackendError):
            resolve_process("false", 30)
    assert len(os.listdir("/proc/self/fd")) == open_before
