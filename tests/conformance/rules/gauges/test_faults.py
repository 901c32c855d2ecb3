"""Small faults that real engines have had exceed the bound (SPEC 16.3 to 16.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.arithmetic import matmul
from reference.attention import attention_exact
from reference.feedforward import ACTIVATIONS
from reference.normalization import rms_norm
from tests.conformance.rules.gauges.margins import F32, fault


def test_the_right_answers_pass() -> None:
    for name in ("window_33", "sinks", "everything", "softcap"):
        assert fault(f"kernel/attention/{name}", attention_exact) == 0
    assert fault("kernel/rms_norm/k192", rms_norm) == 0
    assert fault("kernel/linear/k65_t5", matmul) == 0


@pytest.mark.parametrize("window", [31, 32, 33, 64])
@pytest.mark.parametrize("by", [1, -1])
def test_one_key_more_or_less(window: int, by: int) -> None:
    name = f"kernel/attention/window_{window}"
    assert fault(name, attention_exact, window=window + by) > 100


def test_queries_one_position_early() -> None:
    def early(**about: Any) -> F32:
        q = about.pop("q")
        return attention_exact(np.concatenate([q, q[-1:]]), **about)[: len(q)]

    assert fault("kernel/attention/warm_5_of_40", early) > 100


@pytest.mark.parametrize(
    "changed",
    [
        {"sinks": np.array([-np.inf, np.log(2), 2 + np.log(2), 20 + np.log(2)], np.float32)},
        {"sinks": None},
        {"softcap": 50.0},
        {"scale": 0.0625},
    ],
    ids=["sink counted twice", "sinks left out", "softcap where there is none", "another scale"],
)
def test_faults_of_attention(changed: dict[str, Any]) -> None:
    assert fault("kernel/attention/sinks", attention_exact, **changed) > 100


def test_softcap_left_out() -> None:
    assert fault("kernel/attention/softcap", attention_exact, softcap=None) > 100


def test_heads_read_the_wrong_group() -> None:
    """h modulo Hkv in place of h // (Hq / Hkv)."""

    def wrong(q: F32, k: F32, v: F32, **about: Any) -> F32:
        heads = np.arange(q.shape[1]) % k.shape[1]
        return attention_exact(q, k[:, heads], v[:, heads], **about)

    for heads in ("6_2", "12_4"):
        assert fault(f"kernel/attention/heads_{heads}", wrong) > 100


def test_scores_of_bfloat16() -> None:
    def coarse(q: F32, k: F32, **about: Any) -> F32:
        kept = (k.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return attention_exact(q, kept, **about)

    assert fault("kernel/attention/prefill_64", coarse) > 10


@pytest.mark.parametrize(("name", "eps"), [("eps_1e-6", 1e-5), ("eps_1e-5", 1e-6)])
def test_another_eps(name: str, eps: float) -> None:
    assert fault(f"kernel/rms_norm/{name}", rms_norm, eps=eps) > 1000


def test_eps_outside_the_root() -> None:
    def outside(x: F32, weight: F32, eps: float) -> F32:
        mean = (x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True)
        y: F32 = (x / (np.sqrt(mean) + eps) * weight).astype(np.float32)
        return y

    assert fault("kernel/rms_norm/eps_1e-6", outside) > 1000


def test_mean_over_one_element_less() -> None:
    def short(x: F32, weight: F32, eps: float) -> F32:
        y: F32 = rms_norm(x, weight, eps) * np.float32(np.sqrt((x.shape[1] - 1) / x.shape[1]))
        return y

    for width in (32, 65, 192, 288):
        assert fault(f"kernel/rms_norm/k{width}", short) > 100


@pytest.mark.parametrize("name", ["k31_t5", "k33_t5", "k65_t5", "k127_t1", "k288_t5"])
def test_the_last_term_dropped(name: str) -> None:
    def dropped(x: F32, w: F32) -> F32:
        return matmul(np.ascontiguousarray(x[:, :-1]), np.ascontiguousarray(w[:, :-1]))

    assert fault(f"kernel/linear/{name}", dropped) > 100


def test_a_block_counted_in_half_precision() -> None:
    def half(x: F32, w: F32) -> F32:
        return (x.astype(np.float16) @ w.T.astype(np.float16)).astype(np.float32)

    assert fault("kernel/linear/k64_t5", half) > 10


def test_faults_of_gated_mlp() -> None:
    def mlp(x: F32, gate: F32, up: F32, down: F32, activation: str) -> F32:
        return matmul(ACTIVATIONS[activation](matmul(x, gate)) * matmul(x, up), down)

    def swapped(gate: F32, up: F32, **rest: Any) -> F32:
        return mlp(gate=up, up=gate, **rest)

    assert fault("kernel/gated_mlp/silu_33_65", mlp) == 0
    assert fault("kernel/gated_mlp/silu_33_65", swapped) > 100
    assert fault("kernel/gated_mlp/silu_33_65", mlp, activation="gelu_tanh") > 100


def test_softmax_without_its_last_element() -> None:
    def wrong(x: F32) -> F32:
        p = np.exp(x - x.max(axis=-1, keepdims=True))
        y: F32 = p / p[:, :-1].sum(axis=-1, keepdims=True)
        return y

    for width in (2, 33, 65):
        assert fault(f"elementary/softmax/k{width}", wrong) > 100
