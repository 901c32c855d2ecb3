"""llama.cpp by its server (docs/doors.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from conformance import cli
from conformance.backends import llama_cpp
from conformance.paths import model_folder
from reference.loading import load_gguf
from reference.model import Model, load_model
from reference.tokenizer import Tokenizer

TOKENS = np.random.default_rng(1).integers(0, 1000, 40)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_cpp.write(tmp_path_factory.mktemp("gguf") / "tiny-dense.gguf")


def logits(model: Model) -> Any:
    return model.forward(TOKENS, model.new_cache(), "exact")


def test_the_file_holds_the_model(file: Path) -> None:
    """Every bit of its logits, and the ids of a text."""
    folder = model_folder("fixtures/tiny-dense")
    assert logits(load_model(str(file))).tobytes() == logits(load_model(str(folder))).tobytes()
    text = "In the beginning God created\nthe heaven, and 12 <|endoftext|> more."
    ours, theirs = load_gguf(file).tokenizer, Tokenizer.load(folder / "tokenizer.json", 1024)
    assert ours is not None
    assert ours.encode(text) == theirs.encode(text)


def test_what_it_serves_passes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp")
    for case in ("server/tokenize/*", "server/logprobs/short", "server/greedy/short"):
        assert cli.main(["check", "llama_cpp", "--case", case]) == 0, capsys.readouterr().out
        assert "1 passed, 0 failed" in capsys.readouterr().out


def test_half_precision_is_not_float32(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp")
    case = ["--case", "server/logprobs/short"]
    with llama_cpp.serving(defaults=True) as address:
        assert cli.main(["check", "--server", address, *case]) == 1
        assert cli.main(["check", "--server", address, "--precision", "float16", *case]) == 0
    assert cli.main(["check", "llama_cpp", "--precision", "float16", *case]) == 0


def test_options_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--model", "tiny-moe"], ["--server", "http://x"], ["--api", "openai"]):
        assert cli.main(["check", "llama_cpp", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
