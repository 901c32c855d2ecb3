"""Mixture of experts: the router, and the experts with their routing given (SPEC 9.2, 9.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conformance.cases.contraction import moe_forms
from conformance.cases.recipe import BOTH, Recipe, array32
from conformance.generator import integers, normal
from conformance.golden import Array
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32
from reference.elementary import log
from reference.experts import Ints, Router, route
from reference.feedforward import ACTIVATIONS

FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral": (8, {"top_k": 2, "score": "softmax", "renormalise": True}),
    "qwen2_moe": (60, {"top_k": 4, "score": "softmax"}),
    "qwen3_moe": (128, {"top_k": 8, "score": "softmax", "renormalise": True}),
    "olmoe": (64, {"top_k": 8, "score": "softmax"}),
    "gpt_oss": (32, {"top_k": 4, "score": "logits"}),
    "deepseek_v2": (
        160,
        {"top_k": 6, "score": "softmax", "groups": 8, "kept_groups": 3, "scale": 16.0},
    ),
    "deepseek_v3": (
        64,
        {
            "top_k": 8,
            "score": "sigmoid",
            "groups": 8,
            "kept_groups": 4,
            "group_best": 2,
            "renormalise": True,
            "epsilon": 1e-20,
            "scale": 2.5,
        },
    ),
}
"""Experts and parameters as the families have them; the biases are the cases' own."""

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"score": "softmax", "renormalise": True},
    "sigmoid": {"score": "sigmoid", "renormalise": True, "epsilon": 1e-20, "scale": 2.5},
    "logits": {"score": "logits"},
}


def _router(arguments: Mapping[str, Any]) -> Router:
    options = {name: value for name, value in arguments.items() if name != "logits"}
    return Router(arguments["logits"].shape[1], **options)


def _route_gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    router = _router(arguments)
    return gauges.route(arguments["logits"], router, outputs["experts"], outputs["gates"])


def _route(
    name: str,
    parameters: Mapping[str, Any],
    logits: F32,
    bias: F32 | None = None,
    rules: tuple[str, ...] = ("bits",),
    note: str = "",
) -> Recipe:
    inputs = {"logits": logits} | ({} if bias is None else {"selection_bias": bias})
    gauge = _route_gauge if "gauge" in rules else None
    return Recipe(f"kernel/route/{name}", "9.2", parameters, inputs, rules, gauge, note)


def spaced(name: str, rows: int, experts: int) -> F32:
    """The numbers 0 to experts - 1 in another order in each row: (rows, experts) float32."""
    return np.argsort(normal(name, rows, experts), axis=1, kind="stable").astype(np.float32)


def _wide(logits: F32, parameters: Mapping[str, Any], bias: F32 | None, count: int) -> F32:
    """The first `count` rows whose choice no rounding can change: margins far above 2^-8."""
    router = Router(logits.shape[1], selection_bias=bias, **parameters)
    margins = route(logits, router).margins
    return logits[margins > np.median(margins) / 2][:count]


def _families() -> Iterator[Recipe]:
    """Each family's router on scores evenly spaced, so that another rounding chooses alike."""
    for family, (experts, parameters) in FAMILIES.items():
        name = f"kernel/route/{family}/logits"
        steps, bias = spaced(name, 64, experts), None
        if parameters["score"] == "sigmoid":
            # Scores plus bias are evenly spaced from 0.2 to 0.8; the logits follow.
            bias = normal(f"kernel/route/{family}/selection_bias", experts) * array32([0.03])
            score: F32 = array32([0.2]) + steps * array32([0.6 / experts]) - bias
            logits = log(score / (1 - score))
        else:
            logits = (steps - array32([experts / 2])) * array32([16 / experts])
        yield _route(family, parameters, _wide(logits, parameters, bias, 6), bias, BOTH)


