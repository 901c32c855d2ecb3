"""Experts on a card or with the CPU: counted against the roofline, and against plain simulation."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.commands.measure.models import config_of
from reference.config import ModelConfig
from reference.errors import RequestError
from reference.measure.ceiling import BYTES, PRESETS, Hardware, Storage, sizes, work
from reference.measure.laws import Law, uniform, zipf
from reference.measure.placement import (
    ACTIVATION,
    Offload,
    Passes,
    Placement,
    crossover,
    from_none_to_all,
    parts,
    published,
    reused,
    visible,
)

FIXTURES = Path(__file__).parents[3] / "fixtures"
LARGE = published("qwen3-30b-a3b")
CPU = Hardware("cpu", 80e9, {"float32": 1.5e12}, "given")
STORED = Storage("int4", "float16", "float16", "float16", "float16")


@cache
def config(name: str) -> ModelConfig:
    return config_of(FIXTURES / name)


def offload(of: ModelConfig = LARGE, law: Law | None = None, **changes: Any) -> Offload:
    assert of.sparse is not None
    law = law or uniform(of.sparse.router.experts, of.sparse.router.top_k)
    laws = tuple(law if has else None for has in of.sparse.layers)
    given = (of, STORED, "float32", PRESETS["rtx-4090"], CPU, 31.5e9, 1e-5, laws)
    return replace(Offload(*given), **changes)


# sizes


def test_the_published_model_has_the_published_numbers_of_parameters() -> None:
    """Its card says 30.5 billion, of which 3.3 are active."""
    n = sizes(LARGE)
    rest = n.layers + 2 * n.head + n.vectors
    assert round((rest + n.experts * n.expert) / 1e9, 1) == 30.5
    assert 3.3 <= (rest + n.chosen * n.expert) / 1e9 < 3.4


@pytest.mark.parametrize("name", ["tiny-moe", "families/gpt-oss", "families/qwen2-moe"])
def test_layers_add_up_to_the_model(name: str) -> None:
    n, layers = sizes(config(name)), parts(config(name))
    last = config(name).hidden_size  # the norm after all layers
    assert sum(part.dense for part in layers) == n.layers
    assert sum(part.expert for part in layers) == n.expert
    assert sum(part.vectors for part in layers) == n.vectors - last
    assert tuple(part.window for part in layers) == config(name).windows


def test_what_leaves_the_card_comes_to_the_cpu() -> None:
    both = [offload().bytes_of(Placement(n), 1000) for n in (0, 1, 48)]
    assert len({round(sum(pools)) for pools in both}) == 1
    layer = 128 * 3 * 2048 * 768 * 4.5 / 8
    assert both[1][1] - both[0][1] == layer
    assert both[2][1] - both[0][1] == pytest.approx(48 * layer)
    more = offload(batch=2).bytes_of(Placement(0), 1001)[0]
    cache = 48 * 2 * 4 * 128 * 2  # float16 keys and values of a position
    assert more - both[0][0] == cache * (2 * 1001 - 1000)
    windowed = offload(config("tiny-moe"))
    grown = [windowed.bytes_of(Placement(0), n)[0] for n in (128, 129)]
    assert grown[1] - grown[0] == 2 * 2 * 32 * 2  # one of four layers sees everything


def test_a_card_holds_what_fits() -> None:
    least = offload().bytes_of(Placement(3), 50)[0]
    assert offload(memory=least).fits(Placement(3), 50)
    assert not offload(memory=least).fits(Placement(3), 51)
    assert not offload(memory=least).fits(Placement(2), 50)
    assert offload().fits(Placement(0), 10**9)


# times


@pytest.mark.parametrize("name", ["tiny-moe", "families/qwen2-moe"])
@pytest.mark.parametrize(("tokens", "depth", "batch"), [(1, 0, 1), (1, 300, 5), (150, 40, 1)])
def test_all_on_the_card_is_the_roofline(name: str, tokens: int, depth: int, batch: int) -> None:
    """Where only operations take time, or only bytes, they are those of `ceiling.work`."""
    of = config(name)
    done = work(of, STORED, batch, tokens, depth)
    passes = Passes(batch, np.array([tokens]), np.array([depth]))
    for bandwidth, rate, wanted in ((1e300, 1.0, done.operations), (1.0, 1e300, done.bytes)):
        card = Hardware("card", bandwidth, {"float16": rate}, "given")
        here = offload(of, gpu=card)
        found = float(here.seconds(Placement(0), passes, False)[0]) + here._head(batch)
        if rate > 1:  # embeddings and the last norm are left out
            found += 2 * (batch * tokens + 1) * of.hidden_size
        assert found == pytest.approx(wanted, rel=1e-12)


@given(st.integers(0, 50), st.integers(1, 30), st.sampled_from([None, 1, 7, 40]))
def test_visible_positions_are_counted(depth: int, tokens: int, window: int | None) -> None:
    seen = sum(min(t + 1, window or t + 1) for t in range(depth, depth + tokens))
    assert visible(Passes(1, np.array([tokens]), np.array([depth])), window).tolist() == [seen]


def played(
    here: Offload, placement: Placement, prompt: int, reply: int, held: int, seed: int
) -> float:
    """A reply, token by token, layer by layer, in plain Python; routing is uniform."""
    rng, clock = random.Random(seed), 0.0
    gpu, cpu, weight = here.gpu, here.cpu, BYTES["int4"]
    expert, dense = 3 * 2048 * 768, 2048 * (4096 + 512 + 512 + 4096 + 128)
    norms, cached = 2 * 2048 + 2 * 128, 2 * 4 * 128 * 2

    def roof(pool: Hardware, kind: str, operations: float, moved: float) -> float:
        return max(operations / pool.rates[kind], moved / pool.bandwidth)

    def run(sequences: int, tokens: int, depth: int, prefill: bool) -> float:
        seconds, total = 0.0, sequences * tokens
        pairs = sequences * sum(t + 1 for t in range(depth, depth + tokens))
        for layer in range(48):
            operations = 2 * total * dense + 4 * pairs * 32 * 128
            moved = weight * dense + 2 * norms + cached * sequences * (depth + tokens)
            seconds += roof(gpu, "float16", operations, moved)
            hit = {e for _ in range(total) for e in rng.sample(range(128), 8)}
            operations, moved = 2 * total * 8 * expert, weight * expert * len(hit)
            card = roof(gpu, "float16", operations, moved)
            if layer >= placement.n_cpu_moe:
                seconds += card
            elif prefill and placement.way == "ship":
                seconds += here.latency + moved / here.link + card
            else:
                crossing = here.latency + total * 2048 * ACTIVATION / here.link
                seconds += roof(cpu, "float32", operations, moved) + 2 * crossing
        return seconds

    head = 151936 * 2048
    for _ in range(here.batch):
        for depth in range(held, prompt, here.chunk):
            clock += run(1, min(here.chunk, prompt - depth), depth, True)
        clock += roof(gpu, "float16", 2 * head, 2 * head)
    for depth in range(prompt, prompt + reply - 1):
        clock += run(here.batch, 1, depth, False)
        clock += roof(gpu, "float16", 2 * here.batch * head, 2 * head)
    return clock


@pytest.mark.parametrize("text", ["0", "20:cpu", "20:ship", "48:cpu", "48:ship"])
@pytest.mark.parametrize(
    ("batch", "held", "link", "latency"),
    [(1, 0, 31.5e9, 1e-5), (6, 30, 31.5e9, 1e-5), (1, 0, 1e8, 0.0), (1, 0, 31.5e9, 0.01)],
)
def test_totals_are_within_two_percent_of_what_is_played(
    text: str, batch: int, held: int, link: float, latency: float
) -> None:
    """A slow link, and one that is late, show what crosses it, and how often."""
    here = offload(batch=batch, chunk=16, link=link, latency=latency)
    found = here.total_seconds(Placement.parse(text), 40, 9, held)
    assert found == pytest.approx(played(here, Placement.parse(text), 40, 9, held, 1), rel=0.02)


@pytest.mark.parametrize("law", [uniform(128, 8), zipf(128, 8, 1.1)], ids=("uniform", "zipf"))
def test_totals_are_within_two_percent_of_the_simulation(law: Law) -> None:
    here = offload(law=law, batch=4, chunk=128)
    told = [*from_none_to_all(48), Placement(24, "cpu"), Placement(24, "ship")]
    for seed in (0, 1):
        runs = here.simulated(told, 300, 40, 100, seed)
        for placement, run in zip(told, runs, strict=True):
            total = here.total_seconds(placement, 300, 40, 100)
            assert total == pytest.approx(run, rel=0.02)
            assert total != run
    assert runs == here.simulated(told, 300, 40, 100, 1)


def test_a_wrong_number_of_experts_is_found_out() -> None:
    """The two percent can fail: tokens that crowd on few experts are faster than uniform ones."""
    (run,) = offload(law=zipf(128, 8, 1.5), batch=16).simulated([Placement(48)], 64, 20, 0, 0)
    assert abs(offload(batch=16).total_seconds(Placement(48), 64, 20) / run - 1) > 0.1


@pytest.mark.parametrize("prompt", [10, 219, 221, 700, 3000])
def test_the_faster_way_is_the_faster_one_in_each_pass(prompt: int) -> None:
    here = offload(law=zipf(128, 8, 0.5))
    each = [
        here.seconds(Placement(48, way), here.prompt_passes(prompt, 0), True)
        for way in ("cpu", "ship", "faster")
    ]
    assert each[2] == pytest.approx(np.minimum(*each[:2]))
    share = here.shipped_share(Placement(48), prompt)
    assert share == pytest.approx((each[1] < each[0]).mean())
    assert here.shipped_share(Placement(48, "ship"), prompt) == 1
    assert here.shipped_share(Placement(0), prompt) == 0


def test_prefix_reuse_leaves_the_rest_of_a_prompt() -> None:
    here = offload()
    whole, rest = (here.prefill_seconds(Placement(24), 2000, held) for held in (0, 1800))
    assert rest < whole
    assert here.prompt_passes(2000, 1800).tokens.tolist() == [200]
    assert here.prompt_passes(1100, 0).tokens.tolist() == [512, 512, 76]
    assert [reused(100, x) for x in (0, 0.5, 1)] == [0, 50, 99]
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(RequestError, match=r"^reuse: "):
            reused(10, wrong)


# crossovers

A, B = Placement(1), Placement(2)


@settings(max_examples=60)
@given(st.floats(0.1, 50), st.floats(0.1, 50), st.floats(0, 2000), st.integers(2, 500))
def test_a_crossover_is_the_first_length_that_is_faster(
    slope: float, other: float, start: float, most: int
) -> None:
    def seconds(placement: Placement, n: int) -> float:
        return slope * n if placement == A else start + other * n

    found = crossover(seconds, (A, B), most)
    faster = [None if seconds(A, n) == seconds(B, n) else seconds(B, n) < seconds(A, n)
              for n in range(1, most + 1)]  # fmt: skip
    first = next((x for x in faster if x is not None), None)
    assert found.first == (None if first is None else B if first else A)
    later = [n for n, x in enumerate(faster, 1) if x is not None and x != first]
    assert found.length == (later[0] if later else None)


def test_a_placement_that_does_not_fit_is_overtaken() -> None:
    def seconds(placement: Placement, n: int) -> float:
        return 1.0 if placement == A and n <= 777 else 2.0 if placement == B else math.inf

    assert crossover(seconds, (B, A), 5000) == crossover(seconds, (A, B), 5000)
    found = crossover(seconds, (A, B), 5000)
    assert (found.first, found.length) == (A, 778)
    assert crossover(lambda *_: math.inf, (A, B), 50).first is None


def test_shipping_overtakes_the_cpu_at_some_length() -> None:
    """Alone in a pass: below it experts cross for too few tokens, above it the CPU has too many."""
    here = offload()
    pair = (Placement(48, "cpu"), Placement(48, "ship"))
    found = crossover(lambda p, n: here.total_seconds(p, n, 16), pair, 512)
    times = [[here.prefill_seconds(p, n) for p in pair] for n in range(1, 513)]
    slower = [n for n, (cpu, ship) in enumerate(times, 1) if ship < cpu]
    assert (found.first, found.length) == (pair[0], slower[0])
    assert 64 < slower[0] < 512


# refusals


@pytest.mark.parametrize("text", ["", "x", "-1", "3:", "3:gpu", "1.5", "99999999"])
def test_what_is_no_placement(text: str) -> None:
    with pytest.raises(RequestError, match=r"^placement: "):
        Placement.parse(text)


def test_placements_are_printed_as_they_are_parsed() -> None:
    for text in ("0", "24:cpu", "24:ship"):
        assert str(Placement.parse(text)) == text
    assert [p.n_cpu_moe for p in from_none_to_all(48)] == [0, 12, 24, 36, 48]
    assert [p.n_cpu_moe for p in from_none_to_all(2)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: offload().on_cpu(Placement(49)), "^n_cpu_moe: 49 is out of range; .* 48 layers"),
        (lambda: offload(link=0.0), "^link: "),
        (lambda: offload(batch=0), "^batch, chunk: "),
        (lambda: offload(cpu_compute="int8"), "^compute: the rate of cpu in int8 is not known"),
        (lambda: replace(offload(), config=config("tiny-dense")), "^model: it has no experts"),
        (lambda: published("other"), "^model: 'other' is none of qwen3-30b-a3b"),
    ],
)
def test_what_cannot_be_placed_is_refused(call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
