"""A trace names the first step that is wrong, and none where none is (SPEC 19.2)."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.backends import resolve, resolve_process, tracing
from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.backends.reference import ReferenceBackend
from conformance.diagnosis import divergence, explain, explanation
from conformance.diagnosis.explanation import UNTRACED
from conformance.faults import applied, fault
from conformance.golden import Golden, read_all
from conformance.operations import Sessions
from conformance.paths import data_folder, model_folder
from conformance.results import Answers
from conformance.runner import run
from conformance.selection import Selection
from reference.model import load_model
from tests.conformance.diagnosis.traced_session import traced

FOLDER = data_folder("goldens")
U = 2.0**-24


@cache
def golden(name: str) -> Golden:
    return next(iter(read_all(FOLDER, {name})))


def told(backend: Any, name: str = "model/forward/qwen2", u: float | None = None) -> str:
    return divergence.divergence(Sessions(backend), golden(name), "exact", u)


# What a trace holds.


@pytest.mark.parametrize("folder", ["tiny-dense", "random-qwen2", "families/qwen3-moe"])
def test_every_step_is_traced_in_order(folder: str) -> None:
    model = load_model(model_folder(f"fixtures/{folder}"))
    steps = tracing.trace(model, [3, 1, 4, 1, 5])
    config = model.config
    sparse = [config.sparse_of(i) is not None for i in range(config.layers)]
    expected = [
        name
        for name in tracing.step_names(config.layers)
        if not name.endswith("experts") or sparse[int(name.split(".")[1])]
    ]
    assert list(steps) == expected
    for name, array in steps.items():
        assert array.ndim == len(tracing.described(name)[1]), name
        assert len(array) == 5
    assert np.array_equal(steps["logits"], model.forward([3, 1, 4, 1, 5]))


@pytest.mark.parametrize("folder", sorted(p.name for p in model_folder("families").iterdir()))
def test_every_family_is_traced(folder: str) -> None:
    """A norm that a family lacks is no step; nothing else is left out."""
    model = load_model(model_folder(f"fixtures/families/{folder}"))
    steps = tracing.trace(model, [3, 1, 4, 1, 5])
    assert np.array_equal(steps["logits"], model.forward([3, 1, 4, 1, 5]))
    absent = set(tracing.step_names(model.config.layers)) - set(steps)
    for index, layer in enumerate(model.weights.layers):
        there = {
            "attention_norm": layer.norms.before_attention is not None,
            "mlp_norm": layer.norms.before_mlp is not None,
            "experts": model.config.sparse_of(index) is not None,
        }
        absent -= {f"layer.{index}.{step}" for step, known in there.items() if not known}
    assert absent == set()


def test_the_specification_lists_the_steps() -> None:
    text = (Path(__file__).parents[3] / "SPEC.md").read_text()
    table = text[text.index("| step | shape |") :].split("\n\n")[0]
    listed = re.findall(r"`(?:layer\.<i>\.)?(\w+)`", table)
    assert listed == ["embedding", *tracing.OF_LAYER, "final_norm", "logits"]


@pytest.mark.parametrize("folder", ["gemma2", "olmo2"])
def test_a_branch_is_traced_before_its_own_norm(folder: str) -> None:
    """`o` and `mlp` are what the projections give, also where a norm follows them."""
    model = load_model(model_folder(f"fixtures/families/{folder}"))
    steps = tracing.trace(model, [3, 1, 4])
    seen = steps["layer.1.attention"].reshape(3, -1)
    assert np.array_equal(model.weights.layers[1].output(seen), steps["layer.1.o"])
    scale = steps["layer.1.attention_residual"] - steps["layer.0.residual"]
    assert not np.allclose(scale, steps["layer.1.o"])


def test_chunks_of_a_trace_are_the_whole() -> None:
    model = load_model(model_folder("fixtures/random-mistral"))
    cache, tokens = model.new_cache(), [int(i) for i in range(9)]
    parts = [tracing.trace(model, part, cache) for part in (tokens[:4], tokens[4:5], tokens[5:])]
    whole, together = tracing.trace(model, tokens), tracing.joined(parts)
    assert list(whole) == list(together)
    for name in whole:
        assert np.array_equal(whole[name], together[name]), name


def test_a_name_that_is_no_step() -> None:
    for name in ("layer.1.nothing", "layer.q", "logit", "layer.x.q"):
        with pytest.raises(KeyError):
            tracing.described(name)


# Backends without a mistake.


@pytest.mark.parametrize("name", ["forward/qwen2", "forward/llama", "forward/chunked"])
def test_a_composed_model_has_the_steps_of_the_reference(name: str) -> None:
    """Two ways to the same steps: by the operations' results, and by the composed session's."""
    line = told(traced(None), f"model/{name}")
    layers = load_model(model_folder(golden(f"model/{name}").parameters["model"])).config.layers
    assert f"all {10 * layers + 3} steps that were traced are equal" in line


@pytest.mark.parametrize("name", ["forward/qwen2", "forward/mistral", "forward/llama"])
def test_torch_offers_a_trace(name: str) -> None:
    assert "steps that were traced are equal" in told(resolve("torch"), f"model/{name}")


FLOAT32: list[tuple[Any, str]] = [
    (base, name)
    for base in (OwnOrderBackend, "torch-float32", "numpy-float32")
    for name in ("forward/qwen2", "forward/llama")
] + [("numpy-float32", f"forward/{name}") for name in ("olmo3", "gemma2", "qwen3_moe", "gpt_oss")]


@pytest.mark.parametrize(("base", "name"), FLOAT32)
def test_float32_stays_within_the_bound_at_every_step(base: Any, name: str) -> None:
    backend = resolve(base) if isinstance(base, str) else traced(None, base)
    assert "traced are within the bound" in told(backend, f"model/{name}", U)


def test_angles_that_round_are_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation is a step that noise does not disturb; late positions turn farthest."""

    def turned(steps: dict[str, Any]) -> dict[str, Any]:
        q = steps["layer.0.q"]
        largest = np.abs(q).max(axis=-1, keepdims=True)
        far = 1.9 * U * np.arange(len(q))[:, None, None] * largest
        return {**steps, "layer.0.q": (q + far).astype(np.float32)}

    assert "traced are within the bound" in told(Answering(turned), u=U)
    monkeypatch.setattr(divergence, "_of_rope", lambda *about: 0.0)
    assert "first leaves its bound at layer 0, q after rope" in told(Answering(turned), u=U)


