"""The command line: exit codes 0, 1 and 2, one line for what cannot run, and never a traceback."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conformance import cli
from conformance.commands.workers import process_count
from reference.threads import A_CORE, cores
from tests.conformance.command_line import ROOT, SMALL, Run, process


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
        (("goldens", "verify", "--folder", "/x"), "unreadable (No such file or directory); run"),
        (("check", "--expect", "/nowhere"), "/nowhere: cannot be read (No such file or directory)"),
        (("check", "--process", ""), "bitforbit: --process: the command is empty"),
        (("faults", "show", "pairs-inter"), "no such fault; did you mean rope-pairs-interleaved"),
        (("faults", "show", "rope-interleaved"), "did you mean rope-pairs-interleaved, "),
        (("faults", "show", "zzz"), "zzz: no such fault; `bitforbit faults list` names all"),
        (("generate", "-m", "nowhere", "--prompt", "x"), "nowhere: no such model; give a folder"),
        (("bench", "-m", "fixtures/nowhere"), "fixtures/nowhere: no such model; give a folder"),
        (("diagnose", "nowhere"), "no bench file in json or jsonl (No such file or directory)"),
    ],
)
def test_what_cannot_run_is_one_line(run: Run, arguments: tuple[str, ...], part: str) -> None:
    assert part in run.refused(*arguments)


def test_a_path_that_cannot_be_is_named_in_one_line(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("")
    told = run.refused("export", str(target / "within"), "--case", "kernel/linear/k33_t5")
    assert told.startswith(f"bitforbit: {target}/within")
    assert "Not a directory; check the path" in told


@pytest.mark.parametrize(
    "arguments",
    [
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
    command = " ".join(["bitforbit", *known])
    assert err.startswith(f"{command}: ")
    assert err.endswith(f"see `{command} --help`\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("chekc",), "bitforbit: 'chekc' is no command; did you mean check? see"),
        (
            ("goldens", "verfy"),
            "bitforbit goldens: 'verfy' is no command; did you mean verify? see",
        ),
        (("xyz",), "bitforbit: 'xyz' is no command; see"),
    ],
)
def test_a_command_that_is_meant_is_named(run: Run, arguments: tuple[str, ...], told: str) -> None:
    assert run(*arguments)[2].startswith(told)


def test_the_overview_lists_each_command_once(run: Run) -> None:
    out = run("--help")[1]
    listed = re.findall(r"^  bitforbit ([a-z][\w-]*)", out, re.MULTILINE)
    assert set(listed) == {parser.prog.split()[1] for parser in COMMANDS}
    assert "positional arguments:\n" not in out
    assert "--version" in out


def test_without_a_command_there_is_help(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (2, "")
    assert out == run("--help")[1]


def shell(line: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    line = line.replace("bitforbit", f'"{sys.executable}" -m conformance.cli')
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, env={**os.environ, **more}
    )


def test_what_an_encoding_lacks_is_escaped() -> None:
    line = "bitforbit check nów\u2260here.py"
    done = shell(line, PYTHONIOENCODING="latin-1")
    assert done.returncode == 2
    assert done.stderr == "bitforbit: nów\\u2260here.py: no such file\n".encode("latin-1")


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_takes_all(streams: str) -> None:
    done = shell(f"bitforbit check numpy {shlex.join(SMALL)} {streams}")
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_a_colour_that_is_asked_for_brings_no_bar_where_no_one_looks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, err = run("check", *SMALL, "--json", "-")
    assert (code, err) == (0, "")
    assert json.loads(out)["summary"]["failed"] == 0
    assert "\x1b[" in run("check", *SMALL)[1]


def test_a_lack_of_memory_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(folder: object) -> None:
        np.empty(2**46)

    monkeypatch.setattr("conformance.runner.cases", lacks)
    assert "there is not enough memory (Unable to allocate" in run.refused("check")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
@pytest.mark.parametrize("arguments", [("faults", "list"), ("check", *SMALL, "--json", "-")])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "conformance.cli", *arguments]
    with open("/dev/full", "w") as full:
        told = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (told.returncode, told.stderr) == (2, b"bitforbit: No space left on device\n")


def test_a_report_that_no_one_reads_to_its_end_is_no_verdict() -> None:
    """1 would say that a case failed."""
    table = shell("bitforbit faults list | true; exit ${PIPESTATUS[0]}")
    assert table.returncode == 2
    assert b"Traceback" not in table.stderr


@pytest.mark.parametrize(
    "command", [(), ("check",), ("goldens",), ("goldens", "make"), ("generate",)]
)
def test_help(run: Run, command: tuple[str, ...]) -> None:
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: bitforbit")


def test_the_module_runs_as_the_command_does() -> None:
    done = process("check", "numpy", *SMALL, "--json", "-")
    assert done.returncode == 0
    assert done.stderr == b""
    assert json.loads(done.stdout)["summary"]["passed"] == 4
    assert process("check", "nowhere.py").returncode == 2


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m conformance.cli goldens show kernel/attention/rows_512 | head -1',
        shell=True,
        cwd=ROOT,
        capture_output=True,
    )
    assert b"Traceback" not in done.stderr
    assert b"kernel/attention/rows_512" in done.stdout


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


def test_the_help_of_check_names_every_program_among_the_examples() -> None:
    text = next(p for p in COMMANDS if p.prog == "bitforbit check").description or ""
    readme = (ROOT / "README.md").read_text()
    programs = set(re.findall(r"--process '?(?:node )?(examples/\w+)", readme))
    assert programs == {"examples/c", "examples/node", "examples/rust"}
    for program in programs:
        assert re.search(rf"^  bitforbit check --process .*{program}/", text, re.MULTILINE)


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
    """Its value may be left out, and no BACKEND is taken for it."""
    found = options_named("--json")
    assert {"check", "judge", "generate", "calibrate", "gate", "schedule", "prefix"} <= set(found)
    for command, action in found.items():
        assert (action.metavar, action.nargs, action.const) == ("FILE|-", "?", "-"), command


@pytest.mark.parametrize("command", ["check", "fuzz"])
def test_a_backend_behind_json_is_not_overwritten(run: Run, command: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("class Backend: ...")
    said = run.refused(command, "--json", str(mine))
    assert f"--json: {mine} is taken for the file to write; if it is the BACKEND, put it" in said
    assert mine.read_text() == "class Backend: ..."
    assert "torch is taken for" in run.refused(command, "--json", "torch")


def test_processes_are_workers_everywhere() -> None:
    found = options_named("--workers")
    assert {"check", "goldens make", "goldens verify", "calibrate", "gate"} <= set(found)
    for action in found.values():
        assert str(action.help).startswith("share out to N processes here (default: ")
        assert action.type is process_count
    assert not options_named("--jobs")


def test_as_many_processes_as_no_machine_needs_are_refused(run: Run) -> None:
    most = A_CORE * cores()
    assert process_count(str(most)) == most
    code, out, err = run("check", "--workers", str(most + 1))
    assert (code, out) == (2, "")
    assert f"{most + 1} are too many; give {most} at most, {A_CORE} a core; see" in err


def test_what_is_the_same_has_the_same_name() -> None:
    """An older spelling is understood, and not shown."""
    for letter, name in {"-t": "--threads", "-b": "--batch", "-f": "--file"}.items():
        for command, action in options_named(letter).items():
            shown = action.help != argparse.SUPPRESS
            assert not shown or name in action.option_strings, f"{command} {letter}"
    hidden = {"--folder": "--goldens", "-b": "--passes"}
    for old, name in hidden.items():
        for command, action in options_named(old).items():
            if action.help == argparse.SUPPRESS:
                assert options_named(name)[command].dest == action.dest
    assert set(options_named("--goldens")) >= {
        "check", "goldens make", "goldens verify", "goldens show"
    }  # fmt: skip
    for old in ("--folder", "--text"):
        assert {action.help for action in options_named(old).values()} == {argparse.SUPPRESS}
