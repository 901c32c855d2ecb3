"""`bitforbit bench`: its four forms, its refusals, and what an interrupt leaves."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from conformance.commands.measure import rows as forms
from conformance.commands.measure.bench import trials_of
from reference import model as model_module
from reference.engine import Engine
from reference.measure.bench import Bench
from tests.conformance.command_line import MODEL, ROOT, Run
from tests.reference.serve.servers import running, words

SMALL = ("-p", "6", "-n", "2", "-r", "2", "-t", "1")


def test_all_forms_say_the_same(run: Run) -> None:
    def out(form: str) -> str:
        code, text, _ = run("bench", "-m", MODEL, *SMALL, "-pg", "4,2", "-d", "0,3", "-o", form)
        assert code == 0
        return text

    names = ["pp6", "tg2", "pp4+tg2", "pp6 @ d3", "tg2 @ d3", "pp4+tg2 @ d3"]
    whole, lines = json.loads(out("json")), [json.loads(x) for x in out("jsonl").splitlines()]
    cells = list(csv.DictReader(io.StringIO(out("csv"))))
    for told in (whole, lines, cells):
        assert [row["test"] for row in told] == names
        assert [int(row["cache_n"]) for row in told] == [0] * 3 + [3] * 3
        assert [int(row["prompt_n"]) for row in told] == [6, 1, 4] * 2
        for row in told:
            assert list(row) == list(whole[0])
            assert len(row["digest"]) == 64
            assert (int(row["threads"]), int(row["repetitions"])) == (1, 2)
            assert float(row["rate_least"]) <= float(row["rate_median"]) <= float(row["rate_most"])
    text = out("md")
    assert text.startswith("cpu: ")
    assert whole[0]["digest"][:12] in text
    table = [[cell.strip() for cell in x.split("|")] for x in text.splitlines() if x[:1] == "|"]
    head = table[0]
    assert [row[head.index("test")] for row in table[2:]] == names
    assert {"ms to first token", "t/s", "t/s, median", "runs", "cache_n"} <= set(head)


def test_arms_are_all_that_differ(run: Run) -> None:
    arguments = ("--arithmetic", "exact,float32", "--attention", "exact,fast", "-o", "json")
    code, out, _ = run("bench", "-m", MODEL, *SMALL, "--weights", "float32,int4", *arguments)
    assert code == 0
    arms = [
        (row["test"], row["arithmetic"], row["weights"], row["attention"], row["role"])
        for row in json.loads(out)
    ]
    assert arms == [
        ("pp6", "exact", "float32", "exact", "first"),
        ("pp6", "exact", "float32", "fast", ""),
        ("pp6", "exact", "int4", "exact", ""),
        ("pp6", "exact", "int4", "fast", ""),
        ("pp6", "float32", "float32", "fast", ""),
        ("pp6", "float32", "int4", "fast", ""),
        ("pp6", "exact", "float32", "exact", "do nothing"),
        ("tg2", "exact", "float32", "exact", "first"),
        ("tg2", "exact", "int4", "exact", ""),
        ("tg2", "float32", "float32", "fast", ""),
        ("tg2", "float32", "int4", "fast", ""),
        ("tg2", "exact", "float32", "exact", "do nothing"),
    ]


def test_limits_of_memory_are_arms(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit counts all that the process holds, so that whole models are loaded last."""
    loaded: list[str | None] = []
    real = model_module.load_model

    def load_model(path: Any, weights: Any, arithmetic: Any, memory: Any = None) -> Any:
        loaded.append(memory)
        return real(path, weights, arithmetic, memory)

    monkeypatch.setattr(model_module, "load_model", load_model)
    arguments = ("-m", MODEL, *SMALL, "--memory", "none,8GiB", "--arithmetic", "exact,float32")
    code, out, _ = run("bench", *arguments, "-o", "json")
    assert code == 0
    assert loaded == ["8GiB", "8GiB", None, None]
    rows = json.loads(out)
    assert [(r["arithmetic"], r["memory"], r["role"]) for r in rows if r["test"] == "pp6"] == [
        ("exact", None, "first"),
        ("exact", "8GiB", ""),
        ("float32", None, ""),
        ("float32", "8GiB", ""),
        ("exact", None, "do nothing"),
    ]
    assert {row["digest"] for row in rows if row["arithmetic"] == "exact"} == {rows[0]["digest"]}
    said = run.refused("bench", "-m", MODEL, *SMALL, "--memory", "1KiB")
    assert "memory: 1MiB are too little for a pass of 1 token" in said
    here = ("--server", "http://127.0.0.1:1", "--memory", "1GiB")
    assert "--memory: it is of a model here, not of --server" in run.refused("bench", *here)
    code, out, err = run("bench", "--memory", "none,1GB")
    assert (code, out) == (2, "")
    assert "memory: '1GB' is no size; give one such as 512MiB or 4GiB, or none" in err


