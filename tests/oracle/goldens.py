"""Goldens judged by the oracle: their bits, and how far they lie from the real values.

`python -m tests.oracle.goldens` writes the record, goldens/ORACLE.json: for each golden listed here
whether the oracle gives its outputs to the bit, and the largest share of its `distance` that lies
between its first output and the value that exact real arithmetic gives (null where the golden has
no distance). Nothing here computes with the code that made the goldens, but the forward passes of
whole models (`serving`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.golden import Golden, read_all
from tests.oracle import (
    aligned,
    attention,
    cache,
    elementary,
    experts,
    layers,
    numbers,
    quantization,
    real,
    sampling,
    serving,
)
from tests.oracle.arrays import CANONICAL_NAN
from tests.oracle.nasty import tolist
from tests.oracle.numbers import NAN

Array = NDArray[Any]
Reals = list[Any]

FOLDER = Path(__file__).parents[2] / "goldens"
RECORD = FOLDER / "ORACLE.json"

FUNCTIONS = ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh")
ATTENTION = (
    *("decode_1", "decode_33", "decode_65", "prefill_31", "warm_4_of_8", "head_dim_1"),
    *("head_dim_33", "heads_6_2", "sinks", "everything", "window_1"),
    *("wide_64_decode", "wide_128_decode", "wide_64_window_sinks", "wide_128_window_sinks"),
    "wide_64_softcap",
    *("one_hot_None", "one_hot_8", "constant", "huge_scores", "zero_values", "wide_values"),
    *("poison_future", "poison_past", "poison_edge", "poison_query", "poison_overflow"),
    *("poison_sinks", "poison_softcap", "poison_blind"),
    *("heads_16_1", "heads_32_2", "head_dim_256", "decode_513", "decode_everything"),
    "low_scores_window",
)
MLP = ("silu_33_65", "gelu_tanh_32_64", "silu_saturated", "gelu_tanh_saturated")
LINEAR = (
    *("k1_t1", "k32_t1", "k33_t5", "k65_t1", "k288_t1", "bias", "heavy_tails", "outlier_channels"),
    *("subnormal", "one_hot", "wide_block", "zeros", "overflow", "not_finite"),
    *("tiles_t1", "tiles_t16", "k2049_t1", "columns_261", "bias_t1"),
    *("bias_large", "bias_zero_row"),
)
MOE = (
    *("decode_k3", "gelu_tanh", "no_tokens", "shared_wide", "shared_gated_1", "rank_order"),
    *("not_finite", "overflow", "tokens_70", "experts_136", "shared_alone"),
)
NORM = (
    *("k1", "k33", "k65", "eps_1e-5", "eps_1e-6", "spike", "zero_row", "not_finite", "overflow"),
    *("eps_float64_1e-5", "eps_float64_1e-6", "k2049"),
)


def selected(ids: Sequence[str]) -> list[str]:
    """The goldens that the oracle judges, of all ids."""
    wanted = {f"elementary/{name}/{case}" for name in FUNCTIONS for case in ("all", "special")}
    wanted |= {
        f"elementary/softmax/{case}"
        for case in ("k1", "k2", "k32", "k33", "k65", "k131", "k1025", "low", "special")
    }
    wanted |= {f"kernel/attention/{case}" for case in ATTENTION}
    wanted |= {f"kernel/linear/{case}" for case in LINEAR}
    wanted |= {f"kernel/rms_norm/{case}" for case in NORM}
    wanted |= {
        f"kernel/linear_int4/{case}"
        for case in ("k1_row", "k33_group", "k96_row", "tiles_t1", "tiles_t16", "edges", "limit")
    }
    wanted |= {f"kernel/gated_mlp/{case}" for case in MLP}
    wanted |= {f"kernel/moe/{case}" for case in MOE}
    whole = (
        "kernel/route/",
        "kernel/quantize_int4/",
        "kernel/quantize_int8/",
        "kernel/linear_w4a16/",
        "kernel/linear_q4_0/",
        "kernel/linear_q8_0/",
        "kernel/rope",
        "kernel/philox/",
        "kernel/sample/",
        "kernel/verify_draft/",
        "cache/",
        "generation/generate/to_the_end",
        "generation/complete/",
        "generation/turns/",
        "generation/speculate/",
        "generation/serve/",
        "generation/resume/",
    )
    wanted |= {i for i in ids if "/order" in i and not i.startswith("model/")}
    return [i for i in ids if i in wanted or i.startswith(whole)]


# Outputs to the bit.

Answer = dict[str, Any]


def _linear(x: Any, w: Any, bias: Any = None) -> Answer:
    rows = aligned.matmul(x, w)
    if bias is not None:
        rows = [[numbers.add(v, b) for v, b in zip(row, bias, strict=True)] for row in rows]
    return {"y": rows}


def _quantize_int4(w: Any, group: int) -> Answer:
    rows = [quantization.quantize_row(row, group) for row in w]
    return {"packed": [quantization.pack(q) for q, _ in rows], "scales": [s for _, s in rows]}


def _quantize_int8(x: Any) -> Answer:
    rows = [
        quantization.quantize_int8(row) if aligned.finite(row) else ([0] * len(row), NAN)
        for row in x
    ]
    return {"codes": [codes for codes, _ in rows], "scale": [scale for _, scale in rows]}


def unpack(packed: Any, width: int) -> list[list[int]]:
    """Codes -7..7 of packed rows."""
    return [
        [int(nibble) - 8 for byte in row for nibble in (int(byte) & 15, int(byte) >> 4)][:width]
        for row in packed
    ]


def _linear_int4(x: Any, packed: Any, scales: Any, group: int) -> Answer:
    codes = unpack(packed, len(x[0]))
    return {"y": [quantization.linear_row(row, codes, scales, group) for row in x]}


def w4a16_weights(
    packed: Any, scales: Any, group: int, width: int, zeros: Any = None
) -> list[list[Fraction]]:
    """scale * (code - zero) of every weight, without rounding."""
    weights = []
    for n, row in enumerate(unpack(packed, width)):
        found: list[Fraction] = []
        for g, members in enumerate(quantization.groups(width, group)):
            moved = 0 if zeros is None else 8 - int(zeros[n][g])
            found += [Fraction(scales[n][g]) * (row[k] + moved) for k in members]
        weights.append(found)
    return weights


def _linear_w4a16(x: Any, packed: Any, scales: Any, group: int, zeros: Any = None) -> Answer:
    exact = w4a16_weights(packed, scales, group, len(x[0]), zeros)
    weights = [[numbers.narrow(float(v)) for v in row] for row in exact]
    assert all(
        Fraction(v) == w
        for row, wanted in zip(weights, exact, strict=True)
        for v, w in zip(row, wanted, strict=True)
    ), "a weight must be a float32"
    return _linear(x, weights)


def _linear_blocks(kind: str, x: Any, blocks: Any) -> Answer:
    return {"y": [quantization.linear_blocks(row, blocks, kind) for row in x]}


def _rms_norm(x: Any, weight: Any, eps: float) -> Answer:
    return {"y": [layers.rms_norm(row, weight, eps) for row in x]}


def _rope_constants(parameters: Any, position: int) -> Answer:
    p = dict(parameters)
    d = int(p.pop("head_dim") * p.pop("partial_rotary_factor", 1.0))
    longest = p.pop("max_position_embeddings")
    old = p.pop("original_max_position_embeddings", longest)
    if p["rope_type"] == "longrope":
        p.setdefault("factor", longest / old)
    rope = layers.Rope(p.pop("rope_type"), p.pop("rope_theta"), d, old=old, **p)
    inv_freq, factor = layers.rope_constants(rope, position)
    return {"inv_freq": inv_freq, "factor": [factor]}


def _rope(x: Any, positions: Any, inv_freq: Any, factor: float, interleaved: bool) -> Answer:
    out = []
    for token, position in zip(x, positions, strict=True):
        angles = [numbers.multiply(float(position), f) for f in inv_freq]
        cos = [numbers.multiply(factor, elementary.cos(a)) for a in angles]
        sin = [numbers.multiply(factor, elementary.sin(a)) for a in angles]
        out.append([layers.rotate(head, cos, sin, interleaved) for head in token])
    return {"y": out}


def _attention(q: Any, k: Any, v: Any, **options: Any) -> Answer:
    return {"y": attention.attention(q, k, v, **options)}


def _gated_mlp(x: Any, gate: Any, up: Any, down: Any, activation: str) -> Answer:
    g, u, d = (layers.linear(w) for w in (gate, up, down))
    return {"y": [layers.gated_mlp(row, g, u, d, activation) for row in x]}


def _route(logits: Any, selection_bias: Any = None, **about: Any) -> Answer:
    routed = [experts.route(row, selection_bias=selection_bias, **about) for row in logits]
    return {"experts": [r[0] for r in routed], "gates": [r[1] for r in routed]}


def _moe(x: Any, gates: Any, activation: str, **about: Any) -> Answer:
    def expert(gate: Any, up: Any, down: Any) -> experts.Layer:
        g, u, d = (layers.linear(w) for w in (gate, up, down))
        return lambda row: layers.gated_mlp(row, g, u, d, activation)

    each = [expert(*w) for w in zip(about["gate"], about["up"], about["down"], strict=True)]
    shared, weighed = None, None
    if "shared_gate" in about:
        shared = expert(about["shared_gate"], about["shared_up"], about["shared_down"])
    if "shared_router" in about:
        weighed = layers.linear(about["shared_router"])
    routing = zip(x, about["experts"], gates, strict=True)
    return {"y": [experts.moe(*row, each, shared, weighed) for row in routing]}


def _philox(seed: int, request: int, positions: Any, stream: int = 0) -> Answer:
    return {"y": [sampling.philox(seed, request, int(p), stream) for p in positions]}


def _sample(logits: Any, previous: Any, **about: Any) -> Answer:
    word = sampling.philox(about["seed"], about["request"], about["position"])
    temperature, penalty = (
        numbers.narrow(about[name]) for name in ("temperature", "repetition_penalty")
    )
    filters = about["top_k"], about["top_p"], about["min_p"]
    return {
        "y": [sampling.sample(logits, temperature, *filters, penalty, map(int, previous), word)]
    }


def _verify_draft(
    logits: Any, draft: Any, draft_weights: Any, previous: Any, **about: Any
) -> Answer:
    def random(row: int, stream: int) -> Fraction:
        at = about["seed"], about["request"], about["position"] + row
        return Fraction(sampling.philox(*at, stream), 2**64)

    temperature, penalty = (
        numbers.narrow(about[name]) for name in ("temperature", "repetition_penalty")
    )
    filters = about["top_k"], about["top_p"], about["min_p"]
    laws = [sampling.shares(dict(enumerate(row))) for row in draft_weights]
    rules = temperature, filters, penalty
    return {"y": sampling.verify(logits, draft, laws, *rules, previous, random)}


def _paged(attend: Callable[..., Any], k_pages: Any, v_pages: Any, **about: Any) -> Any:
    """Attention over the positions in order."""
    where = about.pop("block_table"), about.pop("length")
    k, v = (cache.gather(pages, *where) for pages in (k_pages, v_pages))
    return attend(k=k, v=v, **about)


def _store_kv(x: Any, dtype: str) -> Answer:
    return {"y": [[cache.store(head, dtype) for head in token] for token in x]}


def _page_hashes(tokens: Any, page_size: int, digest: str, dtype: str, salt: str) -> Answer:
    chain = cache.hashes(tokens, page_size, digest, dtype, salt)
    return {"y": [list(value) for value in chain]}


def _split(tokens: Any, lengths: Any) -> list[tuple[int, ...]]:
    return [tuple(tokens[sum(lengths[:i]) :][:n]) for i, n in enumerate(lengths)]


def _prefix_reuse(tokens: Any, lengths: Any, page_size: int, pages: int) -> Answer:
    return {"y": cache.prefix_reuse(_split(tokens, lengths), page_size, pages)}


def _serve(
    tokens: Any, lengths: Any, model: str, weights: Any, max_new_tokens: int, **others: int
) -> Answer:
    """Each alone: pages, passes and drafts change nothing."""
    prompts = _split(tokens, lengths)
    answers = [serving.greedy(model, weights, prompt, max_new_tokens) for prompt in prompts]
    return {"tokens": [a[0] for a in answers], "logits": [a[1] for a in answers]}


def _turns(tokens: Any, lengths: Any, **about: Any) -> Answer:
    answer = _serve(tokens, lengths, **about)
    windows = serving.windows(about["model"], about["weights"])
    found = serving.reused(_split(tokens, lengths), answer["tokens"], windows)
    computed = [n - reused for n, reused in zip(lengths, found, strict=True)]
    return {**answer, "cache_n": found, "prompt_n": computed}


def _generate(
    prompt: Any, model: str, weights: Any, max_new_tokens: int, exact_prefill: bool
) -> Answer:
    """Of a prompt below the floor of fast attention, up to the end of the context."""
    assert exact_prefill or len(prompt) < 512
    left = serving.context(model, weights) - len(prompt) + 1
    tokens, rows = serving.greedy(model, weights, tuple(prompt), min(max_new_tokens, left))
    return {"tokens": tokens, "logits": rows}


def _complete(prompt: Any, model: str, weights: Any, max_new_tokens: int) -> Answer:
    """Up to the first end token, in the limits of the context."""
    assert len(prompt) + max_new_tokens <= serving.context(model, weights)
    tokens, rows = serving.greedy(model, weights, tuple(prompt), max_new_tokens)
    count = serving.ended(tokens, serving.end_tokens(model))
    return {"tokens": tokens[:count], "logits": rows[:count]}


def _speculate(
    prompt: Any, model: str, weights: Any, max_new_tokens: int, draft_tokens: int
) -> Answer:
    tokens, rows = serving.greedy(model, weights, tuple(prompt), max_new_tokens)
    accepted = serving.accepted(tuple(prompt), tokens, draft_tokens)
    return {"tokens": tokens, "logits": rows, "accepted": accepted}


def _resume(prompt: Any, longer: Any, model: str, weights: Any, max_new_tokens: int) -> Answer:
    """All of what was saved but the last token, where nothing comes behind it."""
    assert tuple(longer[: len(prompt)]) == tuple(prompt)
    assert len(longer) < 512
    tokens, rows = serving.greedy(model, weights, tuple(longer), max_new_tokens)
    return {"tokens": tokens, "logits": rows, "cache_n": [min(len(prompt), len(longer) - 1)]}


ANSWERS: dict[str, Callable[..., Answer]] = {
    "softmax": lambda x: {"y": [elementary.softmax(row) for row in x]},
    "linear": _linear,
    "quantize_int4": _quantize_int4,
    "quantize_int8": _quantize_int8,
    "linear_int4": _linear_int4,
    "linear_w4a16": _linear_w4a16,
    "linear_q4_0": partial(_linear_blocks, "Q4_0"),
    "linear_q8_0": partial(_linear_blocks, "Q8_0"),
    "rms_norm": _rms_norm,
    "rope_constants": _rope_constants,
    "rope": _rope,
    "attention": _attention,
    "gated_mlp": _gated_mlp,
    "route": _route,
    "moe": _moe,
    "philox": _philox,
    "sample": _sample,
    "verify_draft": _verify_draft,
    "paged_attention": partial(_paged, _attention),
    "store_kv": _store_kv,
    "page_hashes": _page_hashes,
    "paging": lambda script, page_size: {"y": cache.paging(script, page_size)},
    "prefix_reuse": _prefix_reuse,
    "generate": _generate,
    "complete": _complete,
    "turns": _turns,
    "speculate": _speculate,
    "serve": _serve,
    "resume": _resume,
}


def answer(golden: Golden) -> Answer:
    """What the oracle answers, as nested lists by name."""
    inputs = {name: _plain(array) for name, array in golden.inputs.items()}
    if golden.operation in FUNCTIONS:
        function = getattr(elementary, golden.operation)
        return {"y": [function(x) for x in inputs["x"]]}
    return ANSWERS[golden.operation](**inputs, **golden.parameters)


def _plain(array: Array) -> Any:
    """Floats as the oracle's floats, integers as they are."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return array.tolist() if array.dtype.kind in "iu" else tolist(array)


