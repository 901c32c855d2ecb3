"""Who computes what in a pass, and that nobody's bits depend on it (SPEC 14.2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.cache import KVCache, KVType
from reference.engine import Engine
from reference.errors import CacheError, RequestError
from reference.model import Model
from reference.sampling import Sampling
from reference.scheduler import Scheduler
from reference.trace import Pass
from tests.reference.models import (
    LLAMA_SMALL,
    MISTRAL_SMALL,
    QWEN2_SMALL,
    QWEN3_SMALL,
    SMALL,
    small,
    tokens_of,
)
from tests.reference.traffic import (
    GREEDY,
    Asked,
    Sent,
    bits,
    check_empty,
    check_owners,
    drafter,
    drain,
    expected,
    room,
    send,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

STEM = [int(token) for token in np.random.default_rng(7).integers(0, 32, 90)]
SAMPLINGS = [GREEDY, GREEDY, Sampling(1.0), Sampling(0.8, 6, 0.9, 0.01, 1.3)]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """Prompts that share a stem, whole or in part, or another one that begins the same."""
    cut = draw(st.integers(0, 60))
    tail = draw(st.lists(st.integers(0, 31), min_size=cut == 0, max_size=8))
    return Asked(
        (*STEM[:cut], *tail),
        draw(st.integers(1, 14)),
        draw(st.sampled_from(SAMPLINGS)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from([frozenset(), frozenset(), frozenset({3, 11, 25})])),
        draw(st.sampled_from(["", "", "mine"])),
        draw(st.sampled_from([True, True, False])),
    )


class Traffic(RuleBasedStateMachine):
    """Requests come, are cancelled, and share pages; at the end each equals itself alone."""

    engine: Engine

    @initialize(
        family=st.sampled_from(list(SMALL)),
        page_size=st.sampled_from([1, 2, 8, 16]),
        positions=st.sampled_from([60, 90, 150, 400]),
        most=st.sampled_from([5, 7, 16, 64, 300]),
        draft=st.sampled_from([None, "ngram", LLAMA_SMALL]),
        draft_tokens=st.integers(1, 4),
        kv_dtype=st.sampled_from(get_args(KVType)),
    )
    def start(
        self,
        family: str,
        page_size: int,
        positions: int,
        most: int,
        draft: str | None,
        draft_tokens: int,
        kv_dtype: KVType,
    ) -> None:
        model = small(SMALL[family])
        self.how: tuple[KVType, str | None, int] = (kv_dtype, draft, draft_tokens)
        self.config, self.most = SMALL[family], most
        self.engine = Engine(
            model,
            page_size=page_size,
            kv_dtype=kv_dtype,
            cache_bytes=room(model, positions, page_size, kv_dtype, draft),
            max_batched_tokens=most,
            draft=drafter(draft),
            draft_tokens=draft_tokens,
        )
        self.passes: list[Pass] = []
        self.engine.on_pass = self.passes.append
        self.sent: list[Sent] = []

    @rule(asked=requests())
    def submit(self, asked: Asked) -> None:
        try:
            self.sent.append(send(self.engine, asked))
        except RequestError as refused:
            if not str(refused).startswith("cache: "):
                raise

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.sent)).request)

    @invariant()
    def pages_are_owned(self) -> None:
        if hasattr(self, "engine"):
            check_owners(self.engine)

    @invariant()
    def passes_keep_the_budget(self) -> None:
        if hasattr(self, "engine"):
            for done in self.passes:
                assert 0 < sum(count for _, _, count in done.shares) <= self.most
                kinds = [kind for _, kind, _ in done.shares]
                assert kinds == sorted(kinds), "decode comes before prefill"
            self.passes.clear()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        drain(self.engine)
        for sent in self.sent:
            tokens, logits, stop = expected(self.config, sent.asked, *self.how)
            if sent.request.cancelled and sent.request.outcome is None:
                tokens = tokens[: len(sent.tokens)]
                logits = logits[: len(bits(sent.rows))]
            else:
                result = sent.request.result()
                assert result.prompt_n + result.cache_n == len(sent.asked.prompt)
                assert result.prompt_n > 0
                assert (result.stop, tuple(result.tokens)) == (stop, tokens)
            assert tuple(sent.tokens) == tokens
            assert bits(sent.rows) == logits
        check_empty(self.engine)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=20, stateful_step_count=16)


# whose turn it is


def watched(engine: Engine) -> list[Pass]:
    passes: list[Pass] = []
    engine.on_pass = passes.append
    return passes


def shares(passes: list[Pass]) -> list[list[tuple[int, str, int]]]:
    return [list(done.shares) for done in passes]


def plain(start: int, length: int, count: int = 4) -> Asked:
    return Asked(tuple(STEM[start : start + length]), count)


def test_decode_comes_first_and_prompts_share_what_is_left_in_order_of_arrival() -> None:
    engine = Engine(small(LLAMA_SMALL), max_batched_tokens=10)
    passes = watched(engine)
    for asked in (plain(0, 5), plain(10, 14), plain(30, 3), plain(40, 9)):
        send(engine, asked)
    drain(engine)
    assert shares(passes) == [
        [(1, "prefill", 5), (2, "prefill", 5)],
        [(1, "decode", 1), (2, "prefill", 9)],
        [(1, "decode", 1), (2, "decode", 1), (3, "prefill", 3), (4, "prefill", 5)],
        [(1, "decode", 1), (2, "decode", 1), (3, "decode", 1), (4, "prefill", 4)],
        [(2, "decode", 1), (3, "decode", 1), (4, "decode", 1)],
        [(3, "decode", 1), (4, "decode", 1)],
        [(4, "decode", 1)],
    ]
    assert [done.chosen for done in passes[:2]] == [{1: 1, 2: 0}, {1: 1, 2: 1}]


def test_a_pass_is_one_call_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    original = Model.forward_batch

    def spy(self: Model, parts: Any, *more: Any) -> Any:
        calls.append([len(part.tokens) for part in parts])
        return original(self, parts, *more)

    monkeypatch.setattr(Model, "forward_batch", spy)
    engine = Engine(small(LLAMA_SMALL), max_batched_tokens=8)
    passes = watched(engine)
    for start in range(4):
        send(engine, plain(10 * start, 6))
    drain(engine)
    assert calls == [[count for _, _, count in done] for done in shares(passes)]
    assert max(map(len, calls)) == 4


@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_one_token_a_pass_will_do(most: int) -> None:
    engine = Engine(small(MISTRAL_SMALL), max_batched_tokens=most)
    sent = [send(engine, plain(10 * start, 30, 5)) for start in range(3)]
    drain(engine)
    same_as_alone(MISTRAL_SMALL, sent)


def same_as_alone(config: str, sent: list[Sent], *how: Any) -> None:
    for one in sent:
        tokens, logits, stop = expected(config, one.asked, *(how or ("float32",)))
        result = one.request.result()
        assert (tuple(one.tokens), result.stop) == (tokens, stop)
        assert result.tokens == one.tokens
        assert bits(one.rows) == logits
        assert result.cache_n + result.prompt_n == len(one.asked.prompt)
        assert result.prompt_n >= 1


# drafts in company


@pytest.mark.parametrize("draft", ["ngram", LLAMA_SMALL])
@pytest.mark.parametrize("most", [5, 9])
def test_sampled_tokens_do_not_depend_on_whose_drafts_are_in_the_pass(
    draft: str, most: int
) -> None:
    engine = Engine(small(QWEN3_SMALL), max_batched_tokens=most, draft=drafter(draft))
    asked = [Asked(tuple(STEM[i : i + 20]), 14, Sampling(1.0), i) for i in range(4)]
    sent = [send(engine, one) for one in asked]
    drain(engine)
    same_as_alone(QWEN3_SMALL, sent, "float32", draft, 4)


@pytest.mark.parametrize("config", [MISTRAL_SMALL, QWEN2_SMALL])
@pytest.mark.parametrize("draft_tokens", [1, 3, 30])
def test_greedy_drafts_change_nothing(config: str, draft_tokens: int) -> None:
    """The bits of plain decoding; a batch has drafts of several lengths, 0 among them."""
    ending = frozenset({expected(config, plain(7, 25, 12), "float32")[0][6]})
    asked = [
        plain(0, 30, 20),
        plain(7, 25, 2),
        Asked((*STEM[:9], *STEM[:9], *STEM[:9]), 17),
        Asked(tuple(STEM[7:32]), 12, stop_tokens=ending),
    ]
    for draft in ("ngram", config):
        engine = Engine(small(config), draft=drafter(draft), draft_tokens=draft_tokens, page_size=4)
        passes = watched(engine)
        sent = [send(engine, one) for one in asked]
        drain(engine)
        same_as_alone(config, sent)
        assert sent[3].request.result().stop == "token"
        if draft == config:  # what it proposes is right: as few passes as can be
            tally = sent[0].request.result().draft
            full, rest = divmod(19, draft_tokens + 1)
            assert tally.passes == full + (rest > 0)
            assert tally.accepted == tally.drafted == full * draft_tokens + rest
            together = {
                tuple(n for _, kind, n in done if kind == "decode") for done in shares(passes)
            }
            assert draft_tokens == 1 or any(len(set(counts)) > 1 for counts in together)
        check_empty(engine)


def test_drafts_must_fit_a_pass() -> None:
    model = small(QWEN3_SMALL)
    Engine(model, max_batched_tokens=4)
    Engine(model, max_batched_tokens=5, draft="ngram", draft_tokens=4)
    with pytest.raises(RequestError, match=r"^draft_tokens: 4 .* pass of 4; raise"):
        Engine(model, max_batched_tokens=4, draft="ngram", draft_tokens=4)


# pages run out


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the tasks that had to wait again."""
    seen: list[int] = []
    original = Scheduler._preempt

    def spy(self: Scheduler, shares: list[Any]) -> None:
        original(self, shares)
        seen.append(self.waiting[0].number)
        assert len(seen) < 1000, "the scheduler hangs"

    monkeypatch.setattr(Scheduler, "_preempt", spy)
    return seen


