"""`check --server`: what cannot run, its report, and an interrupt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance import cli
from conformance.backends.server import Server
from tests.conformance.cases.server.judging import MODEL
from tests.conformance.cases.server.stand_ins import Proxy, listening, one_more


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--server", "http://127.0.0.1:9"), "--server: http://127.0.0.1:9: "),
        (("--server", "nowhere"), "'nowhere' is no address"),
        (("--server", "ftp://127.0.0.1/"), "is no address"),
        (("--server", "http://[::1"), "is no address"),
        (("--server", "http://127.0.0.1:99999"), "a port is less than 65536"),
        (("--server", "http://x", "--process", "y"), "goes with it"),
        (("numpy", "--server", "http://x"), "goes with it"),
        (("--server", "http://x", "--level", "kernel"), "--level: a server has"),
        (("--server", "http://x", "--case", "kernel/*"), "--case: no case of servers"),
        (("--server", "http://x", "--model", "random-llama"), "has no tokenizer"),
        (("--server", "http://x", "--model", "nowhere"), "nowhere: no such model; give a folder"),
        (("numpy", "--api", "llama"), "they are for --server"),
        (("--precision", "float16"), "they are for --server"),
    ],
)
def test_what_cannot_run(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], part: str
) -> None:
    assert cli.main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert part in err
    assert err.count("\n") == 1


def test_the_command(ours: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    options = ("--server", ours, "--model", MODEL, "--case", "server/[sl]e*")
    assert cli.main(["check", *options, "--json", str(target)]) == 0
    told = json.loads(target.read_text())
    assert told["summary"]["passed"] == len(told["cases"]) == 3
    with listening(Proxy(ours, one_more)) as url:
        late = ("--timeout", "45")
        assert cli.main(["check", "--server", url, *options[2:], *late]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "FAIL server/length/limit:equal" in out
    again = f"bitforbit check --server {url} --api llama --model {MODEL} --precision float32"
    assert f"{again} --timeout 45 --case 'server/" in out


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_an_address_as_openai_clients_take_it(ours: str, end: str) -> None:
    one = ("--model", MODEL, "--case", "server/length/limit")
    assert cli.main(["check", "--server", ours + end, *one]) == 0


def test_an_interrupt_keeps_the_report(
    ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> object:
        raise KeyboardInterrupt

    target = tmp_path / "report.json"
    monkeypatch.setattr(Server, "tokenize", interrupted)
    options = ("--server", ours, "--model", MODEL, "--case", "server/[lt]o*")
    assert cli.main(["check", *options, "--json", str(target)]) == 2
    told = json.loads(target.read_text())
    assert told["interrupted"] is True
    assert [case["id"] for case in told["cases"]] == ["server/logits/any:bits"]