def has_its_bits(golden: Golden) -> bool:
    """Whether the oracle's answer is the golden's, bit for bit."""
    answered = answer(golden)
    return set(answered) == set(golden.outputs) and all(
        _encode(answered[name], wanted.dtype).tobytes() == wanted.tobytes()
        and np.shape(answered[name]) == wanted.shape
        for name, wanted in golden.outputs.items()
    )


def _encode(values: Any, dtype: np.dtype[Any]) -> Array:
    """The oracle's numbers in a golden's dtype; the conversion must be exact."""
    if dtype.kind in "iu":
        return np.array(values, dtype)
    wide = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(dtype)
    known = ~np.isnan(wide)
    assert np.array_equal(narrow[known].astype(np.float64), wide[known]), "the oracle must round"
    if dtype == np.float32:
        narrow[~known] = np.uint32(CANONICAL_NAN).view(np.float32)
    return narrow


# Real values.


def _real_linear_int4(x: Any, packed: Any, scales: Any, group: int) -> Reals:
    """Codes and token scales are given; what follows is not rounded."""
    codes = unpack(packed, len(x[0]))
    rows = []
    for token in x:
        xq, s = (
            quantization.quantize_int8(token) if aligned.finite(token) else ([0] * len(token), 0.0)
        )
        rows.append(
            [
                real.mpf(
                    real.dot([float(q) for q in xq], quantization.dequantize_row(q, row, group))
                    * Fraction(s)
                )
                for q, row in zip(codes, scales, strict=True)
            ]
        )
    return rows


