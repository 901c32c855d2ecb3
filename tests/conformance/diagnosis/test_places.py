"""Where an answer is wrong, said by the names of its axes (SPEC 19.1)."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.diagnosis import places, wrong_part
from conformance.golden import Golden, read_all
from conformance.paths import data_folder

GOLDENS = {g.id: g for g in read_all(data_folder("goldens"))}
U = 2.0**-24


def test_every_result_of_every_golden_has_axes() -> None:
    for golden in GOLDENS.values():
        for name, array in golden.outputs.items():
            axes = places.AXES[golden.operation][name]
            assert len(axes) == array.ndim, (golden.id, name)
            assert places.axes_of(golden.operation, name, array) == axes


def test_an_operation_that_is_not_listed_has_numbered_axes() -> None:
    assert places.axes_of("new", "y", np.zeros((2, 3))) == ("axis 0", "axis 1")
    assert places.axes_of("linear", "y", np.zeros(3)) == ("axis 0",)


@pytest.mark.parametrize(
    ("found", "of", "said"),
    [
        ([0, 1, 2], 3, "all rows"),
        ([0], 1, "the one row"),
        ([7], 12, "row 7 of 12"),
        ([3, 4, 5], 12, "rows 3 to 5 of 12"),
        ([4, 5], 12, "rows 4 to 5 of 12"),
        ([1, 3, 5, 7], 8, "every 2nd row from 1 to 7 of 8"),
        ([0, 3, 6], 8, "every 3rd row from 0 to 6 of 8"),
        ([0, 11, 22], 40, "every 11th row from 0 to 22 of 40"),
        ([0, 21, 42], 80, "every 21st row from 0 to 42 of 80"),
        ([2, 9], 12, "rows 2, 9 of 12"),
        ([0, 1, 2, 4, 5, 6, 8, 9], 12, "rows 0, 1, 2, 4, 5, 6, 8, 9 of 12"),
        ([0, 99, 198], 300, "every 99th row from 0 to 198 of 300"),
        ([0, 101, 202], 300, "every 101st row from 0 to 202 of 300"),
        ([0, 112, 224], 300, "every 112th row from 0 to 224 of 300"),
        ([0, 1, 2, 4, 5, 6, 8, 9, 11], 12, "9 of 12 rows from 0 to 11"),
    ],
)
def test_indices_along_an_axis(found: list[int], of: int, said: str) -> None:
    wrong = np.zeros(of, bool)
    wrong[found] = True
    assert places.spread(wrong, ("row",)) == said


def test_several_axes_are_said_one_by_one() -> None:
    wrong = np.zeros((5, 4, 8), bool)
    wrong[3:, 2, 4:] = True
    said = places.spread(wrong, ("row", "head", "element"))
    assert said == "rows 3 to 4 of 5, head 2 of 4, elements 4 to 7 of 8"
    assert places.at((3, 2, 4), ("row", "head", "element")) == "row 3, head 2, element 4"


def test_several_bytes_and_passes_have_their_plural() -> None:
    assert places.spread(np.ones(2, bool), ("byte",)) == "all bytes"
    assert places.spread(np.ones(2, bool), ("pass",)) == "all passes"


def changed(golden: Golden, name: str, *index: int) -> str:
    outputs = {n: a.copy() for n, a in golden.outputs.items()}
    kind = outputs[name].dtype
    outputs[name][index] = outputs[name][index] + kind.type(1)
    return wrong_part(golden, outputs, U, bits=True)


def test_attention_is_said_by_position_block_and_key_value_head() -> None:
    golden = next(
        g
        for g in GOLDENS.values()
        if g.operation == "attention"
        and g.inputs["q"].shape[1] > g.inputs["k"].shape[1]
        and len(g.inputs["k"]) - len(g.inputs["q"]) > 32
    )
    q, k = golden.inputs["q"], golden.inputs["k"]
    head, position = q.shape[1] - 1, len(k) - len(q)
    said = changed(golden, "y", 0, head, 3)
    assert f"first at row 0, head {head}, element 3 (position {position} of {len(k)}, " in said
    assert f"block {position // 32}, key-value head {k.shape[1] - 1})" in said
    assert "worst at" not in said
    assert said.startswith("wrong in y: ")
    assert f"(1 of {golden.outputs['y'].size:,} values)" in said


def test_a_row_before_the_first_position_has_no_block() -> None:
    golden = GOLDENS["kernel/attention/blind_rows"]
    assert len(golden.inputs["q"]) > len(golden.inputs["k"])
    said = changed(golden, "y", 0, 0, 0)
    assert f"(before the first of {len(golden.inputs['k'])} positions, key-value head 0)" in said
    assert "block 0" in changed(golden, "y", len(golden.inputs["q"]) - 1, 0, 0)


def test_paged_attention_is_said_by_page() -> None:
    golden = next(
        g
        for g in GOLDENS.values()
        if g.operation == "paged_attention" and len(g.inputs["block_table"]) > 1
    )
    size, rows = golden.inputs["k_pages"].shape[1], len(golden.inputs["q"])
    position = golden.parameters["length"] - 1
    said = changed(golden, "y", rows - 1, 0, 0)
    page = int(golden.inputs["block_table"][position // size])
    assert f"position {position}, entry {position // size} of the table, page {page}, " in said


def test_rope_and_models_are_said_by_position() -> None:
    rope = next(g for g in GOLDENS.values() if g.operation == "rope" and len(g.inputs["x"]) > 2)
    assert f"(position {int(rope.inputs['positions'][2])})" in changed(rope, "y", 2, 0, 0)
    model = GOLDENS["model/forward/above_the_floor"]
    assert "first at row 5, token 7 (position 501)" in changed(model, "y", 5, 7)


def test_the_worst_is_said_beside_the_first() -> None:
    golden = GOLDENS["kernel/rms_norm/k33"]
    outputs = {"y": golden.outputs["y"].copy()}
    outputs["y"][0, 3] += np.float32(1)
    outputs["y"][1, 4] += np.float32(100)
    said = wrong_part(golden, outputs, U, bits=False)
    assert said.endswith("; first at row 0, element 3; worst at row 1, element 4")


def test_an_element_of_a_vector_is_said() -> None:
    golden = GOLDENS["elementary/exp/all"]
    at = int(np.flatnonzero(golden.outputs["y"] == 1)[0])
    size = golden.outputs["y"].size
    said = f"wrong in y: element {at} of {size} (1 of {size:,} values); first at element {at}"
    assert changed(golden, "y", at) == said


def test_packed_codes_are_said_by_weight() -> None:
    golden = next(g for g in GOLDENS.values() if g.operation == "quantize_int4")
    assert "weights 0 and 1" in changed(golden, "packed", 0, 0)


def test_what_is_wrong_in_bits_may_be_right_within_the_bound() -> None:
    golden = GOLDENS["kernel/rms_norm/k33"]
    outputs = {"y": np.nextafter(golden.outputs["y"], np.float32(np.inf))}
    size = golden.outputs["y"].size
    assert f"({size} of {size} values)" in wrong_part(golden, outputs, U, bits=True)
    assert wrong_part(golden, outputs, U, bits=False) == ""
    assert wrong_part(golden, {"y": np.zeros(1, np.float32)}, U, bits=True) == ""


def test_every_element_of_every_golden_can_be_said() -> None:
    for golden in GOLDENS.values():
        for name, array in golden.outputs.items():
            if array.size:
                last = places.index_of(array.size - 1, array)
                places.remarks(golden, name, last)
