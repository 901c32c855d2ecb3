"""Operations and bytes against what a pass really does, and against counting by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.config import ModelConfig
from reference.errors import RequestError
from reference.measure.ceiling import (
    BYTES,
    EXACT,
    FAST,
    FLOAT32,
    MOST,
    PASSES,
    PRESETS,
    Ceiling,
    Hardware,
    Storage,
    Work,
    card,
    measured_here,
    sizes,
    turning_batch,
    work,
)
from reference.memory import arrays as arrays_of
from reference.model import Model
from reference.quantization import quantize_int4
from reference.weights import ExactLinear, PlainLinear
from tests.reference.models import (
    LLAMA_SMALL,
    MISTRAL_SMALL,
    QWEN2_SMALL,
    QWEN3_SMALL,
    small,
    tokens_of,
)

CONFIGS = (LLAMA_SMALL, MISTRAL_SMALL, QWEN2_SMALL, QWEN3_SMALL)


def plain(text: str) -> Model:
    return small(text, "float32", "float32")


def sparse() -> Model:
    """Experts in every layer, one of them shared."""
    keys = json.loads(QWEN2_SMALL)
    keys |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": 16,
    }
    for key in ("max_window_layers", "use_sliding_window", "sliding_window"):
        keys.pop(key, None)
    return small(json.dumps(keys), "float32", "float32")


# counted against the model


@pytest.mark.parametrize("config", [*CONFIGS, "sparse"])
@pytest.mark.parametrize(("tokens", "depth"), [(1, 0), (7, 0), (1, 9), (5, 20)])
def test_products_are_those_of_a_pass(config: str, tokens: int, depth: int) -> None:
    """Every linear layer that a pass calls is watched."""
    model = sparse() if config == "sparse" else plain(config)
    seen: list[int] = []

    def watched(layer: Any, x: Any) -> Any:
        y = model.operations.linear(layer, x)
        seen.append(2 * len(x) * x.shape[1] * y.shape[1])
        return y

    spy = replace(model, operations=replace(model.operations, linear=watched))
    cache = spy.new_cache()
    if depth:
        spy.forward(tokens_of(depth, 32), cache)
    seen.clear()
    spy.forward(tokens_of(tokens, 32), cache, last_only=True)
    assert work(model.config, FLOAT32, 1, tokens, depth).products == sum(seen)


@pytest.mark.parametrize("config", [*CONFIGS, "sparse"])
def test_sizes_are_those_of_the_arrays(config: str) -> None:
    model = sparse() if config == "sparse" else plain(config)
    arrays = {id(a): a for _, a in arrays_of("weights", model.weights) if a.dtype == np.float32}
    n = sizes(model.config)
    embedding = 0 if model.config.tied else n.head
    counted = n.layers + n.head + n.experts * n.expert + n.vectors + embedding
    assert counted == sum(a.size for a in arrays.values())


@pytest.mark.parametrize(("arithmetic", "stored"), [("exact", EXACT), ("float32", FLOAT32)])
def test_bytes_of_weights_are_those_of_the_arrays(arithmetic: Any, stored: Storage) -> None:
    """Aligned rows end with zeros up to a multiple of 32: here the widths are such multiples."""
    keys = json.loads(QWEN2_SMALL) | {"hidden_size": 64, "intermediate_size": 96}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = small(json.dumps(keys), "float32", arithmetic)
    head: Any = model.weights.head
    read = head.weight, *(w for layer in model.weights.layers for w in _linear(layer))
    expected = sum(w.values.nbytes if arithmetic == "exact" else w.nbytes for w in read)
    n = sizes(model.config)
    assert BYTES[stored.weights] * n.layers + BYTES[stored.head] * n.head == expected


def _linear(layer: Any) -> list[Any]:
    layers = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    assert all(isinstance(x, ExactLinear | PlainLinear) for x in layers)
    return [x.weight for x in layers]


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_bytes_of_the_cache_are_those_of_its_arrays(arithmetic: Any) -> None:
    """What attention reads of a position: `keys` and `digits` where exact, else `k` and `v`."""
    model = small(json.dumps(json.loads(LLAMA_SMALL) | {"head_dim": 32}), "float32", arithmetic)
    names = ("keys", "digits") if arithmetic == "exact" else ("k", "v")
    shape = model.new_pool().shape
    arrays = shape.arrays(1)
    held = sum(np.prod(arrays[n][0]) * np.dtype(arrays[n][1]).itemsize for n in names)
    assert shape.head_dim == 32, "aligned keys end with zeros up to a multiple of 32"
    stored = EXACT if arithmetic == "exact" else FLOAT32
    one, two = (work(model.config, stored, 1, 1, depth).bytes for depth in (10, 11))
    assert two - one == held * model.config.layers


def test_int4_has_the_bytes_of_its_arrays() -> None:
    matrix = quantize_int4(np.ones((6, 64), np.float32))
    stored = matrix.packed.nbytes + matrix.scales.nbytes
    assert stored == BYTES["int4"] * 6 * 64


# counted by hand

HAND = plain(MISTRAL_SMALL).config


def by_hand(config: ModelConfig, tokens: int, depth: int) -> tuple[int, int]:
    """Operations of attention, and values moved of the cache, pair by pair."""
    pairs = moved = 0
    for window in config.windows:
        seen: set[int] = set()
        for t in range(depth, depth + tokens):
            visible = [j for j in range(t + 1) if window is None or t - window < j]
            pairs += len(visible)
            seen.update(j for j in visible if j < depth)
        moved += len(seen) + tokens
    # a dot product with the key, and a weighted sum of the value, for every head
    return pairs * config.heads * 4 * config.head_dim, moved * 2 * config.kv_heads * config.head_dim


@given(st.integers(1, 30), st.integers(0, 60), st.sampled_from([1, 5, 17, None]))
def test_attention_and_cache_are_counted_pair_by_pair(
    tokens: int, depth: int, window: int | None
) -> None:
    config = replace(HAND, windows=(window,) * HAND.layers)
    attention, moved = by_hand(config, tokens, depth)
    done = work(config, FLOAT32, 1, tokens, depth)
    assert done.attention == attention
    n = sizes(config)
    assert done.bytes == 4 * (n.layers + n.head + n.vectors + tokens * n.row + moved)


def test_sequences_share_weights_and_nothing_else() -> None:
    one, many = (work(HAND, FLOAT32, b, 3, 11) for b in (1, 5))
    n = sizes(HAND)
    shared = 4 * (n.layers + n.head + n.vectors)
    assert many.operations == 5 * one.operations
    assert many.bytes - shared == 5 * (one.bytes - shared)


def test_experts_that_are_read_are_those_that_are_hit() -> None:
    config = sparse().config
    n = sizes(config)

    def experts(tokens: int) -> float:
        done = work(config, FLOAT32, tokens, 1, 0)
        others = n.layers + n.head + n.vectors + tokens * n.row
        others += tokens * 2 * config.kv_heads * config.head_dim * config.layers
        return (done.bytes / 4 - others) / n.expert

    assert experts(1) == pytest.approx(3)
    # two tokens choose 3 of 8 each: 3 + 3 * 5/8 are expected
    assert experts(2) == pytest.approx(3 + 3 * 5 / 8)
    assert experts(1000) == pytest.approx(8)


# the roofline

MACHINE = Hardware("it", 100.0, {"float32": 1000.0, "float64": 500.0}, "made up")


def test_the_slower_of_two_decides() -> None:
    assert MACHINE.seconds(Work(3000, 1000, 100), FLOAT32) == 4
    assert MACHINE.bound(Work(3000, 1000, 100), FLOAT32) == "compute"
    assert MACHINE.seconds(Work(3000, 1000, 900), FLOAT32) == 9
    assert MACHINE.bound(Work(3000, 1000, 900), FLOAT32) == "memory"
    assert MACHINE.times(Work(3000, 1000, 100), FAST) == (7.0, 1.0)


@given(st.floats(0.5, 1e4), st.integers(0, 200))
def test_the_turning_batch_is_that_of_the_closed_form(balance: float, depth: int) -> None:
    """W / bandwidth + b c / bandwidth <= b f / rate, for weights W, and c bytes a sequence."""
    hardware = Hardware("it", 1.0, {"float32": balance}, "made up")
    one = work(HAND, FLOAT32, 1, 1, depth)
    n = sizes(HAND)
    weights = 4 * (n.layers + n.head + n.vectors)
    gain = one.operations / balance - (one.bytes - weights)
    found = turning_batch(HAND, FLOAT32, hardware, depth)
    if gain <= 0 or weights / gain > MOST:
        assert found is None
    else:
        assert found is not None
        assert found == pytest.approx(max(1, np.ceil(weights / gain)), rel=1e-9, abs=1)
        bound = [
            hardware.bound(work(HAND, FLOAT32, b, 1, depth), FLOAT32) for b in (found, found - 1)
        ]
        assert bound == ["compute", "memory"] if found > 1 else bound[0] == "compute"


def test_a_row_is_its_parts() -> None:
    row = Ceiling(HAND, FLOAT32, MACHINE).row(4, 1, 20)
    done = work(HAND, FLOAT32, 4, 1, 20)
    seconds = max(done.operations / 1000, done.bytes / 100)
    assert row["rate"] == pytest.approx(4 / seconds)
    assert row["intensity"] == done.operations / done.bytes
    assert (row["balance"], row["test"], row["cache_n"]) == (10.0, "tg1 @ d20", 20)
    prefill = Ceiling(HAND, FLOAT32, MACHINE).row(1, 30, 0)
    assert (prefill["test"], prefill["turning_batch"]) == ("pp30", None)


def test_cards_have_sources_and_their_rates_are_in_order() -> None:
    for name, hardware in PRESETS.items():
        assert card(name) is hardware
        assert (
            "datasheet" in hardware.source
            or "sheet" in hardware.source
            or "whitepaper" in (hardware.source)
        )
        rates = [hardware.rates[kind] for kind in ("float32", "float16", "int8")]
        assert rates == sorted(rates)
        # no card of these does fewer than 10 or more than 1,000 operations a byte in float16
        assert 10 < hardware.rates["float16"] / hardware.bandwidth < 1000


UNITS = {
    # multiprocessors or compute units; GHz of float32 and of matrix units; operations a clock in
    # float32, float16 and int8; bits of the bus and Gbit/s of a pin; GB of memory
    "h200-sxm": (132, 1.98, 1.83, 256, 4096, 8192, 6144, 6.25, 141),
    "h100-sxm": (132, 1.98, 1.83, 256, 4096, 8192, 5120, 5.23, 80),
    "a100-sxm-80gb": (108, 1.41, 1.41, 128, 2048, 4096, 5120, 3.186, 80),
    "l40s": (142, 2.52, 2.52, 256, 1024, 2048, 384, 18.0, 48),
    "rtx-4090": (128, 2.52, 2.52, 256, 512, 2048, 384, 21.0, 24),
    "mi300x": (304, 2.1, 2.1, 256, 2048, 4096, 8192, 5.2, 192),
}
"""Of the makers' architecture papers."""