def test_a_rotation_may_err_by_its_roundings_and_its_angles() -> None:
    """Those of operands by what is declared, an angle's by float32's unit (SPEC 16.5)."""
    config = load_model(model_folder("fixtures/random-qwen2")).config
    wanted = np.array([[[3, -4]], [[1, 0]]], np.float32)
    for step in "qk":
        found = np.asarray(divergence._of_rope(f"layer.1.{step}", wanted, config, 2.0**-8))
        assert found.ravel().tolist() == [10 * 2.0**-8 * 4, 10 * 2.0**-8 + 2 * U]
    assert divergence._of_rope("layer.1.v", wanted, config, 2.0**-8) == 0


def test_what_is_not_disturbed_may_be_rounded_once() -> None:
    """An embedding has no noise; half a unit in the last place is what is left to it."""

    def off(share: float) -> Any:
        def embedding(steps: dict[str, Any]) -> dict[str, Any]:
            e = steps["embedding"]
            return {**steps, "embedding": np.where(e < 0, e * np.float32(1 + share), e)}

        return Answering(embedding)

    assert "traced are within the bound" in told(off(0.0), u=U)
    assert "first leaves its bound at the embedding" in told(off(2.0**-20), u=U)


def test_the_reference_rounds_to_float32_whatever_is_declared() -> None:
    """So that an engine of finer sums may differ from it as one of float32 may."""

    def off(steps: dict[str, Any]) -> dict[str, Any]:
        return {**steps, "layer.0.o": steps["layer.0.o"] * np.float32(1 + 2.0**-22)}

    line = told(Answering(off), u=2.0**-53)
    assert "traced are within the bound" in line
    assert line == told(Answering(off), u=U)


def test_an_element_may_stray_as_its_row_does() -> None:
    """No element's own noise is taken for less than its row's root mean square."""
    spread = divergence._spread("random-qwen2", "float32", _tokens())
    assert spread is not None
    noise = spread["logits"]
    assert ((noise == noise.min(axis=1, keepdims=True)).mean(axis=1) > 0.25).all()


def test_a_backend_without_a_trace() -> None:
    assert told(ComposedBackend()) == ""


# Backends with one.

