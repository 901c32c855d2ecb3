"""Values of models, counted from names and shapes: of every family, and by layer (SPEC 10.3)."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from conformance.paths import data_folder
from reference.config import ModelConfig
from reference.loading import load_folder
from reference.measure.ceiling import sizes
from reference.measure.placement import parts
from reference.measure.source import Dimensions

FAMILIES = sorted(p.parent.name for p in data_folder("fixtures").glob("families/*/config.json"))


def of(name: str) -> tuple[ModelConfig, int]:
    """A configuration, and how many values its file holds."""
    model = load_folder(data_folder("fixtures") / "families" / name)
    return model.config, sum(prod(tensor.shape) for tensor in model.tensors.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_value_of_a_file_is_counted_once(name: str) -> None:
    """Tied: the embedding is the head too, and counts once."""
    config, stored = of(name)
    n, layers = sizes(config), parts(config)
    outside = n.head if config.tied else 2 * n.head
    assert n.layers + n.experts * n.expert + n.vectors + outside == stored
    assert sum(part.dense for part in layers) == n.layers
    assert sum(part.expert for part in layers) == n.expert
    assert sum(part.vectors for part in layers) == n.vectors - config.hidden_size
    assert [part.window for part in layers] == list(config.windows)
    if config.sparse is not None:
        assert [part.expert > 0 for part in layers] == list(config.sparse.layers)


def test_experts_whose_number_divides_nothing() -> None:
    config = Dimensions(hidden=40, ffn=23, experts=7, layers=3).config
    assert [part.expert for part in parts(config)] == [3 * 40 * 23] * 3
    assert sizes(config).expert == 3 * 3 * 40 * 23
    assert sizes(replace(config, tied=True)) == sizes(config)
