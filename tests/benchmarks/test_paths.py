"""A benchmark for every path, grouped, each beside a numpy primitive of the same run.

    python -m pytest tests/benchmarks/test_paths.py --benchmark-only

Seconds belong to one machine. `extra_info` of each benchmark therefore holds `times_primitive`, how
many times as long the path takes as a primitive that does the like work (a GEMM of the same
operations, a copy of the same bytes, exp over as many elements), the two taking turns, both on one
thread. That can be compared across machines, and `tools/compare_baseline.py` does so;
`baselines/README.md` says how. Nothing here fails for being slow.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reference import elementary
from reference.arithmetic import F32
from reference.attention import Scores, attend_exact, attention_exact, attention_fast, default_scale
from reference.blocks import linear_q4_0, linear_q8_0, read_blocks
from reference.cache import KVCache, PagePool, PageShape
from reference.cache.prefix import page_hash
from reference.cache.snapshot import restore, save
from reference.experts import Router, by_expert, by_token, route
from reference.feedforward import ACTIVATIONS, gated_mlp
from reference.model import Model, load_model
from reference.normalization import rms_norm
from reference.quantization import linear_int4, quantize_int4
from reference.rotary import RopeParameters, cos_sin, rotate
from reference.sampling import Sampling, law_of, sample
from reference.speculation import Proposal, verify
from reference.threads import limited_to
from reference.weights import Arithmetic, Mode, linear, native_linear
from tests.benchmarks.test_speed import normal

Run = Callable[[], object]
FIXTURES = Path(__file__).parents[2] / "fixtures"
TURNS, LEAST = 12, 2e-3
"""How often the sides take turns, and seconds that one of them computes at least."""

TOKENS, WIDTH, INNER, HEADS, HEAD = 256, 256, 1024, 4, 64


# -------------------------------------------------------------------------------------- primitives


@dataclass(frozen=True)
class Primitive:
    """Work of numpy alone, and what it is."""

    name: str
    run: Run


def gemm(rows: int, inner: int, columns: int, dtype: str) -> Primitive:
    """A product (rows, inner) x (inner, columns) of BLAS; of one row, a matrix times a vector."""
    a, b = normal(rows, inner).astype(dtype), normal(columns, inner, seed=1).astype(dtype)
    kind = {"float32": "s", "float64": "d"}[dtype] + ("gemm" if rows > 1 else "gemv")
    if rows == 1:
        return Primitive(f"{kind} {columns} x {inner}", partial(np.dot, b, a[0]))
    return Primitive(f"{kind} {rows} x {inner} x {columns}", lambda: a @ b.T)


def copy(count: int) -> Primitive:
    """Copying so many bytes."""
    source = np.zeros(count, np.uint8)
    return Primitive(f"copy of {count} bytes", partial(np.copyto, np.empty_like(source), source))


def exponentials(count: int) -> Primitive:
    """numpy's exp over so many float32."""
    x = normal(count)
    return Primitive(f"exp of {count} float32", lambda: np.exp(x))


def sorting(count: int) -> Primitive:
    """Sorting so many int64: branches, on one core."""
    x = np.random.default_rng(0).integers(0, 1 << 40, count)
    return Primitive(f"sort of {count} int64", lambda: np.sort(x))


# --------------------------------------------------------------------------------------- measuring


def seconds(run: Run, calls: int) -> float:
    """Seconds of a call, over some in a row."""
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started) / calls


def calls_for(run: Run) -> int:
    """Calls that together take long enough to be timed: too few would each find caches cold."""
    run()
    return max(1, math.ceil(LEAST / max(min(seconds(run, 1) for _ in range(5)), 1e-9)))


@dataclass(frozen=True)
class Case:
    """A path, its group, and the primitive beside it; both are made when they are needed."""

    name: str
    group: str
    make: Callable[[], Run]
    primitive: Callable[[], Primitive]