@pytest.mark.parametrize("config", SMALL.values())
@pytest.mark.parametrize("draft", [None, "ngram", LLAMA_SMALL])
def test_preemption_changes_nothing(config: str, draft: str | None, preempted: list[int]) -> None:
    """The last to come gives way, computes anew, and goes on where it was."""
    model = small(config)
    engine = Engine(
        model,
        page_size=4,
        cache_bytes=room(model, 44, 4, draft=draft),
        max_batched_tokens=40,
        draft=drafter(draft),
    )
    asked = [
        Asked(tuple(STEM[10 * i : 10 * i + 8]), 30, SAMPLINGS[1 + i], i, reuse=i > 0)
        for i in range(3)
    ]
    sent = [send(engine, one) for one in asked]
    drain(engine)
    assert preempted
    assert 1 not in preempted
    same_as_alone(config, sent, "float32", draft, 4)
    check_empty(engine)


@pytest.fixture
def restored(tmp_path: Path) -> Engine:
    """An engine that has room for one sequence, and keeps one that no window was cut from."""
    model = small(MISTRAL_SMALL)
    writer = Engine(model, page_size=256, cache_bytes=1 << 24)
    writer.generate(STEM[:80], 1, stop_tokens=())
    writer.save_cache(tmp_path / "whole.cache")
    engine = Engine(model, page_size=1, cache_bytes=room(model, 85, 1), max_batched_tokens=32)
    engine.restore_cache(tmp_path / "whole.cache")
    assert engine.pool.used_bytes == room(model, 80, 1), "all of it, though the window is short"
    return engine