def _real_linear_w4a16(x: Any, packed: Any, scales: Any, group: int, zeros: Any = None) -> Reals:
    """Rows that are not finite have no real value."""
    weights = w4a16_weights(packed, scales, group, len(x[0]), zeros)
    return [
        [real.mpf(real.dot(row, w)) for w in weights]
        if aligned.finite(row)
        else [None] * len(packed)
        for row in x
    ]


def _real_linear_blocks(kind: str, x: Any, blocks: Any) -> Reals:
    """The same on blocks; every x is finite."""
    rows = []
    for token in x:
        xq, s = quantization.quantize_int8(token)
        row = []
        for stored in blocks:
            parts = [quantization.block(b, kind) for b in stored]
            weights = [scale * q for codes, scale in parts for q in codes]
            exact = sum((a * w for a, w in zip(xq, weights, strict=True)), Fraction(0))
            row.append(real.mpf(exact * Fraction(s)))
        rows.append(row)
    return rows


def _real_rope(x: Any, positions: Any, inv_freq: Any, factor: float, interleaved: bool) -> Reals:
    return [
        [real.rope(head, int(p), inv_freq, factor, interleaved) for head in token]
        for token, p in zip(x, positions, strict=True)
    ]


def _real_attention(
    q: Any, k: Any, v: Any, scale: float, window: Any, softcap: Any, sinks: Any = None
) -> Reals:
    """Rows that see what is not finite are None: they have no real value."""
    group = len(q[0]) // len(k[0])
    keys, values = ([[token[g] for token in x] for g in range(len(k[0]))] for x in (k, v))
    out: Reals = []
    for i, token in enumerate(q):
        t = len(k) - len(q) + i
        row: Reals = []
        for h, query in enumerate(token):
            g, sink = h // group, None if sinks is None else sinks[h]
            seen = attention.visible(t, window)
            if len(seen) == 0:
                row.append([real.mpf(0.0)] * len(query))
                continue
            sound = aligned.finite(query) and all(
                aligned.finite(keys[g][j]) and aligned.finite(values[g][j]) for j in seen
            )
            sound = sound and (sink is None or sink < math.inf)
            about = (query, keys[g], values[g], t, scale, window, softcap, sink)
            row.append(real.attend(*about) if sound else [None] * len(query))
        out.append(row)
    return out


