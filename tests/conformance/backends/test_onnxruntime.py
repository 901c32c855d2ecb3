"""ONNX Runtime as a backend: its kernels within the bounds of float32, by the goldens (SPEC 17)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from conformance.backends import resolve
from conformance.backends.reference import ReferenceBackend
from conformance.errors import BackendError
from conformance.golden import Golden, read_all
from conformance.operations import NotImplementedByBackendError, Sessions, call
from conformance.rules import judge

Array = NDArray[Any]
BACKEND, REFERENCE = resolve("onnxruntime"), ReferenceBackend()
SESSIONS = Sessions(BACKEND)
GOLDENS = {
    golden.id: golden
    for golden in read_all(Path(__file__).parents[3] / "goldens")
    if golden.id.startswith(("kernel/", "elementary/"))
    and callable(getattr(BACKEND, golden.operation, None))
}
BOUNDS = ("gauge", "ulp", "bias")
BEYOND = {
    "elementary/sigmoid/all",  # 0 from -18 down
    "elementary/tanh/all",  # 94 ulp beside the subnormal numbers
    "kernel/attention/poison_edge",  # NaN that is not visible is read
    "kernel/attention/poison_future",
    "kernel/attention/poison_past",
}
"""Cases that ONNX Runtime 1.32 fails, and why."""


def verdicts(golden: Golden, answer: dict[str, Array]) -> list[str]:
    rules = [rule for rule in golden.rules if rule.startswith(BOUNDS)]
    return [judge(rule, golden, answer, 2.0**-24).outcome for rule in rules]


def answer_to(golden: Golden) -> dict[str, Array]:
    more = {"mode": "fast"} if golden.operation == "attention" else {}
    arguments = {**golden.parameters, **golden.inputs, **more}
    return call(BACKEND, SESSIONS, golden.operation, arguments)


def test_what_it_has() -> None:
    assert {golden.operation for golden in GOLDENS.values()} == {
        *("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh", "softmax", "linear"),
        *("linear_int4", "linear_q4_0", "linear_q8_0", "rms_norm", "rope", "attention"),
        *("linear_w4a16", "gated_mlp"),
    }
    for operation in ("moe", "route", "quantize_int4", "quantize_int8", "sample", "load"):
        with pytest.raises(NotImplementedByBackendError, match=operation):
            call(BACKEND, SESSIONS, operation, {})


@pytest.mark.parametrize("operation", sorted({g.operation for g in GOLDENS.values()}))
def test_every_kernel_is_within_the_bound_of_float32(operation: str) -> None:
    judged = 0
    for name, golden in GOLDENS.items():
        bounded = any(rule.startswith(BOUNDS) for rule in golden.rules)
        if golden.operation != operation or name in BEYOND or not bounded:
            continue
        found = verdicts(golden, answer_to(golden))
        assert set(found) <= {"pass"}, (name, found)
        judged += len(found)
    assert judged >= (0 if operation in ("sigmoid", "tanh") else 1)


def test_what_its_operator_refuses_is_not_implemented() -> None:
    golden = GOLDENS["kernel/attention/order_sink_last"]
    with pytest.raises(NotImplementedByBackendError, match="no multiple of 8"):
        answer_to(golden)


@pytest.mark.parametrize("name", ["kernel/attention/everything", "kernel/linear_int4/k33_row"])
def test_a_wrong_answer_fails(name: str) -> None:
    golden = GOLDENS[name]
    answer = answer_to(golden)
    answer["y"] = answer["y"] * np.float32(1.001)
    assert "fail" in verdicts(golden, answer)


def test_sigmoid_and_tanh_are_near_where_they_are_not_tiny() -> None:
    x = np.linspace(-9, 30, 5000, dtype=np.float32)
    for name in ("sigmoid", "tanh"):
        wanted = getattr(REFERENCE, name)(x)
        np.testing.assert_allclose(getattr(BACKEND, name)(x), wanted, atol=2e-7)


def test_a_row_of_attention_is_that_of_its_own_position() -> None:
    """Past and new keys, windows, softcaps and sinks, against the exact lane."""
    rng = np.random.default_rng(1)
    for rows, past in ((1, 0), (7, 0), (1, 20), (5, 33)):
        keys = past + rows
        q, k, v = (
            rng.standard_normal((n, heads, 16)).astype(np.float32)
            for n, heads in ((rows, 6), (keys, 2), (keys, 2))
        )
        for window in (None, 1, 8, 100):
            for softcap in (None, 1.5):
                for sinks in (None, rng.standard_normal(6).astype(np.float32)):
                    about = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": sinks}
                    ours = BACKEND.attention(q=q, k=k, v=v, mode="fast", **about)
                    exact = REFERENCE.attention(q=q, k=k, v=v, mode="exact", **about)
                    np.testing.assert_allclose(ours, exact, atol=2e-6, err_msg=str(about))


def test_blocks_and_codes_are_those_that_are_stored() -> None:
    rng = np.random.default_rng(2)
    for k in (32, 96):
        x = rng.standard_normal((4, k)).astype(np.float32)
        for operation, size in (("linear_q4_0", 18), ("linear_q8_0", 34)):
            blocks = rng.integers(0, 256, (9, k // 32, size), dtype=np.uint8)
            scales = rng.standard_normal((9, k // 32)).astype("<f2")
            blocks[..., :2] = scales[..., None].view(np.uint8)
            ours = getattr(BACKEND, operation)(x=x, blocks=blocks)
            exact = getattr(REFERENCE, operation)(x=x, blocks=blocks)
            np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-3)
            assert not np.allclose(ours, getattr(REFERENCE, operation)(x=x, blocks=blocks[::-1]))


def test_weight_only_int4_has_any_group_and_zero_points() -> None:
    rng = np.random.default_rng(3)
    for k, group in ((256, 128), (72, 64), (33, 32), (100, 0), (5, 0)):
        groups = -(-k // group) if group else 1
        given: dict[str, Any] = {
            "x": rng.standard_normal((4, k)).astype(np.float32),
            "packed": rng.integers(0, 256, (9, (k + 1) // 2), dtype=np.uint8),
            "scales": (rng.standard_normal((9, groups)) + 2).astype(np.float16),
            "group": group,
        }
        for zeros in (None, rng.integers(0, 16, (9, groups), dtype=np.uint8)):
            ours = BACKEND.linear_w4a16(**given, zeros=zeros)
            exact = REFERENCE.linear_w4a16(**given, zeros=zeros)
            np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-3)
            if zeros is not None:
                other = REFERENCE.linear_w4a16(**given, zeros=zeros[::-1].copy())
                assert not np.allclose(ours, other)


def test_a_nan_is_the_one_of_the_specification() -> None:
    y = BACKEND.log(x=np.array([-1.0, np.nan], np.float32))
    assert y.view(np.uint32).tolist() == [0x7FC00000] * 2


def test_fewer_keys_than_queries() -> None:
    """The first rows see nothing, and are +0."""
    q, k = np.ones((5, 2, 4), np.float32), np.ones((2, 1, 4), np.float32)
    y = BACKEND.attention(q=q, k=k, v=k, mode="fast")
    assert y[:, 0, 0].tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(NotImplementedByBackendError, match="fewer keys"):
        BACKEND.attention(q=q, k=k, v=k, sinks=np.zeros(2, np.float32), mode="fast")


def test_another_device_is_refused() -> None:
    with pytest.raises(BackendError, match="onnxruntime"):
        resolve("onnxruntime", "cuda")
