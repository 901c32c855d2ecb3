"""What is drawn: all of an operation's domain, and nothing outside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.fuzzing.attention import EACH, WORK
from conformance.fuzzing.case import OPERATIONS, Case
from conformance.fuzzing.draw import Asked, Draw
from conformance.fuzzing.drawn import Drawn
from conformance.fuzzing.kernels import share
from conformance.operations import APPEND, FORK, FREE, TRUNCATE
from conformance.rules import ASK_BITS, BITS_FOR_ALL
from reference.experts import Router
from reference.experts import route as routed

BOUNDS = Asked(exact=False)


def drawn(operation: str, count: int, asked: Asked = BOUNDS) -> Iterator[Drawn]:
    """Draws, without what the reference answers."""
    for i in range(count):
        yield OPERATIONS[operation][1](Draw(f"{operation}/{i}", asked))


def test_attention_is_drawn_in_all_its_forms() -> None:
    seen = set()
    for case in drawn("attention", 300):
        q, k, about = case.inputs["q"], case.inputs["k"], case.parameters
        seen |= {("group", q.shape[1] // k.shape[1]), ("kv_heads", k.shape[1])}
        seen |= {("warm", len(k) > len(q) > 1), ("decode", len(q) == 1), ("blind", len(q) > len(k))}
        seen |= {(name, about[name] is None) for name in ("window", "softcap", "scale")}
        seen |= {("sinks", "sinks" in case.inputs), ("long", len(k) > 2048)}
        seen |= {("poison", bool(np.isnan(x).any())) for x in (q, k)}
        assert np.abs(np.nan_to_num(q, posinf=0, neginf=0)).max() <= 8
        assert q.shape[1] % k.shape[1] == 0
        assert case.bounded
        rows, heads, width = q.shape
        assert rows * len(k) * heads * (width + EACH) <= 2 * WORK or len(q) > len(k)
        if np.isnan(k[0]).all():  # what no row sees, and not a key more
            unseen = len(k) - rows - about["window"] + 1
            assert np.isnan(k).all(axis=(1, 2)).sum() == unseen > 0
            seen.add(("behind", True))
    for name in ("warm", "decode", "blind", "window", "softcap", "scale", "sinks", "long"):
        assert {(name, True), (name, False)} <= seen, name
    assert {("group", n) for n in (1, 2, 3, 4, 8)} | {("kv_heads", n) for n in (1, 2, 3)} <= seen
    assert {("poison", True), ("behind", True)} <= seen


def test_weight_only_layers_have_zero_points_or_none_and_every_group() -> None:
    seen = set()
    for case in drawn("linear_w4a16", 60):
        seen.add((case.parameters["group"], "zeros" in case.inputs))
    assert seen == {(group, zeros) for group in (0, 32, 64, 128) for zeros in (True, False)}


def test_long_sums_of_like_weights_are_drawn_where_a_bound_is_asked() -> None:
    """Their bound counts what is alike (SPEC 16.4)."""
    equal = 0
    for case in drawn("attention", 250):
        q, k = case.inputs["q"], case.inputs["k"]
        sound = np.isfinite(q).all(axis=(1, 2))
        if case.bounded and len(k) > 49 and sound.any():
            scores = np.nan_to_num(k[:, -1], posinf=0, neginf=0) @ q[sound][-1, -1]
            equal += len(set(scores.tolist())) < 0.5 * len(scores)
    assert equal > 20


def test_pages_hold_the_sequence_and_poison() -> None:
    sizes = set()
    for case in drawn("paged_attention", 80):
        pages, table = case.inputs["v_pages"], case.inputs["block_table"]
        length, size = case.parameters["length"], pages.shape[1]
        sizes.add(size)
        assert len(set(table.tolist())) == len(table) == -(-length // size)
        assert len(case.inputs["q"]) <= length
        held = np.zeros(pages.shape[:2], bool)
        held[table] = True
        held.reshape(-1)[table[-1] * size + (length - 1) % size + 1 : (table[-1] + 1) * size] = 0
        assert held.sum() == length
        assert (pages[~held] == np.inf).all()
        assert case.parameters["scale"] is not None
    assert sizes == {1, 2, 4, 8, 16, 32, 64, 128, 256}


def test_rope_is_whole_and_partial_in_both_pairings() -> None:
    seen = set()
    for case in drawn("rope", 100):
        x, turned = case.inputs["x"], 2 * len(case.inputs["inv_freq"])
        assert turned <= x.shape[2]
        assert case.inputs["positions"].max() < 2**24
        seen.add((turned < x.shape[2], case.parameters["interleaved"]))
    assert len(seen) == 4


def test_constants_are_of_every_kind() -> None:
    kinds = {case.parameters["parameters"]["rope_type"] for case in drawn("rope_constants", 100)}
    assert kinds == {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}


def test_a_share_of_a_head_is_what_turns() -> None:
    for head_dim in range(4, 400, 2):
        for turned in range(2, head_dim, 2):
            assert int(head_dim * share(turned, head_dim)) == turned


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_no_rounding_changes_a_choice_that_is_judged_by_bounds(dtype: Any) -> None:
    judged = 0
    for case in drawn("route", 150, Asked(False, dtype is np.float16)):
        if not case.bounded:
            continue
        judged += 1
        logits, about = case.inputs["logits"], dict(case.parameters)
        bias, top_k = case.inputs.get("selection_bias"), about.pop("top_k")
        router = Router(logits.shape[1], top_k, selection_bias=bias, **about)
        coarse = logits.astype(dtype).astype(np.float32)
        assert np.array_equal(routed(coarse, router).experts, routed(logits, router).experts)
    assert judged > 100


def test_experts_of_a_token_are_different_ones() -> None:
    kinds = set()
    for case in drawn("moe", 40):
        for row in case.inputs["experts"]:
            assert len(set(row.tolist())) == len(row)
        kinds |= {("shared_gate" in case.inputs, "shared_router" in case.inputs)}
    assert kinds == {(False, False), (True, False), (True, True)}


def test_scripts_of_pages_name_only_what_is_there() -> None:
    done = set()
    for case in drawn("paging", 60):
        lengths: dict[int, int] = {}
        for what, name, amount in case.inputs["script"].tolist():
            done.add(what)
            if what == APPEND:
                lengths[name] = lengths.get(name, 0) + amount
                continue
            assert name in lengths
            if what == FORK:
                assert amount not in lengths
                lengths[amount] = lengths[name]
            elif what == TRUNCATE:
                assert 0 <= amount <= lengths[name]
                lengths[name] = amount
            else:
                del lengths[name]
    assert done == {APPEND, FORK, TRUNCATE, FREE}


def test_drafts_have_a_law_that_could_give_them() -> None:
    shapes: Mapping[bool, list[int]] = {True: [], False: []}
    for case in drawn("verify_draft", 80):
        tokens, weights = case.inputs["draft"], case.inputs["draft_weights"]
        assert all(weights[i, token] > 0 for i, token in enumerate(tokens))
        shapes[bool(len(tokens) and (weights.sum(axis=1) == 1).all())].append(len(tokens))
    assert shapes[True]
    assert max(shapes[False]) > 3


@pytest.mark.parametrize("operation", ["sample", "verify_draft"])
def test_rows_of_logits_have_something_to_choose(operation: str) -> None:
    for case in drawn(operation, 100):
        logits = np.atleast_2d(case.inputs["logits"])
        assert np.isfinite(logits).any(axis=1).all()
        assert not np.isnan(logits).any()


def test_exact_backends_are_asked_for_what_is_not_finite() -> None:
    for operation in ("linear", "rms_norm", "softmax", "gated_mlp", "moe", "linear_q8_0"):
        cases = list(drawn(operation, 120, Asked()))
        broken = [
            case
            for case in cases
            if any(x.dtype.kind == "f" and np.isnan(x).any() for x in case.inputs.values())
        ]
        assert broken, operation
        assert not any(case.bounded for case in broken)
        assert any(case.bounded for case in cases)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in BITS_FOR_ALL])
def test_most_draws_can_be_judged_by_a_bound(operation: str) -> None:
    """Of a backend that rounds, which is asked for nothing else; 9 in 10 at least."""
    drawn = [Case(operation, 2, i).draw(BOUNDS).recipe for i in range(20)]
    assert sum(bool(set(recipe.rules) - set(ASK_BITS)) for recipe in drawn) >= 18