def _choices() -> Iterator[Recipe]:
    """What decides between equal and nearly equal experts, and between groups."""
    for kind, options in KINDS.items():
        name = f"kernel/route/ties_{kind}"
        few = integers(name, 3, 8, 12).astype(np.float32)
        few[few == 0] *= np.where(np.arange((few == 0).sum()) % 2, -1, 1)
        yield _route(f"ties_{kind}", {"top_k": 5, **options}, few, note="three values, both zeros")
        equal = np.repeat(array32([[0], [-0.0], [1.5], [-90], [80]]), 9, axis=1)
        yield _route(f"all_equal_{kind}", {"top_k": 4, **options}, equal)
        one_ulp = np.repeat(array32([[0.5], [3.0]]), 6, axis=1)
        one_ulp[:, [2, 5]] = np.nextafter(one_ulp[:, [2, 5]], np.float32(9))
        yield _route(f"one_ulp_{kind}", {"top_k": 3, **options}, one_ulp)
        every = normal(f"kernel/route/k_is_e_{kind}", 5, 7)
        yield _route(f"k_is_e_{kind}", {"top_k": 7, **options}, every)
        yield _route(f"one_of_one_{kind}", {"top_k": 1, **options}, every[:, :1].copy())
        yield _route(f"one_of_seven_{kind}", {"top_k": 1, **options}, every)
    groups = {"groups": 4, "kept_groups": 2}
    sigmoid = {"top_k": 4, **KINDS["sigmoid"], **groups}
    x = normal("kernel/route/groups/logits", 8, 16)
    negative = array32([-1.5]) + normal("kernel/route/groups/selection_bias", 16) * array32([0.1])
    for best in (1, 2):
        about = {**sigmoid, "group_best": best}
        note = "every score of the kept groups is below zero"
        yield _route(f"negative_groups_{best}", about, x, negative, note=note)
        few = integers(f"kernel/route/tied_groups_{best}", 2, 8, 16).astype(np.float32)
        yield _route(f"tied_groups_{best}", about, few, np.zeros(16, np.float32))
    # The best expert is in a group that the sum of two drops.
    lone = array32([[3, -9, -9, -9, 1, 1, 0, 0, 2, 0.5, 0, 0, -1, -1, -1, -1]])
    for best in (1, 2):
        yield _route(f"lone_expert_{best}", {**sigmoid, "group_best": best}, lone, negative * 0)
    about = {"top_k": 3, "score": "softmax", **groups, "scale": 16.0}
    yield _route("groups_softmax", about, x)
    bias = np.zeros(8, np.float32)
    bias[[1, 6]] = array32([4, -4])
    about = {"top_k": 3, "score": "sigmoid", "renormalise": True}
    note = "the bias chooses and does not weigh"
    yield _route("selection_bias", about, x[:, :8].copy(), bias, note=note)
    # What is forbidden lies in groups whose other scores are below zero too.
    barred = x.copy()
    barred[:, [0, 1, 2, 5, 9, 10, 11]] = -np.inf
    about = {**sigmoid, "group_best": 1}
    note = "a forbidden expert is no best of a group of negative scores"
    yield _route("forbidden_in_groups", about, barred, negative, note=note)
    steps = spaced("kernel/route/large_logits/logits", 64, 8) * array32([4]) + array32([160])
    about = {"top_k": 3, "score": "softmax", "scale": 2.827}
    note = "exponentials of them overflow; a scale that is no short number"
    yield _route("large_logits", about, _wide(steps, about, None, 6), rules=BOTH, note=note)
    about = {"top_k": 2, "score": "softmax", "renormalise": True}
    note = "more tokens than a tile"
    yield _route("tokens_70", about, normal("kernel/route/tokens_70/logits", 70, 8), note=note)
    steps = spaced("kernel/route/small_scores/logits", 64, 8) - array32([16])
    for k in (1, 4):
        about = {"top_k": k, "score": "sigmoid", "renormalise": True, "epsilon": 1e-20}
        note = "scores of 10^-4 and less, renormalised: no other epsilon is as small"
        rows = _wide(steps, about, None, 6)
        yield _route(f"small_scores_{k}", about, rows, rules=BOTH, note=note)
    # One score for all, and biases that are one in bfloat16.
    near = array32([5]) + spaced("kernel/route/near_biases", 1, 8)[0] * array32([2**-12])
    about = {"top_k": 3, "score": "sigmoid", "renormalise": True}
    yield _route("near_biases", about, np.zeros((1, 8), np.float32), near)


