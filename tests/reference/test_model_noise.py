"""Logits of others, and of our own float32, are within the noise of the golden (SPEC 16.5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.golden import Golden, read
from conformance.paths import data_folder
from conformance.rules import bound, judge
from tests.oracle.arrays import Float32, assert_same
from tests.reference.models import TINY, tiny

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def golden(name: str) -> Golden:
    return read(data_folder("goldens") / "model" / "forward" / f"{name}.safetensors")


def their_logits(tokens: NDArray[np.int64], implementation: str) -> Float32:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.reference.test_model_transformers import feed_constants

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation=implementation
    ).eval()
    feed_constants(theirs, tiny())
    with torch.no_grad():
        logits: Float32 = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    return logits


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["short", "above_the_floor"])
def test_transformers_is_within_the_noise(
    name: str, implementation: str, record_property: Any
) -> None:
    case = golden(name)
    theirs = their_logits(case.inputs["tokens"], implementation)[-case.parameters["last"] :]
    verdict = judge("gauge", case, {"y": theirs}, 2.0**-24)
    record_property("margin", verdict.worst)
    assert verdict.outcome == "pass", verdict.message
    apart = np.abs(theirs.astype(np.float64) - case.outputs["y"])
    assert (apart <= bound(case, 2.0**-24)).all()
    assert verdict.worst is not None
    assert verdict.worst > 0, "plain float32 does not have the bits of the exact lane"


@pytest.mark.parametrize("name", ["short", "above_the_floor"])
@pytest.mark.parametrize("lane", ["plain", "fast"])
def test_own_float32_is_within_the_noise(name: str, lane: str, record_property: Any) -> None:
    case = golden(name)
    model = tiny("float32", "float32" if lane == "plain" else "exact")
    y = model.forward(case.inputs["tokens"], attention="fast")[-case.parameters["last"] :]
    verdict = judge("gauge", case, {"y": y}, 2.0**-24)
    record_property("margin", verdict.worst)
    assert verdict.outcome == "pass", verdict.message


def test_the_golden_logits_are_ours() -> None:
    case = golden("short")
    assert_same(tiny().forward(case.inputs["tokens"]), case.outputs["y"])
