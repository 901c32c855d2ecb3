"""The goldens against a second reading of the specification that shares no code with the first,
but the forward passes of whole models (`tests.oracle.serving`).

The oracle gives their bits; and real arithmetic, without any rounding, gives values from which they
lie no farther than their `distance` says (SPEC 16.3). Both are on record in goldens/ORACLE.json,
which `python -m tests.oracle.goldens` writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.cases import recipes
from conformance.golden import Golden
from tests.oracle.goldens import RECORD, goldens, has_its_bits, margins, measure, real_values, text

GOLDENS = {golden.id: golden for golden in goldens()}
ON_RECORD: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())


@pytest.mark.parametrize("golden", GOLDENS.values(), ids=GOLDENS.keys())
def test_the_record_is_honest(
    golden: Golden, record_property: Callable[[str, object], None]
) -> None:
    found = measure(golden)
    assert found == ON_RECORD[golden.id]
    assert found["bits"] is True
    assert found["margin"] is None or found["margin"] <= 1
    record_property("margin", str(found["margin"]))


def test_the_record_is_complete_and_in_its_form() -> None:
    assert list(ON_RECORD) == sorted(GOLDENS)
    assert RECORD.read_text() == text(ON_RECORD)


def test_every_operation_is_on_record() -> None:
    """All but whole models alone, whose oracle is another library (tests/reference)."""
    made = {recipe.id.split("/")[1] for recipe in recipes()} - {"forward", "forced"}
    assert {name.split("/")[1] for name in ON_RECORD} == made
    judged = {golden.operation for golden in GOLDENS.values() if golden.distance is not None}
    bounded = {recipe.id.split("/")[1] for recipe in recipes() if recipe.gauge}
    bounded -= {"forward", "forced", "generate", "complete"}
    bounded -= {"turns", "serve", "speculate", "resume"}
    assert judged == bounded


def test_distances_are_not_vacuous() -> None:
    """Half of the goldens with a distance use more than a tenth of it, and some nearly all."""
    used = sorted(line["margin"] for line in ON_RECORD.values() if line["margin"])
    assert used[len(used) // 2] > 0.1
    assert used[-1] > 0.9


# That a golden with a fault would be found out.


def spoilt(golden: Golden, at: tuple[int, ...], name: str = "y") -> Golden:
    """One element is the next larger number of its type."""
    y = golden.outputs[name].copy()
    y[at] = np.nextafter(y[at], np.float32(np.inf)) if y.dtype.kind == "f" else y[at] + 1
    return replace(golden, outputs={**golden.outputs, name: y})


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("elementary/exp/all", (40,)),
        ("elementary/softmax/k33", (3, 32)),
        ("kernel/linear/k33_t5", (4, 32)),
        ("kernel/rms_norm/k33", (0, 0)),
        ("kernel/attention/decode_33", (0, 3, 31)),
        ("cache/paged_attention/pages_of_1", (1, 1, 31)),
        ("cache/store_kv/bfloat16_normal", (4, 1, 32)),
        ("cache/store_kv/int8_normal", (0, 0, 0)),
        ("cache/page_hashes/salt", (2, 31)),
        ("cache/paging/fork_and_write", (3, 2)),
        ("cache/prefix_reuse/least_recently_used", (6,)),
    ],
)
def test_one_step_is_seen(name: str, at: tuple[int, ...]) -> None:
    assert not has_its_bits(spoilt(GOLDENS[name], at))


@pytest.mark.parametrize(
    ("name", "output", "at"),
    [
        ("turns/same", "logits", (2, 3, 1023)),
        ("turns/same", "cache_n", (1,)),
        ("turns/same", "prompt_n", (0,)),
        ("speculate/prose", "tokens", (11,)),
        ("turns/window_qwen2", "cache_n", (3,)),
        ("speculate/prose", "accepted", (0,)),
        ("serve/four", "logits", (3, 0, 7)),
    ],
)
def test_one_step_of_a_model_is_seen(name: str, output: str, at: tuple[int, ...]) -> None:
    assert not has_its_bits(spoilt(GOLDENS[f"generation/{name}"], at, output))


def test_a_distance_too_small_is_seen() -> None:
    golden = GOLDENS["kernel/linear/heavy_tails"]
    values = real_values(golden.operation, dict(golden.inputs), {})
    distance: NDArray[np.float64] = np.asarray(golden.distance)
    assert margins(golden.outputs["y"], values, distance).max() <= 1
    assert margins(golden.outputs["y"], values, distance / 2).max() > 1
