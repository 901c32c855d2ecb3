"""Models of given sizes, slices of models, and turns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reference.errors import RequestError
from reference.measure.source import Dimensions, Source, sliced
from reference.measure.turns import in_turns
from tests.reference.test_model import LLAMA_SMALL, small, tokens_of


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
    source, again = (Source(Dimensions.parse(text)) for _ in range(2))
    assert again.load().digest == source.load().digest
    assert source.name.startswith("random layers=1 hidden=32")
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
    huge = Source(Dimensions.parse("hidden=9999999,vocab=9999999"))
    with pytest.raises(RequestError, match=r"^random: weights of \d+MiB do not fit in the \d+MiB"):
        huge.load()


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
