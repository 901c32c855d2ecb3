"""CTranslate2 as it is: whole models in float32 on the CPU, by its own converter.

    pip install ctranslate2 torch transformers
    bitforbit check examples/engines/ctranslate2.py --case 'model/*:gauge'

Its converter wants a tokenizer beside the weights, and gets one of as many words as there are
tokens; only ids are fed. A sequence that goes on is computed again from its start.
"""

# ruff: noqa: D102

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2 import Generator
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models

from conformance.operations import NotImplementedByBackendError


def converted(model: Path, out: str) -> Generator:
    """A generator of a model folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(model / "model.safetensors", folder)
        config = json.loads((model / "config.json").read_text()) | {"pad_token_id": None}
        (folder / "config.json").write_text(json.dumps(config))
        words = {f"t{i}": i for i in range(config["vocab_size"])}
        Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "t0")
        about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        TransformersConverter(str(folder)).convert(out, force=True)
    return Generator(out, device="cpu", compute_type="float32", intra_threads=1)


class Backend:
    """Float32 throughout."""

    numerics = {"accumulator": "float32"}  # noqa: RUF012

    def load(self, model: Any, weights: str = "float32") -> Session:
        if weights != "float32":
            raise NotImplementedByBackendError(f"weights as {weights}")
        try:
            with tempfile.TemporaryDirectory() as out:
                return Session(converted(Path(model), out))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise NotImplementedByBackendError(f"{Path(model).name} ({reason})") from error


class Session:
    """A model, and the sequence fed to it."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.reset()

    def reset(self) -> None:
        self.fed: list[int] = []

    def forward(self, tokens: Any, attention: str = "exact") -> Any:
        self.fed += [int(token) for token in tokens]
        return np.array(self.generator.forward_batch([self.fed]))[0, -len(tokens) :]