def _real_route(logits: Any, top_k: int, score: str, **about: Any) -> Reals:
    """Its experts are those of the oracle: no rounding decides between them."""
    rows = []
    for row in logits:
        chosen, _, _ = experts.route(row, top_k, score, **about)
        gates = {n: about[n] for n in ("renormalise", "epsilon", "scale") if n in about}
        rows.append(real.gates(row, chosen, score, **gates))
    return rows


def _real_moe(x: Any, gates: Any, activation: str, **about: Any) -> Reals:
    def expert(gate: Any, up: Any, down: Any) -> Callable[[Any], Reals]:
        return lambda row: real.gated_mlp(row, gate, up, down, activation)

    each = [expert(*w) for w in zip(about["gate"], about["up"], about["down"], strict=True)]
    shared = None
    if "shared_gate" in about:
        shared = expert(about["shared_gate"], about["shared_up"], about["shared_down"])
    router = about["shared_router"][0] if "shared_router" in about else None
    routing = zip(x, about["experts"], gates, strict=True)
    return [real.moe(*row, each, shared, router) for row in routing]


REALS: dict[str, Callable[..., Reals]] = {
    "softmax": lambda x: [real.softmax(row) for row in x],
    "linear": lambda x, w, bias=None: [real.linear(row, w, bias) for row in x],
    "linear_int4": _real_linear_int4,
    "linear_w4a16": _real_linear_w4a16,
    "linear_q4_0": partial(_real_linear_blocks, "Q4_0"),
    "linear_q8_0": partial(_real_linear_blocks, "Q8_0"),
    "rms_norm": lambda x, weight, eps: [real.rms_norm(row, weight, eps) for row in x],
    "rope": _real_rope,
    "attention": _real_attention,
    "paged_attention": partial(_paged, _real_attention),
    "route": _real_route,
    "moe": _real_moe,
    "gated_mlp": lambda x, activation, **w: [
        real.gated_mlp(row, w["gate"], w["up"], w["down"], activation) for row in x
    ],
}


