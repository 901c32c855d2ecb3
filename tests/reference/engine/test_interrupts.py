"""Interrupts: raised by a callback, or while a pass is computed; nobody else loses a token."""

from __future__ import annotations

from typing import Any

import pytest

from reference.engine import Engine
from reference.model import Model
from reference.request import Request
from tests.oracle.arrays import Float32
from tests.reference.engine.decoding import argmax_chain
from tests.reference.models import QWEN3_SMALL, small, tiny
from tests.reference.traffic import check_empty, drain

PROMPTS = [[5, 1, 30, 2], [7, 7, 1], [2, 9, 4, 4, 1], [3, 8]]


class Interrupting:
    """Raises when it is called for the `turn`-th time, whatever it is given."""

    def __init__(self, turn: int, error: BaseException) -> None:
        self.left, self.error = turn, error

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def interrupted(engine: Engine) -> int:
    """Step until nothing is left; how often a step was interrupted."""
    count = 0
    for _ in range(200):
        if not engine.busy:
            return count
        try:
            engine.step()
        except (KeyboardInterrupt, SystemExit):
            count += 1
    raise AssertionError("the engine hangs")


@pytest.mark.parametrize("error", [KeyboardInterrupt("^C"), SystemExit(3)])
@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize(
    ("name", "turn"), [("on_token", 1), ("on_token", 4), ("on_prompt", 1), ("on_done", 1)]
)
def test_an_interrupt_in_a_callback_ends_its_request_and_is_raised(
    name: str, turn: int, draft: Any, error: BaseException
) -> None:
    """Wherever in a pass its request stands: the others get their tokens of that pass too."""
    for which in range(len(PROMPTS)):
        engine = Engine(small(QWEN3_SMALL), page_size=4, draft=draft)
        requests = list[Request]()
        for number, prompt in enumerate(PROMPTS):
            options: dict[str, Any] = {name: Interrupting(turn, error)} if number == which else {}
            requests.append(engine.submit(prompt, 9, stop_tokens=(), **options))
        assert interrupted(engine) == 1
        for number, (prompt, request) in enumerate(zip(PROMPTS, requests, strict=True)):
            if number == which:
                with pytest.raises(type(error)):
                    request.result()
            else:
                assert request.result().tokens == argmax_chain(engine.model, prompt, 9)
        check_empty(engine)


def test_an_interrupt_as_text_is_streamed() -> None:
    engine = Engine(tiny(), page_size=4)
    expected = engine.generate("And God said", 8, cache_prompt=False).tokens
    other = engine.submit("And God said", 8)
    with pytest.raises(KeyboardInterrupt):
        engine.generate("And God", 8, on_text=Interrupting(2, KeyboardInterrupt()))
    drain(engine)
    assert other.result().tokens == expected
    check_empty(engine)


def test_two_interrupts_of_one_pass_are_one() -> None:
    engine = Engine(small(QWEN3_SMALL))
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, 5, stop_tokens=(), on_token=Interrupting(2, KeyboardInterrupt()))
    last = engine.submit(PROMPTS[2], 5, stop_tokens=())
    assert interrupted(engine) == 1
    assert last.result().tokens == argmax_chain(engine.model, PROMPTS[2], 5)
    check_empty(engine)


def test_who_is_told_that_it_was_cancelled_may_interrupt() -> None:
    engine = Engine(small(QWEN3_SMALL))
    gone = engine.submit(PROMPTS[0], 9, stop_tokens=(), on_done=Interrupting(1, SystemExit()))
    other = engine.submit(PROMPTS[1], 5, stop_tokens=())
    engine.step()
    engine.cancel(gone)
    assert interrupted(engine) == 1
    assert other.result().tokens == argmax_chain(engine.model, PROMPTS[1], 5)
    check_empty(engine)


def test_an_interrupt_of_the_pass_itself_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal comes, within the model: all go on where they were."""
    engine = Engine(small(QWEN3_SMALL), page_size=4, draft="ngram")
    requests = [engine.submit(prompt, 9, stop_tokens=()) for prompt in PROMPTS]
    whole, once = Model._finish, Interrupting(3, KeyboardInterrupt())

    def finish(self: Model, *arguments: Any) -> list[Float32]:
        once()
        return whole(self, *arguments)

    monkeypatch.setattr(Model, "_finish", finish)
    assert interrupted(engine) == 1
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.result().tokens == argmax_chain(engine.model, prompt, 9)
    check_empty(engine)


def test_after_a_cancel_nothing_more_of_the_pass_is_told() -> None:
    """Several tokens of one pass: the callback cancels at the first."""
    model, seen = small(QWEN3_SMALL), list[int]()
    engine = Engine(model, draft=model, draft_tokens=6)

    def take(token: int, logits: Float32) -> None:
        seen.append(token)
        if len(seen) == 3:
            engine.cancel(request)

    request = engine.submit(PROMPTS[0], 12, stop_tokens=(), on_token=take)
    drain(engine)
    assert seen == argmax_chain(model, PROMPTS[0], 3)
    assert request.cancelled
    check_empty(engine)