def measure(benchmark: Any, run: Run, primitive: Primitive) -> None:
    """The two in turns, and the benchmark's own rounds of the path.

    times_primitive is that of the least times: what others do on the machine only adds to them.
    """
    with limited_to(1):
        mine, other = calls_for(run), calls_for(primitive.run)
        pairs = [(seconds(run, mine), seconds(primitive.run, other)) for _ in range(TURNS)]
        least, plain = (min(times) for times in zip(*pairs, strict=True))
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        benchmark.extra_info.update(
            primitive=primitive.name,
            primitive_seconds=plain,
            path_seconds=least,
            times_primitive=least / plain,
            times_primitive_quarter=ratios[TURNS // 4],
            times_primitive_three_quarters=ratios[-1 - TURNS // 4],
            turns=TURNS,
        )
        benchmark.pedantic(run, rounds=5, iterations=mine, warmup_rounds=1)


# ------------------------------------------------------------------------------------------- paths


def on_array(function: Callable[[F32], F32], *shape: int) -> Callable[[], Run]:
    """A function of one array."""
    return lambda: partial(function, normal(*shape))


def dense(mode: Mode, arithmetic: Arithmetic, rows: int) -> Run:
    """A linear layer as a model has it, its weights prepared once."""
    return partial(
        linear(normal(INNER, WIDTH, seed=1), None, mode, arithmetic), normal(rows, WIDTH)
    )


@cache
def blocks(kind: str) -> Any:
    """Bytes of a Q4_0 or Q8_0 matrix, (INNER, WIDTH / 32, 18 or 34) uint8."""
    shape = (INNER, WIDTH // 32, 18 if kind == "Q4_0" else 34)
    stored = np.random.default_rng(2).integers(0, 256, shape, np.uint8)
    scales = np.full((*shape[:2], 1), 0.01, "<f2")
    stored[..., :2] = scales.view(np.uint8)
    return stored


def native(kind: Any) -> Run:
    """A layer that computes on the codes of a GGUF file."""
    layer = native_linear(read_blocks(blocks(kind), kind), None, "exact", "benchmark")
    return partial(layer, normal(TOKENS, WIDTH))


def of_kernel(kind: str) -> Run:
    """The same operations with their packed bytes as arguments, unpacked at each call."""
    x = normal(TOKENS, WIDTH)
    if kind == "int4":
        return partial(linear_int4, x, quantize_int4(normal(INNER, WIDTH, seed=1)))
    return partial(linear_q4_0 if kind == "Q4_0" else linear_q8_0, x, blocks(kind))


def heads(rows: int, kind: str) -> Run:
    """Attention of `rows` last tokens among TOKENS."""
    q, k, v = normal(rows, HEADS, HEAD), *(normal(TOKENS, HEADS, HEAD, seed=i) for i in (1, 2))
    return partial(attention_exact if kind == "exact" else attention_fast, q, k, v)


def paged() -> Run:
    """A decode step's attention over pages of 16."""
    pages = KVCache(PagePool(PageShape(HEADS, HEAD, (None,)), 1 << 26))
    (layer,) = pages.extend(TOKENS)
    layer.write(normal(TOKENS, HEADS, HEAD, seed=1), normal(TOKENS, HEADS, HEAD, seed=2))
    pages.commit(TOKENS)
    (held,) = pages.views()
    q, scores = normal(1, HEADS, HEAD), Scores(default_scale(HEAD))
    return lambda: attend_exact(q, held.aligned(), TOKENS, scores)


def normed(x: F32) -> F32:
    """A norm with weights."""
    return rms_norm(x, x[0], 1e-6)


def rope() -> Run:
    """Angles and rotation of all heads."""
    parameters, positions = RopeParameters("default", 10000.0, HEAD), np.arange(TOKENS)
    x = normal(TOKENS, HEADS, HEAD)
    return lambda: rotate(x, *cos_sin(parameters, positions))


def mlp(inner: int = INNER) -> Callable[[F32], F32]:
    """A gated layer with its weights."""
    gate_up = linear(normal(2 * inner, WIDTH, seed=1), None, "float32", "exact")
    down = linear(normal(WIDTH, inner, seed=2), None, "float32", "exact")
    return lambda x: gated_mlp(x, gate_up, down, ACTIVATIONS["silu"])


def of_mlp() -> Run:
    """The gated layer of a prompt."""
    return partial(mlp(), normal(TOKENS, WIDTH))


EXPERTS, CHOSEN = 16, 4


def routing() -> Run:
    """The choice of experts for all tokens."""
    return partial(route, normal(TOKENS, EXPERTS), Router(EXPERTS, CHOSEN))


def experts(run: Callable[..., F32], rows: int) -> Run:
    """What the chosen experts make of `rows` tokens."""
    chosen = route(normal(rows, EXPERTS), Router(EXPERTS, CHOSEN)).experts
    return partial(run, normal(rows, WIDTH), chosen, [mlp(64) for _ in range(EXPERTS)])


VOCABULARY, DRAFTED = 32000, 4
WARM = Sampling(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1)


def sampled() -> Run:
    """A draw with every step on."""
    return partial(sample, normal(VOCABULARY), WARM, np.arange(64), 1, 2, 3)


def verified() -> Run:
    """A draft judged, that the target would have drawn from the same laws."""
    logits, previous = normal(DRAFTED + 1, VOCABULARY), np.arange(64)
    laws = [law_of(row, WARM, previous) for row in logits[:DRAFTED]]
    tokens = [sample(row, WARM, previous, 1, 2, 3) for row in logits[:DRAFTED]]
    return partial(verify, logits, Proposal(tokens, laws), WARM, previous, 1, 2, 3)


@cache
def tiny(weights: Mode, arithmetic: Arithmetic) -> Model:
    """`tiny-dense`."""
    return load_model(FIXTURES / "tiny-dense", weights, arithmetic)


def products(model: Model) -> int:
    """Weights of `tiny-dense` that a token is multiplied with, over its width."""
    config = model.config
    attention = config.heads * config.head_dim * 2 + config.kv_heads * config.head_dim * 2
    layer = attention + 3 * config.intermediate_size
    return config.layers * layer + config.vocab_size


def prompt() -> list[int]:
    """TOKENS tokens."""
    found: list[int] = np.random.default_rng(0).integers(0, 1024, TOKENS).tolist()
    return found


def prefill(weights: Mode, arithmetic: Arithmetic) -> Run:
    """A pass of the whole prompt."""
    model = tiny(weights, arithmetic)
    attention: Any = "exact" if arithmetic == "exact" else "fast"
    return lambda: model.forward(prompt(), None, attention, last_only=True)


def decode(weights: Mode, arithmetic: Arithmetic) -> Run:
    """A pass of one token after the prompt."""
    model = tiny(weights, arithmetic)
    held = model.new_cache()
    attention: Any = "exact" if arithmetic == "exact" else "fast"
    model.forward(prompt(), held, attention)

    def step() -> None:
        model.forward([5], held, attention)
        held.truncate(TOKENS)

    return step


def whole(rows: int, dtype: str) -> Primitive:
    """The products of `tiny-dense` with its weights, as one."""
    model = tiny("float32", "exact")
    return gemm(rows, model.config.hidden_size, products(model), dtype)


PAGES = 64


def hashing() -> Run:
    """The chain of hashes of PAGES pages of 16 tokens."""
    tokens = np.arange(16 * PAGES).reshape(PAGES, 16)

    def chain() -> bytes:
        digest = b"\0" * 32
        for page in tokens:
            digest = page_hash(digest, page)
        return digest

    return chain


def plain_hashing() -> Primitive:
    """sha256 as Python has it, of as many bytes in as many calls."""
    page = os.urandom(32 + 64)
    return Primitive(
        f"sha256 of 96 bytes, {PAGES} times",
        lambda: [hashlib.sha256(page).digest() for _ in range(PAGES)],
    )


def held_cache() -> tuple[Model, KVCache, list[int]]:
    """A cache that holds the prompt."""
    model, tokens = tiny("float32", "exact"), prompt()
    held = model.new_cache()
    model.forward(tokens, held)
    return model, held, tokens


def saving(folder: Path) -> Run:
    """A cache written to a file, onto the disk."""
    model, held, tokens = held_cache()
    return lambda: save(folder / "kept", held, tokens, model.digest)


def restoring(folder: Path) -> Run:
    """A cache read from a file."""
    model, held, tokens = held_cache()
    save(folder / "kept", held, tokens, model.digest)
    pool = model.new_pool(1 << 26)
    return lambda: restore(folder / "kept", pool, model.digest)[2].free()


def snapshot() -> NDArray[np.uint8]:
    """As many bytes as a snapshot holds: keys and values of all layers in float32."""
    config = tiny("float32", "exact").config
    return np.zeros(2 * 4 * config.layers * config.kv_heads * config.head_dim * TOKENS, np.uint8)


def writing(folder: Path) -> Primitive:
    """As many bytes written by numpy, onto the disk."""
    kept = snapshot()

    def write() -> None:
        with (folder / "plain").open("wb") as file:
            kept.tofile(file)
            os.fsync(file.fileno())

    return Primitive(f"tofile and fsync of {kept.nbytes} bytes", write)


def digesting(folder: Path) -> Primitive:
    """sha256 of as many bytes, which a snapshot is checked by."""
    kept = snapshot()
    return Primitive(f"sha256 of {kept.nbytes} bytes", lambda: hashlib.sha256(kept.data).digest())


def encoding(decode_too: bool) -> Run:
    """512 tokens of text to ids, or ids to text."""
    tokenizer = tiny("float32", "exact").tokenizer
    assert tokenizer is not None
    text = (FIXTURES / "prompts" / "512.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    return partial(tokenizer.decode, ids) if decode_too else partial(tokenizer.encode, text)


FUNCTIONS = ("exp", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh")
MANY = 1 << 16

exps, copied = partial(exponentials, MANY), partial(copy, 4 * TOKENS * WIDTH)
product = partial(gemm, TOKENS, WIDTH, INNER)
row = partial(gemm, 1, WIDTH, INNER)
scores = partial(gemm, TOKENS, WIDTH, 2 * TOKENS)
row_scores = partial(gemm, 1, WIDTH, 2 * TOKENS)
of_experts = partial(gemm, TOKENS, WIDTH, 3 * 64 * CHOSEN, "float64")
row_of_experts = partial(gemm, 1, WIDTH, 3 * 64 * CHOSEN, "float64")
DOUBLE, SINGLE = "float64", "float32"

MODELS: dict[str, tuple[Mode, Arithmetic, str]] = {
    "exact": ("float32", "exact", DOUBLE),
    "float32": ("float32", "float32", SINGLE),
    "int4": ("int4", "exact", DOUBLE),
}

CASES = [
    *(
        Case(name, "elementary", on_array(getattr(elementary, name), MANY), exps)
        for name in FUNCTIONS
    ),
    Case("log", "elementary", on_array(lambda x: elementary.log(np.abs(x)), MANY), exps),
    Case("softmax", "elementary", on_array(elementary.softmax, 64, 1024), exps),
    Case("rms_norm", "normalization", on_array(normed, TOKENS, WIDTH), copied),
    Case("rope", "rotary", rope, copied),
    Case("exact", "linear", partial(dense, "float32", "exact", TOKENS), partial(product, DOUBLE)),
    Case(
        "float32", "linear", partial(dense, "float32", "float32", TOKENS), partial(product, SINGLE)
    ),
    Case("int4", "linear", partial(dense, "int4", "exact", TOKENS), partial(product, DOUBLE)),
    Case("native q4_0", "linear", partial(native, "Q4_0"), partial(product, DOUBLE)),
    Case("native q8_0", "linear", partial(native, "Q8_0"), partial(product, DOUBLE)),
    Case("int4 from bytes", "linear", partial(of_kernel, "int4"), partial(product, DOUBLE)),
    Case("q4_0 from bytes", "linear", partial(of_kernel, "Q4_0"), partial(product, DOUBLE)),
    Case("q8_0 from bytes", "linear", partial(of_kernel, "Q8_0"), partial(product, DOUBLE)),
    Case("exact", "linear, one row", partial(dense, "float32", "exact", 1), partial(row, DOUBLE)),
    Case(
        "float32", "linear, one row", partial(dense, "float32", "float32", 1), partial(row, SINGLE)
    ),
    Case("int4", "linear, one row", partial(dense, "int4", "exact", 1), partial(row, DOUBLE)),
    Case("exact", "attention", partial(heads, TOKENS, "exact"), partial(scores, DOUBLE)),
    Case("fast", "attention", partial(heads, TOKENS, "fast"), partial(scores, SINGLE)),
    Case("exact", "attention, one row", partial(heads, 1, "exact"), partial(row_scores, DOUBLE)),
    Case("fast", "attention, one row", partial(heads, 1, "fast"), partial(row_scores, SINGLE)),
    Case("paged", "attention, one row", paged, partial(row_scores, DOUBLE)),
    Case("gated mlp", "feedforward", of_mlp, partial(gemm, TOKENS, WIDTH, 3 * INNER, DOUBLE)),
    Case("route", "experts", routing, partial(exponentials, TOKENS * EXPERTS)),
    Case("by expert", "experts", partial(experts, by_expert, TOKENS), of_experts),
    Case("by token", "experts", partial(experts, by_token, TOKENS), of_experts),
    Case("by token, one row", "experts", partial(experts, by_token, 1), row_of_experts),
    Case("sample", "sampling", sampled, partial(sorting, VOCABULARY)),
    Case("verify_draft", "sampling", verified, partial(sorting, VOCABULARY * (DRAFTED + 1))),
    *(
        Case(name, group, partial(make, weights, arithmetic), partial(whole, rows, dtype))
        for group, make, rows in (("prefill", prefill, TOKENS), ("decode", decode, 1))
        for name, (weights, arithmetic, dtype) in MODELS.items()
    ),
    Case("page hashing", "cache", hashing, plain_hashing),
    Case("encode", "tokenizer", partial(encoding, False), partial(sorting, 1 << 14)),
    Case("decode", "tokenizer", partial(encoding, True), partial(sorting, 1 << 14)),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=pytest.mark.benchmark(group=case.group), id=f"{case.group}: {case.name}"
        )
        for case in CASES
    ],
)
def test_path(benchmark: Any, case: Case) -> None:
    measure(benchmark, case.make(), case.primitive())


@pytest.mark.benchmark(group="cache")
@pytest.mark.parametrize(
    ("make", "primitive"), [(saving, writing), (restoring, digesting)], ids=["save", "restore"]
)
def test_snapshot(
    benchmark: Any,
    tmp_path: Path,
    make: Callable[[Path], Run],
    primitive: Callable[[Path], Primitive],
) -> None:
    measure(benchmark, make(tmp_path), primitive(tmp_path))
