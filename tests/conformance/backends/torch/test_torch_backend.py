"""The torch backend against the reference, operation by operation, bit for bit (SPEC 17)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from conformance.backends.reference import ReferenceBackend  # noqa: E402
from conformance.backends.torch import TorchBackend  # noqa: E402
from conformance.backends.torch.float32 import TorchFloat32Backend  # noqa: E402
from conformance.backends.torch.pages import BlockTables, OutOfPagesError  # noqa: E402
from conformance.backends.torch.quantization import pack, quantize_by_search  # noqa: E402
from conformance.backends.torch.session import Text  # noqa: E402
from conformance.backends.torch.speculation import propose  # noqa: E402
from reference.quantization import quantize_int4_row  # noqa: E402
from reference.sampling import Sampling  # noqa: E402
from reference.speculation import NgramDraft  # noqa: E402
from tests.oracle import cache as oracle  # noqa: E402
from tests.oracle import serving  # noqa: E402

Array = NDArray[Any]
FIXTURES = Path(__file__).parents[4] / "fixtures"
TORCH, REFERENCE, FLOAT32 = TorchBackend(), ReferenceBackend(), TorchFloat32Backend()
MAX = float(np.finfo(np.float32).max)
SPECIALS = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2**-149, -(2**-149), 1, MAX, -MAX])


def nasty(rng: np.random.Generator, *shape: int, specials: float = 0.0) -> Array:
    """Float32 values of all sizes, row by row of another kind; a share of them special."""
    x = rng.standard_normal(shape)
    kind = rng.integers(0, 7, (*shape[:-1], 1))
    x = np.where(kind == 1, x * 2.0 ** rng.integers(-40, 40, shape), x)
    x = np.where(kind == 2, rng.integers(-40, 41, shape) * 2.0**-149, x)
    x = np.where(kind == 3, np.clip(x, -1, 1) * MAX, x)
    x = np.where(kind == 4, rng.integers(-2, 3, shape) * 0.5, x)
    x = np.where(kind == 5, (2 * rng.integers(-9, 9, shape) + 1) * 2.0**-24, x)
    x[..., ::32] = np.where(kind[..., 0, None] == 5, 1.5, x[..., ::32])
    for start in range(0, shape[-1], 32):
        zero = rng.random(shape[:-1]) < 0.15
        x[..., start : start + 32][zero] *= 0.0  # signs stay
    x = np.where(rng.random(shape) < specials, rng.choice(SPECIALS, shape), x)
    return x.astype(np.float32)


def bits(x: Array) -> Array:
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def same(ours: Any, theirs: Any, about: object = "") -> None:
    """Equal in shape, dtype and bits; a tuple item by item."""
    ours, theirs = (a if isinstance(a, tuple) else (a,) for a in (ours, theirs))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), about
        differs = bits(a) != bits(np.ascontiguousarray(b))
        first = np.argwhere(differs)[:1]
        assert not differs.any(), f"{about}: {differs.sum()} differ, first at {first}"


def both(operation: str, **arguments: Any) -> None:
    ours = getattr(TORCH, operation)(**arguments)
    theirs = getattr(REFERENCE, operation)(**arguments)
    shown = {k: v.shape if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    same(ours, theirs, (operation, shown))


# Elementary functions (4).

ELEMENTWISE = ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh")


def hard_inputs(name: str) -> list[int]:
    table = json.loads((FIXTURES.parent / "reference" / "hard_cases.json").read_text())
    return [int(x, 16) for x in table.get(name, {})]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    tame = (rng.standard_normal(200_000) * 8).astype(np.float32)
    near = (tame * 2.0 ** -rng.integers(0, 26, tame.shape)).astype(np.float32)
    special = SPECIALS.astype(np.float32)
    both(name, x=np.concatenate([anything.view(np.float32), tame, near, 1 + near, special]))


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "tanh"])
def test_hard_inputs(name: str) -> None:
    x = np.array(hard_inputs(name), dtype=np.uint32)
    assert len(x) > 50
    both(name, x=x.view(np.float32))


def test_softmax() -> None:
    rng = np.random.default_rng(2)
    for width in (1, 2, 31, 32, 33, 100, 257):
        both("softmax", x=nasty(rng, 40, width))
        both("softmax", x=nasty(rng, 40, width, specials=0.5 / width))
    x = (rng.standard_normal((60, 70)) * 30).astype(np.float32)
    x[rng.random(x.shape) < 0.5] = -np.inf
    x[0] = -np.inf
    both("softmax", x=x)


# Linear layers (2, 5, 6, 9).


def test_linear() -> None:
    rng = np.random.default_rng(3)
    for k in (1, 2, 31, 32, 33, 64, 95, 200):
        x, w, bias = nasty(rng, 30, k), nasty(rng, 25, k), nasty(rng, 25, specials=0.2)
        both("linear", x=x, w=w, bias=None)
        both("linear", x=x, w=w, bias=bias)
        x, w = nasty(rng, 30, k, specials=0.1 / k), nasty(rng, 25, k, specials=0.1 / k)
        both("linear", x=x, w=w, bias=None)
    x = rng.standard_normal((20, 64)).astype(np.float32)
    x[:, 32:] = -x[:, :32]
    both("linear", x=x, w=np.ones((3, 64), np.float32), bias=None)


def weights(rng: np.random.Generator, n: int, k: int) -> Array:
    """Quantizable rows of all sizes, with ties of the rounding and zero groups among them."""
    w = rng.standard_normal((n, k)) * 2.0 ** rng.integers(-45, 12, (n, 1))
    w[0], w[1] = 0.0, rng.integers(-14, 15, k) * 0.5
    w[2] = rng.integers(-30, 31, k) * 2.0**-149
    w[3, :] = rng.choice([7 * 2.0**-25, 10 * 2.0**-24, -0.0], k)
    w[4:, ::32][rng.random(w[4:, ::32].shape) < 0.3] *= -0.0
    return w.astype(np.float32)


def test_quantize_int4() -> None:
    rng = np.random.default_rng(4)
    for k in (1, 2, 31, 32, 33, 77, 128):
        both("quantize_int4", w=weights(rng, 60, k), group=32)
        both("quantize_int4", w=weights(rng, 60, k), group=0)


def test_quantize_int4_search() -> None:
    rng = np.random.default_rng(5)
    for k in (1, 2, 33, 77, 128):
        w = weights(rng, 60, k)
        ours, theirs = quantize_by_search(torch.tensor(w)), quantize_int4_row(w, search=True)
        same(ours.scales.numpy().astype(np.float16), theirs.scales, k)
        same(pack(ours.codes).numpy(), theirs.packed, k)


@pytest.mark.parametrize("value", [np.inf, np.nan, 7 * 65520.0])
def test_unquantizable_weights_are_refused(value: float) -> None:
    w = np.zeros((2, 40), np.float32)
    w[1, 35] = value
    for group in (0, 32):
        with pytest.raises(ValueError, match=r"float16|finite"):
            TORCH.quantize_int4(w=w, group=group)


def test_quantize_int8() -> None:
    rng = np.random.default_rng(6)
    for k in (1, 31, 96):
        both("quantize_int8", x=nasty(rng, 200, k))
        both("quantize_int8", x=nasty(rng, 200, k, specials=0.2 / k))
    ties = (rng.integers(-127, 128, (50, 40)) + 0.5).astype(np.float32)
    ties[:, 0] = 127
    both("quantize_int8", x=ties)


def test_linear_int4() -> None:
    rng = np.random.default_rng(7)
    for k in (1, 2, 33, 100, 130):
        x = nasty(rng, 30, k, specials=0.05 / k)
        for group in (0, 32):
            packed, scales = TORCH.quantize_int4(w=weights(rng, 40, k), group=group)
            both("linear_int4", x=x, packed=packed, scales=scales, group=group)


@pytest.mark.parametrize(("operation", "size"), [("linear_q4_0", 18), ("linear_q8_0", 34)])
def test_linear_on_blocks(operation: str, size: int) -> None:
    rng = np.random.default_rng(9)
    for groups in (1, 2, 5):
        x = nasty(rng, 30, 32 * groups, specials=0.05 / groups)
        blocks = rng.integers(0, 256, (40, groups, size), np.uint8)
        scales = np.ldexp(rng.uniform(-1, 1, (40, groups)), rng.integers(-26, 7, (40, groups)))
        blocks[:, :, :2] = scales.astype("<f2")[:, :, None].view(np.uint8)
        both(operation, x=x, blocks=blocks)
    with pytest.raises(ValueError, match="do not fit"):
        getattr(TORCH, operation)(x=x[:, :-1], blocks=blocks)


def test_rms_norm() -> None:
    rng = np.random.default_rng(8)
    for k in (1, 31, 32, 64, 100, 192):
        for eps in (1e-6, 1e-5, 0.0, 1e-300):
            weight = nasty(rng, k, specials=0.1)
            both("rms_norm", x=nasty(rng, 50, k, specials=0.1 / k), weight=weight, eps=eps)


def test_gated_mlp() -> None:
    rng = np.random.default_rng(9)
    for activation in ("silu", "gelu_tanh"):
        for k, inner in ((33, 70), (64, 96)):
            x, gate, up = nasty(rng, 20, k), nasty(rng, inner, k), nasty(rng, inner, k)
            down = nasty(rng, k, inner)
            both("gated_mlp", x=x, gate=gate, up=up, down=down, activation=activation)
            scaled = {"x": x, "gate": gate, "up": up, "down": down}
            tame = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in scaled.items()}
            both("gated_mlp", **tame, activation=activation)


# Rotary embedding (7).

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 2048},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.1,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 1.0,
        "mscale": 0.0,
        "mscale_all_dim": 1.0,
    },
)


def longrope(head_dim: int, **more: Any) -> dict[str, Any]:
    """Longrope from position 1,000 on; its lists have an element for each pair."""
    steps = np.arange(head_dim // 2)
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1000,
        "short_factor": (1 + steps / 64).tolist(),
        "long_factor": (1.1 + steps / 3).tolist(),
        **more,
    }


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"factor": 0.5}, {"attention_factor": 1.1}])
def test_longrope_constants(more: dict[str, Any]) -> None:
    for head_dim in (16, 64):
        given = longrope(head_dim, **more) | {"rope_theta": 10000.0, "head_dim": head_dim}
        for position in (0, 999, 1000, 4000):
            full = given | {"max_position_embeddings": 4096}
            both("rope_constants", parameters=full, position=position)


@pytest.mark.parametrize("parameters", ROPES)
def test_rope_constants(parameters: dict[str, Any]) -> None:
    for head_dim in (16, 64, 128):
        for theta in (10000.0, 500000.0, 1e6, 1000.5):
            given = parameters | {"rope_theta": theta, "head_dim": head_dim}
            for position in (0, 4095, 4096, 5000):
                full = given | {"max_position_embeddings": 4096}
                both("rope_constants", parameters=full, position=position)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    rng = np.random.default_rng(10)
    for half in (1, 8, 16):
        positions = np.array([0, 1, 2, 1000, 65535, 2**24 - 1, *rng.integers(0, 2**24, 30)])
        inv_freq = (10000.0 ** -rng.random(half)).astype(np.float32)
        x = nasty(rng, len(positions), 3, 32, specials=0.02)
        for factor in (1.0, 1.2):
            both(
                "rope",
                x=x,
                positions=positions,
                inv_freq=inv_freq,
                factor=factor,
                interleaved=interleaved,
            )


# Attention (8).

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 1},
    {"window": 7},
    {"window": 40},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 33, "softcap": 30.0, "sinks": True},
)


def attention_case(rng: np.random.Generator, hard: bool, **options: Any) -> dict[str, Any]:
    """Arguments of one attention call."""
    s = int(rng.choice([1, 5, 32, 33, 70, 130]))
    t, d = int(rng.integers(1, min(s, 40) + 1)), int(rng.choice([1, 8, 32, 48]))
    kv = int(rng.choice([1, 2]))
    heads = kv * int(rng.choice([1, 3]))

    def draw(*shape: int) -> Array:
        return nasty(rng, *shape) if hard else rng.standard_normal(shape).astype(np.float32)

    if options.pop("sinks", False):
        sinks = rng.standard_normal(heads)
        sinks[0] = rng.choice([-np.inf, 50.0, 0.0])
        options["sinks"] = sinks.astype(np.float32)
    scale = np.float32(rng.choice([0.125, 1.0, 3.0]))
    settings = {"scale": scale, "window": None, "softcap": None, "sinks": None} | options
    return {"q": draw(t, heads, d), "k": draw(s, kv, d), "v": draw(s, kv, d)} | settings


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_exact(variant: dict[str, Any]) -> None:
    rng = np.random.default_rng(11)
    for i in range(40):
        both("attention", mode="exact", **attention_case(rng, i % 3 == 0, **variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_with_what_is_not_finite(variant: dict[str, Any]) -> None:
    rng = np.random.default_rng(12)
    for _ in range(25):
        case = attention_case(rng, False, **variant)
        for name in "qkv":
            bad = rng.random(case[name].shape) < 0.3 / case[name].shape[-1] / 4
            case[name][bad] = rng.choice([np.nan, np.inf, -np.inf], bad.sum())
        if case["sinks"] is not None:
            case["sinks"][-1] = rng.choice([np.nan, np.inf, -np.inf, 1.0])
        both("attention", mode="exact", **case)
        ours, theirs = (b.attention(mode="fast", **case) for b in (TORCH, REFERENCE))
        assert np.array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def test_invisible_values_are_never_read() -> None:
    rng = np.random.default_rng(13)
    q, k, v = (rng.standard_normal((70, 2, 16)).astype(np.float32) for _ in range(3))
    clean = TORCH.attention(q[-1:], k, v, window=35)
    k[:35], v[:35] = np.nan, np.inf
    same(TORCH.attention(q[-1:], k, v, window=35), clean)
    fast = TORCH.attention(q[-1:], k, v, window=35, mode="fast")
    np.testing.assert_allclose(fast, clean, rtol=1e-5, atol=1e-5)


def test_nothing_visible_is_zero() -> None:
    one = np.ones((1, 1, 4), np.float32)
    for mode in ("exact", "fast"):
        same(TORCH.attention(one, one, one, window=0, mode=mode), np.zeros_like(one))


def test_rows_do_not_depend_on_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance.backends.torch import attention

    rng = np.random.default_rng(14)
    q, k, v = (rng.standard_normal((100, 2, 16)).astype(np.float32) for _ in range(3))
    whole = TORCH.attention(q, k, v, window=50)
    monkeypatch.setattr(attention, "TILE", 1400)
    same(TORCH.attention(q, k, v, window=50), whole)


def test_the_example_of_sdpa_is_within_its_bounds_where_nothing_is_poisoned() -> None:
    from conformance.backends import resolve
    from conformance.golden import read_all
    from conformance.operations import NotImplementedByBackendError
    from conformance.rules import judge

    sdpa = resolve(str(FIXTURES.parent / "examples" / "torch_sdpa.py"))
    outcomes = {}
    for golden in read_all(FIXTURES.parent / "goldens"):
        if golden.operation == "attention" and "gauge" in golden.rules:
            arguments = {**golden.parameters, **golden.inputs}
            try:
                answer = {"y": sdpa.attention(**arguments, mode="fast")}
            except NotImplementedByBackendError:
                assert {"softcap", "sinks"} & {n for n, x in arguments.items() if x is not None}
                continue
            outcomes[golden.id] = judge("gauge", golden, answer, 2.0**-24).outcome
    assert len(outcomes) > 40
    assert all(outcome == "pass" for name, outcome in outcomes.items() if "poison" not in name)


# Sampling (13).


def test_philox() -> None:
    rng = np.random.default_rng(15)
    positions = np.concatenate([[0, 1, 2**31, 2**32 - 1], rng.integers(0, 2**32, 100)])
    for seed, request in ((0, 0), (2**64 - 1, 2**32 - 1), (0x123456789ABCDEF0, 7)):
        both("philox", seed=seed, request=request, positions=positions)
        both("philox", seed=seed, request=request, positions=positions, stream=3)


def test_philox_known_answer() -> None:
    """Known answers of Random123 for zero input: 6627e8d5 e169c58d."""
    word = TORCH.philox(seed=0, request=0, positions=np.zeros(1, np.int64))
    assert int(word[0]) == 0xE169C58D_6627E8D5


def test_sample() -> None:
    rng = np.random.default_rng(16)
    for i in range(600):
        size = int(rng.integers(1, 80))
        logits = (rng.standard_normal(size) * rng.choice([0.1, 2, 30])).astype(np.float32)
        if i % 4 == 0:
            logits = np.round(logits)
        logits[1:][rng.random(size - 1) < 0.2] = -np.inf
        both(
            "sample",
            logits=logits,
            temperature=float(rng.choice([0.0, 0.7, 1.0, 3.0])),
            top_k=int(rng.choice([0, 1, 5, 200])),
            top_p=float(rng.choice([1.0, 0.9, 0.3, 0.01])),
            min_p=float(rng.choice([0.0, 0.05, 0.5, 1.0])),
            repetition_penalty=float(rng.choice([1.0, 1.1, 0.7])),
            previous=rng.integers(0, size, int(rng.integers(0, 9))),
            seed=int(rng.integers(0, 2**63)),
            request=int(rng.integers(0, 2**32)),
            position=i,
        )


def test_verify_draft() -> None:
    rng = np.random.default_rng(17)
    lengths = set()
    for i in range(400):
        size, n = int(rng.integers(1, 30)), int(rng.integers(0, 5))
        logits = (rng.standard_normal((n + 1, size)) * rng.choice([0.1, 2, 30])).astype(np.float32)
        logits[:, 1:][rng.random((n + 1, size - 1)) < 0.2] = -np.inf
        weights = rng.integers(0, rng.choice([3, 2**40]), (n, size)) * (rng.random((n, size)) < 0.7)
        draft = logits[:n].argmax(axis=1) if i % 3 else rng.integers(0, size, n)
        weights[np.arange(n), draft] += 1
        arguments: dict[str, Any] = {
            "logits": logits,
            "draft": draft,
            "draft_weights": weights,
            "temperature": float(rng.choice([0.0, 0.7, 1.0, 3.0])),
            "top_k": int(rng.choice([0, 1, 5, 200])),
            "top_p": float(rng.choice([1.0, 0.9, 0.3])),
            "min_p": float(rng.choice([0.0, 0.05, 0.5])),
            "repetition_penalty": float(rng.choice([1.0, 1.1, 0.7])),
            "previous": rng.integers(0, size, int(rng.integers(0, 9))),
            "seed": int(rng.integers(0, 2**63)),
            "request": int(rng.integers(0, 2**32)),
            "position": i,
        }
        both("verify_draft", **arguments)
        lengths.add((n, len(REFERENCE.verify_draft(**arguments))))
    assert len(lengths) == 1 + 2 + 3 + 4 + 5


# Models (10).

MODES = ("float32", "int4", "int4-row")
TOKENS = np.random.default_rng(17).integers(0, 1000, 80)


@pytest.fixture(scope="module", params=MODES)
def sessions(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    folder, mode = str(FIXTURES / "tiny-dense"), request.param
    return TORCH.load(folder, mode), REFERENCE.load(folder, mode)


def test_session_equals_the_reference(sessions: tuple[Any, Any]) -> None:
    ours, theirs = sessions
    for session in sessions:
        session.reset()
    for part in (TOKENS[:70], TOKENS[70:71], TOKENS[71:]):
        same(ours.forward(tokens=part, attention="exact"), theirs.forward(part, "exact"))


def test_chunks_change_nothing(sessions: tuple[Any, Any]) -> None:
    session = sessions[0]
    session.reset()
    whole = session.forward(TOKENS, "exact")
    for size in (3, 32, 64):
        session.reset()
        parts = [session.forward(TOKENS[i : i + size], "exact") for i in range(0, 80, size)]
        same(np.concatenate(parts), whole, size)


def test_generation_equals_the_reference(sessions: tuple[Any, Any]) -> None:
    ours, theirs = (
        session.generate(prompt=TOKENS[:20], max_new_tokens=6, exact_prefill=False)
        for session in sessions
    )
    same(ours, theirs)


def test_draft_equals_the_reference() -> None:
    folder = str(FIXTURES / "tiny-draft")
    ours, theirs = (backend.load(folder, "float32") for backend in (TORCH, REFERENCE))
    same(ours.forward(TOKENS, "exact"), theirs.forward(TOKENS, "exact"))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 20,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 9,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 20},
        "hidden_act": "gelu_pytorch_tanh",
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 33,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A random model of a family, in bfloat16, in two shards."""
    from safetensors.torch import save_file

    from reference.config import parse_config
    from reference.loading.huggingface import expected_tensors

    generator = torch.Generator().manual_seed(20)
    shapes = expected_tensors(parse_config(config, "config.json"))
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.3 + 0.1).bfloat16()
        for name, shape in shapes.items()
    }
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_the_reference(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, SIZES | FAMILIES[family])
    tokens = TOKENS[:60] % 90
    for mode in MODES:
        ours, theirs = TORCH.load(tmp_path, mode), REFERENCE.load(str(tmp_path), cast(Any, mode))
        for part in (tokens[:45], tokens[45:46], tokens[46:]):
            same(ours.forward(part, "exact"), theirs.forward(part, "exact"), (family, mode))


