"""What the serving state costs and saves, side by side in one run.

    pytest tests/benchmarks/test_serving.py --benchmark-only -s

prints the figures. The sides take turns, and a ratio is that of medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from reference.arithmetic import F32
from reference.attention import Scores, attend_exact, attend_fast, default_scale
from reference.cache import KVCache, PagePool, PageShape
from reference.engine import Engine
from reference.model import Model, Part, load_model
from tests.benchmarks.test_speed import compare, normal

TINY = "fixtures/tiny-dense"
HEADS, WIDTH, HELD = 6, 64, 2048


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@pytest.mark.parametrize("exact_prefill", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("name", ["tiny-dense", "llama"])
def test_second_turn_against_a_cold_one(
    benchmark: Any, request: pytest.FixtureRequest, name: str, exact_prefill: bool
) -> None:
    """An agent's conversation: 2,000 tokens are held, 60 are new, and these are exact always."""
    model = load_model(TINY if name == "tiny-dense" else request.getfixturevalue("llama"))
    tokens = np.random.default_rng(0).integers(0, 1024, 2060).tolist()
    cold, warm = list[float](), list[float]()
    for _ in range(3):
        engine = Engine(model, exact_prefill)
        engine.generate(tokens[:2000], 1)
        result = engine.generate(tokens, 1, stop_tokens=())
        assert (result.cache_n, result.prompt_n) == (2000, 60)
        warm.append(result.timings.time_to_first_token)
        first = Engine(model, exact_prefill).generate(tokens, 1)
        cold.append(first.timings.time_to_first_token)
    ratio = median(cold) / median(warm)
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(lambda: engine.generate(tokens, 1), rounds=1)
    kind = "exact" if exact_prefill else "fast"
    print(
        f"\nsecond turn on {name}, 2,000 tokens held and 60 new: first token after "
        f"{1e3 * median(warm):.0f} ms, cold ({kind}) {1e3 * median(cold):.0f} ms: "
        f"{ratio:.1f} times faster (aim: 10)"
    )


