"""Which tokens a request is given: greedy, drawn, and whatever else runs (SPEC 13.1, 14)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from reference.engine import Engine
from reference.sampling import Sampling, sample
from tests.oracle.arrays import Float32, assert_same
from tests.reference.engine.decoding import PROMPT, WARM, argmax_chain, generate
from tests.reference.models import LLAMA_SMALL, QWEN2_SMALL, QWEN3_SMALL, small, tiny
from tests.reference.traffic import drain, room

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.parametrize("config", [LLAMA_SMALL, QWEN2_SMALL, QWEN3_SMALL])
@pytest.mark.parametrize("weights", ["float32", "int4", "int4-row"])
def test_greedy_is_the_argmax_chain(config: str, weights: Any) -> None:
    model = small(config, weights)
    assert generate(model, PROMPT, 20).tokens == argmax_chain(model, PROMPT, 20)


def test_greedy_of_the_trained_model() -> None:
    model = tiny()
    result = Engine(model).generate("And it came to pass", 12)
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("And it came to pass")
    assert result.tokens == argmax_chain(model, prompt, 12)
    assert result.text == model.tokenizer.decode(result.tokens)


def test_the_prompt_may_be_text_or_its_tokens() -> None:
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    text = generate(tiny(), "And God said", 4)
    ids = generate(tiny(), tokenizer.encode("And God said"), 4)
    array = Engine(tiny()).generate(np.array(tokenizer.encode("And God said")), 4)  # type: ignore[arg-type]
    assert text.tokens == ids.tokens == array.tokens
    assert text.prompt_n == ids.prompt_n == len(tokenizer.encode("And God said"))


def by_hand(seed: int, request: int, count: int, sampling: Sampling) -> list[int]:
    model, tokens = small(QWEN3_SMALL), list(PROMPT)
    for _ in range(count):
        previous = np.array(tokens, np.int64)
        logits = model.forward(tokens)[-1]
        tokens.append(sample(logits, sampling, previous, seed, request, len(tokens)))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    "sampling",
    [WARM, Sampling(0.7, 5, 0.9, 0.01, 1.3), Sampling(repetition_penalty=1.5)],
)
def test_tokens_are_sampled_by_position_and_history(sampling: Sampling) -> None:
    result = generate(small(QWEN3_SMALL), PROMPT, 20, sampling=sampling, seed=9, request=3)
    assert result.tokens == by_hand(9, 3, 20, sampling)


def test_a_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    engine = Engine(small(QWEN3_SMALL))

    def ask(seed: int, request: int = 0) -> list[int]:
        return engine.generate(
            PROMPT, 24, sampling=WARM, seed=seed, request=request, stop_tokens=()
        ).tokens

    first = ask(1)
    np.random.seed(0)
    assert ask(2) != first
    assert ask(1, request=1) != first
    assert ask(1) == first
    answers: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda s=s: answers.update({s: ask(s)})) for s in (1, 2, 1 << 40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {seed: ask(seed) for seed in answers}
    assert answers[1] == first


def test_requests_in_turns_do_not_touch() -> None:
    engine = Engine(small(QWEN2_SMALL))
    texts = [list(PROMPT), [7, 8, 9]]
    requests = [engine.submit(text, 15, stop_tokens=()) for text in texts]
    while engine.busy:
        engine.step()
    assert [request.chosen for request in requests] == [
        generate(engine.model, text, 15).tokens for text in texts
    ]


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_on_token_is_given_each_token_and_the_logits_that_chose_it(draft: Any) -> None:
    model, seen = small(QWEN3_SMALL), list[tuple[int, Float32]]()
    engine = Engine(model, draft=draft)
    result = engine.generate(
        PROMPT, 9, stop_tokens=(), on_token=lambda token, logits: seen.append((token, logits))
    )
    tokens = [token for token, _ in seen]
    assert tokens == result.tokens
    for count, (_, logits) in enumerate(seen):
        assert logits.shape == (32,)
        assert logits.tobytes() == model.forward(PROMPT + tokens[:count])[-1].tobytes()


@pytest.mark.parametrize("most", [3, 2048])
def test_on_prompt_is_given_the_logits_of_the_prompt(most: int) -> None:
    """All of them, in order, though an earlier request left the prompt's pages."""
    engine, rows = Engine(small(QWEN3_SMALL), max_batched_tokens=most), list[Float32]()
    engine.generate(PROMPT * 3, 2)

    def take(first: int, logits: Float32) -> None:
        assert first == sum(map(len, rows))
        rows.append(logits)

    result = engine.generate(PROMPT * 3, 5, stop_tokens=(), on_prompt=take)
    assert_same(np.concatenate(rows), engine.model.forward(PROMPT * 3))
    assert (result.cache_n, result.prompt_n) == (0, 12)
    assert result.tokens == argmax_chain(engine.model, PROMPT * 3, 5)


def test_on_prompt_is_given_nothing_of_output_that_is_computed_again() -> None:
    """Where pages run out the prompt comes anew, and only the prompt."""
    model = small(QWEN3_SMALL)
    engine = Engine(model, page_size=4, cache_bytes=room(model, 44, 4))
    whole = model.forward(PROMPT * 2)
    seen: list[int] = []

    def take(first: int, logits: Float32) -> None:
        seen.append(first)
        assert_same(logits, whole[first : first + len(logits)])

    engine.submit([7, 8, 9], 30, stop_tokens=())
    engine.submit(PROMPT * 2, 30, stop_tokens=(), on_prompt=take)
    drain(engine)
    assert seen == [0, 0], "it had to wait again once"


def test_numbers_may_be_of_any_type() -> None:
    model = small(QWEN3_SMALL)
    numbers: list[Any] = [np.float16(1), np.int64(9), np.float32(0.9), np.float32(0.01)]
    page_size: Any = np.int8(4)
    count: Any = np.int32(9)
    sampling = Sampling(1.0, 9, float(np.float32(0.9)), float(np.float32(0.01)))
    assert Sampling(*numbers) == sampling
    one = Engine(model, page_size=4)
    other = Engine(model, page_size=page_size)
    for seed in (np.int32(7), np.uint8(7), np.uint64(7)):
        of: dict[str, Any] = {"seed": seed, "request": np.int16(2), "stop_tokens": np.array([3])}
        found = other.generate(PROMPT, count, sampling=Sampling(*numbers), **of)
        expected = one.generate(PROMPT, 9, sampling=sampling, seed=7, request=2, stop_tokens=[3])
        assert found.tokens == expected.tokens