def test_what_nobody_asked_for_fits_the_context(run: Run) -> None:
    def trials(**options: Any) -> list[str]:
        given = {"p": None, "n": None, "d": [0], "pg": []} | options
        return [trial.name for trial in trials_of(Namespace(**given), 256)]

    assert trials() == ["pp256", "tg128"]
    assert trials(d=[0, 200]) == ["pp56", "tg56", "pp56 @ d200", "tg56 @ d200"]
    assert trials(p=[512], n=[300]) == ["pp512", "tg300"], "what is asked for is kept"
    assert [t.name for t in trials_of(Namespace(p=None, n=None, d=[0], pg=[]))] == [
        "pp512",
        "tg128",
    ]
    model = str(ROOT / "fixtures" / "random-llama")  # of a context of 256
    code, out, _ = run("bench", "-m", model, "-n", "0", "-r", "1", "--no-warmup", "-o", "json")
    assert (code, [row["test"] for row in json.loads(out)]) == (0, ["pp256"])
    assert "512 positions are needed" in run.refused("bench", "-m", model, "-p", "512", "-n", "0")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-d", "5000"), "pp6 @ d5000: 5006 positions are needed"),
        (("-r", "0"), "repetitions: 0 is out of range"),
        (("-p", "0", "-n", "0"), "there is nothing to measure"),
        (("-t", "0"), "-t: 0 threads"),
        (("--arithmetic", "float32", "--attention", "exact"), "float32 arithmetic has fast"),
        (("--cold",), "--cold, --vocab, --api: they are for --server"),
        (("-m", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_values_are_refused(run: Run, arguments: tuple[str, ...], part: str) -> None:
    assert part in run.refused("bench", "-m", MODEL, *SMALL, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [("-p", "-1"), ("-p", "a"), ("-pg", "5"), ("-pg", "0,5"), ("--weights", "int2"), ("-o", "x")],
)
def test_what_the_grammar_lacks(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run("bench", *arguments)
    assert (code, out) == (2, "")
    assert err.endswith(" --help`\n")


Check = Callable[[str], Any]
READ: dict[str, Check] = {
    "json": json.loads,
    "jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
    "csv": lambda text: list(csv.DictReader(io.StringIO(text))),
    "md": lambda text: [line for line in text.splitlines() if "| pp6 |" in line],
}


@pytest.mark.parametrize("form", READ)
def test_an_interrupt_keeps_the_rows(run: Run, monkeypatch: Any, form: str) -> None:
    rows = Bench.rows

    def interrupted(bench: Bench, on_run: Callable[[], object]) -> Iterator[Any]:
        yield next(rows(bench, on_run))
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "rows", interrupted)
    code, out, err = run("bench", "-m", MODEL, *SMALL, "-o", form)
    assert code == 2
    assert err == "bitforbit: interrupted; 1 row was kept\n"
    assert len(READ[form](out)) == 1


def test_a_terminal_is_told_once_what_all_rows_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"a": a, "b": "same", "c": None, "cpu": cpu} for cpu, a in (("x", 1), ("x", 20), ("y", 3))
    ]
    columns = {name: partial(forms.shown, name=name) for name in "abc"}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert forms.write("md", columns, ["cpu"], rows) == 0
    assert capsys.readouterr().out.splitlines() == [
        *("cpu: x", "b: same", "|    a |", "| ---: |", "|    1 |", "|   20 |", ""),
        *("cpu: y", "a: 3; b: same", ""),
    ]
    forms.write("jsonl", columns, ["cpu"], rows)
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("terminal", [False, True])
def test_words_stand_on_the_left_and_figures_on_the_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    figures = ["5", "-1.5e-07", "96.1% \u00b1 1.5%", "12.3 (11.9 to 13.0)", "-", "1,024"]
    words = ["99c22ffcea11", "pp512", "reuse of prompt prefixes"]
    rows = [{c: c, **{str(i): cell for i, cell in enumerate(figures + words)}} for c in "xy"]
    rows[1] |= {str(i): f"{rows[1][str(i)]} " for i in range(len(figures + words))}
    columns = {name: partial(forms.shown, name=name) for name in rows[0] if name != "x"}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "200")
    forms.write("md", columns, [], rows)
    lines = capsys.readouterr().out.splitlines()
    rule = next(line for line in lines if set(line) == set("|-: ")).strip("| ").split("|")
    told = [cell.strip() for cell in rule]
    assert told == ["---:"] * len(figures) + ["---"] * len(words)


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_cuts_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    spans = ["412.25 (411.93 to 413.07)", "1024.5 (1000.1 to 1100.2)"]
    rows = [{"test [s]": f"pp{i}", "t/s": s, "t/s, median": s} for i, s in enumerate(spans)]
    columns = {name: partial(forms.shown, name=name) for name in rows[0]}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    forms.write("md", columns, [], rows)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= width
    assert {word for s in spans for word in s.split()} | {"[s]"} <= set(
        out.replace(":", "").split()
    )


def test_an_error_ends_json_in_good_form(capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield {"a": 1}
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        forms.write("json", {}, (), rows())
    assert json.loads(capsys.readouterr().out) == [{"a": 1}]


def test_a_server(run: Run) -> None:
    with running(Engine(words(), cache_bytes=1 << 24)) as server:
        where = ("bench", "--server", server.url, "--vocab", "32", "-r", "2", "-o", "json")
        for cold in (True, False):
            mark = ("--cold",) if cold else ()
            code, out, _ = run(*where, "-p", "9", "-n", "3", *mark)
            assert code == 0
            rows = json.loads(out)
            assert [row["test"] for row in rows] == ["pp9", "tg3"]
            assert rows[0]["cache"] == ("cold" if cold else "warm")
            assert rows[0]["prompt_n"] == (9 if cold else 1)
            for row in rows:
                assert (row["model"], row["digest"]) == ("tiny", words().digest)
                assert row["server"] == server.url
        assert "drop --cold" in run.refused(*where, "--cold", "-d", "4")
    assert "Connection refused" in run.refused(*where)
    assert "unsupported protocol" in run.refused("bench", "--server", "foo://x")


def test_a_cold_server_of_openai_s_kind(run: Run) -> None:
    """On a server of its own: that interface cannot ask for no reuse of what others sent before."""
    with running(Engine(words(), cache_bytes=1 << 24)) as server:
        where = ("bench", "--server", server.url, "--vocab", "32", "-r", "2", "-o", "json")
        _, out, _ = run(*where, "-p", "9", "-n", "0", "--cold", "--api", "openai")
    assert [(row["cache"], row["prompt_n"]) for row in json.loads(out)] == [("cold", 9)]