def _special() -> Iterator[Recipe]:
    """NaN, infinities, and scores that vanish."""
    inf, nan = np.inf, np.nan
    for kind, options in KINDS.items():
        x = normal(f"kernel/route/not_finite_{kind}", 9, 6)
        x[0, 3], x[1, 5], x[2], x[3] = nan, inf, -inf, nan
        x[4, [0, 2]], x[5, :5], x[6, 1:] = -inf, -inf, -inf
        x[7, 0], x[7, 1] = inf, nan
        yield _route(f"not_finite_{kind}", {"top_k": 3, **options}, x, note="NaN, +inf and -inf")
        far = array32([[-inf, -200, 0, -300, -inf, -250], [-inf, -3e38, 3e38, 1, 0, -1]])
        yield _route(f"vanishing_{kind}", {"top_k": 4, **options}, far, note="-inf comes last")
    low = np.full((2, 6), -120, np.float32)
    low[1, 4] = -1
    about = {"top_k": 2, "score": "sigmoid", "renormalise": True}
    yield _route("zero_over_zero", about, low, note="no score and no epsilon: NaN gates")
    yield _route("zero_over_epsilon", {**about, "epsilon": 1e-20}, low)
    forbidden, bias = low.copy(), array32([9, 8, 7, 6, 5, 4])
    forbidden[:, :3] = -inf
    about = {**about, "top_k": 4, "epsilon": 1e-20}
    yield _route("bias_of_the_forbidden", about, forbidden, bias)


def _moe_gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    del outputs  # the gauge needs what each expert makes, not the sum
    a = arguments
    shared = (a["shared_gate"], a["shared_up"], a["shared_down"]) if "shared_up" in a else None
    return gauges.moe(
        a["x"],
        a["experts"],
        a["gates"],
        list(zip(a["gate"], a["up"], a["down"], strict=True)),
        ACTIVATIONS[a["activation"]],
        shared,
        a.get("shared_router"),
    )


COUNT, WIDTH, INNER = 6, 33, 20
"""Experts, K and I of the dispatch cases."""


def _weights(name: str) -> dict[str, F32]:
    shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    quarter = np.float32(0.25)
    return {part: normal(f"{name}/{part}", COUNT, *s) * quarter for part, s in shapes.items()}


def _shared(name: str, inner: int) -> dict[str, F32]:
    shapes = {"gate": (inner, WIDTH), "up": (inner, WIDTH), "down": (WIDTH, inner)}
    quarter = np.float32(0.25)
    return {f"shared_{p}": normal(f"{name}/shared_{p}", *s) * quarter for p, s in shapes.items()}


def _moe(
    name: str,
    experts: Ints,
    changed: Mapping[str, Array] | None = None,
    rules: tuple[str, ...] = (*BOTH, "either"),
    note: str = "",
    activation: str = "silu",
) -> Recipe:
    at = f"kernel/moe/{name}"
    inputs: dict[str, Array] = {
        "x": normal(f"{at}/x", len(experts), WIDTH),
        "experts": experts,
        "gates": np.abs(normal(f"{at}/gates", *experts.shape)),
        **_weights(at),
        **(changed or {}),
    }
    gauge = _moe_gauge if "gauge" in rules else None
    forms = moe_forms if "either" in rules else None
    parameters = {"activation": activation}
    return Recipe(at, "9.3", parameters, inputs, rules, gauge, note, forms=forms)


def _drawn(name: str, tokens: int, k: int) -> Ints:
    """Different experts for each token, (tokens, k) int64."""
    return spaced(f"kernel/moe/{name}/experts", tokens, COUNT)[:, :k].astype(np.int64)


