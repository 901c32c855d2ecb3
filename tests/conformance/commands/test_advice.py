"""`--generation-config` of `generate` and `serve`: an advice is taken, and flags come before it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reference.engine import Engine
from reference.model import load_model
from reference.sampling import Sampling
from tests.conformance.command_line import MODEL, Run

PROMPT = "In the beginning"
FILE = "generation_config.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose makers advise something."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    advice = {"do_sample": True, "temperature": 0.9, "top_k": 8, "eos_token_id": 0}
    (folder / FILE).write_text(json.dumps(advice))
    return folder


def tokens(run: Run, model: Path, *arguments: str) -> list[int]:
    command = ("generate", "--model", str(model), "--prompt", PROMPT, "-n", "20", "--seed", "3")
    code, out, _ = run(*command, *arguments, "--json")
    assert code == 0
    found: list[int] = json.loads(out)["tokens"]
    return found


def test_generate_takes_an_advice_when_it_is_told(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(load_model(model))

    def alone(sampling: Sampling) -> list[int]:
        return engine.generate(PROMPT, 20, sampling=sampling, seed=3).tokens

    assert tokens(run, model) == alone(Sampling())
    auto = ("--generation-config", "auto")
    assert tokens(run, model, *auto) == alone(Sampling(0.9, 8)) != alone(Sampling())
    assert tokens(run, model, *auto, "--temperature", "0") == alone(Sampling())
    assert tokens(run, model, *auto, "--top-k", "0") == alone(Sampling(0.9))
    changed = ("--top-p", "0.5", "--min-p", "0.1", "--repetition-penalty", "1.5")
    assert tokens(run, model, *auto, *changed) == alone(Sampling(0.9, 8, 0.5, 0.1, 1.5))
    for path in (model, model / FILE):
        from_there = tokens(run, Path(MODEL), "--generation-config", str(path))
        assert from_there == alone(Sampling(0.9, 8))


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_what_cannot_be_given_is_one_line(run: Run, model: Path, command: str) -> None:
    more = ("--prompt", PROMPT) if command == "generate" else ("--port", "0")
    ask = (command, "--model", str(model), *more, "--generation-config")
    (model / FILE).write_text('{"num_beams": 4}')
    assert f"{model / FILE}: num_beams is 4; it is not supported" in run.refused(*ask, "auto")
    (model / FILE).unlink()
    assert f"{model / FILE}: it cannot be read" in run.refused(*ask, "auto")
    assert "nowhere: it cannot be read" in run.refused(*ask, "nowhere")


def test_the_help_tells_it(run: Run) -> None:
    for command in ("generate", "serve"):
        assert "--generation-config auto|PATH" in run(command, "--help")[1]
