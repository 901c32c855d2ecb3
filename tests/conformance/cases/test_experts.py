"""The cases of mixtures of experts, their gauges, and the torch backends (SPEC 9.2, 9.3, 16.5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backends.reference import ReferenceBackend
from conformance.cases.experts import recipes
from conformance.golden import Golden
from conformance.rules import Verdict, bounded, gauges, judge
from reference.arithmetic import matmul_float32
from reference.experts import Router, route
from reference.feedforward import ACTIVATIONS, ACTIVATIONS_FLOAT32
from tests.oracle import nasty
from tests.oracle.goldens import margins, real_values

Array = NDArray[Any]
U = 2.0**-24
MADE = {recipe.id: recipe.make() for recipe in recipes()}
BOUNDED = [name for name, golden in MADE.items() if "gauge" in golden.rules]
ROUTED = [name for name in BOUNDED if name.startswith("kernel/route/")]
REFERENCE = ReferenceBackend()


def arguments(golden: Golden) -> dict[str, Any]:
    return {**golden.parameters, **{name: array.copy() for name, array in golden.inputs.items()}}


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ours(golden: Golden, **changed: Any) -> Any:
    return getattr(REFERENCE, golden.operation)(**{**arguments(golden), **changed})


def routed(name: str, experts: Array, gates: Array, rule: str = "gauge") -> Verdict:
    return judge(rule, MADE[name], {"experts": experts, "gates": gates}, U)


# The router.


@pytest.mark.parametrize("name", ROUTED)
def test_no_rounding_changes_the_choice_of_a_bounded_case(name: str) -> None:
    """Neither the experts nor their order, at half precision and with room to spare."""
    golden = MADE[name]
    assert len(golden.inputs["logits"]) >= 5
    rng = np.random.default_rng(1)
    for _ in range(20):
        logits = golden.inputs["logits"]
        error = rng.uniform(-1, 1, logits.shape) * 2.0**-10 * (1 + np.abs(logits))
        experts, _ = ours(golden, logits=(logits + error).astype(np.float32))
        assert (experts == golden.outputs["experts"]).all()


@pytest.mark.parametrize("name", ROUTED)
def test_bounds_of_the_router(name: str) -> None:
    """Right gates pass and use some of the bound; the experts must be the very ones."""
    golden = MADE[name]
    experts, gates = golden.outputs["experts"], golden.outputs["gates"]
    assert routed(name, experts, gates).worst == 0
    off = gates * np.float32(1 + 2.0**-23)
    verdict = routed(name, experts, off)
    assert verdict.worst is not None
    assert 0.005 < verdict.worst < 1
    assert routed(name, experts, gates * np.float32(1 + 2.0**-14)).outcome == "fail"
    other = experts.copy()
    other[-1, -1] += 1
    assert routed(name, other, gates).outcome == "fail"
    assert "experts" in routed(name, other, gates).message
    if experts.shape[1] > 1:
        swapped = experts[:, [1, 0, *range(2, experts.shape[1])]]
        assert routed(name, swapped, gates).outcome == "fail"


FAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"renormalise": False},
    "qwen2_moe": {"renormalise": True},
    "qwen3_moe": {"score": "sigmoid"},
    "olmoe": {"score": "logits"},
    "gpt_oss": {"score": "softmax"},
    "deepseek_v2": {"scale": 1.0},
    "deepseek_v3": {"selection_bias": None},
}


@pytest.mark.parametrize(("family", "changed"), FAULTS.items())
def test_faults_of_routers(family: str, changed: dict[str, Any]) -> None:
    name = f"kernel/route/{family}"
    for rule in ("bits", "gauge"):
        experts, gates = ours(MADE[name], **changed)
        assert routed(name, experts, gates, rule).outcome == "fail"


def test_faults_of_groups() -> None:
    for changed in ({"group_best": 1}, {"groups": 1, "kept_groups": 1, "group_best": 1}):
        name = "kernel/route/deepseek_v3"
        assert routed(name, *ours(MADE[name], **changed)).outcome == "fail"
    # Dropped groups masked by zeros, while the scores of the kept ones are below zero.
    for best in (1, 2):
        golden = MADE[f"kernel/route/negative_groups_{best}"]
        scores = REFERENCE.sigmoid(golden.inputs["logits"])
        selection = scores + golden.inputs["selection_bias"]
        assert (selection < 0).all()
        kept = golden.outputs["experts"] // 4
        masked = np.zeros_like(selection)
        for row, groups in enumerate(kept):
            inside = np.isin(np.arange(16) // 4, groups)
            masked[row, inside] = selection[row, inside]
        chosen = np.argsort(-masked, axis=1, kind="stable")[:, :4]
        assert (np.sort(chosen) != np.sort(golden.outputs["experts"])).any(axis=1).all()


def test_a_tie_broken_by_the_highest_index_is_seen() -> None:
    for kind in ("softmax", "sigmoid", "logits"):
        for name in (f"kernel/route/ties_{kind}", f"kernel/route/all_equal_{kind}"):
            golden = MADE[name]
            logits = golden.inputs["logits"]
            experts, gates = ours(golden, logits=logits[:, ::-1].copy())
            last = logits.shape[1] - 1 - experts
            assert routed(name, last, gates, "bits").outcome == "fail"
            assert (np.take_along_axis(logits, last, 1) >= logits.min()).all()


def test_distance_of_the_router() -> None:
    found = []
    for about in (
        {"score": "softmax", "renormalise": True},
        {"score": "softmax", "scale": 3.0},
        {"score": "sigmoid", "renormalise": True, "epsilon": 1e-20, "scale": 2.5},
        {"score": "logits"},
    ):
        for seed, spread in ((1, 0.1), (2, 2.0), (3, 12.0)):
            logits = normal(seed, 8, 40) * np.float32(spread)
            parameters: dict[str, Any] = {"top_k": 6, **about}
            router = Router(40, **parameters)
            routing = route(logits, router)
            distance = gauges.route(logits, router, routing.experts, routing.gates).distance
            assert distance is not None
            values = real_values("route", {"logits": logits}, parameters)
            found.append(margins(routing.gates, values, distance).max())
    assert 0.1 < max(found) <= 1, max(found)


# The experts.


def experts_float32(a: dict[str, Any], order: Any, fma: bool, backwards: bool) -> Array:
    """Another engine: float32, any order within an expert, experts by index up or down."""

    def mlp(x: Array, gate: Array, up: Array, down: Array) -> Array:
        g, u = (matmul_float32(x, w, order, fma) for w in (gate, up))
        hidden = ACTIVATIONS_FLOAT32[a["activation"]](g) * u
        return matmul_float32(hidden, down, order, fma)

    total: Array = np.zeros_like(a["x"])
    ids = range(len(a["gate"]))
    for expert in reversed(ids) if backwards else ids:
        tokens, ranks = np.nonzero(a["experts"] == expert)
        y = mlp(a["x"][tokens], a["gate"][expert], a["up"][expert], a["down"][expert])
        total[tokens] += a["gates"][tokens, ranks, None] * y
    if "shared_gate" in a:
        y = mlp(a["x"], a["shared_gate"], a["shared_up"], a["shared_down"])
        if "shared_router" in a:
            logit = matmul_float32(a["x"], a["shared_router"], order, fma)
            y = y / (np.float32(1) + np.exp(-logit))
        total = y + total
    return total


@pytest.mark.parametrize("name", [name for name in BOUNDED if "/moe/" in name])
def test_bounds_of_the_experts(name: str) -> None:
    golden = MADE[name]
    worst = 0.0
    for order in ("blas", "sequential", "pairwise", "lanes8"):
        for fma in (False, True) if order != "blas" else (False,):
            for backwards in (False, True):
                y = experts_float32(arguments(golden), order, fma, backwards)
                verdict = judge("gauge", golden, {"y": y}, U)
                assert verdict.outcome == "pass", verdict.message
                worst = max(worst, verdict.worst or 0)
    assert 0.001 < worst < 1


def wrong(name: str, **changed: Any) -> bool:
    golden = MADE[f"kernel/moe/{name}"]
    return judge("gauge", golden, {"y": ours(golden, **changed)}, U).outcome == "fail"


def test_faults_of_the_experts() -> None:
    spread = arguments(MADE["kernel/moe/spread"])
    assert not wrong("spread")
    assert wrong("spread", gates=spread["gates"][:, ::-1].copy())
    assert wrong("spread", gate=spread["up"], up=spread["gate"])
    assert wrong("spread", activation="gelu_tanh")
    assert wrong("spread", experts=(spread["experts"] + 1) % 6)
    dropped = spread["gates"].copy()
    dropped[4, 1] = 0
    assert wrong("spread", gates=dropped), "one token of one expert dropped"
    nothing = {f"shared_{part}": None for part in ("gate", "up", "down")}
    assert wrong("shared", **nothing)
    assert wrong("shared_gated_6", shared_router=None)
    assert wrong("shared_gated_1", **nothing)
    gated = arguments(MADE["kernel/moe/shared_gated_6"])
    assert wrong("shared_gated_6", shared_router=-gated["shared_router"])


def test_sums_out_of_rank_order_are_seen_by_bits() -> None:
    golden = MADE["kernel/moe/rank_order"]
    given = arguments(golden)
    for order in (np.arange(5)[::-1], None):
        at = np.argsort(given["experts"], axis=1) if order is None else order[None].repeat(12, 0)
        changed = {n: np.take_along_axis(given[n], at, axis=1) for n in ("experts", "gates")}
        verdict = judge("bits", golden, {"y": ours(golden, **changed)}, U)
        assert verdict.outcome == "fail"


def test_distance_of_the_experts() -> None:
    found = []
    for seed, (width, inner) in enumerate(((1, 1), (5, 7), (33, 12))):
        for activation in ACTIVATIONS:
            shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
            w = {n: normal(seed, 4, *s) for n, s in shapes.items()}
            shared = {f"shared_{n}": normal(seed + 5, *s) for n, s in shapes.items()}
            x = nasty.row(np.random.default_rng(seed), "zero blocks", 3 * width).reshape(3, width)
            routing = route(normal(seed + 1, 3, 4), Router(4, 2))
            router = normal(seed + 2, 1, width)
            inputs: dict[str, Any] = {
                "x": x,
                "experts": routing.experts,
                "gates": routing.gates,
                **w,
            }
            inputs |= {**shared, "shared_router": router}
            gauge = gauges.moe(
                x,
                routing.experts,
                routing.gates,
                list(zip(*w.values(), strict=True)),
                ACTIVATIONS[activation],
                (shared["shared_gate"], shared["shared_up"], shared["shared_down"]),
                router,
            )
            assert gauge.distance is not None
            y = REFERENCE.moe(**inputs, activation=activation)
            values = real_values("moe", inputs, {"activation": activation})
            found.append(margins(y, values, gauge.distance).max())
    assert 0.01 < max(found) <= 1, max(found)


# Rules.


def test_integers_have_no_bound() -> None:
    golden = MADE["kernel/route/olmoe"]
    assert bounded(golden) == "gates"
    assert golden.distance is not None
    assert golden.distance.shape == golden.outputs["gates"].shape


# The torch backends.

OPTIONS: list[dict[str, Any]] = [
    {"top_k": 3, "score": "softmax"},
    {"top_k": 5, "score": "softmax", "renormalise": True, "scale": 1.8},
    {"top_k": 4, "score": "logits"},
    {"top_k": 12, "score": "sigmoid", "renormalise": True},
    {"top_k": 4, "score": "sigmoid", "groups": 4, "kept_groups": 2, "epsilon": 1e-20},
    {"top_k": 6, "score": "sigmoid", "groups": 3, "kept_groups": 2, "group_best": 2},
    {"top_k": 2, "score": "softmax", "groups": 6, "group_best": 2},
]


def same(a: Array, b: Array) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def test_torch_routes_alike() -> None:
    torch = pytest.importorskip("conformance.backends.torch")
    backend = torch.TorchBackend()
    rng = np.random.default_rng(3)
    for options in OPTIONS:
        ties = rng.integers(-2, 3, (40, 12)) * rng.choice([-0.0, 1.0, 50.0], (40, 1))
        logits = np.concatenate([nasty.matrix(rng, 60, 12), ties]).astype(np.float32)
        logits = nasty.with_specials(rng, logits, 0.3)
        bias = rng.integers(-2, 3, 12).astype(np.float32)
        for b in (None, bias, normal(4, 12)) if options["score"] != "logits" else (None,):
            asked = {"logits": logits, "selection_bias": b, **options}
            experts, gates = REFERENCE.route(**asked)
            theirs = backend.route(**asked)
            assert same(experts, theirs[0]), options
            assert same(gates, theirs[1]), options


def test_torch_adds_up_alike() -> None:
    torch = pytest.importorskip("conformance.backends.torch")
    backend = torch.TorchBackend()
    rng = np.random.default_rng(5)
    for tokens in (1, 12):
        x = nasty.with_specials(rng, nasty.matrix(rng, tokens, 40), 0.2)
        w = {"gate": normal(6, 5, 20, 40), "up": normal(7, 5, 20, 40), "down": normal(8, 5, 40, 20)}
        shared = {f"shared_{n}": a[0] for n, a in w.items()}
        routing = route(normal(9, tokens, 5), Router(5, 3))
        asked = {"x": x, "experts": routing.experts, "gates": routing.gates, **w}
        gated = {**shared, "shared_router": normal(10, 1, 40)}
        extras: list[dict[str, Any]] = [{}, shared, gated]
        for extra in extras:
            about = {**asked, **extra, "activation": "silu"}
            assert same(REFERENCE.moe(**about), backend.moe(**about))


@pytest.mark.parametrize("backend", ["numpy-float32", "torch-float32"])
def test_float32_passes_every_bounded_case(backend: str) -> None:
    if backend == "torch-float32":
        pytest.importorskip("torch")
    from conformance.backends import resolve

    plain = resolve(backend)
    for name in BOUNDED:
        golden = MADE[name]
        answer = getattr(plain, golden.operation)(**arguments(golden))
        values = answer if isinstance(answer, tuple) else (answer,)
        names = ("experts", "gates") if golden.operation == "route" else ("y",)
        verdict = judge("gauge", golden, dict(zip(names, values, strict=True)), U)
        assert verdict.outcome == "pass", (name, verdict.message)
