"""--memory of the commands: the same answers, and a bar of layers, tokens and time left."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conformance.cli import main
from conformance.commands.memory import layer_bar
from reference.model import load_model

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "fixtures" / "tiny-dense")


def answer(capsys: pytest.CaptureFixture[str], *command: str) -> Any:
    assert main([*command]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "--model", TINY, "--prompt", "In the beginning", "-n", "5", "--json")
    whole, parts = (answer(capsys, *command, *more) for more in ((), ("--memory", "8GiB")))
    assert parts["tokens"] == whole["tokens"]


def test_perplexity_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("perplexity", "-m", TINY, "-c", "32", "--chunks", "3", "-o", "json")
    (whole,), (parts,) = (answer(capsys, *command, *more) for more in ((), ("--memory", "8GiB")))
    same = ("perplexity", "digest", "tokens", "prompt_n", "window_most")
    assert [parts[key] for key in same] == [whole[key] for key in same]


@pytest.mark.parametrize("size", ["1MiB", "much"])
def test_a_limit_that_does_not_do_is_refused(capsys: pytest.CaptureFixture[str], size: str) -> None:
    assert main(["generate", "--model", TINY, "--prompt", "a", "--memory", size]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("bitforbit: memory: ")
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("memory", [None, 2**40])
def test_the_bar_shows_layers_tokens_and_time_left(memory: int | None) -> None:
    model, out = load_model(TINY, memory=memory), io.StringIO()
    layers = model.config.layers
    with layer_bar(model, 2, Console(file=out, force_terminal=True, width=90)) as bar:
        for count in (1234, 1):
            model.forward([1])
            bar.tokens(count)
    if memory is None:
        assert out.getvalue() == ""
        return
    assert f"layer {layers}/{layers}, tokens 1,235" in out.getvalue()
    assert "0:00:00" in out.getvalue(), "all passes are done"