SPREAD: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in sorted(p.name for p in (FIXTURES / "families").iterdir())},
    "gemma2-biased": ("gemma2", {"attention_bias": True, "query_pre_attn_scalar": 7}),
    "gemma3-typed": (
        "gemma3",
        {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_theta": 300.0, "partial_rotary_factor": 0.5},
            },
            "sliding_window_pattern": None,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt-oss-unclamped": ("gpt-oss", {"swiglu_limit": 7.0}),
    "mixtral-without-window": ("mixtral", {"sliding_window": None, "num_experts_per_tok": 3}),
    "mellum-as-they-are": ("mellum", {"norm_topk_prob": False, "attention_bias": True}),
    "olmo3-named": (
        "olmo3",
        {"layer_types": ["full_attention", *["sliding_attention"] * 3], "attention_bias": True},
    ),
    "olmoe-biased": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "phi3-given-factor": (
        "phi3",
        {
            "original_max_position_embeddings": None,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [2.0, 3.0, 9.0],
                "original_max_position_embeddings": 31,
                "attention_factor": 1.3,
            },
            "partial_rotary_factor": 0.75,
            "sliding_window": None,
        },
    ),
    "qwen2-moe-windows": (
        "qwen2-moe",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-stepped": (
        "qwen3-moe",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
        },
    ),
    "smollm3-by-layer": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": None,
        },
    ),
}
"""A family's fixture, and changes of its switches, by name."""


