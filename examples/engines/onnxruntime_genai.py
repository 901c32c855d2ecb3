"""onnxruntime-genai as it is: a model that its own builder writes from a folder, on the CPU.

    pip install onnxruntime-genai onnx onnx-ir torch transformers
    bitforbit check examples/engines/onnxruntime_genai.py --case 'model/forward/short:gauge'

Its builder wants a tokenizer beside the weights, and gets one of as many words as there are tokens;
only ids are fed.
"""

# ruff: noqa: D102

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
from tokenizers import Tokenizer, models

from conformance.operations import NotImplementedByBackendError


def with_words(model: Path, folder: Path) -> int:
    """Copy a model to a folder, with a tokenizer; the number of its positions."""
    for file in ("config.json", "model.safetensors"):
        shutil.copy(model / file, folder)
    config = json.loads((model / "config.json").read_text())
    words = {f"t{i}": i for i in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return int(config["max_position_embeddings"])


class Backend:
    """Float32 throughout."""

    numerics = {"accumulator": "float32"}  # noqa: RUF012

    def load(self, model: Any, weights: str = "float32") -> Session:
        if weights != "float32":
            raise NotImplementedByBackendError(f"weights as {weights}")
        with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as out:
            positions = with_words(Path(model), Path(source))
            build = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
            build += ["-m", source, "-o", out, "-p", "fp32", "-e", "cpu"]
            done = subprocess.run(build, capture_output=True, text=True)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1][:200]
                raise NotImplementedByBackendError(f"{Path(model).name} ({reason})")
            return Session(og.Model(out), positions)


class Session:
    """A model, and the sequence fed to it."""

    def __init__(self, model: Any, positions: int) -> None:
        self.model, self.positions = model, positions
        self.reset()

    def reset(self) -> None:
        params = og.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, max_length=self.positions)
        self.generator = og.Generator(self.model, params)

    def forward(self, tokens: Any, attention: str = "exact") -> Any:
        self.generator.append_tokens(np.asarray(tokens, np.int32)[None])
        return np.array(self.generator.get_output("logits"))[0]