ORDERS = {"as allocated": HELD // 16, "in runs of 96": 6, "all apart": 1}
"""Pages of 16 that lie one behind the other. A pool with room gives a sequence one run; one that is
nearly full gave runs of 95 positions on average (40 requests, 40 MiB, `tiny-dense`)."""


def paged(run: int) -> KVCache:
    """2,048 positions in pages of 16, `run` of them side by side."""
    cache = KVCache(PagePool(PageShape(HEADS, WIDTH, (None,)), 1 << 28))
    cache.extend(HELD)
    pages = np.arange(HELD // 16)
    apart = np.random.default_rng(0).permutation(-(-len(pages) // run))
    cache.tables[0].pages = (apart[pages // run] * (run + 1) + pages % run).tolist()
    (layer,) = cache.views(HELD)
    layer.write(normal(HELD, HEADS, WIDTH, seed=1), normal(HELD, HEADS, WIDTH, seed=2))
    cache.commit(HELD)
    return cache


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_paged_attention_against_contiguous(
    benchmark: Any, kind: str, order: str, rows: int
) -> None:
    q, scores = normal(rows, HEADS, WIDTH), Scores(default_scale(WIDTH))
    contiguous = PagePool(PageShape(HEADS, WIDTH, (None,), page_size=256))
    k, v = normal(HELD, HEADS, WIDTH, seed=1), normal(HELD, HEADS, WIDTH, seed=2)
    plain = KVCache(contiguous)
    (layer,) = plain.extend(HELD)
    layer.write(k, v)
    (pages,) = paged(ORDERS[order]).views()

    def run(layer: Any) -> F32:
        if kind == "exact":
            return attend_exact(q, layer.aligned(), HELD, scores)
        return attend_fast(q, layer.plain(), HELD, scores)

    assert run(pages).tobytes() == run(layer).tobytes() or kind == "fast"
    name = f"{kind} attention over pages of 16, {order}, {rows} row(s), against contiguous"
    compare(benchmark, name, lambda: run(pages), lambda: run(layer), "0.87 (1 / 1.15)", 30)


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_sixteen_requests_against_one(benchmark: Any, llama: Path, arithmetic: Any) -> None:
    """Aggregate decode rate at a context of 64 to 96 tokens: weights are read once a step."""
    model, rng = load_model(llama, arithmetic=arithmetic), np.random.default_rng(0)
    rates: dict[int, list[float]] = {1: [], 16: []}
    for _ in range(5):
        for count, found in rates.items():
            pool = model.new_pool(1 << 28)
            caches = [KVCache(pool) for _ in range(count)]
            for cache in caches:
                model.forward(rng.integers(0, 32000, 64), cache, last_only=True)
            parts = [Part([7], cache) for cache in caches]
            model.forward_batch(parts)
            started = time.perf_counter()
            for _ in range(16):
                model.forward_batch(parts)
            found.append(count * 16 / (time.perf_counter() - started))
    one, many = median(rates[1]), median(rates[16])
    benchmark.extra_info["ratio"] = many / one
    benchmark.pedantic(lambda: model.forward_batch(parts), rounds=3)
    print(
        f"\n16 requests at once, {arithmetic}: {many:.0f} tokens/s against {one:.0f} of one: "
        f"{many / one:.1f} times (aim: 4)"
    )


def test_bookkeeping_of_a_decode_step(benchmark: Any) -> None:
    """The share of pages, tables, planning and the trace in a decode step of `tiny-dense`."""
    model = load_model(TINY)
    engine = Engine(model)
    request = engine.submit(list(range(200)), 400, stop_tokens=())
    engine.step()
    spent = 0.0

    def timed(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal spent
            started = time.perf_counter()
            result = original(*arguments, **options)
            spent += time.perf_counter() - started
            return result

        setattr(owner, name, wrapped)

    cache = request.task.cache
    for owner, name in (
        (engine.scheduler, "plan"),
        (engine, "_receive"),
        (cache, "extend"),
        (cache, "commit"),
        (cache, "truncate"),
        (cache, "trim"),
    ):
        timed(owner, name)
    shares = []
    for _ in range(200):
        spent = 0.0
        whole = seconds(engine.step)
        shares.append(spent / whole)
    benchmark.extra_info["share"] = median(shares)
    benchmark.pedantic(engine.step, rounds=3)
    print(f"\nbookkeeping of a decode step: {median(shares):.1%} of its time (aim: below 5%)")


@pytest.mark.parametrize("draft", ["ngram", "tiny-draft"])
def test_speculation_against_plain_decoding(benchmark: Any, draft: str) -> None:
    """Greedy on `tiny-dense`, and the do-nothing arm: plain decoding against itself."""
    model: Model = load_model(TINY)
    helper: Any = draft if draft == "ngram" else load_model(f"fixtures/{draft}")
    prompt = Path("fixtures/prompts/512.txt").read_text()
    plain, again, drafted = list[float](), list[float](), list[float]()
    for _ in range(3):
        for rates, engine in (
            (plain, Engine(model, exact_prefill=True)),
            (drafted, Engine(model, exact_prefill=True, draft=helper)),
            (again, Engine(model, exact_prefill=True)),
        ):
            result = engine.generate(prompt, 64, stop_tokens=())
            rates.append(result.timings.decode_rate)
            if rates is drafted:
                tally = result.draft
    ratio, nothing = median(drafted) / median(plain), median(again) / median(plain)
    benchmark.extra_info.update(ratio=ratio, nothing=nothing)
    benchmark.pedantic(lambda: engine.generate(prompt, 8, stop_tokens=()), rounds=1)
    print(
        f"\nspeculation by {draft}: {tally.acceptance_rate:.0%} of {tally.drafted} accepted, "
        f"{tally.tokens_per_pass:.2f} tokens a pass, {ratio:.2f} of plain decoding's speed "
        f"(doing nothing: {nothing:.2f})"
    )
