"""A model in chunks gives what it gives whole, in the goldens as they lie there (SPEC 10.2)."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from conformance.cases.families import CHUNKS, FAMILIES, RANDOM
from conformance.golden import Golden, read_all
from conformance.operations import Sessions
from conformance.paths import data_folder, model_folder
from conformance.rules import judge
from conformance.runner import attempt
from reference.model import load_model

NAMES = (*FAMILIES, *RANDOM)


@cache
def goldens() -> dict[str, Golden]:
    wanted = {f"model/forward/{n}{s}" for n in NAMES for s in ("", "_chunked", "_chunked_int4")}
    return {golden.id: golden for golden in read_all(data_folder("goldens"), wanted)}


@pytest.mark.parametrize("name", NAMES)
def test_chunks_give_the_rows_of_the_whole_prompt(name: str) -> None:
    """To the bit, though the two goldens were made apart; and the noise is that of these rows."""
    whole, chunked = (goldens()[f"model/forward/{name}{s}"] for s in ("", "_chunked"))
    last = chunked.parameters["last"]
    assert np.array_equal(whole.inputs["tokens"], chunked.inputs["tokens"])
    assert chunked.outputs["y"].tobytes() == whole.outputs["y"][-last:].tobytes()
    assert chunked.rules == ("bits", "gauge")
    assert chunked.gauges["noise"].shape == chunked.outputs["y"].shape
    int4 = goldens()[f"model/forward/{name}_chunked_int4"]
    alone = load_model(model_folder(int4.parameters["model"]), "int4")
    assert int4.outputs["y"].tobytes() == alone.forward(int4.inputs["tokens"])[-last:].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_decoding_reaches_past_every_window(name: str) -> None:
    folder = model_folder(goldens()[f"model/forward/{name}_chunked"].parameters["model"])
    window = json.loads((folder / "config.json").read_text()).get("sliding_window") or 0
    assert CHUNKS[0] > window
    assert sum(CHUNKS[1:]) > window
    assert CHUNKS.count(1) >= 5


class FirstPassOnly:
    """A session that answers zeros from its second pass on."""

    def __init__(self, model: str, weights: str) -> None:
        self.model = load_model(model, weights)  # type: ignore[arg-type]

    def reset(self) -> None:
        self.passes = 0

    def forward(self, tokens: object, attention: object) -> object:
        self.passes += 1
        return self.model.forward(tokens) * np.float32(self.passes == 1)  # type: ignore[arg-type]


class Backend:
    """A backend of such sessions."""

    numerics = {"accumulator": "float32"}  # noqa: RUF012

    def load(self, model: str, weights: str) -> FirstPassOnly:
        return FirstPassOnly(model, weights)


def test_zeros_after_the_first_pass_fail() -> None:
    backend = Backend()
    for suffix, rules in (("_chunked", ("bits", "gauge")), ("_chunked_int4", ("bits",)), ("", ())):
        golden = goldens()[f"model/forward/gemma2{suffix}"]
        for rule in rules:
            verdict, _ = attempt(backend, Sessions(backend), golden, rule, 2.0**-24)
            assert verdict.outcome == "fail"
        if not suffix:
            verdict, _ = attempt(backend, Sessions(backend), golden, "bits", 2.0**-24)
            assert verdict.outcome == "pass"
    chunked = goldens()["model/forward/gemma2_chunked"]
    assert judge("gauge", chunked, chunked.outputs, 2.0**-24).outcome == "pass"
