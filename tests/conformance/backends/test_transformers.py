"""transformers as a backend: within its bounds, and what it cannot load is said (SPEC 17)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import save_file
from safetensors.torch import load_file

from conformance.backends import resolve
from conformance.backends.reference import ReferenceBackend
from conformance.golden import read_all
from conformance.operations import NotImplementedByBackendError, Sessions, call
from conformance.rules import judge

Array = NDArray[Any]
ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "fixtures"
BACKEND, REFERENCE = resolve("transformers"), ReferenceBackend()
SESSIONS = Sessions(BACKEND)
TOKENS = np.random.default_rng(1).integers(0, 48, 40)
GOLDENS = {
    golden.id.rsplit("/", 1)[1]: golden
    for golden in read_all(ROOT / "goldens")
    if golden.operation == "forward"
    and "gauge" in golden.rules
    and golden.parameters.get("weights", "float32") == "float32"  # it knows no int4
}
BEYOND = {"phi3", "phi3_chunked", "llama", "llama_chunked"}
"""Its longrope goes by the length of a call; its Llama knows no partial rotation."""


@pytest.mark.parametrize("name", sorted(set(GOLDENS) - BEYOND - {"above_the_floor"}))
def test_logits_are_within_the_bound_of_float32(name: str) -> None:
    golden = GOLDENS[name]
    arguments = {**golden.parameters, **golden.inputs, "attention": "fast"}
    answer = call(BACKEND, SESSIONS, "forward", arguments)
    verdict = judge("gauge", golden, answer, 2.0**-24)
    assert verdict.outcome == "pass", verdict.message
    answer["y"] = answer["y"] + np.float32(1e-3)
    assert judge("gauge", golden, answer, 2.0**-24).outcome == "fail"


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "phi3"])
def test_chunks_continue_the_sequence(name: str, size: int) -> None:
    """Phi-3 up to its original length, where its two rotations do not differ."""
    golden = GOLDENS[name]
    tokens = golden.inputs["tokens"][:24]
    session = SESSIONS.get(golden.parameters["model"], "float32")
    parts = [session.forward(tokens[i : i + size], "exact") for i in range(0, len(tokens), size)]
    np.testing.assert_allclose(np.concatenate(parts), golden.outputs["y"][:24], atol=1e-4)


def test_one_token_at_a_time_is_the_specification_where_a_whole_prompt_may_not_be() -> None:
    """A token's longrope goes by its own position when tokens are fed one by one (7.2)."""
    golden = GOLDENS["phi3"]
    session = SESSIONS.get("families/phi3", "float32")
    parts = [session.forward(token[None], "exact") for token in golden.inputs["tokens"]]
    np.testing.assert_allclose(np.concatenate(parts), golden.outputs["y"], atol=1e-4)


def test_generate_is_greedy_and_starts_afresh() -> None:
    folder = str(FIXTURES / "tiny-dense")
    session, theirs = SESSIONS.get("tiny-dense", "float32"), REFERENCE.load(folder, "float32")
    session.forward(TOKENS, "exact")
    prompt = TOKENS[:12] * 20
    tokens, logits = session.generate(prompt=prompt, max_new_tokens=9, exact_prefill=True)
    wanted = theirs.generate(prompt, 9, True)
    assert (tokens.dtype, logits.dtype) == (np.int64, np.float32)
    assert np.array_equal(tokens, wanted[0])
    np.testing.assert_allclose(logits, wanted[1], atol=1e-3)


def test_it_ends_a_text_by_what_it_finds_itself() -> None:
    """The ids of generation_config.json, or that of config.json where there is no such file."""
    assert SESSIONS.get("random-ends", "float32").ends == [51, 8]
    session = SESSIONS.get("random-end", "float32")
    assert session.ends == 8
    tokens, logits = session.complete(prompt=TOKENS[:12] % 64, max_new_tokens=40)
    assert len(tokens) == len(logits) <= 40
    assert 8 not in tokens[:-1]


def test_the_context_ends_generation() -> None:
    session = SESSIONS.get("random-mistral", "float32")
    prompt = np.tile(TOKENS, 7)[:250]
    tokens, logits = session.generate(prompt=prompt, max_new_tokens=20, exact_prefill=True)
    assert (len(tokens), len(logits)) == (7, 7)


def test_what_is_not_implemented_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedByBackendError, match="weights as int4"):
        BACKEND.load(str(FIXTURES / "tiny-dense"), "int4")
    with pytest.raises(NotImplementedByBackendError, match="random-llama in transformers"):
        BACKEND.load(str(FIXTURES / "random-llama"))
    shutil.copy(FIXTURES / "random-mistral" / "config.json", tmp_path)
    with pytest.raises(NotImplementedByBackendError, match=tmp_path.name):
        BACKEND.load(str(tmp_path))


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_no_weight_is_random(change: str, tmp_path: Path) -> None:
    folder = FIXTURES / "random-mistral"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = {k: v.float().numpy() for k, v in load_file(folder / "model.safetensors").items()}
    name = "model.layers.1.mlp.up_proj.weight"
    given = tensors.pop(name)
    if change == "unexpected":
        tensors |= {name: given, "model.layers.1.mlp.up_proj.bias": given[0]}
    elif change == "mismatched":
        tensors[name] = given[:-1]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotImplementedByBackendError, match=r"up_proj|mismatch"):
        BACKEND.load(str(tmp_path))


@pytest.mark.parametrize("model", ["families/gemma2", "tiny-moe"])
def test_the_steps_that_it_shows(model: str) -> None:
    session = SESSIONS.get(model, "float32")
    theirs = REFERENCE.load(str(FIXTURES / model), "float32")
    for part in (TOKENS[:30], TOKENS[30:33]):
        steps, wanted = session.trace(part, "exact"), theirs.trace(part, "exact")
        assert {"embedding", "layer.0.residual", "final_norm", "logits"} <= set(steps)
        for name, step in steps.items():
            assert step.shape == wanted[name].shape, name
            np.testing.assert_allclose(step, wanted[name], atol=2e-4, err_msg=name)
        kept = {name for name in steps if name.endswith((".k", ".v"))}
        layers = json.loads((FIXTURES / model / "config.json").read_text())["num_hidden_layers"]
        assert len(kept) == 2 * layers if len(part) == 3 or model == "tiny-moe" else kept
