"""The floor of fast attention: prefill alone, decided once a request (SPEC 8.4)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from reference.engine import Engine
from reference.model import Model, Part
from reference.scheduler import FAST_FLOOR, prefill_attention
from tests.oracle.arrays import Float32
from tests.reference.models import QWEN3_SMALL, ROOT, small, tiny, tokens_of
from tests.reference.traffic import drain

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

Call = tuple[int, str, int | None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every part of a pass: how many tokens, which attention, and how many rows of logits."""
    seen: list[Call] = []
    original = Model.forward_batch

    def spy(self: Model, parts: Sequence[Part], *more: Any) -> list[Float32]:
        seen.extend((len(part.tokens), part.attention, part.last) for part in parts)
        return original(self, parts, *more)

    monkeypatch.setattr(Model, "forward_batch", spy)
    return seen


@pytest.mark.parametrize(
    ("count", "exact_prefill", "expected"),
    [
        (1, False, "exact"),
        (511, False, "exact"),
        (512, False, "fast"),
        (513, False, "fast"),
        (511, True, "exact"),
        (512, True, "exact"),
        (900, True, "exact"),
    ],
)
def test_the_floor_decides_prefill_and_never_decode(
    count: int, exact_prefill: bool, expected: str, calls: list[Call]
) -> None:
    assert prefill_attention(count, exact_prefill) == expected
    engine = Engine(small(QWEN3_SMALL), exact_prefill)
    result = engine.generate(tokens_of(count, 32).tolist(), 3, stop_tokens=())
    assert calls == [(count, expected, 1), (1, "exact", 1), (1, "exact", 1)]
    assert result.prompt_n == count


@pytest.mark.parametrize(("count", "expected"), [(511, "exact"), (512, "fast")])
def test_the_floor_is_decided_before_any_chunking(
    count: int, expected: str, calls: list[Call]
) -> None:
    engine = Engine(small(QWEN3_SMALL), max_batched_tokens=100)
    engine.generate(tokens_of(count, 32).tolist(), 2, stop_tokens=())
    assert calls[:-1] == [
        *[(100, expected, 0)] * 5,
        (count - 500, expected, 1),
    ]
    assert calls[-1] == (1, "exact", 1)


def test_the_floor_counts_what_is_computed(calls: list[Call]) -> None:
    """After reuse; and verification of a draft is exact, as decode steps are."""
    text = tokens_of(900, 32).tolist()
    engine = Engine(small(QWEN3_SMALL), draft="ngram")
    engine.generate(text[:389], 1, stop_tokens=())
    engine.generate(text, 1, stop_tokens=())
    assert calls == [(389, "exact", 1), (511, "exact", 1)]
    other = Engine(small(QWEN3_SMALL), draft="ngram")
    other.generate(text[:388], 1, stop_tokens=())
    other.generate(text, 9, stop_tokens=())
    assert calls[3] == (512, "fast", 1)
    assert {attention for _, attention, _ in calls[4:]} == {"exact"}
    assert max(count for count, *_ in calls[4:]) > 1


def test_the_floor_counts_the_prompt_and_not_the_output(calls: list[Call]) -> None:
    Engine(small(QWEN3_SMALL)).generate(tokens_of(505, 32).tolist(), 20, stop_tokens=())
    assert {attention for _, attention, _ in calls} == {"exact"}
    assert FAST_FLOOR == 512


def test_exact_prefill_gives_the_bits_of_decode() -> None:
    model, prompt = small(QWEN3_SMALL), tokens_of(512, 32).tolist()
    first: list[bytes] = []
    for wanted in (True, False):
        Engine(model, wanted).generate(
            prompt, 1, on_token=lambda _, logits: first.append(logits.tobytes())
        )
    exact, fast = first
    held = model.new_cache()
    for token in prompt:
        last = model.forward([token], held)
    assert exact == last[-1].tobytes()
    assert fast != exact


def test_an_exact_request_that_must_wait_again_stays_exact() -> None:
    """It was decided when it was first admitted; pages of a fast one are not for it."""
    model = tiny()
    assert model.tokenizer is not None
    text = (ROOT / "fixtures" / "prompts" / "2000.txt").read_text()
    base = model.tokenizer.encode(text)[:700]
    page = model.new_pool().groups[0].page_bytes
    alone = Engine(model)
    alone.generate(base, 1, exact_prefill=True, stop_tokens=())
    rows: list[Float32] = []
    ask: dict[str, Any] = {"stop_tokens": ()}

    def keep(into: list[Float32], token: int, row: Float32) -> None:
        into.append(row)

    alone.generate([*base, *range(10)], 30, on_token=partial(keep, rows), **ask)
    for pages in (92, 96):
        engine = Engine(model, cache_bytes=pages * page)
        fast = engine.submit([*base, *range(5)], 200, **ask)
        engine.step()
        engine.generate(base, 1, exact_prefill=True, **ask)
        found: list[Float32] = []
        exact = engine.submit([*base, *range(10)], 30, on_token=partial(keep, found), **ask)
        drain(engine)
        assert exact.result().prompt_n == 10
        assert np.array_equal(np.stack(found), np.stack(rows))
        assert fast.result().tokens