def family_config(name: str) -> dict[str, Any]:
    family, change = SPREAD[name]
    config: dict[str, Any] = json.loads(
        (FIXTURES / "families" / family / "config.json").read_text()
    )
    return config | change


@pytest.mark.parametrize("name", SPREAD)
def test_every_family_and_switch_equals_the_reference(name: str, tmp_path: Path) -> None:
    """In chunks and in every weight mode: 60 tokens of a model of random weights."""
    write_model(tmp_path, family_config(name))
    tokens = TOKENS[:60] % 48
    for mode in MODES:
        ours, theirs = TORCH.load(tmp_path, mode), REFERENCE.load(str(tmp_path), cast(Any, mode))
        for part in (tokens[:45], tokens[45:46], tokens[46:]):
            same(ours.forward(part, "exact"), theirs.forward(part, "exact"), (name, mode))


@pytest.mark.parametrize("model", ["families/gemma3", "families/gpt-oss", "tiny-moe"])
def test_every_step_equals_the_reference(model: str) -> None:
    folder, tokens = str(FIXTURES / model), TOKENS[:40] % 48
    ours, theirs = (b.load(folder, "float32").trace(tokens, "exact") for b in (TORCH, REFERENCE))
    assert set(ours) == set(theirs)
    for name, step in theirs.items():
        same(ours[name], step, name)


