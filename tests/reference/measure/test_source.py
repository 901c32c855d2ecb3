"""Models of given sizes, slices of models, and turns."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from reference.errors import RequestError
from reference.measure import source
from reference.measure.source import Dimensions, Source, sliced
from reference.measure.turns import in_turns
from reference.weights import Arithmetic, Mode
from tests.reference.models import LLAMA_SMALL, small, tokens_of


def test_sizes_are_those_that_were_given() -> None:
    text = "layers=3,hidden=48,heads=6,kv=3,head_dim=12,ffn=40,vocab=77,context=90"
    config = Source(Dimensions.parse(text)).load().config
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads) == (3, 48, 6, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (12, 40, 77)
    assert config.max_positions == 90
    assert config.sparse is None
    sparse = Source(Dimensions.parse(f"{text},experts=5,chosen=3")).load().config.sparse
    assert sparse is not None
    assert (sparse.router.experts, sparse.router.top_k) == (5, 3)


def test_a_source_gives_the_same_model_again() -> None:
    text = "layers=1,hidden=32,heads=2,kv=1,head_dim=16,ffn=32,vocab=8"
    one, again = (Source(Dimensions.parse(text)) for _ in range(2))
    assert again.load().digest == one.load().digest
    assert one.name.startswith("random layers=1 hidden=32")
    assert Source(Path("fixtures/tiny-dense")).name == "tiny-dense"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depth=3", "'depth' is none of layers, hidden"),
        ("layers=x", "'layers=x' is no size, as layers=8"),
        ("layers", "'layers' is no size"),
        ("layers=-1", "is no size"),
    ],
)
def test_sizes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Dimensions.parse(text)


def test_sizes_beyond_the_memory_are_refused_before_a_weight_is_drawn() -> None:
    for text in (
        "hidden=9999999,vocab=9999999",
        "experts=500000,layers=2",
        "layers=10000,ffn=9999",
    ):
        huge = Source(Dimensions.parse(text))
        with pytest.raises(
            RequestError, match=r"^random: such weights, .* more than the \d+MiB of"
        ):
            huge.load()


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
@pytest.mark.parametrize("weights", ["float32", "int4"])
@pytest.mark.parametrize(
    "text",
    [
        "layers=2,hidden=512,heads=8,kv=4,ffn=1536,vocab=8192",
        "layers=2,hidden=256,ffn=512,vocab=2048,experts=12",
        "layers=1,hidden=512,vocab=9000",
    ],
)
def test_the_memory_that_is_asked_for_is_what_making_takes(
    text: str, weights: Mode, arithmetic: Arithmetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least memory in which a model is not refused, against the peak of making it."""
    made = Source(Dimensions.parse(text), weights, arithmetic)
    tracemalloc.start()
    made.load()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    def refused(memory: int) -> bool:
        monkeypatch.setattr(source, "physical_memory", lambda: memory)
        try:
            made._check_memory(made.model.config)  # type: ignore[union-attr]
        except RequestError:
            return True
        return False

    assert refused(int(0.97 * peak))
    assert not refused(int(1.7 * peak))


def test_a_slice_is_the_first_layers() -> None:
    whole = small(LLAMA_SMALL)
    part = sliced(whole, 1)
    assert part.config.layers == len(part.weights.layers) == len(part.config.windows) == 1
    assert part.weights.layers[0] is whole.weights.layers[0]
    assert np.isfinite(part.forward(tokens_of(5, 32))).all()
    for wrong in (0, whole.config.layers):
        with pytest.raises(RequestError, match=f"layers: {wrong} is no slice"):
            sliced(whole, wrong)


def test_each_arm_comes_first_in_its_turn() -> None:
    log: list[str] = []
    runs: list[int] = []

    def arm(name: str) -> str:
        log.append(name)
        return f"{name}{len(log)}"

    arms = [lambda: arm("a"), lambda: arm("b"), lambda: arm("c")]
    turns = in_turns(arms, 2, 1, lambda: runs.append(1))
    assert "".join(log) == "abc" + "bca" + "cab"
    assert turns == [["a6", "b4", "c5"], ["a8", "b9", "c7"]]
    assert len(runs) == 9
