"""The noise of a whole model: the exact engine, disturbed at random (SPEC 16.5)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backends.composed import OwnOrderBackend
from conformance.cases.model import prompt
from conformance.faults import applied, fault
from conformance.golden import read_all
from conformance.paths import data_folder, model_folder
from conformance.rules import judge, noise
from conformance.rules.noise import (
    RUNS,
    UNIT,
    choices_of,
    disturbing,
    moved,
    recording,
    root_mean_square,
    spread,
    spread_of_experts,
)
from reference.model import Model, load_model
from reference.weights import Experts

F32 = NDArray[np.float32]
TOKENS = prompt(12)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(model_folder("tiny-draft"))


def test_root_mean_squares() -> None:
    assert root_mean_square("dot(9)") == UNIT * math.sqrt(2)
    assert root_mean_square("dot(576)") == UNIT * math.sqrt(65)
    assert root_mean_square("ops(3)") == UNIT
    assert root_mean_square("ops(12)") == UNIT * 2


def test_a_product_sum_errs_no_more_than_its_root_mean_square() -> None:
    """SPEC 16.5 of dot(K), against random products summed in float32."""
    rng = np.random.default_rng(3)
    for terms in (8, 64, 512):
        x, w = (rng.standard_normal((400, terms)).astype(np.float32) for _ in "xw")
        total = np.zeros(400, np.float32)
        for k in range(terms):
            total = total + x[:, k] * w[:, k]
        exact = (x.astype(np.float64) * w).sum(axis=1)
        gauge = np.abs(x.astype(np.float64) * w).sum(axis=1)
        share = np.sqrt(np.mean(((total - exact) / gauge) ** 2)) / 2.0**-24
        assert share <= root_mean_square(f"dot({terms})") / UNIT


def test_recording_changes_nothing(model: Model) -> None:
    sizes: list[Any] = []
    recorded = replace(model, operations=moved(recording(sizes))).forward(TOKENS)
    assert recorded.tobytes() == model.forward(TOKENS).tobytes()
    steps_of_a_layer = 12
    assert len(sizes) >= model.config.layers * steps_of_a_layer - 2
    assert all(np.isfinite(size).all() and (size >= 0).all() for size in sizes)
    assert all((size > 0).any() for size in sizes)


def test_disturbing_moves_by_just_the_size() -> None:
    move = disturbing([np.full(1000, 0.25), np.full(1000, 0.5)], "name")
    y = np.zeros(1000, np.float32)
    first, second = (move(y, lambda: y) for _ in range(2))
    assert set(np.abs(first).tolist()) == {0.25}
    assert set(np.abs(second).tolist()) == {0.5}
    assert 400 < (first > 0).sum() < 600
    assert ((first > 0) != (second > 0)).any()
    again = disturbing([np.full(1000, 0.25)], "name")(y, lambda: y)
    assert again.tobytes() == first.tobytes()
    other = disturbing([np.full(1000, 0.25)], "another")(y, lambda: y)
    assert other.tobytes() != first.tobytes()


def test_the_spread_is_the_same_every_time_and_at_least_the_rows(model: Model) -> None:
    one = spread(model, "name", TOKENS, 5)
    assert one.shape == (5, model.config.vocab_size)
    assert one.dtype == np.float32
    assert one.tobytes() == spread(model, "name", TOKENS, 5).tobytes()
    least = one.min(axis=1)
    assert (least > 0).all()
    assert ((one == least[:, None]).mean(axis=1) > 0.3).all()  # its row's own root mean square


def test_the_spread_hardly_depends_on_the_draw(model: Model) -> None:
    one, two = (spread(model, name, TOKENS, 5) for name in ("name", "another"))
    ratio = one / two
    assert 0.8 < float(np.median(ratio)) < 1.25
    assert ratio.min() > 0.2
    assert ratio.max() < 5


def test_the_spread_is_linear_in_the_unit(model: Model) -> None:
    """So that a gauge measured at 2^-20 serves float32 and float16."""
    one = spread(model, "name", TOKENS, 5)
    two = spread(model, "name", TOKENS, 5, UNIT * 4)
    assert one.tobytes() != two.tobytes()
    assert float(np.median(np.abs(one / two - 1))) < 0.05


def test_routing_is_sure_up_to_the_least_sure_choice_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row's logits rest on the experts of all rows before it."""
    monkeypatch.setattr(noise, "RUNS", 4)
    model = load_model(model_folder("tiny-moe"))
    found, steady = spread_of_experts(model, "name", TOKENS)
    assert steady.shape == found.shape == (12, model.config.vocab_size)
    assert (steady == steady[:, :1]).all()
    assert (np.diff(steady[:, 0]) <= 0).all()
    assert 0 < steady[-1, 0] < steady[0, 0]


