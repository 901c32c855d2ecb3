"""The fork: figures of a text, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reference.errors import QuantizationError, RequestError
from reference.measure.formats import Quantized, projections
from reference.measure.perplexity import perplexity
from reference.measure.quantization import BASE, joined, reduced, text_figures
from tests.reference.measure.formats import experiment, normal


def test_figures_of_a_text_are_those_of_perplexity() -> None:
    done = experiment(formats=("int4", "q8_0"))
    windows = list(done.run())
    told = text_figures([reduced(scores) for scores in windows])
    assert list(told) == [BASE, "int4", "q8_0"]
    for kind, figures in told.items():
        alone = perplexity([scores[kind] for scores in windows])
        assert figures["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-12)
        assert (figures["positions"], figures["repetitions"]) == (45, 3)
        assert figures["perplexity_low"] < figures["perplexity"] < figures["perplexity_high"]
    base, int4, q8 = told.values()
    assert (base["kl"], base["kl_high"], base["same_top"], base["ratio"]) == (0, 0, 1, 1)
    assert base["to_int4"] == pytest.approx(1 / int4["ratio"])
    assert 0 < q8["kl"] < q8["kl_high"] < int4["kl_low"]
    assert 0 < int4["same_top"] <= 1
    assert int4["ratio"] == pytest.approx(int4["perplexity"] / base["perplexity"])
    one = joined([reduced(scores) for scores in windows])["int4"]
    other = np.concatenate(
        [s["int4"].logits.argmax(1) == s[BASE].logits.argmax(1) for s in windows]
    )
    assert one.same.tolist() == other.tolist()


def test_without_int4_nothing_is_held_against_it() -> None:
    done = experiment(formats=("q8_0",))
    told = text_figures([reduced(next(iter(done.run())))])
    assert {figures["to_int4"] for figures in told.values()} == {None}


def test_what_cannot_be_run_is_refused() -> None:
    for changes, message in (
        ({"formats": ("int3",)}, "^formats: 'int3' is none of int4, int4-row-max"),
        ({"positions": 1000}, "^positions: 1000 are wanted, and the text has 90 in windows of 32"),
        ({"context": 3}, "^context: 3 is out of range"),
    ):
        with pytest.raises(RequestError, match=message):
            _ = replace(experiment(), **changes).evaluations
    with pytest.raises(RequestError, match=r"^model: .* is 48 wide, .* no multiple of 32"):
        Quantized.of({"w": normal(2, 48)}, ["w"], "q4_0")
    for kind in ("int4", "int4-row"):
        with pytest.raises(QuantizationError, match=r"^w: int4: "):
            Quantized.of({"w": normal(2, 32) * np.float32(1e9)}, ["w"], kind)
    with pytest.raises(RequestError, match="stores its experts as one tensor"):
        list(projections(experiment("families/gpt-oss").base))