def test_float32_experts_are_near_the_reference() -> None:
    folder, tokens = str(FIXTURES / "tiny-moe"), TOKENS[:40] % 48
    near, exact = (b.load(folder, "float32").forward(tokens, "exact") for b in (FLOAT32, REFERENCE))
    assert not np.array_equal(near, exact)
    np.testing.assert_allclose(near, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("mixtral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("mixtral", {"num_experts": 5}, "one number"),
        ("qwen2-moe", {"layer_types": ["sliding_attention"] * 3}, "no window is in use"),
        ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 5}, "layer_types"),
        ("qwen2-moe", {"qkv_bias": False}, "qkv_bias"),
        ("qwen3-moe", {"decoder_sparse_step": None}, "decoder_sparse_step"),
        ("mellum", {"rope_theta": 5.0, "rope_parameters": None}, "rope_parameters"),
        ("mellum", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "gelu"}, "gelu"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt-oss", {"swiglu_limit": None}, "swiglu_limit"),
        ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers"),
        ("olmo2", {"num_experts": 4}, "num_experts"),
    ],
)
def test_what_a_family_refuses(name: str, change: dict[str, Any], named: str) -> None:
    from conformance.backends.torch.config import parse

    config = family_config(name) | change
    with pytest.raises(ValueError, match=named):
        parse(config)
    parse(family_config(name))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"attention_multiplier": 2.0}, "attention_multiplier"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "turns": 3}}, "turns"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta"),
    ],
)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    from conformance.backends.torch.config import parse

    with pytest.raises(ValueError, match=named):
        parse(SIZES | FAMILIES["llama"] | change)


