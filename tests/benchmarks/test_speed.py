"""The speed of the exact lane beside float64 GEMM, plain numpy and transformers, in one run.

    pytest tests/benchmarks --benchmark-only -s

prints the ratios. They are figures, not tests: nothing here fails for being slow. The sides take
turns, some rounds each, and the ratio is that of the medians.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from reference.arithmetic import BLOCK, F32, F64, align, align_weights, matmul
from reference.attention import attention_exact, attention_fast
from reference.model import Model, load_model
from reference.threads import single_blas, thread_count

Run = Callable[[], object]


def seconds(run: Run, rounds: int) -> list[float]:
    """Times of one side's rounds in a row, once the other side's threads have come to rest.

    The first 0.1 s do not count: after a rest, Linux may keep both threads on one core for a while.
    """
    time.sleep(0.2)
    warm = time.perf_counter() + 0.1
    while time.perf_counter() < warm:
        run()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def compare(
    benchmark: Any, name: str, ours: Run, theirs: Run, wanted: str, rounds: int = 3
) -> None:
    """Print and record speed(ours) / speed(theirs); the benchmark's own rounds time ours."""
    sides: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        for run, times in zip((ours, theirs), sides, strict=True):
            times += seconds(run, rounds)
    mine, other = map(median, sides)
    benchmark.pedantic(ours, rounds=3)
    benchmark.extra_info.update(ratio=other / mine, wanted=wanted)
    figures = f"{mine * 1e3:.3g} ms against {other * 1e3:.3g} ms"
    print(f"\n{name}: {other / mine:.2f} of the other's speed ({figures}; aim: {wanted})")


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_matmul_against_dgemm(benchmark: Any) -> None:
    x, w = normal(512, 2048), normal(2048, 2048, seed=1)
    aligned, x64, w64 = align_weights(w), x.astype(np.float64), w.astype(np.float64)
    name = f"exact matmul 512 x 2048 x 2048, {thread_count()} threads, against dgemm"
    compare(benchmark, name, lambda: matmul(x, aligned), lambda: x64 @ w64.T, "0.5")


