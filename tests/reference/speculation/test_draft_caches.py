"""Draft models' caches: a share of the engine's bytes, given up and computed again (SPEC 13.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.cache import PageShape
from reference.engine import Engine
from reference.errors import RequestError
from reference.model import Model
from reference.sampling import Sampling
from reference.speculation import ModelDraft
from tests.oracle.arrays import assert_same
from tests.reference.models import (
    LLAMA_SMALL,
    MISTRAL_SMALL,
    QWEN2_SMALL,
    QWEN3_SMALL,
    small,
    tokens_of,
)
from tests.reference.speculation.loop import GREEDY, ids
from tests.reference.traffic import Asked, check_empty, drain, send

WARM = Sampling(temperature=1.5)


def drafts(engine: Engine) -> ModelDraft:
    assert isinstance(engine._draft, ModelDraft)
    return engine._draft


def pages(draft: ModelDraft, positions: int) -> int:
    """Bytes of the pages of so many positions."""
    return draft.pool.bytes_for([-(-positions // 16)] * len(draft.pool.groups))


def share(models: tuple[Model, Model], whole: int, **options: Any) -> tuple[int, int]:
    engine = Engine(models[0], draft=models[1], cache_bytes=whole, **options)
    own, its = engine.pool.budget, drafts(engine).pool.budget
    assert own is not None
    assert its is not None
    return own, its


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_both_caches_have_room_for_as_many_positions(kv_dtype: str) -> None:
    models, whole = (small(LLAMA_SMALL), small(QWEN2_SMALL)), 10_000_019
    own, its = share(models, whole, kv_dtype=kv_dtype, page_size=4)
    assert own + its == whole
    of_position = []
    for model, dtype in zip(models, (kv_dtype, "float32"), strict=True):
        config, kind = model.config, {"dtype": dtype, "page_size": 1}
        shape = PageShape(config.kv_heads, config.head_dim, config.windows, **kind)  # type: ignore[arg-type]
        of_position.append(config.layers * shape.layer_bytes())
    assert abs(own / of_position[0] - its / of_position[1]) < 1
    assert Engine(models[0], draft="ngram", cache_bytes=whole).pool.budget == whole


def watched(cache_bytes: int, share: int | None = None) -> tuple[list[Any], int]:
    """Tokens and tallies of four requests at once; how often a cache was found given up."""
    engine = Engine(small(LLAMA_SMALL), draft=small(QWEN3_SMALL), cache_bytes=cache_bytes)
    pool = drafts(engine).pool
    pool.budget = pool.budget if share is None else share
    prompts = [tuple(tokens_of(60 + 7 * i, 32).tolist()) for i in range(4)]
    asked = [Asked(text, 20, WARM if i % 2 else GREEDY, i) for i, text in enumerate(prompts)]
    sent = [send(engine, one) for one in asked]
    given_up = 0
    while engine.busy:
        engine.step()
        owned = [one.request.draft for one in sent]
        caches = [draft._cache for draft in owned if isinstance(draft, ModelDraft)]
        assert pool.used_bytes == sum(cache.bytes for cache in caches) <= (pool.budget or 0)
        given_up += sum(cache.length == 0 for cache in caches)
    assert pool.used_bytes == 0
    check_empty(engine)
    return [(one.tokens, one.request.result().draft) for one in sent], given_up


def test_the_limit_is_kept_and_no_token_depends_on_it() -> None:
    """The share holds one request and a half, or the whole cache does; they take turns."""
    plenty, _ = watched(1 << 26)
    assert sum(tally.drafted for _, tally in plenty) > 100
    models = small(LLAMA_SMALL), small(QWEN3_SMALL)
    share = pages(ModelDraft(models[1], models[1]), 160)
    few, given_up = watched(1 << 26, share)
    assert given_up > 10
    assert few == plenty
    positions = sum(model.new_pool().position_bytes for model in models)
    assert watched(160 * positions)[0] == plenty


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_what_the_cache_holds_the_share_holds(page_size: int) -> None:
    """So that no token of an engine without windows depends on its cache's size."""
    model, drafter = small(LLAMA_SMALL), small(QWEN3_SMALL)
    bytes_ = sum(one.new_pool().position_bytes for one in (model, drafter))
    for size in range(40, 140, 3):
        engine = Engine(model, draft=drafter, cache_bytes=size * bytes_, page_size=page_size)
        fits = 0
        for positions in range(size + 1):
            whole = engine.scheduler.most_bytes(positions)
            fits = positions if whole <= (engine.pool.budget or 0) else fits
        assert fits <= drafts(engine).pool.most_positions