def test_a_prefix_is_as_short_as_its_windows(restored: Engine, preempted: list[int]) -> None:
    """What the windows of its next token do not need makes room for a prompt that starts so."""
    sent = send(restored, Asked((*STEM[:80], *STEM[:30]), 4))
    drain(restored, 20)
    assert preempted == []
    assert sent.request.result().cache_n == 80
    same_as_alone(MISTRAL_SMALL, [sent])
    check_empty(restored)


def test_nobody_is_admitted_twice_in_a_pass(
    restored: Engine, preempted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that has no room once it runs: other calls must get the lock."""
    monkeypatch.setattr(KVCache, "trim", lambda self: None)
    sent = send(restored, Asked((*STEM[:80], *STEM[:30]), 4))
    restored.step()
    assert preempted == [1]
    restored.cancel(sent.request)
    restored.step()
    check_empty(restored)


def test_a_request_waits_until_its_pages_are_free() -> None:
    model = small(LLAMA_SMALL)
    engine = Engine(model, page_size=4, cache_bytes=room(model, 60, 4), max_batched_tokens=100)
    passes = watched(engine)
    sent = [send(engine, plain(20 * i, 40, 5)) for i in range(3)]
    drain(engine)
    assert all(len(done) == 1 for done in shares(passes)), "two never have room at once"
    assert [done[0][0] for done in shares(passes)] == sorted(done[0][0] for done in shares(passes))
    same_as_alone(LLAMA_SMALL, sent)
    check_empty(engine)


def test_a_request_that_waits_holds_nothing() -> None:
    """Not even the pages of the prefix that was found for it."""
    model = small(LLAMA_SMALL)
    engine = Engine(model, page_size=4, cache_bytes=room(model, 60, 4))
    engine.generate(STEM[:20], 1, stop_tokens=())
    sent = [send(engine, plain(30, 30, 8))]
    engine.step()
    sent.append(send(engine, plain(0, 30, 20)))
    engine.step()
    assert [task.cache for task in engine.scheduler.waiting] == [None]
    check_owners(engine)
    drain(engine)
    same_as_alone(LLAMA_SMALL, sent)
    check_empty(engine)


def test_a_request_larger_than_the_pool_is_refused_and_no_other_is_touched() -> None:
    model = small(LLAMA_SMALL)
    engine = Engine(model, page_size=4, cache_bytes=room(model, 60, 4))
    first = send(engine, plain(0, 30, 8))
    engine.step()
    with pytest.raises(
        RequestError, match=r"^cache: 6\d positions take \d+ bytes .* has \d+; raise"
    ):
        send(engine, plain(0, 60, 3))
    fits = [check_fits(engine, 30, count) for count in range(25, 33)]
    assert fits == sorted(fits, reverse=True)
    assert (fits[0], fits[-1]) == (True, False)
    drain(engine)
    same_as_alone(LLAMA_SMALL, [first])
    check_empty(engine)


def check_fits(engine: Engine, length: int, count: int) -> bool:
    """Whether a request that is not refused ends at all."""
    try:
        sent = send(engine, plain(1, length, count))
    except RequestError:
        return False
    drain(engine)
    return len(sent.request.result().tokens) == count


@pytest.mark.parametrize("config", [MISTRAL_SMALL, QWEN2_SMALL])
def test_a_window_needs_pages_of_the_window_alone(config: str) -> None:
    """A sequence may be far longer than the pool where every layer forgets."""
    model = small(config)
    engine = Engine(model, page_size=4, cache_bytes=room(model, 60, 4), max_batched_tokens=8)
    tokens = [token % 32 for token in range(150)]
    if config == MISTRAL_SMALL:
        result = engine.generate(tokens, 20, stop_tokens=())
        assert result.tokens == list(expected(config, Asked(tuple(tokens), 20), "float32")[0])
    else:  # one of its layers sees everything
        with pytest.raises(RequestError, match=r"^cache: (170|169) positions"):
            engine.generate(tokens, 20)
    check_empty(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 7])
def test_cancelled_at_any_time(steps: int) -> None:
    """While it waits, in the middle of its prompt, or of its output."""
    engine = Engine(small(QWEN2_SMALL), page_size=4, max_batched_tokens=16)
    other = send(engine, plain(30, 20, 9))
    gone = send(engine, plain(0, 50, 9))
    for _ in range(steps):
        engine.step()
    engine.cancel(gone.request)
    assert gone.request.done
    drain(engine)
    with pytest.raises(RequestError, match=r"^request: it was cancelled"):
        gone.request.result()
    same_as_alone(QWEN2_SMALL, [other])
    tokens, logits, _ = expected(QWEN2_SMALL, gone.asked, "float32")
    assert tuple(gone.tokens) == tokens[: len(gone.tokens)]
    assert bits(gone.rows) == logits[: len(bits(gone.rows))]
    assert len(engine.prefixes) == 1, "what was cancelled is not kept"
    check_empty(engine)


# chunks that are moved


@pytest.mark.parametrize("config", [LLAMA_SMALL, QWEN3_SMALL])
@pytest.mark.parametrize("most", [3, 1000])
def test_moved_chunks_count_as_reused(config: str, most: int) -> None:
    first, edited = STEM[:60], [*STEM[:10], *STEM[20:40], 1, *STEM[40:60], 2, 3]
    for least, moved in ((0, 0), (8, 40), (20, 40), (21, 0)):
        engine = Engine(small(config), page_size=4, cache_reuse=least, max_batched_tokens=most)
        passes = watched(engine)
        engine.generate(first, 4, stop_tokens=())
        passes.clear()
        result = engine.generate(edited, 4, stop_tokens=())
        assert (result.cache_n, result.prompt_n) == (10 + moved, 43 - moved)
        counts = [count for done in shares(passes) for _, kind, count in done if kind == "prefill"]
        assert sum(counts) == result.prompt_n
        check_empty(engine)


@pytest.mark.parametrize(("edit", "moved"), [(False, 0), (True, 40)])
def test_a_prompt_below_the_floor_starts_from_nothing_that_is_not_exact(
    edit: bool, moved: int
) -> None:
    """Where no chunk is moved it is exact, though chunks may be; what follows an edit is moved."""
    engine = Engine(small(QWEN3_SMALL), cache_reuse=20)
    text = tokens_of(600, 32).tolist()
    engine.generate(text, 1, stop_tokens=())
    assert not next(iter(engine.prefixes._kept.values())).cache.exact
    assert engine.generate(text, 1, stop_tokens=()).cache_n == 599, "one above the floor may"
    asked = Asked((*text[:100], *([1, 2, 3] if edit else []), *text[100:140], 1), 4)
    sent = send(engine, asked)
    drain(engine)
    assert sent.request.result().cache_n == moved
    if not edit:
        same_as_alone(QWEN3_SMALL, [sent])
    check_empty(engine)


@pytest.mark.parametrize("config", [MISTRAL_SMALL, QWEN2_SMALL])
def test_chunks_that_a_window_forgot_are_computed(config: str) -> None:
    engine = Engine(small(config), page_size=4, cache_reuse=8)
    engine.generate(STEM[:60], 4, stop_tokens=())
    sent = send(engine, Asked((*STEM[:10], *STEM[20:60], 1, 2), 4))
    drain(engine)
    assert sent.request.result().cache_n == 0
    same_as_alone(config, [sent])
    check_empty(engine)


def test_a_source_that_is_evicted_for_its_own_heir_is_computed() -> None:
    """Making room for the task gives up the sequence that its chunks would come from."""
    model = small(LLAMA_SMALL)
    pages = model.new_pool(None, 4, originals=True)
    engine = Engine(model, page_size=4, cache_reuse=8, cache_bytes=20 * pages.groups[0].page_bytes)
    engine.generate(STEM[:60], 4, stop_tokens=())
    sent = send(engine, Asked((*STEM[40:60], *STEM[:10], *STEM[20:52]), 8))
    drain(engine)
    result = sent.request.result()
    assert result.prompt_n + result.cache_n == 62
    check_empty(engine)


def test_a_request_that_must_wait_anyway_costs_no_kept_sequence() -> None:
    model = small(QWEN3_SMALL)
    page = model.new_pool().groups[0].page_bytes
    engine = Engine(model, cache_bytes=12 * page)
    engine.generate(tokens_of(40, 32).tolist(), 1, stop_tokens=())
    running = engine.submit(tokens_of(100, 31).tolist(), 20, stop_tokens=())
    engine.step()
    assert len(engine.prefixes) == 1
    waiting = engine.submit(tokens_of(120, 30).tolist(), 2, stop_tokens=())
    engine.step()
    assert len(engine.prefixes) == 1
    while engine.busy:
        engine.step()
    assert running.result().tokens
    assert waiting.result().tokens


@pytest.mark.parametrize("length", range(20, 44, 3))
def test_kept_sequences_are_given_up_for_a_success_alone(length: int) -> None:
    model = small(QWEN2_SMALL)
    engine = Engine(model, page_size=4, cache_bytes=room(model, 48, 4), max_batched_tokens=64)
    engine.generate([5] * 8, 1, stop_tokens=())
    engine.submit([7] * 21, 8, stop_tokens=())
    engine.step()
    kept = len(engine.prefixes)
    engine.submit([9] * length, 1, stop_tokens=())
    engine.step()
    assert len(engine.prefixes) >= kept or not engine.scheduler.waiting


@pytest.mark.parametrize("length", range(20, 60, 6))
def test_a_file_for_which_there_is_no_room_costs_no_kept_sequence(
    length: int, tmp_path: Path
) -> None:
    model = small(QWEN2_SMALL)
    writer = Engine(model, page_size=4, cache_bytes=1 << 24)
    writer.generate([1] * length, 1, stop_tokens=())
    writer.save_cache(tmp_path / "a.cache")
    engine = Engine(model, page_size=4, cache_bytes=room(model, 48, 4), max_batched_tokens=64)
    engine.generate([5] * 8, 1, stop_tokens=())
    engine.submit([7] * 21, 8, stop_tokens=())
    engine.step()
    try:
        engine.restore_cache(tmp_path / "a.cache")
    except CacheError:
        assert length > 40
        assert len(engine.prefixes) == 1
    else:
        assert length < 56
