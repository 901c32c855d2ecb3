"""`bitforbit serve` itself: it serves until it is told to stop, and errors are one line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from safetensors.numpy import load_file

from conformance.cli import main
from reference.tokenizer import Tokenizer
from tests.reference.loading.gguf_files import add_byte_level, converted, finish, writer
from tests.reference.loading.texts import ROOT

TINY = "fixtures/tiny-dense"


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", "--model", TINY, *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("bitforbit: ")
    assert error.count("\n") == 1
    return error


def test_a_server_serves_and_stops(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content }}")
    command = [sys.executable, "-m", "conformance.cli", "serve", "--model", TINY]
    command += ["--port", "0", "--alias", "it", "--chat-template", str(template)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            name, url = server.stdout.readline().strip().split(": ")
            assert name == "it"
            assert url.startswith("http://127.0.0.1:")
            body = {
                "model": "it",
                "messages": [{"role": "user", "content": "And"}],
                "max_tokens": 2,
            }
            request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
            with urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 2
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
        finally:
            server.kill()


def test_a_gguf_file_brings_its_template_and_bos_comes_once(tmp_path: Path) -> None:
    """From the template where it writes one, from the tokenizer elsewhere, and never twice."""
    fixture = ROOT / "fixtures" / "tiny-draft"
    raw = json.loads((fixture / "config.json").read_text())
    out = writer(raw, tmp_path / "m.gguf")
    add_byte_level(out, fixture / "tokenizer.json", "gpt-2")
    out.add_bos_token_id(0)
    out.add_add_bos_token(True)
    first = "{% if messages | length == 1 %}{{ bos_token }}{% endif %}"
    out.add_chat_template(first + "{{ messages[-1].content }}")
    finish(out, converted(raw, load_file(fixture / "model.safetensors")))
    command = [
        sys.executable,
        "-m",
        "conformance.cli",
        "serve",
        "--model",
        str(tmp_path / "m.gguf"),
    ]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            name, url = server.stdout.readline().strip().split(": ")
            assert name == "m.gguf"

            def ids(path: str, **fields: Any) -> list[int]:
                body = {"model": name, "max_tokens": 1, "return_token_ids": True, **fields}
                request = Request(f"{url}/v1/{path}", json.dumps(body).encode())
                with urlopen(request, timeout=60) as answer:
                    found: list[int] = json.load(answer)["choices"][0]["prompt_token_ids"]
                    return found

            plain = Tokenizer.load(fixture / "tokenizer.json", 10**6).encode("And then")
            messages = [{"role": "user", "content": "And then"}]
            assert ids("chat/completions", messages=messages) == [0, *plain]
            assert ids("chat/completions", messages=messages * 2) == plain
            assert ids("completions", prompt="And then") == [0, *plain]
            assert ids("completions", prompt="<|endoftext|>And then") == [0, *plain]
        finally:
            server.kill()


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = one_line(capsys, "--port", port)
    assert f"--port: cannot listen on 127.0.0.1:{port} (Address already in use)" in error


@pytest.mark.parametrize("port", ["-1", "65536", "99999999999999999999"])
def test_a_port_that_is_none(capsys: pytest.CaptureFixture[str], port: str) -> None:
    assert f"127.0.0.1:{port}" in one_line(capsys, "--port", port)


def test_a_malformed_template(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("a\n{% if %}")
    error = one_line(capsys, "--port", "0", "--chat-template", str(template))
    assert f"{template}: line 2: " in error
    assert "nowhere: it cannot be read" in one_line(
        capsys, "--port", "0", "--chat-template", "nowhere"
    )


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "pydantic", "jinja2"])
def test_without_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    ours = [name for name in sys.modules if name.startswith(("reference.serve", "reference.chat"))]
    for name in [n for n in sys.modules if n == package or n.startswith(package + ".")] + ours:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    error = one_line(capsys, "--port", "0")
    assert f"it needs {package}; pip install 'bitforbit[serve]'" in error


def test_the_engine_needs_no_extra() -> None:
    missing = ["starlette", "uvicorn", "pydantic", "jinja2", "prometheus_client"]
    script = f"import sys; sys.modules.update(dict.fromkeys({missing})); import conformance.cli; "
    script += "from reference import Engine, load_model"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [("--max-sequences", "0"), ("--max-body", "-1"), ("--max-body", "x"), ("--timeout", "0")],
)
def test_a_limit_that_is_none(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["serve", "--model", TINY, *arguments])
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err