@pytest.mark.parametrize("threads", [1, 2])
def test_one_row_against_dgemv(
    benchmark: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread is one on both sides: BLAS is held to it, and so is what shares out our tiles."""
    x, w = normal(1, 2048), normal(2048, 2048, seed=1)
    aligned, x64, w64 = align_weights(w), x.astype(np.float64), w.astype(np.float64)
    ours = align(x)
    name = f"exact matmul, one row, {threads} thread(s), against dgemv"
    monkeypatch.setattr("reference.arithmetic.thread_count", lambda: min(threads, thread_count()))
    with single_blas() if threads == 1 else nullcontext():
        compare(
            benchmark, name, lambda: matmul(ours, aligned), lambda: x64 @ w64.T, "0.8", rounds=30
        )


@pytest.mark.parametrize("data", ["normal", "heavy tails", "outlier channels"])
def test_error_against_a_float32_gemm(benchmark: Any, data: str) -> None:
    rng = np.random.default_rng(3)
    x, w = normal(128, 1024), normal(256, 1024, seed=1)
    if data == "heavy tails":
        x, w = (rng.standard_t(2, v.shape).astype(np.float32) for v in (x, w))
    if data == "outlier channels":
        x[:, rng.choice(1024, 8, replace=False)] *= 1000
    real = x.astype(np.longdouble) @ w.T.astype(np.longdouble)
    exact, plain = (float(np.sqrt(((y - real) ** 2).mean())) for y in (matmul(x, w), x @ w.T))
    benchmark.pedantic(lambda: matmul(x, w), rounds=3)
    benchmark.extra_info["error_ratio"] = exact / plain
    print(f"\nrms error of exact matmul over a float32 GEMM's, {data}: {exact / plain:.2f}")
    assert exact < plain


def plain_attention(q: F32, k: F32, v: F32) -> F32:
    """Materialised float32 attention of one head group, as it is usually written in numpy."""
    width = q.shape[-1]
    mask = np.where(np.tri(len(q), dtype=bool), np.float32(0), np.float32(-np.inf))
    scores = q[:, 0] @ k[:, 0].T * np.float32(width**-0.5) + mask
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: F32 = p @ v[:, 0] / p.sum(axis=-1, keepdims=True)
    return out


@pytest.mark.parametrize(("kind", "wanted"), [("exact", "0.25"), ("fast", "above 1")])
def test_attention_against_plain_numpy(benchmark: Any, kind: str, wanted: str) -> None:
    q, k, v = (normal(2048, 1, 64, seed=i) for i in range(3))
    run = attention_exact if kind == "exact" else attention_fast
    name = f"{kind} attention, 2,048 tokens, head_dim 64, against plain float32 numpy"
    compare(benchmark, name, lambda: run(q, k, v), lambda: plain_attention(q, k, v), wanted)


@pytest.mark.parametrize("kind", ["exact", "fast", "plain"])
def test_memory_of_attention(benchmark: Any, kind: str) -> None:
    runs = {"exact": attention_exact, "fast": attention_fast, "plain": plain_attention}
    peaks = []
    for length in (2048, 4096, 8192):
        q, k, v = (normal(length, 1, 64, seed=i) for i in range(3))
        tracemalloc.start()
        runs[kind](q, k, v)
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    benchmark.pedantic(lambda: None, rounds=1)
    benchmark.extra_info["peaks"] = peaks
    figures = ", ".join(f"{peak:.1f}" for peak in peaks)
    print(f"\npeak memory of {kind} attention at 2,048, 4,096 and 8,192 tokens: {figures} MiB")


PROMPT = np.random.default_rng(0).integers(0, 32000, 512)


class Ours:
    """Prefill and decode of our model."""

    def __init__(self, model: Model) -> None:
        self.model, self.cache = model, model.new_cache()
        model.forward(PROMPT, self.cache, "fast")

    def prefill(self) -> None:
        self.model.forward(PROMPT, None, "fast")

    def decode(self) -> None:
        self.cache.truncate(len(PROMPT))
        for token in (5, 6, 7, 8):
            self.model.forward([token], self.cache)


class Theirs:
    """Prefill (all logits, as ours) and decode of transformers."""

    def __init__(self, folder: Path, attention: str) -> None:
        self.torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        self.torch.set_num_threads(thread_count())
        load: Any = transformers.LlamaForCausalLM.from_pretrained
        self.model = load(folder, attn_implementation=attention).eval()
        self.prompt = self.torch.from_numpy(PROMPT)[None]

    def prefill(self) -> Any:
        with self.torch.no_grad():
            return self.model(self.prompt, use_cache=True)

    def decode(self) -> None:
        past = self.past
        with self.torch.no_grad():
            for token in (5, 6, 7, 8):
                self.model(self.torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past.crop(-4)

    def warm(self) -> Theirs:
        self.past = self.prefill().past_key_values
        return self


def test_float32_prefill_against_transformers(benchmark: Any, llama: Path) -> None:
    ours, eager = Ours(load_model(llama, arithmetic="float32")), Theirs(llama, "eager")
    name = "float32 prefill of 512 tokens against transformers eager"
    compare(benchmark, name, ours.prefill, eager.prefill, "above 1")


def test_float32_decode_against_transformers(benchmark: Any, llama: Path) -> None:
    ours, sdpa = Ours(load_model(llama, arithmetic="float32")), Theirs(llama, "sdpa").warm()
    name = "float32 decode of 4 tokens after 512 against transformers sdpa"
    compare(benchmark, name, ours.decode, sdpa.decode, "above 1")


@pytest.mark.parametrize(("step", "wanted"), [("prefill", "0.25"), ("decode", "0.4")])
def test_exact_model_against_float32(benchmark: Any, llama: Path, step: str, wanted: str) -> None:
    exact, plain = Ours(load_model(llama)), Ours(load_model(llama, arithmetic="float32"))
    name = f"exact {step} against our own float32"
    compare(benchmark, name, getattr(exact, step), getattr(plain, step), wanted)


def products_of_a_step(ours: Ours) -> list[tuple[F64, F64]]:
    """Operands of all products of one exact decode step, in its order: rows, and what they meet.

    Those are the weights of every linear layer, and the keys and values of 512 positions.
    """
    view = ours.cache.extend(1)
    found = []
    for layer, seen in zip(ours.model.weights.layers, view, strict=True):
        kv = seen.aligned()
        heads, positions = kv.values.digits.shape[0], slice(0, len(PROMPT))
        keys = kv.keys[:, :, positions].swapaxes(-1, -2)
        values = kv.values.digits[:, positions].reshape(heads, -1, BLOCK, kv.values.digits.shape[2])
        mlp: Any = layer.mlp
        linear: list[Any] = [layer.qkv, layer.output, mlp.gate_up, mlp.down]
        weights = [part.weight.values.swapaxes(-1, -2) for part in linear]
        found += [weights[0], keys, values, *weights[1:]]
    head: Any = ours.model.weights.head
    ours.cache.truncate(len(PROMPT))
    return [(np.ones((*w.shape[:-2], 1, BLOCK)), w) for w in (*found, head.weight.values.mT)]


def test_products_of_an_exact_step(benchmark: Any, llama: Path) -> None:
    """How near to the float32 lane an exact step could come if all but its products took no time.

    They are called as the step calls them, the head's shared between threads, and read twice the
    bytes of the float32 lane's.
    """
    exact, plain = Ours(load_model(llama)), Ours(load_model(llama, arithmetic="float32"))
    products = products_of_a_step(exact)

    def run() -> None:
        for _ in range(4):
            for x, w in products:
                np.matmul(x, w)

    gib = sum(w.nbytes for _, w in products) / 2**30
    name = f"the products of exact decode alone, {gib:.3f} GiB, against our own float32 decode"
    compare(benchmark, name, run, plain.decode, "none: exact decode lies below it")