def test_the_floor_decides_the_prefill() -> None:
    """511 prompt tokens are exact, 512 fast unless told otherwise (8.4)."""
    session = TORCH.load(str(FIXTURES / "tiny-draft"), "float32")
    prompt = np.random.default_rng(18).integers(0, 1000, 512)
    session.reset()
    exact = session.forward(prompt, "exact")
    same(session.generate(prompt[:511], 1, False)[1], exact[510:511])
    same(session.generate(prompt, 1, True)[1], exact[511:])
    fast = session.generate(prompt, 1, False)[1]
    assert not np.array_equal(fast, exact[511:])
    np.testing.assert_allclose(fast, exact[511:], rtol=1e-3, atol=1e-3)


# The cache (11).

KV_TYPES = ("float32", "float16", "bfloat16", "int8")


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_store_kv(dtype: str) -> None:
    rng = np.random.default_rng(21)
    for width in (1, 32, 33):
        both("store_kv", x=nasty(rng, 60, 2, width, specials=0.1 / width), dtype=dtype)
        both("store_kv", x=nasty(rng, 60, 2, width), dtype=dtype)
    half = (2 * rng.integers(-(2**12), 2**12, (50, 1, 40)) + 1) * 2.0**-12  # ties among them
    both("store_kv", x=half.astype(np.float32), dtype=dtype)


