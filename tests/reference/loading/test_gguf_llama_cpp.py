"""Small random models as GGUF files, against llama.cpp: the law of the next token.

`xllamacpp`, a build of llama.cpp with its server, is optional.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.model import load_model
from tests.reference.loading.folders import random_tensors, with_keys
from tests.reference.loading.gguf_files import add_byte_level, converted, finish, writer
from tests.reference.loading.test_gguf import FAMILIES, OLMO3, SMOLLM3, YARN
from tests.reference.loading.texts import ROOT

xllamacpp = pytest.importorskip("xllamacpp")
pytestmark = [pytest.mark.real, pytest.mark.slow]

FIXTURE = ROOT / "fixtures" / "tiny-draft"
VOCABULARY = json.loads((FIXTURE / "config.json").read_text())["vocab_size"]
ONE_THETA = {
    "full_attention": {**YARN, "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": FAMILIES["llama"],
    "smollm3": with_keys(SMOLLM3, tie_word_embeddings=True),
    "olmo3": with_keys(OLMO3, rope_scaling=YARN),
    "mellum": with_keys(FAMILIES["mellum"], rope_parameters=ONE_THETA),
    "gpt-oss": FAMILIES["gpt-oss"],
}


def write(path: Path, raw: Mapping[str, Any]) -> Path:
    """A file of a wider model, whose weights are small enough for moderate logits."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": VOCABULARY}
    sizes |= {"head_dim": 16} if "head_dim" in raw else {}
    sizes |= {"moe_intermediate_size": 32} if "moe_intermediate_size" in raw else {}
    raw = {**raw, **sizes}
    tensors = {
        name: np.float32(1) + w * np.float32(0.1) if "norm" in name else w * np.float32(0.2)
        for name, w in random_tensors(raw).items()
    }
    out = writer(raw, path)
    add_byte_level(out, FIXTURE / "tokenizer.json", "gpt-2")
    finish(out, converted(raw, tensors))
    return path


def theirs(file: Path, tokens: list[int]) -> dict[int, float]:
    """Log-probabilities of llama.cpp's likeliest next tokens."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.port, params.verbosity = str(file), 128, 0, -1
    params.cpuparams.n_threads, params.warmup = 1, False
    server = xllamacpp.Server(params)
    body = {"prompt": tokens, "n_predict": 1, "temperature": 0, "n_probs": 40}
    request = urllib.request.Request(
        server.listening_address + "/completion", json.dumps(body).encode()
    )
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        listed = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
    return {entry["id"]: entry["logprob"] for entry in listed}


@pytest.mark.parametrize("name", MODELS)
def test_the_next_token_has_the_law_of_llama_cpp(tmp_path: Path, name: str) -> None:
    """Within 0.05 of each log-probability.

    llama.cpp keeps keys and values, and what it multiplies, in 16 bits: 0.004 to 0.013 was seen.
    Rope in all layers of SmolLM3, where every fourth has none, moves them by 1.4.
    """
    file = write(tmp_path / "model.gguf", MODELS[name])
    tokens = [int(t) for t in np.random.default_rng(0).integers(5, VOCABULARY, 30)]
    logits = load_model(file, arithmetic="float32").forward(tokens, last_only=True)[0]
    shifted = logits.astype(np.float64) - logits.max()
    ours = shifted - np.log(np.exp(shifted).sum())
    found = theirs(file, tokens)
    assert len(found) == 40
    assert max(found, key=lambda token: found[token]) == int(ours.argmax())
    assert max(abs(ours[token] - value) for token, value in found.items()) < 0.05