def _dispatch() -> Iterator[Recipe]:
    """Tokens spread, few or all with one expert, shared experts, and what is not finite."""
    yield _moe("spread", _drawn("spread", 9, 2))
    yield _moe("gelu_tanh", _drawn("gelu_tanh", 9, 2), activation="gelu_tanh")
    for k in (1, 3, COUNT):
        rules = BOTH if k == 1 else (*BOTH, "either")  # one expert is no sum
        yield _moe(f"decode_k{k}", _drawn(f"decode_k{k}", 1, k), rules=rules)
    yield _moe("k_is_e", _drawn("k_is_e", 5, COUNT))
    yield from _beyond_a_tile()
    few = np.array([[0, 3], [3, 0], [0, 3], [0, 3], [3, 4]])
    weights = _weights("kernel/moe/no_tokens")
    for w in weights.values():
        w[[1, 2, 5]] = np.nan
    note = "experts without tokens are NaN; one has one token"
    yield _moe("no_tokens", few, weights, note=note)
    yield _moe("all_to_one", np.full((12, 1), 2), rules=BOTH, note="12 tokens, all with expert 2")
    for name, inner in (("shared", INNER), ("shared_wide", 45)):
        yield _moe(name, _drawn(name, 6, 2), _shared(f"kernel/moe/{name}", inner))
    for tokens in (1, 6):
        name = f"shared_gated_{tokens}"
        router = normal(f"kernel/moe/{name}/shared_router", 1, WIDTH) * np.float32(0.25)
        shared = _shared(f"kernel/moe/{name}", 25)
        yield _moe(name, _drawn(name, tokens, 3), {**shared, "shared_router": router})
    # Sums that depend on their order: gates of other sizes and signs in each row.
    order = _drawn("rank_order", 12, 5)
    scales = np.ldexp(np.float32(1), integers("kernel/moe/rank_order/scales", 24, 12, 5))
    gates = normal("kernel/moe/rank_order/gates", 12, 5) * scales.astype(np.float32)
    note = "gates over 24 binades, both signs"
    yield _moe("rank_order", order, {"gates": gates}, note=note)
    yield from _not_finite()


def _beyond_a_tile() -> Iterator[Recipe]:
    """More tokens with an expert, and more experts, than a kernel takes at a time."""
    for name, tokens, count, k, note in (
        ("tokens_70", 70, 3, 1, "most of 70 tokens are with one expert"),
        ("experts_136", 9, 136, 8, "8 of 136 experts a token"),
    ):
        at = f"kernel/moe/{name}"
        experts = spaced(f"{at}/experts", tokens, count)[:, :k].astype(np.int64)
        if k == 1:
            experts[np.arange(tokens) % 5 > 0] = 2
        shapes = {"gate": (3, 5), "up": (3, 5), "down": (5, 3)}
        made = {part: normal(f"{at}/{part}", count, *shape) for part, shape in shapes.items()}
        rules = BOTH if k == 1 else (*BOTH, "either")  # one expert is no sum
        yield _moe(name, experts, {"x": normal(f"{at}/x", tokens, 5), **made}, rules, note)
    name = "shared_alone"
    router = normal(f"kernel/moe/{name}/shared_router", 1, WIDTH)
    about = {**_shared(f"kernel/moe/{name}", 25), "shared_router": router}
    none = {"gates": np.zeros((6, 2), np.float32)}
    note = "gates of zero: the shared expert and its gate, which the others do not hide"
    yield _moe(name, _drawn(name, 6, 2), {**about, **none}, BOTH, note)


def _not_finite() -> Iterator[Recipe]:
    """Gates, tokens, weights and sums that are not finite: they spoil their own rows alone."""
    name = "not_finite"
    x = normal(f"kernel/moe/{name}/x", 8, WIDTH)
    x[1, 4], x[2, 32] = np.nan, np.inf
    gates = np.abs(normal(f"kernel/moe/{name}/gates", 8, 2))
    gates[3], gates[4, 1], gates[5] = np.nan, np.inf, 0
    weights = _weights(f"kernel/moe/{name}")
    weights["down"][5, 7, 0] = np.nan
    experts = np.array([[0, 1], [2, 3], [3, 2], [0, 1], [1, 0], [4, 3], [4, 5], [5, 0]])
    note = "each row has its own trouble, or none"
    yield _moe(name, experts, {"x": x, "gates": gates, **weights}, ("bits", "either"), note)
    large = normal("kernel/moe/overflow/gates", 6, 2) * np.float32(1e38)
    x = normal("kernel/moe/overflow/x", 6, WIDTH) * np.float32(8)
    weights = _weights("kernel/moe/overflow")
    for w in weights.values():
        w[1] = w[0]
    note = "experts 0 and 1 are one: sums that overflow, and infinity minus infinity"
    experts = np.array([[0, 1], [1, 0], [0, 1], [0, 2], [2, 1], [3, 4]])
    yield _moe("overflow", experts, {"x": x, "gates": large, **weights}, ("bits", "either"), note)


def recipes() -> Iterator[Recipe]:
    """Every golden of mixtures of experts."""
    yield from _families()
    yield from _choices()
    yield from _special()
    yield from _dispatch()