FIRST = {
    "model-embedding-scaled": "the embedding, position 0",
    "norm-epsilon-1e-5": "layer 0, the norm before attention, position 0",
    "rope-pairs-interleaved": "layer 0, q after rope, position 1",
    "model-rotary-halved-per-layer": "layer 1, q after rope, position 0, head 0, element 4",
    "model-cache-half": "layer 0, attention, position 0",
    "model-residual-cut-to-bfloat16": "layer 0, the residual after attention, position 0",
    "model-residual-of-normed": "layer 0, the residual after attention, position 0",
    "model-residual-doubled": "layer 0, the residual after attention, position 0",
    "model-final-norm-skipped": "the final norm, position 0",
}
"""What each of these mistakes touches first."""


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("exact", [True, False])
def test_the_first_wrong_step_of_a_fault(name: str, exact: bool) -> None:
    base, u = (ComposedBackend, None) if exact else (OwnOrderBackend, U)
    line = told(traced(fault(name), base), "model/forward/qwen2", u)
    how = "differs" if exact else "leaves its bound"
    assert line.startswith(f"trace: first {how} at {FIRST[name]}"), line


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("model-positions-restart", "layer 0, q after rope, position 16"),
        ("model-decode-position-ahead", "layer 0, q after rope, position 16"),
        ("model-hole-in-cache", "layer 0, attention, position 16"),
    ],
)
def test_a_mistake_of_decoding_begins_where_decoding_does(name: str, first: str) -> None:
    line = told(traced(fault(name)), "model/forward/chunked")
    assert line.startswith(f"trace: first differs at {first}"), line
    assert told(traced(fault(name)), "model/forward/short").count("are equal") == 1


def test_a_generation_is_followed_with_the_right_tokens() -> None:
    """20 tokens of prompt; the first that is decoded is at position 20."""
    line = told(traced(fault("model-positions-restart")), "generation/generate/short")
    assert "first differs at layer 0, q after rope, position 20, " in line
    assert "positions 20 to 42 of 43" in line


class OneLayerLater(ReferenceBackend):
    """A model with a mistake in one step of one layer, at one position of one head."""

    def load(self, model: str, weights: Any) -> Any:
        session = super().load(model, weights)
        right = session.trace

        def wrong(tokens: Any, attention: Any) -> dict[str, Any]:
            steps = right(tokens, attention)
            steps["layer.1.k"] = steps["layer.1.k"].copy()
            steps["layer.1.k"][17, 1, 5] += np.float32(0.25)
            return {**steps, "logits": steps["logits"] + 1}

        session.trace = wrong  # type: ignore[method-assign]
        return session


def test_layer_head_position_and_element_are_named() -> None:
    line = told(OneLayerLater())
    assert line.startswith(
        "trace: first differs at layer 1, k after rope, position 17, key-value head 1, element 5: "
    )
    wanted = divergence._reference("random-qwen2", "float32", _tokens())["layer.1.k"][17, 1, 5]
    raw = int(wanted.view(np.uint32))
    assert f"{wanted.item()!r} (0x{raw:08x}) expected" in line
    assert "; 1 of " in line
    assert "the 13 traced before are equal" in line


def _tokens() -> tuple[int, ...]:
    return tuple(golden("model/forward/qwen2").inputs["tokens"].tolist())


# What a trace may be.


