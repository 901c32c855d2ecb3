"""The rule `either`, and the forms that contraction gives (SPEC 16.9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backends.composed import ComposedBackend, OwnOrderBackend
from conformance.backends.reference import ReferenceBackend
from conformance.calibration.trials import exact_rules, judged
from conformance.cases.contraction import Gelu
from conformance.errors import GoldenError
from conformance.faults import applied, fault
from conformance.fuzzing.case import Case
from conformance.fuzzing.draw import Asked
from conformance.golden import Golden, read, read_all
from conformance.paths import data_folder
from conformance.rules import asked, bounded_rules, judge
from conformance.runner import run
from conformance.selection import Selection
from conformance.variants import contracted
from reference import rotary
from tests.oracle.numbers import add, fma, multiply

Array = NDArray[Any]
U = 2.0**-24
ROPE = ("half", "interleaved", "partial_half", "partial_interleaved", "factor", "not_finite")
GOLDENS = {
    golden.id: golden
    for golden in read_all(data_folder("goldens"))
    if "either" in golden.rules or golden.operation in ("rope", "moe", "gated_mlp")
}
WITH_FORMS = [golden for golden in GOLDENS.values() if "either" in golden.rules]


def ids(golden: Golden) -> str:
    return golden.id


def same(got: Any, wanted: float) -> bool:
    """To the bit, the sign of zero included."""
    return np.float32(got).tobytes() == np.float32(wanted).tobytes()


# The forms, by an fma of fractions.


def lines(kept: str) -> Callable[[float, float, float, float], float]:
    """a b + c d, one product unrounded."""
    return {
        "cos": lambda a, b, c, d: fma(a, b, multiply(c, d)),
        "sin": lambda a, b, c, d: fma(c, d, multiply(a, b)),
        "none": lambda a, b, c, d: add(multiply(a, b), multiply(c, d)),
    }[kept]


@pytest.mark.parametrize("name", ["half", "interleaved", "partial_interleaved", "not_finite"])
def test_forms_of_rope(name: str) -> None:
    golden = GOLDENS[f"kernel/rope/{name}"]
    x, positions, inv_freq = (golden.inputs[n] for n in ("x", "positions", "inv_freq"))
    angle = positions.astype(np.float32)[:, None] * inv_freq
    cos, sin = rotary.turn(angle, np.float32(golden.parameters["factor"]))
    half = len(inv_freq)
    interleaved = golden.parameters["interleaved"]
    assert len(golden.forms) == 8
    for form, outputs in golden.forms.items():
        upper, lower = map(lines, form.split("-"))
        for token, head in ((1, 0), (2, 1), (8, 2)):
            for i in range(0, half, 3):
                j, k = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                a, b = (float(x[token, head, at]) for at in (j, k))
                c, s = float(cos[token, i]), float(sin[token, i])
                got = outputs["y"][token, head]
                assert same(got[j], upper(a, c, -b, s))
                assert same(got[k], lower(b, c, a, s))


def test_the_form_of_gelu() -> None:
    golden = GOLDENS["elementary/gelu_tanh/all"]
    cubic, root = np.array([0x3D372713, 0x3F4C422A], np.uint32).view(np.float32).tolist()
    x, y = golden.inputs["x"], golden.forms["cubic"]["y"]
    for at in range(0, len(x), 7):
        v = float(x[at])
        inner = fma(cubic, multiply(multiply(v, v), v), v)
        u = np.array([multiply(root, inner)], np.float32)
        turned = add(1.0, float(ReferenceBackend.tanh(u)[0]))
        assert same(y[at], multiply(multiply(0.5, v), turned)), at


@pytest.mark.parametrize("name", ["decode_k3", "shared", "shared_gated_1"])
def test_forms_of_experts(name: str) -> None:
    golden = GOLDENS[f"kernel/moe/{name}"]
    a, backend = golden.inputs, ReferenceBackend()

    def layer(gate: Array, up: Array, down: Array) -> list[float]:
        made: list[float] = backend.gated_mlp(a["x"][:1], gate, up, down, "silu")[0].tolist()
        return made

    chosen = a["experts"][0].tolist()
    parts = [layer(*(a[w][e] for w in ("gate", "up", "down"))) for e in chosen]
    weights = [float(g) for g in a["gates"][0]]
    gated = "shared_router" in a
    assert set(golden.forms) == ({"routed", "shared", "both"} if gated else {"routed"})
    for form, outputs in golden.forms.items():
        for column, got in enumerate(outputs["y"][0]):
            acc = 0.0
            for g, y in zip(weights, parts, strict=True):
                v = y[column]
                acc = fma(g, v, acc) if form != "shared" else add(acc, multiply(g, v))
            if "shared_gate" in a:
                beside = layer(*(a[f"shared_{w}"] for w in ("gate", "up", "down")))[column]
                if not gated:
                    acc = add(acc, beside)
                else:
                    logit = backend.linear(a["x"][:1], a["shared_router"])
                    weight = float(backend.sigmoid(logit)[0, 0])
                    fused = form in ("shared", "both")
                    acc = fma(weight, beside, acc) if fused else add(acc, multiply(weight, beside))
            assert same(got, acc), (form, column)


@pytest.mark.parametrize(("shared", "sums"), [("plain", 1), ("gated", 3)])
def test_experts_of_a_contracted_gelu(shared: str, sums: int) -> None:
    sizes = "experts=4 top_k=3 width=40 rows=18 inner=9 x=normal gates=normal"
    drawn = Case.read(f"moe/1/1 {sizes} shared={shared} activation=gelu_tanh")
    numerics = {"accumulator": "exact", "fma": True}
    golden = drawn.draw(Asked.of(numerics)).golden(numerics)
    names = ["routed", "shared", "both"][:sums]
    assert set(golden.forms) == {*names, "cubic", *(f"cubic-{name}" for name in names)}
    a, layers = golden.inputs, Gelu()

    def layer(row: int, *weights: Array) -> list[float]:
        gate, up, down = weights
        y = layers.gated_mlp(a["x"][row, None], gate, up, down, "gelu_tanh")
        made: list[float] = y[0].tolist()
        return made

    for row in (0, 17):
        acc = [0.0] * 40
        for g, e in zip(a["gates"][row], a["experts"][row], strict=True):
            y = layer(row, *(a[w][e] for w in ("gate", "up", "down")))
            acc = [fma(float(g), v, total) for v, total in zip(y, acc, strict=True)]
        beside = layer(row, *(a[f"shared_{w}"] for w in ("gate", "up", "down")))
        if shared == "gated":
            logit = layers.linear(a["x"][row, None], a["shared_router"])
            weight = float(layers.sigmoid(logit)[0, 0])
            wanted = [fma(weight, v, total) for v, total in zip(beside, acc, strict=True)]
        else:
            wanted = [add(total, v) for v, total in zip(beside, acc, strict=True)]
        form = "cubic-both" if shared == "gated" else "cubic-routed"
        assert all(map(same, golden.forms[form]["y"][row], wanted))


@pytest.mark.parametrize("golden", WITH_FORMS, ids=ids)
def test_no_form_is_another(golden: Golden) -> None:
    """Nor the unfused one: what a golden cannot tell apart it does not ask for."""
    found = [golden.outputs["y"], *(outputs["y"] for outputs in golden.forms.values())]
    assert len({y.tobytes() for y in found}) == 1 + len(golden.forms) > 1


def test_which_goldens_have_forms() -> None:
    assert {golden.operation for golden in WITH_FORMS} == {"rope", "gelu_tanh", "gated_mlp", "moe"}
    assert {f"kernel/rope/{name}" for name in ROPE} <= {golden.id for golden in WITH_FORMS}


# The rule.


@pytest.mark.parametrize("golden", WITH_FORMS, ids=ids)
def test_every_form_passes_and_is_named(golden: Golden) -> None:
    for form, outputs in {"unfused": golden.outputs, **golden.forms}.items():
        verdict = judge("either", golden, outputs, U)
        assert (verdict.outcome, verdict.worst) == ("pass", 0.0)
        assert verdict.message == f"equals the form {form!r} in all bits"
        assert judge("bits", golden, outputs, U).outcome == (
            "pass" if form == "unfused" else "fail"
        )


def test_a_mixture_of_forms_fails() -> None:
    golden = GOLDENS["kernel/rope/half"]
    one, other = golden.forms["cos-cos"]["y"], golden.forms["sin-sin"]["y"]
    y = np.where(np.arange(len(one))[:, None, None] < 7, one, other)
    verdict = judge("either", golden, {"y": y}, U)
    assert verdict.outcome == "fail"
    assert verdict.worst is not None
    assert 0 < verdict.worst < 0.5
    assert verdict.message.startswith("none of 9 forms; nearest is '")


def test_one_bit_is_seen_and_the_nearest_form_named() -> None:
    golden = GOLDENS["kernel/rope/factor"]
    y = golden.forms["none-sin"]["y"].copy()
    y[3, 1, 9] = np.nextafter(y[3, 1, 9], np.float32(9))
    verdict = judge("either", golden, {"y": y}, U)
    assert verdict.outcome == "fail"
    assert "nearest is 'none-sin': y: 1 of " in verdict.message
    assert "[3, 1, 9]" in verdict.message


def test_the_wrong_shape_fails_and_a_golden_without_forms_is_unusable() -> None:
    golden = GOLDENS["kernel/rope/half"]
    assert judge("either", golden, {"y": golden.outputs["y"][:3]}, U).outcome == "fail"
    with pytest.raises(GoldenError, match="no other form"):
        judge("either", replace(golden, forms={}), golden.outputs, U)


def test_forms_survive_the_file(tmp_path: Path) -> None:
    golden = GOLDENS["kernel/moe/shared_gated_6"]
    path = tmp_path / "one.safetensors"
    path.write_bytes(golden.to_bytes())
    again = read(path)
    assert list(again.forms) == sorted(golden.forms)
    assert again.to_bytes() == golden.to_bytes()


# Who is asked for what.


def test_a_contracted_exact_backend_is_asked_for_either_in_place_of_bits() -> None:
    golden = GOLDENS["kernel/rope/half"]
    exact = {"accumulator": "exact", "fma": True}
    assert asked(golden, exact) == ("gauge", "either")
    for numerics in ({"accumulator": "exact"}, {"accumulator": "float32", "fma": True}):
        assert asked(golden, numerics) == ("bits", "gauge")
        assert asked(golden, numerics, "bounds") == ("gauge",)
    alone = replace(golden, rules=("bits", "gauge"))
    assert asked(alone, exact) == ("bits", "gauge")


def test_a_run_of_a_contracted_backend() -> None:
    folder, chosen = data_folder("goldens"), Selection((), ("kernel/rope/half*",))
    declared = list(run(contracted.RopeSine(), folder, chosen))
    assert {r.rule: r.outcome for r in declared} == {"gauge": "pass", "either": "pass"}

    class Silent(contracted.RopeSine):
        numerics = ComposedBackend.numerics

    silent = {r.rule: r for r in run(Silent(), folder, chosen)}
    outcomes = {rule: result.outcome for rule, result in silent.items()}
    assert outcomes == {"bits": "fail", "gauge": "pass"}
    told = {r.rule: r.message for r in declared}
    assert told["either"] == "equals the form 'sin-sin' in all bits"


def test_a_backend_of_another_order_fails_it_as_it_fails_bits() -> None:
    """And is not held to it."""
    golden = GOLDENS["kernel/moe/k_is_e"]
    trial = judged(OwnOrderBackend(), [golden], lambda g: ["either"])
    assert trial.failed
    assert "either" not in bounded_rules(golden)


@pytest.mark.parametrize(
    "variant", [contracted.RopeCosine, contracted.RopeSine, contracted.Throughout]
)
def test_contracted_variants_pass_either_and_fail_bits(variant: type[Any]) -> None:
    backend = variant()
    trial = judged(backend, GOLDENS.values(), partial(asked, numerics=backend.numerics))
    assert not trial.failed
    strict = judged(backend, GOLDENS.values(), lambda g: ["bits"])
    assert len(strict.failed) >= len(ROPE)


@pytest.mark.parametrize(
    "name", ["rope-fma-sign-lost", "rope-fma-of-the-turned-pair", "rope-fma-not-in-the-remainder"]
)
def test_faults_of_a_contracted_backend_are_caught_by_either(name: str) -> None:
    rope = [golden for golden in GOLDENS.values() if golden.operation == "rope"]
    backend = applied(fault(name), ComposedBackend)
    assert backend.numerics["fma"] is True
    trial = judged(backend, rope, partial(exact_rules, fma=True))
    assert trial.failed
    assert all(case.endswith(":either") for case in trial.failed)