def test_a_text_that_exceeds_the_whole_share_is_refused() -> None:
    """Windows may hold a text in the target's cache that the draft model's share does not hold."""
    target, drafter = small(MISTRAL_SMALL), small(QWEN3_SMALL)
    bytes_ = sum(one.new_pool().position_bytes for one in (target, drafter))
    engine = Engine(target, draft=drafter, cache_bytes=81 * bytes_, max_batched_tokens=16)
    assert drafts(engine).pool.most_positions == 80
    prompt = tokens_of(60, 32).tolist()
    for reuse in (True, False):
        result = engine.generate(prompt, 20, stop_tokens=(), cache_prompt=reuse)
        assert result.tokens == Engine(target).generate(prompt, 20, stop_tokens=()).tokens
    with pytest.raises(
        RequestError, match="cache: 81 positions are more than the 80 that the draft"
    ):
        engine.submit(prompt, 21)
    Engine(target, draft="ngram", cache_bytes=81 * bytes_).submit(prompt, 21)
    short = small(QWEN2_SMALL)  # its context is 256, and no more of a text is ever in its cache
    bytes_ = sum(one.new_pool().position_bytes for one in (target, short))
    engine = Engine(target, draft=short, cache_bytes=257 * bytes_, max_batched_tokens=16)
    engine.submit(prompt, 900)


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
def test_a_refusal_tells_what_the_target_has_of_the_cache(draft: Any) -> None:
    """And that a draft model has the rest, where there is one."""
    model, drafter = small(LLAMA_SMALL), small(QWEN3_SMALL) if draft == "model" else draft
    total = 40 * model.new_pool().position_bytes + 1
    engine = Engine(model, draft=drafter, cache_bytes=total)
    own = engine.pool.budget or 0
    with pytest.raises(RequestError) as refused:
        engine.submit([1] * 60, 1)
    said = str(refused.value)
    needed = engine.scheduler.most_bytes(engine.positions(60, 1))
    assert f"take {needed} bytes of pages, and " in said
    if draft == "model":
        assert own < total
        assert f"{own} of the cache's {total} are not the draft model's; raise cache" in said
        assert "draft without a model, or ask for fewer tokens" in said
    else:
        assert f"the whole cache has {total}; raise cache_bytes, or ask for fewer tokens" in said


@pytest.fixture
def three() -> list[ModelDraft]:
    model = small(QWEN3_SMALL)
    first = ModelDraft(model, model, pages(ModelDraft(model, model), 48))
    return [first, first.fresh(), first.fresh()]


def test_the_least_recently_used_is_given_up_first(three: list[ModelDraft]) -> None:
    """Each text takes two of three pages, or one."""
    a, b, c = three
    for draft, length in ((a, 10), (b, 10), (a, 11), (c, 20)):
        draft.propose(ids([1] * length), 1, GREEDY)
    assert [draft._cache.length for draft in three] == [11, 0, 20]
    found = b.propose(ids([1] * 12), 2, GREEDY)
    assert [draft._cache.length for draft in three] == [0, 13, 20]
    model = small(QWEN3_SMALL)
    fresh = ModelDraft(model, model).propose(ids([1] * 12), 2, GREEDY)
    assert list(found.tokens) == list(fresh.tokens)
    for law, other in zip(found.laws, fresh.laws, strict=True):
        assert_same(law.weights, other.weights)


def test_an_ended_draft_holds_nothing(three: list[ModelDraft]) -> None:
    for draft in three:
        draft.propose(ids([1] * 10), 1, GREEDY)
    three[1].end()
    three[1].end()
    assert three[0].pool.used_bytes == pages(three[0], 32)
    assert np.array_equal([draft._cache.length for draft in three], [10, 0, 10])
    for draft in three:
        draft.end()
    assert three[0].pool.used_bytes == 0
    assert three[0]._recent == []


def test_a_request_that_is_given_up_ends_its_draft() -> None:
    engine = Engine(small(LLAMA_SMALL), draft=small(QWEN3_SMALL))
    request = engine.submit([1, 2, 3], 20, stop_tokens=())
    for _ in range(3):
        engine.step()
    assert drafts(engine).pool.used_bytes > 0
    engine.cancel(request)
    drain(engine)
    assert drafts(engine).pool.used_bytes == 0
