"""Callbacks that fail, submit or cancel; passes that fail; and callers on several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from reference.engine import Engine
from reference.model import Model
from reference.request import Request, Result
from reference.scheduler import Scheduler
from tests.oracle.arrays import Float32
from tests.reference.engine.decoding import PROMPT, argmax_chain
from tests.reference.models import QWEN2_SMALL, QWEN3_SMALL, small, tiny
from tests.reference.traffic import check_empty, drain

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def gone(*_: Any) -> None:
    raise LookupError("the screen is gone")


@pytest.mark.parametrize("name", ["on_text", "on_token", "on_prompt", "on_done"])
def test_a_callback_that_raises_fails_its_request_alone(name: str) -> None:
    options: dict[str, Any] = {name: gone}
    engine = Engine(tiny(), page_size=4)
    expected = engine.generate("And God said", 6, cache_salt="first").tokens
    failing = engine.submit("And God", 6, **options)
    other = engine.submit("And God said", 6)
    drain(engine)
    assert other.result().tokens == expected
    with pytest.raises(LookupError, match="the screen is gone"):
        failing.result()
    with pytest.raises(LookupError, match="the screen is gone"):
        engine.generate("And it", 3, **options)
    check_empty(engine)


def test_callbacks_may_submit_and_cancel() -> None:
    engine, started = Engine(small(QWEN3_SMALL)), list[Request]()

    def again(token: int, logits: Float32) -> None:
        if len(started) < 3:
            started.append(engine.submit(PROMPT, 4, stop_tokens=(), on_token=again))
        elif len(started) == 3:
            engine.cancel(started[-1])
            started.append(first)

    first = engine.submit(PROMPT, 4, stop_tokens=(), on_token=again)
    drain(engine)
    chain = argmax_chain(engine.model, PROMPT, 4)
    assert [one.result().tokens for one in (first, *started[:2])] == [chain] * 3
    assert started[2].cancelled
    check_empty(engine)


def test_what_was_cancelled_or_failed_within_a_pass_is_not_kept() -> None:
    engine = Engine(small(QWEN3_SMALL))
    cancelled = engine.submit(PROMPT, 9, on_token=lambda *_: engine.cancel(cancelled))
    failing = engine.submit(PROMPT, 9, on_token=gone)
    drain(engine)
    assert cancelled.cancelled
    assert isinstance(failing.outcome, LookupError)
    assert len(engine.prefixes) == 0
    check_empty(engine)


def test_submit_step_and_cancel_from_different_threads() -> None:
    engine = Engine(small(QWEN2_SMALL), page_size=4, max_batched_tokens=24, draft="ngram")
    chains = {n: argmax_chain(engine.model, PROMPT[:n], 12) for n in (1, 2, 3, 4)}
    requests: dict[int, list[Request]] = {n: [] for n in chains}
    stop = threading.Event()

    def stepping() -> None:
        while not stop.is_set() or engine.busy:
            engine.step()

    def asking(count: int) -> None:
        for turn in range(6):
            request = engine.submit(PROMPT[:count], 12, stop_tokens=())
            requests[count].append(request)
            if turn % 3 == 2:
                engine.cancel(request)
            elif turn % 3 == 1:
                assert engine.generate(PROMPT[:count], 12, stop_tokens=()).tokens == chains[count]

    threads = [threading.Thread(target=asking, args=(n,)) for n in chains]
    steppers = [threading.Thread(target=stepping) for _ in range(2)]
    for thread in threads + steppers:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    for thread in steppers:
        thread.join(60)
        assert not thread.is_alive()
    assert [len(sent) for sent in requests.values()] == [6] * 4
    for count, sent in requests.items():
        for request in sent:
            assert request.done
            if not request.cancelled or isinstance(request.outcome, Result):
                assert request.result().tokens == chains[count]
    numbers = [request.task.number for sent in requests.values() for request in sent]
    assert len(set(numbers)) == len(numbers)
    check_empty(engine)


def test_a_pass_that_fails_fails_those_who_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`step` does not raise it, and those who come later are computed."""
    engine = Engine(small(QWEN3_SMALL), max_batched_tokens=8)
    first, second = (engine.submit([n] * 8, 4, stop_tokens=()) for n in (1, 2))

    def failing(*arguments: Any) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(Model, "forward_batch", failing)
        engine.step()
    with pytest.raises(MemoryError):
        first.result()
    drain(engine)
    assert second.result().tokens == argmax_chain(engine.model, [2] * 8, 4)
    check_empty(engine)


def test_a_pass_that_cannot_be_planned_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small(QWEN3_SMALL))
    requests = [engine.submit([n] * 8, 4) for n in (1, 2)]

    def failing(*arguments: Any) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "plan", failing)
        engine.step()
    for request in requests:
        with pytest.raises(MemoryError):
            request.result()
    check_empty(engine)