def test_page_hashes() -> None:
    rng = np.random.default_rng(22)
    for size in (1, 4, 256):
        for count in (0, 1, 3, 4, 300):
            tokens = rng.integers(0, 2**31, count)
            digest, salt = rng.bytes(32).hex(), str(rng.choice(["", "a", "ü"]))
            for dtype in KV_TYPES:
                about = {"page_size": size, "digest": digest, "dtype": dtype, "salt": salt}
                both("page_hashes", tokens=tokens, **about)


def paged_case(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments of one call; all that is not the sequence's is poison."""
    size, pages = int(rng.choice([1, 4, 16, 64])), int(rng.integers(1, 9))
    length = int(rng.integers((pages - 1) * size + 1, pages * size + 1))
    kv, d = int(rng.choice([1, 2])), int(rng.choice([8, 33]))
    rows = int(rng.integers(1, min(length, 9) + 1))
    table = rng.permutation(pages + 3)[:pages]
    both_pages = np.full((2, pages + 3, size, kv, d), np.nan, np.float32)
    for j in range(length):
        at = table[j // size], j % size
        both_pages[:, *at] = rng.standard_normal((2, kv, d))
    return {
        "q": rng.standard_normal((rows, 2 * kv, d)).astype(np.float32),
        "k_pages": both_pages[0],
        "v_pages": both_pages[1],
        "block_table": table.astype(np.int64),
        "length": length,
        "scale": float(np.float32(0.3)),
        "window": [None, 5, 32][rng.integers(3)],
        "softcap": [None, 2.0][rng.integers(2)],
    }


def test_paged_attention() -> None:
    rng = np.random.default_rng(23)
    for _ in range(60):
        case = paged_case(rng)
        both("paged_attention", mode="exact", **case)
        fast = [b.paged_attention(mode="fast", **case) for b in (TORCH, FLOAT32)]
        same(*fast)
        exact = TORCH.paged_attention(mode="exact", **case)
        np.testing.assert_allclose(fast[0], exact, rtol=1e-4, atol=1e-4)


def test_paging() -> None:
    rng = np.random.default_rng(24)
    copied = 0
    for _ in range(200):
        script, lengths, size = [], dict[int, int](), int(rng.choice([1, 2, 4, 16]))
        for new in range(30):
            step = int(rng.choice(4, p=[0.5, 0.25, 0.15, 0.1])) if lengths else 0
            name = int(rng.choice(list(lengths))) if lengths and rng.random() < 0.8 else 100 + new
            name = name if step == 0 or name in lengths else next(iter(lengths))
            amount = int(rng.integers(1, 3 * size + 2))
            if step == 0:
                lengths[name] = lengths.get(name, 0) + amount
            elif step == 1:
                amount = new
                lengths[amount] = lengths[name]
            elif step == 2:
                amount = lengths[name] = int(rng.integers(0, lengths[name] + 1))
            else:
                del lengths[name]
                amount = 0
            script.append((step, name, amount))
        arguments: dict[str, Any] = {"script": np.array(script), "page_size": size}
        both("paging", **arguments)
        same(TORCH.paging(**arguments), np.array(oracle.paging(script, size)), script)
        copied += int(TORCH.paging(**arguments)[-1, 2])
    assert copied > 100


def packed(prompts: list[list[int]]) -> dict[str, Any]:
    return {
        "tokens": np.array([t for p in prompts for t in p], np.int64),
        "lengths": np.array([len(p) for p in prompts], np.int64),
    }


def branching(rng: np.random.Generator) -> list[list[int]]:
    """Prompts that begin as earlier ones do."""
    prompts: list[list[int]] = []
    for _ in range(rng.integers(2, 12)):
        base = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.8 else []
        kept = base[: rng.integers(0, len(base) + 1)]
        prompts.append([*kept, *rng.integers(0, 3, rng.integers(1, 9)).tolist()])
    return prompts


def test_prefix_reuse() -> None:
    """Where several kept sequences have the longest prefix, which is used is left open (11.3)."""
    rng = np.random.default_rng(25)
    for _ in range(100):
        both("prefix_reuse", **packed(branching(rng)), page_size=4, pages=1000)
    given_up = 0
    for _ in range(400):
        prompts, size = branching(rng), int(rng.choice([1, 4, 8]))
        pages = max(-(-len(p) // size) for p in prompts) + int(rng.integers(0, 6))
        arguments: dict[str, Any] = {**packed(prompts), "page_size": size}
        try:
            expected = oracle.prefix_reuse([tuple(p) for p in prompts], size, pages)
        except AssertionError:
            continue
        both("prefix_reuse", **arguments, pages=pages)
        same(TORCH.prefix_reuse(**arguments, pages=pages), np.array(expected), prompts)
        given_up += expected != TORCH.prefix_reuse(**arguments, pages=1000).tolist()
    assert given_up > 30


def test_what_pages_refuse() -> None:
    with pytest.raises(OutOfPagesError):
        TORCH.prefix_reuse(**packed([[1] * 9]), page_size=4, pages=2)
    with pytest.raises(ValueError, match="lengths of 3"):
        TORCH.prefix_reuse(np.arange(4), np.array([1, 2]), page_size=4, pages=2)
    for script, named in (([(0, 0, 1), (0, 1, 1), (1, 0, 1)], "1 is there"), ([(4, 0, 0)], "4 is")):
        with pytest.raises(ValueError, match=named):
            TORCH.paging(np.array(script), page_size=4)


def test_what_has_no_room_changes_nothing() -> None:
    blocks = BlockTables(4, limit=3)
    blocks.create(0)
    blocks.append(0, 6)
    blocks.fork(0, 1)
    before = blocks.counts(), dict(blocks.lengths), {n: list(t) for n, t in blocks.tables.items()}
    with pytest.raises(OutOfPagesError):
        blocks.append(1, 3)  # a copy and a page more
    assert before == (blocks.counts(), blocks.lengths, blocks.tables)
    blocks.append(1, 2)
    assert blocks.counts() == (3, 1, 1)


# Serving (11.3, 11.4, 13.5, 14.2).


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both sessions of a random model; mistral's window is 9, and the context 128."""
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, SIZES | FAMILIES[request.param])
    return [backend.load(str(folder), "float32") for backend in (TORCH, REFERENCE)]


def session_both(sessions: Any, method: str, **arguments: Any) -> tuple[Array, ...]:
    ours, theirs = (getattr(session, method)(**arguments) for session in sessions)
    same(ours, theirs, (method, arguments))
    return cast(tuple[Array, ...], ours)


class Watched:
    """How many tokens each pass of a session's model computes, and in which attention."""

    def __init__(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []
        hidden = session.model.hidden

        def watch(tokens: Any, caches: Any, mode: str, note: Any) -> Any:
            self.passes.append(len(tokens))
            return hidden(tokens, caches, mode, note)

        monkeypatch.setattr(session.model, "hidden", watch)


def test_turns(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(26)
    a, b = (rng.integers(0, 90, 60).tolist() for _ in range(2))
    prompts = [a[:20], a[:40], a[:25] + b[:9], b[:50], a[:40], a, a[:1]]
    watched = Watched(small[0], monkeypatch)
    arguments = {**packed(prompts), "max_new_tokens": 3}
    (*answer, cache_n, prompt_n), theirs = (session.turns(**arguments) for session in small)
    same(tuple(answer), theirs[:2])
    if set(small[0].model.config.windows) == {None}:  # else the reference forgets what is behind
        same((cache_n, prompt_n), theirs[2:])
    assert cache_n.tolist() == [0, 20, 25, 0, 39, 40, 0]
    assert (cache_n + prompt_n).tolist() == [len(p) for p in prompts]
    assert watched.passes == [n for computed in prompt_n for n in (computed, 1, 1)]


def test_turns_reuse_answers_but_their_last_token(small: Any) -> None:
    prompt = TOKENS[:12] % 90
    answer = small[0].generate(prompt, 5, False)[0]
    again = [prompt.tolist(), [*prompt.tolist(), *answer.tolist(), 7]]
    assert session_both(small, "turns", **packed(again), max_new_tokens=5)[2].tolist() == [0, 16]


@pytest.mark.parametrize("draft_tokens", [0, 1, 4, 9])
def test_speculate(small: Any, draft_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.tile(TOKENS[:9] % 90, 4)
    plain = small[0].generate(prompt, 14, False)
    watched = Watched(small[0], monkeypatch)
    arguments = {"prompt": prompt, "max_new_tokens": 14, "draft_tokens": draft_tokens}
    tokens, logits, accepted = session_both(small, "speculate", **arguments)
    same((tokens, logits), plain)
    assert len(watched.passes) == 1 + len(accepted)
    assert max(watched.passes[1:]) == 1 + draft_tokens
    assert (accepted < watched.passes[1:]).all()


def test_a_right_draft_saves_passes() -> None:
    session = TORCH.load(str(FIXTURES / "tiny-dense"), "float32")
    prompt = np.tile(session.generate(TOKENS[:5], 40, False)[0], 2)
    assert session.speculate(prompt, 12, 4)[2].sum() > 0


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_serve(small: Any, draft_tokens: int) -> None:
    prompts = [(TOKENS[i : i + n] % 90).tolist() for i, n in ((0, 3), (9, 40), (30, 17))]
    about = {"page_size": 4, "max_batched_tokens": 16, "draft_tokens": draft_tokens}
    answer = session_both(small, "serve", **packed(prompts), max_new_tokens=5, **about)
    alone = small[0].generate(np.array(prompts[1]), 5, False)
    same(tuple(part[1] for part in answer), alone)


def test_resume(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = TOKENS[:60] % 90
    watched = Watched(small[0], monkeypatch)
    for count in (1, 33, 59, 60):
        path = tmp_path / f"{count}.cache"
        arguments = {"longer": longer, "max_new_tokens": 4, "path": str(path)}
        watched.passes.clear()
        answer = session_both(small, "resume", prompt=longer[:count], **arguments)
        assert answer[2].tolist() == [min(count, 59)]
        assert watched.passes == [count, max(1, 60 - count), 1, 1, 1]


def test_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the file decides; another model's is refused."""
    target, draft = (TORCH.load(str(FIXTURES / f"tiny-{n}"), "float32") for n in ("dense", "draft"))
    path = tmp_path / "a.cache"
    first = target.resume(TOKENS[:30], TOKENS[:40], 2, str(path))
    text = Text.load(path, target.model)
    assert text.tokens == TOKENS[:30].tolist()
    with pytest.raises(ValueError, match="not written by this model"):
        Text.load(path, draft.model)
    other = TORCH.load(str(FIXTURES / "tiny-dense"), "int4")
    with pytest.raises(ValueError, match="not written by this model"):
        Text.load(path, other.model)
    load = Text.load

    def changed(path: Path, model: Any) -> Text:
        text = load(path, model)
        text.caches[0].v[0, 3, 0] += 1
        text.caches[0].fractions[0, 3, 0] *= 2
        return text

    monkeypatch.setattr(Text, "load", changed)
    second = target.resume(TOKENS[:30], TOKENS[:40], 2, str(path))
    assert not np.array_equal(first[1], second[1])


def test_values_that_are_not_finite_survive_the_file(tmp_path: Path) -> None:
    session = TORCH.load(str(FIXTURES / "tiny-draft"), "float32")
    text = Text(session.model)
    text.feed(TOKENS[:9].tolist(), "exact", 1)
    cache = text.caches[0]
    k, v = (x.transpose(0, 1).clone() for x in (cache.k, cache.v))
    v[4, 0, 0] = torch.inf
    text.caches[0] = type(cache)(k, v)
    text.save(tmp_path / "a.cache")
    again = Text.load(tmp_path / "a.cache", session.model).caches[0]
    assert torch.equal(again.finite, text.caches[0].finite)
    assert not bool(again.finite.all())
    for name, tensor in vars(text.caches[0]).items():
        assert torch.equal(getattr(again, name), tensor), name


def test_what_is_fast_is_not_reused() -> None:
    """A prompt of 512 tokens or more to be computed has other bits (8.4)."""
    session = TORCH.load(str(FIXTURES / "tiny-draft"), "float32")
    prompt = np.random.default_rng(27).integers(0, 1000, 530).tolist()
    prompts = [prompt, prompt[:40], [*prompt[:500], 5]]
    answer = session.turns(**packed(prompts), max_new_tokens=1)
    assert answer[2].tolist() == [0, 0, 40]
    same(answer[1][2], session.generate(np.array(prompts[2]), 1, False)[1])


def test_the_end_of_the_context(small: Any) -> None:
    prompt = np.tile(TOKENS, 2)[:120] % 90
    tokens = session_both(small, "generate", prompt=prompt, max_new_tokens=20, exact_prefill=False)
    assert len(tokens[0]) == 128 - 120 + 1
    for count in (1, 9):
        arguments = {"prompt": prompt, "max_new_tokens": 20, "draft_tokens": count}
        same(session_both(small, "speculate", **arguments)[:2], tokens)
    for length in (0, 129):
        with pytest.raises(ValueError, match=f"prompt of {length} tokens"):
            small[0].generate(np.zeros(length, np.int64), 1, False)


def test_drafts() -> None:
    """Sizes from 3 down, the latest occurrence, over and over (13.3)."""
    assert propose([7, 8, 9, 5, 7, 8], 3) == [9, 5, 7]
    assert propose([1, 2, 3, 4, 2, 3, 5, 2, 3], 4) == [5, 2, 3, 5]
    assert propose([4, 4, 4], 5) == [4] * 5
    assert propose([1, 2, 3], 5) == []
    assert propose([1], 5) == []
    rng = np.random.default_rng(28)
    for _ in range(300):
        context = rng.integers(0, 4, int(rng.integers(1, 30))).tolist()
        count = int(rng.integers(0, 9))
        proposed = NgramDraft().propose(np.array(context), count, Sampling()).tokens
        assert propose(context, count) == list(proposed)
        assert serving.draft(context, count) == list(proposed)


# Plain float32.


def test_float32_is_near_and_not_exact() -> None:
    rng = np.random.default_rng(19)
    x, w = (rng.standard_normal((30, 200)).astype(np.float32) for _ in range(2))
    plain, exact = (backend.linear(x, w) for backend in (FLOAT32, TORCH))
    np.testing.assert_allclose(plain, exact, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(plain, exact)
    q, k, v = (rng.standard_normal((70, 2, 16)).astype(np.float32) for _ in range(3))
    plain, exact = (backend.attention(q, k, v) for backend in (FLOAT32, TORCH))
    np.testing.assert_allclose(plain, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_float32_session_is_near(mode: str) -> None:
    plain, exact = (b.load(str(FIXTURES / "tiny-dense"), mode) for b in (FLOAT32, TORCH))
    difference = np.abs(plain.forward(TOKENS, "fast") - exact.forward(TOKENS, "exact"))
    assert np.median(difference) < (1e-4 if mode == "float32" else 0.2)