class Answering(ReferenceBackend):
    """The reference, whose trace goes through a function."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def load(self, model: str, weights: Any) -> Any:
        session = super().load(model, weights)
        right = session.trace
        changed = lambda tokens, attention: self.change(right(tokens, attention))  # noqa: E731
        session.trace = changed  # type: ignore[method-assign]
        return session


def test_some_steps_are_enough_and_the_others_are_named() -> None:
    def some(steps: dict[str, Any]) -> dict[str, Any]:
        mlp = steps["layer.0.mlp"] * np.float32(2)
        return {"layer.0.mlp": mlp, "embedding": steps["embedding"], "logits": steps["logits"]}

    line = told(Answering(some))
    assert "first differs at layer 0, the feed-forward layer, position 0" in line
    assert "not traced: layer.0.o, layer.0.attention_residual, layer.0.mlp_norm and 5 more" in line


def test_few_steps_that_are_not_traced_are_all_named() -> None:
    def some(steps: dict[str, Any]) -> dict[str, Any]:
        return {n: x for n, x in steps.items() if n not in ("layer.0.q", "layer.1.v")}

    assert told(Answering(some)).endswith("; not traced: layer.0.q, layer.1.v")


def test_nan_is_outside_of_every_bound() -> None:
    def broken(steps: dict[str, Any]) -> dict[str, Any]:
        steps["layer.0.v"] = np.full_like(steps["layer.0.v"], np.nan)
        return steps

    assert "first leaves its bound at layer 0, v, position 0" in told(Answering(broken), u=U)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: {"layer.7.q": steps["logits"]}, "'layer.7.q' is no step of this model"),
        (lambda steps: {"logits": steps["logits"][:3]}, "logits: expected float32 .*, got"),
        (lambda steps: {"logits": steps["logits"].astype(float)}, "got float64"),
        (lambda steps: None, "trace must return arrays by name, not NoneType"),
        (lambda steps: {}, "trace must return arrays by name"),
    ],
)
def test_a_trace_that_is_none(change: Any, message: str) -> None:
    with pytest.raises(divergence.TraceError, match=message):
        told(Answering(change))


def test_without_a_bound_the_largest_jump_is_named() -> None:
    """int4: an activation that rounds to another code is no small change, so no noise is known."""

    def off(steps: dict[str, Any]) -> dict[str, Any]:
        order = list(steps)
        for name in order[order.index("layer.1.attention") :]:
            steps[name] = steps[name] * np.float32(1.01)
        return steps

    line = told(Answering(off), "model/forward/short_int4", U)
    assert line.startswith("trace: the relative error grows most at layer 1, attention: from 6e-08")
    same = told(ReferenceBackend(), "model/forward/short_int4", U)
    assert same == "trace: no step's relative error exceeds 2^-24"


def test_another_expert_is_named_and_may_be_a_near_tie() -> None:
    def other(steps: dict[str, Any]) -> dict[str, Any]:
        steps["layer.1.experts"] = steps["layer.1.experts"][:, ::-1]
        return steps

    line = told(Answering(other), "model/forward/mixtral", U)
    assert "leaves its bound at layer 1, the router's choice, position 0, rank 0: " in line
    assert "; rounding may decide a near tie either way; " in line
    assert "near tie" not in told(Answering(other), "model/forward/mixtral")


# In a run.


def _explained(backend: Any, pattern: str) -> Any:
    answers: Answers = {}
    results = list(run(backend, FOLDER, Selection(patterns=(pattern,)), answers))
    return explain(results, answers, FOLDER, backend.numerics, backend)


def test_a_failed_case_is_explained_by_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.diagnosis.explanation.suspects", lambda operation: [])
    wrong = traced(fault("model-final-norm-skipped"))
    found = _explained(wrong, "model/forward/qwen2:bits")["model/forward/qwen2:bits"]
    assert found.trace.startswith("trace: first differs at the final norm, position 0")
    assert found.trace in found.lines()


def test_a_backend_without_a_trace_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.diagnosis.explanation.suspects", lambda operation: [])
    wrong = applied(fault("model-final-norm-skipped"), ComposedBackend)
    found = _explained(wrong, "model/forward/qwen2:bits")["model/forward/qwen2:bits"]
    assert found.trace == UNTRACED


def test_a_backend_without_models_has_nothing_to_trace() -> None:
    class NoModels:
        pass

    line = explanation._trace(Sessions(NoModels()), golden("model/forward/qwen2"), "bits", None)
    assert line == ""


def test_a_trace_that_raises_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.diagnosis.explanation.suspects", lambda operation: [])

    class Raising(ReferenceBackend):
        def load(self, model: str, weights: Any) -> Any:
            session = super().load(model, weights)
            right = session.forward
            session.forward = lambda tokens, attention: right(tokens, attention) + 1  # type: ignore[method-assign]

            def trace(tokens: Any, attention: Any) -> Any:
                raise SystemExit("no\ntrace")

            session.trace = trace  # type: ignore[method-assign]
            return session

    found = _explained(Raising(), "model/forward/qwen2:bits")
    line = found["model/forward/qwen2:bits"].trace
    assert line == "trace: cannot be compared: SystemExit: no trace"


def test_a_program_may_offer_a_trace() -> None:
    program = Path(__file__).parents[1] / "programs" / "answering.py"
    backend = resolve_process(shlex.join([sys.executable, str(program)]))
    try:
        assert "steps that were traced are equal" in told(backend)
    finally:
        backend.close()