@pytest.mark.parametrize("name", PRESETS)
def test_cards_are_what_their_units_and_clocks_make(name: str) -> None:
    """A sparse figure would be twice as large. The L40S has 2.49 GHz in its float16 figure."""
    units, plain, matrix, f32, f16, i8, bus, pin, memory = UNITS[name]
    found, tera = PRESETS[name], 1e-3 * units
    assert found.rates["float32"] / 1e12 == pytest.approx(tera * plain * f32, rel=0.01)
    assert found.rates["float16"] / 1e12 == pytest.approx(tera * matrix * f16, rel=0.015)
    assert found.rates["bfloat16"] == found.rates["float16"]
    assert found.rates["int8"] / 1e12 == pytest.approx(tera * matrix * i8, rel=0.01)
    assert found.bandwidth / 1e9 == pytest.approx(bus * pin / 8, rel=0.01)
    assert found.memory == memory * 1e9


def test_this_machine_is_measured_by_the_clock() -> None:
    ticks = itertools.count()
    seen: list[int] = []
    found = measured_here(1, 8, 1 << 16, lambda: float(next(ticks)), on_run=lambda: seen.append(1))
    assert found.bandwidth == 1 << 16
    assert found.rates == {"float32": 2.0 * 8**3, "float64": 2.0 * 8**3}
    assert len(seen) == 3 * (PASSES + 1)
    assert found.spreads is not None
    assert {spread.repetitions for spread in found.spreads.values()} == {PASSES}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: card("h1000"), r"^card: 'h1000' is none of h200-sxm"),
        (lambda: Storage("int3", *["float16"] * 4), r"^weights: 'int3' is none of"),
        (lambda: Hardware("x", 0.0, {}, ""), r"^bandwidth: 0.0 is out of range"),
        (lambda: Hardware("x", 1.0, {"int8": float("nan")}, ""), r"^int8: nan is out of range"),
        (lambda: PRESETS["l40s"].rate("float64"), r"^compute: the rate of l40s in float64"),
        (
            lambda: Ceiling(plain(QWEN2_SMALL).config, FLOAT32, MACHINE).row(1, 7, 250),
            r"^ceiling: 257 positions are needed, .* has 256",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_the_engines_own_storage_says_what_it_is() -> None:
    assert set(asdict(EXACT).values()) == {"float64"}
    assert (FAST.kv, FAST.attention, FAST.weights) == ("float32", "float32", "float64")
