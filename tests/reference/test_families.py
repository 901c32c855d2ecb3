"""Every family's miniature: the same bits however it is fed, and every switch of it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.generator import integers
from fixtures.make_families import make
from reference.cache import KVCache
from reference.config import ModelConfig
from reference.engine import Engine
from reference.errors import RequestError
from reference.experts import Routing
from reference.families import FAMILIES
from reference.model import Model, Part, load_model
from reference.weights import ExactInt4Linear, ExactLinear, Experts, GatedMLP
from tests.oracle.arrays import assert_same

ROOT = Path(__file__).parents[2] / "fixtures" / "families"
NAMES = sorted(path.name for path in ROOT.iterdir())
SPARSE = ["gpt-oss", "mellum", "mixtral", "olmoe", "qwen2-moe", "qwen3-moe"]
COUNT = 45


@cache
def model(name: str, **options: Any) -> Model:
    return load_model(ROOT / name, **options)


def tokens(count: int = COUNT) -> NDArray[np.int64]:
    return integers("families", 48, count)


@cache
def whole(name: str) -> NDArray[np.float32]:
    return model(name).forward(tokens())


def test_there_is_a_miniature_of_every_family_that_has_no_other() -> None:
    dense = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    assert {model(name).config.architecture for name in NAMES} == set(FAMILIES) - dense
    for path in ROOT.rglob("*"):
        assert path.stat().st_size < 100_000


@pytest.mark.parametrize("name", NAMES)
def test_making_a_miniature_again_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (ROOT / name / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [[1] * COUNT, [16, 7, 1, 1, 20], [44, 1]])
def test_decode_chunks_and_prefill_give_the_same_bits(name: str, sizes: list[int]) -> None:
    session, rows = model(name).new_cache(), []
    for piece in np.split(tokens(), np.cumsum(sizes)[:-1]):
        rows.append(model(name).forward(piece, session))
    assert_same(np.concatenate(rows), whole(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_gives_what_each_gives_alone(name: str) -> None:
    ours = model(name)
    pool = ours.new_pool(page_size=32)
    parts = [Part(tokens(n), KVCache(pool)) for n in (COUNT, 3, 30)]
    for part, found in zip(parts, ours.forward_batch(parts), strict=True):
        assert_same(found, whole(name)[: len(part.tokens)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_both_arithmetics_run_the_same_model(name: str, weights: str) -> None:
    """Near, where no near tie of experts stands between them: routing is a step function."""
    exact = model(name, weights=weights).forward(tokens())
    plain = model(name, weights=weights, arithmetic="float32").forward(tokens(), attention="fast")
    limit = 1e-4 if weights == "float32" else 0.5
    differences = np.abs(exact - plain).max(axis=1)
    assert np.median(differences) < limit


@pytest.mark.parametrize("name", NAMES)
def test_int4_quantizes_the_projections_of_experts_and_no_router(name: str) -> None:
    for layer in model(name, weights="int4").weights.layers:
        mlps = [layer.mlp]
        if isinstance(layer.mlp, Experts):
            assert isinstance(layer.mlp.logits, ExactLinear)
            assert layer.mlp.shared_gate is None or isinstance(layer.mlp.shared_gate, ExactLinear)
            mlps = [*layer.mlp.experts, *([layer.mlp.shared] if layer.mlp.shared else [])]
        for mlp in mlps:
            assert isinstance(mlp, GatedMLP)
            assert isinstance(mlp.gate_up, ExactInt4Linear)
            assert isinstance(mlp.down, ExactInt4Linear)


# -------------------------------------------------------------------------------- what tells


def config(**changes: Any) -> Callable[[Model], Model]:
    return lambda m: replace(m, config=replace(m.config, **changes))


def family(**changes: Any) -> Callable[[Model], Model]:
    def change(m: Model) -> Model:
        class Changed(ModelConfig):
            @property
            def family(self) -> Any:
                return replace(FAMILIES[self.architecture], **changes)

        return replace(m, config=Changed(**vars(m.config)))

    return change


def layers(**changes: Any) -> Callable[[Model], Model]:
    def change(m: Model) -> Model:
        changed = tuple(replace(layer, **changes) for layer in m.weights.layers)
        return replace(m, weights=replace(m.weights, layers=changed))

    return change


def norms(**changes: Any) -> Callable[[Model], Model]:
    def change(m: Model) -> Model:
        changed = tuple(
            replace(layer, norms=replace(layer.norms, **changes)) for layer in m.weights.layers
        )
        return replace(m, weights=replace(m.weights, layers=changed))

    return change


def experts(**changes: Any) -> Callable[[Model], Model]:
    def change(m: Model) -> Model:
        changed = tuple(
            replace(layer, mlp=replace(layer.mlp, **changes))
            if isinstance(layer.mlp, Experts)
            else layer
            for layer in m.weights.layers
        )
        return replace(m, weights=replace(m.weights, layers=changed))

    return change


def routers(**changes: Any) -> Callable[[Model], Model]:
    return lambda m: experts(router=replace(m.config.sparse.router, **changes))(m)  # type: ignore[union-attr]


SWITCHES: list[tuple[str, Callable[[Model], Model]]] = [
    ("mixtral", config(windows=(None,) * 3)),
    ("mixtral", routers(renormalise=False)),
    ("qwen2-moe", routers(renormalise=True)),
    ("qwen2-moe", experts(shared=None)),
    ("qwen3-moe", routers(renormalise=False)),
    ("olmoe", routers(top_k=1)),
    ("mellum", config(local_rope=None)),
    ("mellum", config(windows=(None,) * 4)),
    ("olmo2", norms(after_attention=None)),
    ("olmo2", norms(after_mlp=None)),
    ("olmo3", config(local_rope=None)),
    ("gemma2", config(attention_softcap=None)),
    ("gemma2", config(final_softcap=None)),
    ("gemma2", config(query_scalar=None)),
    ("gemma2", family(scaled_embedding=False)),
    ("gemma2", norms(after_mlp=None)),
    ("gemma3", config(local_rope=None)),
    ("gemma3", config(windows=(None,) * 3)),
    ("smollm3", config(rotates=None)),
    ("gpt-oss", layers(sinks=None)),
    ("gpt-oss", config(glu_limit=7.0)),
    ("gpt-oss", config(activation="silu")),
    ("gpt-oss", routers(score="softmax")),
]


@pytest.mark.parametrize(("name", "change"), SWITCHES)
def test_every_switch_tells(name: str, change: Callable[[Model], Model]) -> None:
    """Otherwise the goldens of these models and the comparison above would prove little."""
    assert np.abs(change(model(name)).forward(tokens()) - whole(name)).max() > 1e-3


def test_long_factors_tell_beyond_the_original_length() -> None:
    ours = model("phi3")
    rope = replace(ours.config.rope, long_factor=ours.config.rope.short_factor)
    found = config(rope=rope)(ours).forward(tokens())
    length = ours.config.rope.original_max_positions
    assert_same(found[:length], whole("phi3")[:length])
    assert np.abs(found[length:] - whole("phi3")[length:]).max() > 1e-3


# ---------------------------------------------------------------------------------- the trace


@pytest.mark.parametrize("name", SPARSE)
def test_routing_and_margins_are_shown_layer_by_layer(name: str) -> None:
    ours, seen = model(name), dict[int, Routing]()
    assert ours.config.sparse is not None
    assert_same(ours.forward(tokens(), routed=seen.__setitem__), whole(name))
    assert list(seen) == [i for i, sparse in enumerate(ours.config.sparse.layers) if sparse]
    for routing in seen.values():
        assert routing.experts.shape == (COUNT, ours.config.sparse.router.top_k)
        assert routing.margins.shape == (COUNT,)
        assert (routing.margins >= 0).all()
        assert len(np.unique(routing.experts)) > 1
    again: dict[int, Routing] = {}
    session = ours.new_cache()
    ours.forward(tokens()[:-1], session)
    ours.forward(tokens()[-1:], session, routed=again.__setitem__)
    for layer, routing in seen.items():
        assert np.array_equal(routing.experts[-1:], again[layer].experts)
        assert_same(routing.gates[-1:].copy(), again[layer].gates)


# ------------------------------------------------------------------------------ moved chunks


@pytest.mark.parametrize("name", ["gemma3", "mellum", "olmo3", "phi3", "smollm3"])
def test_keys_that_do_not_rotate_alike_are_not_moved(name: str) -> None:
    with pytest.raises(RequestError, match="cache_reuse: this model rotates keys by"):
        Engine(model(name), cache_reuse=4)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "mixtral"])
def test_keys_that_rotate_alike_are(name: str) -> None:
    Engine(model(name), cache_reuse=4)