def test_what_is_added_for_the_choice_alone_is_part_of_how_sure_it_is() -> None:
    """A bias of 100 for the last experts leaves a gap of 99 and more to all others."""
    model = load_model(model_folder("tiny-moe"))
    layers = list(model.weights.layers)
    sparse = [i for i, layer in enumerate(layers) if isinstance(layer.mlp, Experts)]
    for i in sparse:
        mlp = layers[i].mlp
        assert isinstance(mlp, Experts)
        bias = np.zeros(mlp.router.experts, np.float32)
        bias[-mlp.router.top_k :] = 100
        router = replace(mlp.router, selection_bias=bias)
        layers[i] = replace(layers[i], mlp=replace(mlp, router=router))
    biased = replace(model, weights=replace(model.weights, layers=layers))
    run, _ = noise._runs(biased, "name", TOKENS)
    assert sorted(run.seen) == sparse
    for i in sparse:
        assert 99 <= noise._gaps(run, i).min() <= 101


def test_what_bfloat16_may_put_first_is_kept_with_what_it_is_below_by() -> None:
    """Tokens as far below the first as rounding at 2^-8 moves them against it, times seven."""
    logits = np.array([[1.0, 0.75, -9.0], [0.0, -8.0, 3.0]])
    change = np.array([[0.0, UNIT, 0.0], [UNIT, 0.0, 0.0]])
    found = choices_of(logits, [change] * RUNS)
    assert found.tokens.tolist() == [0, 2]
    assert (found.row.tolist(), found.token.tolist()) == ([], [])
    found = choices_of(logits, [change * 16] * RUNS)
    assert (found.row.tolist(), found.token.tolist()) == ([0], [1])
    assert (found.margin.tolist(), found.noise.tolist()) == ([0.25], [16.0])


def test_codes_that_flip_move_logits_by_what_hardly_depends_on_the_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a float model's noise is 64 times as much, theirs is a few times at most."""
    monkeypatch.setattr(noise, "RUNS", 16)
    rms: dict[str, list[float]] = {}
    for weights in ("float32", "int4"):
        model = load_model(model_folder("tiny-dense"), weights)
        for unit in (2.0**-20, 2.0**-14):
            found = spread(model, "name", prompt(24), 24, unit).astype(np.float64) * unit
            rms.setdefault(weights, []).append(float(np.sqrt((found**2).mean())))
    fine, coarse = rms["int4"]
    assert fine <= coarse <= 4 * fine
    fine, coarse = rms["float32"]
    assert 50 < coarse / fine < 80


def test_a_float32_engine_of_int4_weights_is_within_the_bound_of_codes() -> None:
    """One of its codes flips, and moves a logit by more than the noise of floats would allow."""
    golden = next(read_all(data_folder("goldens"), {"model/forward/short_int4"}))
    assert golden.terms == {"noise": "noise_of_codes(7)"}
    session = OwnOrderBackend().load(model=str(model_folder("tiny-dense")), weights="int4")
    session.reset()
    y = session.forward(golden.inputs["tokens"], "fast")
    verdict = judge("gauge", golden, {"y": y}, 2.0**-24)
    assert verdict.outcome == "pass"
    assert verdict.worst is not None
    assert 0.05 < verdict.worst < 0.8
    of_floats = replace(golden, terms={"noise": "noise(7)"})
    assert judge("gauge", of_floats, {"y": y}, 2.0**-24).outcome == "fail"


@pytest.mark.parametrize(
    "name",
    ["int4-nibbles-swapped", "rope-pairs-interleaved", "norm-weight-ignored",
     "model-residual-of-normed"],
)  # fmt: skip
def test_a_fault_of_a_model_of_int4_weights_is_beyond_it(name: str) -> None:
    golden = next(read_all(data_folder("goldens"), {"model/forward/short_int4"}))
    session = applied(fault(name), OwnOrderBackend).load(
        model=str(model_folder("tiny-dense")), weights="int4"
    )
    session.reset()
    y = session.forward(golden.inputs["tokens"], "fast")
    assert judge("gauge", golden, {"y": y}, 2.0**-24).outcome == "fail"


def test_the_bound_covers_float32_and_sees_small_faults() -> None:
    """The golden of the whole model against the float32 lane, and against engines with a fault."""
    golden = next(read_all(data_folder("goldens"), {"model/forward/short"}))
    tokens = golden.inputs["tokens"]

    def margin(y: F32) -> float:
        verdict = judge("gauge", golden, {"y": y}, 2.0**-24)
        assert verdict.worst is not None
        return verdict.worst

    plain = load_model(model_folder("tiny-dense"), "float32", "float32")
    assert 0.05 < margin(plain.forward(tokens)) < 0.6
    model = load_model(model_folder("tiny-dense"))
    assert margin(model.forward(tokens)) == 0

    def altered(**changes: Any) -> float:
        return margin(replace(model, config=replace(model.config, **changes)).forward(tokens))

    assert altered(rms_norm_eps=model.config.rms_norm_eps * 10) > 1
    assert altered(rope=replace(model.config.rope, theta=10001.0)) > 1
    assert altered(rope=replace(model.config.rope, interleaved=True)) > 100
    windows = (39, *model.config.windows[1:])
    assert altered(windows=windows) > 1
