"""llama.cpp by its server, as `examples/llama_cpp.py` starts it (docs/doors.md)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from conformance import cli
from conformance.paths import model_folder
from reference.loading import load_gguf
from reference.model import Model, load_model
from reference.tokenizer import Tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_cpp.py"
TOKENS = np.random.default_rng(1).integers(0, 1000, 40)


def loaded() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("example_llama_cpp", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = loaded().write(tmp_path_factory.mktemp("gguf") / "tiny-dense.gguf")
    return path


@pytest.fixture
def server(file: Path) -> Any:
    """llama.cpp in this process, with a cache of float32."""
    pytest.importorskip("xllamacpp")
    return loaded().serve(file, port=0, defaults=False)


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


def test_what_it_serves_passes(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for case in ("server/tokenize/*", "server/logprobs/short", "server/greedy/short"):
        assert cli.main(["check", "--server", server.listening_address, "--case", case]) == 0, (
            capsys.readouterr().out
        )
        assert "1 passed, 0 failed" in capsys.readouterr().out
