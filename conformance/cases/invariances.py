"""What needs no golden: a backend against itself, divided, moved or poisoned (SPEC 18).

Each check draws its own inputs, calls the backend twice or more, and demands the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conformance.cases import sampling_checks, serving_checks
from conformance.cases.checks import Caller, Invariance, compare
from conformance.cases.linear import random_blocks
from conformance.cases.model import MODEL, prompt
from conformance.generator import integers, normal
from conformance.golden import Array
from conformance.rules import Verdict
from reference.quantization import quantize_int4


def _rows_alone(
    operation: str, rowwise: Mapping[str, Array], fixed: Mapping[str, Any]
) -> Callable[[Caller], Verdict]:
    """Every row computed alone equals the row computed among others."""

    def check(do: Caller) -> Verdict:
        whole = do(operation, **rowwise, **fixed)
        count = len(next(iter(rowwise.values())))
        rows = [
            do(operation, **{n: a[i : i + 1] for n, a in rowwise.items()}, **fixed)
            for i in range(count)
        ]
        together = {n: np.concatenate([row[n] for row in rows]) for n in whole}
        return compare(whole, together, "a row alone against the row in a batch")

    return check


def _repeated(operation: str, arguments: Mapping[str, Any]) -> Callable[[Caller], Verdict]:
    def check(do: Caller) -> Verdict:
        return compare(
            do(operation, **arguments), do(operation, **arguments), "the same call twice"
        )

    return check


def _attention_inputs(rows: int) -> dict[str, Any]:
    at = f"invariance/attention/{rows}"
    return {
        "q": normal(f"{at}/q", rows, 4, 32),
        "k": normal(f"{at}/k", rows, 2, 32),
        "v": normal(f"{at}/v", rows, 2, 32),
        "scale": float(np.float32(32**-0.5)),
        "window": None,
        "softcap": None,
        "mode": "exact",
    }


def _chunked_attention(sizes: list[int]) -> Callable[[Caller], Verdict]:
    """Prefill whole equals prefill in chunks over a growing cache."""

    def check(do: Caller) -> Verdict:
        whole = _attention_inputs(sum(sizes))
        parts, start = [], 0
        for size in sizes:
            stop = start + size
            part = {"q": whole["q"][start:stop], "k": whole["k"][:stop], "v": whole["v"][:stop]}
            parts.append(do("attention", **{**whole, **part})["y"])
            start = stop
        return compare(do("attention", **whole), {"y": np.concatenate(parts)}, f"chunks of {sizes}")

    return check


def _poisoned_attention(do: Caller) -> Verdict:
    """What lies behind the window changes nothing."""
    clean = {**_attention_inputs(70), "window": 33}
    clean["q"] = clean["q"][-5:]
    poisoned = {**clean, "k": clean["k"].copy(), "v": clean["v"].copy()}
    poisoned["k"][:33], poisoned["v"][:33] = np.nan, np.inf
    return compare(do("attention", **clean), do("attention", **poisoned), "NaN behind the window")


def _chunked_model(weights: str, length: int, chunks: list[int]) -> Callable[[Caller], Verdict]:
    """Logits of a prompt whole equal those of any chunking, decode (chunks of 1) included."""

    def check(do: Caller) -> Verdict:
        arguments = {
            "model": MODEL,
            "weights": weights,
            "attention": "exact",
            "tokens": prompt(length),
        }
        return compare(
            do("forward", **arguments),
            do("forward", **arguments, chunks=chunks),
            "prefill against chunks",
        )

    return check


def _split(length: int, size: int) -> list[int]:
    return [min(size, length - start) for start in range(0, length, size)]


def invariances() -> list[Invariance]:
    """Every check."""
    x, w = normal("invariance/x", 9, 100), normal("invariance/w", 40, 100)
    matrix = quantize_int4(w)
    int4 = {"packed": matrix.packed, "scales": matrix.scales, "group": 32}
    awq = {**int4, "zeros": integers("invariance/zeros", 16, 40, 4).astype(np.uint8)}
    narrow = np.ascontiguousarray(x[:, :96])
    q4_0 = {"blocks": random_blocks("Q4_0", "invariance/q4_0", 40, 3)}
    q8_0 = {"blocks": random_blocks("Q8_0", "invariance/q8_0", 40, 3)}
    norm = {"weight": w[0], "eps": 1e-6}
    mlp = {
        "gate": w,
        "up": normal("invariance/up", 40, 100),
        "down": normal("invariance/down", 100, 40),
        "activation": "silu",
    }
    router = {"top_k": 4, "score": "softmax", "renormalise": True}
    experts = {
        "gate": normal("invariance/moe/gate", 5, 24, 100),
        "up": normal("invariance/moe/up", 5, 24, 100),
        "down": normal("invariance/moe/down", 5, 100, 24),
        "activation": "silu",
    }
    ranks = np.argsort(normal("invariance/moe/experts", 9, 5), axis=1, kind="stable")[:, :3]
    gates = normal("invariance/moe/gates", 9, 3)
    routed: dict[str, Array] = {"x": x, "experts": ranks.copy(), "gates": gates}
    attention = _attention_inputs(70)
    checks: dict[str, tuple[str, Callable[[Caller], Verdict]]] = {
        "linear/rows_alone": ("2.2", _rows_alone("linear", {"x": x}, {"w": w})),
        "linear_int4/rows_alone": ("5.5", _rows_alone("linear_int4", {"x": x}, int4)),
        "linear_w4a16/rows_alone": ("5.9", _rows_alone("linear_w4a16", {"x": x}, awq)),
        "linear_q4_0/rows_alone": ("5.7", _rows_alone("linear_q4_0", {"x": narrow}, q4_0)),
        "linear_q8_0/rows_alone": ("5.7", _rows_alone("linear_q8_0", {"x": narrow}, q8_0)),
        "rms_norm/rows_alone": ("6", _rows_alone("rms_norm", {"x": x}, norm)),
        "softmax/rows_alone": ("4.3", _rows_alone("softmax", {"x": x}, {})),
        "gated_mlp/rows_alone": ("9", _rows_alone("gated_mlp", {"x": x}, mlp)),
        "route/rows_alone": ("9.2", _rows_alone("route", {"logits": x}, router)),
        "moe/rows_alone": ("9.3", _rows_alone("moe", routed, experts)),
        "linear/repeated": ("2.2", _repeated("linear", {"x": x, "w": w})),
        "attention/repeated": ("8.2", _repeated("attention", attention)),
        "attention/poison_behind_window": ("8.1", _poisoned_attention),
    }
    for sizes in ([1] * 40, [7, 7, 7, 7], [31, 1, 33], [32, 32, 6]):
        name = "decode" if set(sizes) == {1} else "_".join(map(str, sizes))
        checks[f"attention/chunks_{name}"] = ("8.2", _chunked_attention(sizes))
    for weights in ("float32", "int4", "int4-row"):
        for size in (1, 7, 32):
            name = f"forward/{weights}_chunks_of_{size}"
            checks[name] = ("10.2", _chunked_model(weights, 40, _split(40, size)))
    checks["forward/long_chunks_of_100"] = (
        "10.2",
        _chunked_model("float32", 520, _split(520, 100)),
    )
    checks |= sampling_checks.CHECKS
    checks |= serving_checks.checks()
    return [
        Invariance(f"invariance/{name}", section, check)
        for name, (section, check) in checks.items()
    ]