def real_values(operation: str, inputs: dict[str, Any], parameters: dict[str, Any]) -> Reals:
    """The first output without any rounding, nested as it is; arrays in, mpmath numbers out."""
    lists = {name: _plain(array) for name, array in inputs.items()}
    with real.precision():
        if operation in real.ACTIVATIONS:
            return [real.ACTIVATIONS[operation](real.mpf(x)) for x in lists["x"]]
        return REALS[operation](**lists, **parameters)


def margins(output: Array, reals: Reals, distance: Array) -> NDArray[np.float64]:
    """|output - real| / distance by element; 0 where the output is not finite."""
    flat = np.array(reals, dtype=object).reshape(-1)
    assert flat.shape == (output.size,)
    out = np.zeros(output.size)
    with real.precision():
        for at, (y, wanted, allowed) in enumerate(
            zip(output.flat, flat, distance.flat, strict=True)
        ):
            if not math.isfinite(y):
                continue
            error = abs(real.mpf(float(y)) - wanted)
            out[at] = (
                float(error / real.mpf(float(allowed))) if allowed else (math.inf if error else 0)
            )
    return out.reshape(output.shape)


def measure(golden: Golden) -> dict[str, Any]:
    """One line of the record."""
    margin = None
    if golden.distance is not None:
        values = real_values(golden.operation, dict(golden.inputs), dict(golden.parameters))
        bounded = next(y for y in golden.outputs.values() if y.dtype.kind == "f")
        worst = margins(bounded, values, golden.distance).max(initial=0.0)
        margin = round(float(worst), 3)
    return {"bits": has_its_bits(golden), "margin": margin}


def goldens() -> list[Golden]:
    """The goldens of the record."""
    listed = json.loads((FOLDER / "MANIFEST.json").read_text())["files"]
    wanted = selected([name.removesuffix(".safetensors") for name in listed])
    return list(read_all(FOLDER, set(wanted)))


def text(record: dict[str, dict[str, Any]]) -> str:
    """The record's file: one golden a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(line)}" for name, line in sorted(record.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    RECORD.write_text(text({golden.id: measure(golden) for golden in goldens()}))
