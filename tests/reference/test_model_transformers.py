"""The model against transformers in float32, on random weights, fed the same inv_freq."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.model import Model, load_model
from reference.rotary import rope_constants

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LIMIT = 2e-6
"""The largest difference of a logit that float32 in another order makes on these models."""

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama-{kind}": ("Llama", {"rope_parameters": rope}) for kind, rope in ROPES.items()},
    "llama-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-head_dim": ("Llama", {"head_dim": 48, "num_key_value_heads": 1}),
    "llama-groups_of_8": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 17, "head_dim": 32}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias-yarn": (
        "Qwen3",
        {"head_dim": 24, "attention_bias": True, "rope_parameters": ROPES["yarn"]},
    ),
    "qwen3-window": (
        "Qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
}


def random_model(folder: Path, family: str, options: dict[str, Any]) -> Any:
    """A transformers model with random weights, biases and norms included, saved to `folder`."""
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **options})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def feed_constants(theirs: Any, ours: Model) -> None:
    """Give transformers our inv_freq and attention factor, in the place of its own float32 ones."""
    inv_freq, factor = rope_constants(ours.config.rope)
    rotary = theirs.model.rotary_emb
    rotary.inv_freq = torch.from_numpy(inv_freq.copy())
    rotary.original_inv_freq = rotary.inv_freq.clone()
    rotary.attention_scaling = float(factor)


def tokens_of(count: int) -> Any:
    return np.random.default_rng(count).integers(0, SMALL["vocab_size"], count)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_model(tmp_path, *CASES[name])
    exact, plain = load_model(tmp_path), load_model(tmp_path, arithmetic="float32")
    feed_constants(theirs, exact)
    for count in (40, 700):
        tokens = tokens_of(count)
        with torch.no_grad():
            expected = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
        for model, attention in ((exact, "exact"), (exact, "fast"), (plain, "fast")):
            worst = np.abs(model.forward(tokens, attention=attention) - expected).max()  # type: ignore[arg-type]
            assert worst < LIMIT, (count, attention, worst)


def test_own_constants_of_transformers_cost_little(tmp_path: Path, record_property: Any) -> None:
    """transformers computes inv_freq in float32; what its last bits do is no more than this."""
    theirs = random_model(tmp_path, "Llama", {})
    ours = load_model(tmp_path)
    tokens = tokens_of(700)
    with torch.no_grad():
        own = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
        feed_constants(theirs, ours)
        fed = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    record_property("own_inv_freq", float(np.abs(own - fed).max()))
    assert 0 < np.abs(own - fed).max() < 1e-4


def test_dynamic_rope_beyond_its_length_is_that_of_a_decoder(tmp_path: Path) -> None:
    """Past the original length a token is rotated as if it were the last (SPEC 7.2)."""
    options = {"max_position_embeddings": 48, "rope_parameters": ROPES["dynamic"]}
    theirs = random_model(tmp_path, "Llama", options)
    tokens = tokens_of(64)
    ours = load_model(tmp_path).forward(tokens)
    rows, past = [], None
    with torch.no_grad():
        for token in tokens:
            out = theirs(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            rows.append(out.logits[0, 0].numpy())
    assert np.abs(ours - np.stack(rows)).max() < 10 * LIMIT
