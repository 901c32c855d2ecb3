"""That a wrong verification of drafts fails its goldens, whatever is wrong with it (SPEC 13.4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.backends.reference import ReferenceBackend
from conformance.golden import Golden, read_all, read_manifest
from reference import sampling, speculation
from reference.sampling import Ints, Law, Words, draw, philox
from reference.speculation import acceptance, residual, total, weight_of

FOLDER = Path(__file__).parents[3] / "goldens"
IDS = {name.removesuffix(".safetensors") for name in read_manifest(FOLDER)}
GOLDENS = list(read_all(FOLDER, {i for i in IDS if i.startswith("kernel/verify_draft/")}))


def failing() -> set[str]:
    return {golden.id.split("/")[-1] for golden in GOLDENS if not passes(golden)}


def passes(golden: Golden) -> bool:
    """What raises fails: a wrong acceptance may leave nothing to draw from."""
    arguments: dict[str, Any] = {**golden.inputs, **golden.parameters}
    try:
        found = ReferenceBackend().verify_draft(**arguments)
    except IndexError:
        return False
    return np.array_equal(found, golden.outputs["y"])


def test_the_reference_passes_and_every_length_occurs() -> None:
    assert failing() == set()
    accepted = {(len(g.inputs["draft"]), len(g.outputs["y"]) - 1) for g in GOLDENS}
    assert accepted >= {(0, 0), *((4, n) for n in range(5))}


def in_floats(dtype: Any) -> Callable[[Law, Law], Law]:
    """The residual of probabilities; the target where it comes out as nothing."""

    def wrong(target: Law, drafted: Law) -> Law:
        q = np.array([weight_of(drafted, token) for token in target.ids.tolist()], dtype)
        excess = np.maximum(target.weights / dtype(total(target)) - q / dtype(total(drafted)), 0)
        excess = excess.astype(dtype)
        if not excess.any():
            return target
        return Law(target.ids, np.rint(excess / excess.max() * 2.0**40).astype(np.int64))

    return wrong


def in_int64(target: Law, drafted: Law) -> Law:
    q = np.array([weight_of(drafted, token) for token in target.ids.tolist()], np.int64)
    excess = target.weights.astype(np.int64) * total(drafted) - q * total(target)
    return Law(target.ids, np.maximum(excess, 0))


def of_unequal_totals(target: Law, drafted: Law) -> Law:
    q = np.array([weight_of(drafted, token) for token in target.ids.tolist()], object)
    excess = np.maximum(target.weights.astype(object) - q, 0)
    return Law(target.ids, excess) if excess.any() else target


def of_the_likeliest(target: Law, drafted: Law, token: int) -> tuple[int, int]:
    return int(weight_of(target, token) == target.weights.max()), 1


def draw_of_stream_0(law: Law, seed: int, request: int, position: int, stream: int = 0) -> int:
    return draw(law, seed, request, position)


def draw_of_stream_3(law: Law, seed: int, request: int, position: int, stream: int = 0) -> int:
    return draw(law, seed, request, position, 3)


def words_of_one_position(seed: int, request: int, positions: Ints, stream: int = 0) -> Words:
    return philox(seed, request, np.full_like(positions, 23), stream)


FAULTS: dict[str, tuple[str, Any, str]] = {
    "residual_is_the_target": ("residual", lambda target, drafted: target, "plain_0"),
    "residual_of_unequal_totals": ("residual", of_unequal_totals, "top_k_0"),
    "residual_in_int64": ("residual", in_int64, "plain_0"),
    "residual_in_float32": ("residual", in_floats(np.float32), "cancelling_float32"),
    "residual_in_float64": ("residual", in_floats(np.float64), "cancelling_float64"),
    "residual_is_the_drafts": ("residual", lambda target, drafted: drafted, "cancelling_float32"),
    "acceptance_without_q": (
        "acceptance",
        lambda target, drafted, token: (weight_of(target, token), total(target)),
        "plain_0",
    ),
    "acceptance_upside_down": (
        "acceptance",
        lambda target, drafted, token: acceptance(target, drafted, token)[::-1],
        "not_kept",
    ),
    "acceptance_of_the_likeliest": ("acceptance", of_the_likeliest, "plain_3"),
    "acceptance_by_the_word_of_the_draft": ("ACCEPTANCE", 1, "plain_0"),
    "acceptance_by_the_word_of_a_plain_draw": ("ACCEPTANCE", 0, "plain_3"),
    "correction_by_the_word_of_the_test": ("RESIDUAL", 2, "plain_0"),
    "correction_by_the_word_of_a_plain_draw": ("draw", draw_of_stream_0, "plain_0"),
    "bonus_by_the_word_of_a_correction": ("draw", draw_of_stream_3, "plain_3"),
    "one_word_for_all": ("philox", words_of_one_position, "plain_0"),
    "penalty_without_the_draft": ("_with", lambda previous, tokens: previous, "greedy_again"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_fault_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong, caught_by = FAULTS[fault]
    assert hasattr(speculation, name)
    monkeypatch.setattr(speculation, name, wrong)
    assert caught_by in failing()


def test_ties_go_to_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(logits: Any, options: Any, previous: Any) -> Law:
        law = sampling.law_of(logits, options, previous)
        if len(law.ids) > 1:
            return law
        return Law(np.flatnonzero(logits == logits.max())[-1:], law.weights)

    monkeypatch.setattr(speculation, "law_of", last)
    assert "greedy_tie" in failing()


def test_exactness_of_the_parts() -> None:
    """A float64 residual is right but where laws nearly cancel, so those cases are needed."""
    target, drafted = Law(np.arange(3), np.array([3, 2, 1])), Law(np.arange(3), np.array([1, 1, 4]))
    assert residual(target, drafted).weights.tolist() == [12, 6, 0]
    wrong = in_floats(np.float64)(target, drafted).weights
    assert wrong.tolist() == [2**40, 2**39, 0]
