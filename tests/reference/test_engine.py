"""Generation: tokens, where they end, and the text as it becomes final (SPEC 8.4, 13, 14)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import speculation
from reference.engine import Engine
from reference.errors import CacheError, RequestError
from reference.model import Model, Part
from reference.request import Request, Result
from reference.sampling import Sampling, sample
from reference.scheduler import FAST_FLOOR, Scheduler, prefill_attention
from reference.speculation import NgramDraft, Proposal
from reference.tokenizer import TextStream, Tokenizer
from reference.trace import Pass
from tests.oracle.arrays import Float32, assert_same
from tests.reference.test_model import LLAMA_SMALL, QWEN2_SMALL, QWEN3_SMALL, small, tiny, tokens_of
from tests.reference.traffic import check_empty, drain, room

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

WARM = Sampling(temperature=1.0)
PROMPT = [5, 1, 30, 2]


def argmax_chain(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.forward(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def generate(model: Model, prompt: str | Sequence[int], count: int, **options: Any) -> Result:
    return Engine(model).generate(prompt, count, **{"stop_tokens": (), **options})


# tokens


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


# the floor (SPEC 8.4)

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


# a model that says what it is told


@dataclass(frozen=True)
class Scripted(Model):
    """Its greedy tokens after a prompt of one token are those of `script`."""

    script: tuple[int, ...] = ()

    def forward_batch(self, parts: Sequence[Part], routed: Any = None) -> list[Float32]:
        rows = []
        for part in parts:
            assert part.cache is not None
            rows.append(np.zeros((len(part.tokens), self.config.vocab_size), np.float32))
            for row in rows[-1]:
                part.cache.extend(1)
                part.cache.commit(1)
                row[self.script[part.cache.length - 1]] = 1
        return rows


def tokenizer() -> Tokenizer:
    found = tiny().tokenizer
    assert found is not None
    return found


def scripted(script: Sequence[int]) -> Scripted:
    base = tiny()
    return Scripted(
        base.config,
        base.weights,
        base.operations,
        base.tokenizer,
        base.eos_tokens,
        script=tuple(script),
    )


def say(script: Sequence[int], **options: Any) -> tuple[Result, list[str]]:
    """The result of a script, and the pieces that were streamed."""
    pieces: list[str] = []
    options = {"stop_tokens": (), **options}
    count = options.pop("count", len(script))
    engine = Engine(scripted(script), cache_bytes=1 << 21)
    result = engine.generate([65], count, on_text=pieces.append, **options)
    assert "".join(pieces) == result.text
    assert all(pieces), "no piece is empty"
    return result, pieces


def spelled(text: str) -> list[int]:
    """One token a byte."""
    names = {tokenizer().token(id_): id_ for id_ in range(tokenizer().vocab_size)}
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in alphabet]
    letter = {byte: chr(byte) for byte in alphabet}
    letter |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [names[letter[byte]] for byte in text.encode()]


# the end


def test_a_stop_token_ends_the_text_and_is_reported() -> None:
    script = [*spelled("ab"), 0, *spelled("cd")]
    result, _ = say(script, stop_tokens=None)
    assert (result.tokens, result.text, result.stop) == (script[:3], "ab", "token")
    result, _ = say(script)
    assert (result.tokens, result.text, result.stop) == (script, "abcd", "length")


def test_a_stop_token_may_be_any_and_has_no_text() -> None:
    script = spelled("xyz")
    result, _ = say(script, stop_tokens=[script[1], 999])
    assert (result.tokens, result.text, result.stop) == (script[:2], "x", "token")
    result, pieces = say(script, stop_tokens=iter([script[0]]))
    assert (result.tokens, result.text, result.stop, pieces) == (script[:1], "", "token", [])


def test_the_models_own_stop_tokens_are_the_default() -> None:
    assert tiny().eos_tokens == (0,)
    model = small(QWEN3_SMALL)
    chain = argmax_chain(model, PROMPT, 30)
    ending = replace(model, eos_tokens=(chain[4], 31))
    result = Engine(ending).generate(PROMPT, 30)
    assert result.tokens == chain[: chain.index(chain[4]) + 1]
    assert result.stop == "token"
    assert Engine(ending).generate(PROMPT, 30, stop_tokens=[]).tokens == chain


def test_a_stop_token_that_comes_last_is_the_reason() -> None:
    assert say([*spelled("a"), 0], stop_tokens=None)[0].stop == "token"


@pytest.mark.parametrize(
    ("said", "stop", "text", "used"),
    [
        ("hello END more", ["END"], "hello ", 9),
        ("hello END more", [" END"], "hello", 9),
        ("hello END more", ["E"], "hello ", 7),
        ("hello", ["h"], "", 1),
        ("hello", ["lo"], "hel", 5),
        ("aaab", ["aab"], "a", 4),
        ("abababc", ["ababc"], "ab", 7),
        ("one two", ["two", "ne"], "o", 3),
        ("ab", ["c", "b"], "a", 2),
        ("x🙂y", ["🙂"], "x", 5),
        ("x🙂y", ["🙂y"], "x", 6),
        ("a\nb\n\nc", ["\n\n"], "a\nb", 5),
    ],
)
def test_a_stop_string_ends_the_text_before_it(
    said: str, stop: list[str], text: str, used: int
) -> None:
    """Whatever tokens it is spread over; and the tokens end where it was complete."""
    script = spelled(said)
    result, _ = say(script, stop=stop)
    assert (result.text, result.stop, result.tokens) == (text, "string", script[:used])


def test_a_stop_string_inside_one_token() -> None:
    word = tokenizer().encode("hello world\n")
    result, pieces = say(word, stop=["o w"])
    assert (result.text, result.stop) == ("hell", "string")
    assert len(result.tokens) < len(word)
    assert "".join(pieces) == "hell"


def test_stop_strings_that_do_not_come_change_nothing() -> None:
    script = spelled("hello EN, E")
    result, pieces = say(script, stop=["END", "E?"])
    assert (result.text, result.stop) == ("hello EN, E", "length")
    assert pieces == ["h", "e", "l", "l", "o", " ", "EN,", " ", "E"]


def test_no_part_of_a_stop_string_is_streamed() -> None:
    _, pieces = say(spelled("aXYXYZb"), stop=["XYZ"])
    assert pieces == ["a", "XY"]


def test_a_prompts_text_is_no_part_of_a_stop_string() -> None:
    prompt = tokenizer().encode("A")
    assert prompt == [33] or len(prompt) == 1
    pieces: list[str] = []
    result = Engine(scripted(spelled("Bc"))).generate(
        prompt, 2, stop=["AB"], stop_tokens=(), on_text=pieces.append
    )
    assert (result.text, pieces) == ("Bc", ["B", "c"])


# characters of several bytes


def test_a_character_is_streamed_whole() -> None:
    script = tokenizer().encode("a🙂é漢")
    assert len(script) > 4
    result, pieces = say(script)
    assert result.text == "a🙂é漢"
    assert pieces == ["a", "🙂", "é", "漢"]


def test_a_character_that_is_not_finished_is_replaced_at_the_end() -> None:
    script = spelled("a🙂")[:-1]
    result, pieces = say(script)
    assert result.text == tokenizer().decode(script)
    assert result.text.startswith("a\ufffd")
    assert pieces[0] == "a"
    result, _ = say([*script, 0], stop_tokens=None)
    assert result.text == tokenizer().decode(script)
    assert result.stop == "token"


ALPHABET = "ab \n🙂é漢"
TOKENS = st.one_of(
    st.integers(0, 1023),
    st.sampled_from([128, 163, 173, 225, 248, 254]),
    st.sampled_from(range(60, 90)),
)


@given(
    script=st.lists(TOKENS, min_size=1, max_size=25)
    | st.text(ALPHABET, min_size=1, max_size=15).map(spelled),
    stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    own=st.integers(0, 20),
)
@settings(max_examples=200)
def test_the_stream_is_the_text(script: list[int], stop: list[str], own: int) -> None:
    """A stop string cuts the decoded text where it comes first, and ends it at once."""
    decoded = tokenizer().decode(script)
    if own < len(decoded) and "\ufffd" not in decoded[own : own + 3]:
        stop = [*stop, decoded[own : own + 3]]
    result, _ = say(script, stop=stop)
    assert result.tokens == script[: len(result.tokens)]
    whole = tokenizer().decode(result.tokens)
    found = [whole.find(s) for s in stop if s in whole]
    assert result.text == (whole[: min(found)] if found else whole)
    assert result.stop == ("string" if found else "length")
    stream = TextStream(tokenizer())
    before = "".join(stream.feed(token) for token in result.tokens[:-1])
    assert not any(s in before for s in stop), "generation had to end earlier"
    if not found:
        assert result.tokens == script


# the end of the context


@pytest.mark.parametrize(("count", "room"), [(250, 7), (255, 2), (256, 1)])
def test_the_context_ends_generation(count: int, room: int) -> None:
    """The last token is chosen from the last position that there is, and takes none itself."""
    model, prompt = small(QWEN2_SMALL), tokens_of(count, 32).tolist()
    result = generate(model, prompt, 100)
    assert (len(result.tokens), result.stop) == (room, "context")
    assert generate(model, prompt, room).stop == "length"
    assert generate(model, prompt, room).tokens == result.tokens
    assert generate(model, prompt, room + 1).stop == "context"
    ended = generate(model, prompt, 100, stop_tokens=result.tokens[-1:])
    assert ended.stop == "token"


def test_a_context_that_ends_gives_the_text_held_back() -> None:
    script = spelled("abcE")
    base = scripted(script)
    short = replace(base, config=replace(base.config, max_positions=4))
    result = Engine(short).generate([65], 100, stop=["END"], stop_tokens=())
    assert (result.text, result.stop, len(result.tokens)) == ("abcE", "context", 4)


# the result


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_result_is_consistent(count: int) -> None:
    started = time.perf_counter()
    result = generate(small(QWEN3_SMALL), PROMPT, count)
    elapsed, spent = time.perf_counter() - started, result.timings
    assert result.prompt_n + result.cache_n == len(PROMPT)
    assert result.cache_n == 0
    assert len(result.tokens) == count
    assert all(type(token) is int for token in result.tokens)
    assert result.stop == "length"
    assert result.text == "", "a model without a tokenizer has no text"
    assert spent.time_to_first_token > 0
    assert spent.decode >= 0
    assert spent.time_to_first_token + spent.decode <= elapsed
    assert spent.prefill_rate == pytest.approx(result.prompt_n / spent.time_to_first_token)
    if count == 1:
        assert spent.decode_rate == 0
    else:
        assert spent.decode_rate == pytest.approx((count - 1) / spent.decode)


def test_on_text_is_called_as_the_tokens_come() -> None:
    seen: list[tuple[str, int]] = []
    model = scripted(spelled("abc"))
    lengths: list[int] = []

    class Watching(Scripted):
        def forward_batch(self, parts: Sequence[Part], routed: Any = None) -> list[Float32]:
            lengths.append(len(lengths))
            return super().forward_batch(parts)

    watching = Watching(*(getattr(model, name) for name in model.__dataclass_fields__))
    Engine(watching).generate(
        [65], 3, stop_tokens=(), on_text=lambda piece: seen.append((piece, len(lengths)))
    )
    assert seen == [("a", 1), ("b", 2), ("c", 3)]


# callers that fail, other threads, and streams


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": -1}, "seed: -1 is out of range"),
        ({"seed": 2**64}, "seed"),
        ({"request": 2**32}, "request"),
        ({"seed": 0.5}, "^seed: 0.5 is no whole number"),
        ({"seed": "1"}, "^seed: '1' is no whole number"),
        ({"request": None}, "^request: None is no whole number"),
        ({"stop_tokens": 5}, "^stop_tokens: 5 is no list"),
        ({"stop_tokens": [[1]]}, r"^stop_tokens: \[1\] is no whole number"),
        ({"sampling": None}, "^sampling: None is no `Sampling`"),
        ({"cache_salt": "\ud800"}, r"^cache_salt: '\\ud800' is no Unicode text"),
        ({"cache_salt": None}, "^cache_salt: None is no Unicode text"),
        ({"cache_salt": 5}, "^cache_salt: 5 is no Unicode text"),
        ({"exact_prefill": "no"}, "^exact_prefill: 'no' is neither true nor false"),
        ({"cache_prompt": None}, "^cache_prompt: None is neither true nor false"),
        ({"on_text": None}, "^on_text: None cannot be called"),
        ({"on_token": 5}, "^on_token: 5 cannot be called"),
        ({"stop": None}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": ["a", ""]}, "stop: an empty text"),
        ({"stop": ""}, "stop: an empty text"),
        ({"stop": "."}, "stop: the model has no tokenizer"),
    ],
)
def test_what_would_only_fail_later_is_refused_at_once(options: dict[str, Any], named: str) -> None:
    engine = Engine(small(QWEN3_SMALL))
    with pytest.raises(RequestError, match=named):
        engine.submit(PROMPT, 5, **options)
    assert not engine.busy


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


def test_a_draft_must_be_one() -> None:
    lookup: Any = "lookup"
    with pytest.raises(RequestError, match="draft"):
        Engine(small(QWEN3_SMALL), draft=lookup)


def test_a_stream_has_its_own_callbacks() -> None:
    async def first() -> None:
        async for _ in Engine(tiny()).stream("And", 3, on_text=print):
            pass

    with pytest.raises(RequestError, match="on_text"):
        asyncio.run(first())


def test_who_waits_for_its_draft_comes_next() -> None:
    """Two drafts never fit one pass; both requests go on in turns."""
    engine = Engine(small(QWEN3_SMALL), max_batched_tokens=5, draft="ngram", draft_tokens=4)
    prompt, passes = [1, 2, 3, 1, 2, 3, 1, 2], list[Pass]()
    engine.on_pass = passes.append
    requests = [engine.submit([*prompt, n], 30, stop_tokens=()) for n in (1, 2)]
    while not any(request.done for request in requests):
        engine.step()
    took_part = Counter(number for done in passes[5:] for number, _, _ in done.shares)
    assert 3 * min(took_part.values()) > 2 * max(took_part.values())
    drain(engine)


def test_an_exact_request_that_must_wait_again_stays_exact() -> None:
    """It was decided when it was first admitted; pages of a fast one are not for it."""
    model = tiny()
    assert model.tokenizer is not None
    text = (Path(__file__).parents[2] / "fixtures/prompts/2000.txt").read_text()
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


async def listen(engine: Engine, prompt: Any, count: int, **options: Any) -> str:
    return "".join([piece async for piece in engine.stream(prompt, count, **options)])


def test_streams_side_by_side() -> None:
    """Each is the text of its request alone, in pieces; their passes are shared."""
    engine, passes = Engine(tiny(), page_size=4), list[Pass]()
    engine.on_pass = passes.append
    prompts = ["And God said", "And it came", "In the beginning"]

    async def together() -> list[str]:
        return await asyncio.gather(*(listen(engine, prompt, 12) for prompt in prompts))

    for _ in range(2):  # an engine serves one event loop after another
        texts = asyncio.run(together())
        assert texts == [Engine(tiny()).generate(prompt, 12).text for prompt in prompts]
    assert max(len(done.shares) for done in passes) == 3
    check_empty(engine)


def test_a_stream_comes_as_it_is_computed() -> None:
    engine = Engine(scripted(spelled("abcdef")))

    async def first() -> tuple[str, int]:
        stream = engine.stream([65], 6, stop_tokens=())
        piece = await anext(stream)
        chosen = max(len(request.chosen) for request in engine._requests.values())
        rest = [piece async for piece in stream]
        return piece + "".join(rest), chosen

    text, chosen = asyncio.run(first())
    assert text == "abcdef"
    assert 1 <= chosen <= 6


def test_a_consumer_that_goes_away_cancels_its_request() -> None:
    engine = Engine(tiny(), page_size=4)
    alone = Engine(tiny()).generate("And God said", 20).text

    async def leaving() -> str:
        async def leave() -> None:
            async for _ in engine.stream("And God", 4000, stop_tokens=()):
                break

        async def waiting() -> None:
            await listen(engine, "And it", 4000, stop_tokens=())

        impatient = asyncio.create_task(waiting())
        staying = asyncio.create_task(listen(engine, "And God said", 20))
        await leave()
        await asyncio.sleep(0.05)
        impatient.cancel()
        text = await staying
        while engine.busy:  # the engine learns of it with its next pass
            await asyncio.sleep(0.01)
        return text

    assert asyncio.run(asyncio.wait_for(leaving(), 60)) == alone
    check_empty(engine)


def test_an_event_loop_that_ends_leaves_nothing() -> None:
    """`asyncio.run` returns while a request is in the middle of its output."""
    engine = Engine(tiny(), page_size=4)

    async def hasty() -> None:
        pending = asyncio.create_task(listen(engine, "And God", 4000, stop_tokens=()))
        while not any(request.chosen for request in engine._requests.values()):
            await asyncio.sleep(0.001)
        del pending

    asyncio.run(hasty())
    drain(engine)
    check_empty(engine)
    assert engine.generate("And God", 5).tokens == Engine(tiny()).generate("And God", 5).tokens


def test_an_error_in_the_middle_reaches_every_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails is the pass itself; the next stream starts afresh."""
    engine, original, count = Engine(tiny(), page_size=4), Model.forward_batch, 0

    def failing(self: Model, parts: Sequence[Part], *more: Any) -> list[Float32]:
        nonlocal count
        count += 1
        if count == 4:
            raise MemoryError("no more")
        return original(self, parts, *more)

    monkeypatch.setattr(Model, "forward_batch", failing)

    async def both() -> list[Any]:
        streams = [listen(engine, prompt, 12) for prompt in ("And God", "And it")]
        failed = await asyncio.gather(*streams, return_exceptions=True)
        return [*failed, await listen(engine, "And God said", 6)]

    first, second, third = asyncio.run(both())
    assert isinstance(first, MemoryError)
    assert isinstance(second, MemoryError)
    assert third == Engine(tiny()).generate("And God said", 6).text
    assert not caplog.records, "no exception was left unheard"
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


def test_an_event_loop_that_was_closed_is_not_waited_for() -> None:
    """Its pump never ends; the next loop has its own."""
    engine = Engine(tiny(), page_size=4)
    loop = asyncio.new_event_loop()

    async def left() -> None:
        await anext(engine.stream("And God", 400, stop_tokens=()))
        loop.stop()
        await asyncio.sleep(60)

    task = loop.create_task(left())
    loop.run_forever()
    loop.close()
    pump = engine._pump
    assert pump is not None
    assert not pump.done()
    text = asyncio.run(asyncio.wait_for(listen(engine, "And God said", 6), 60))
    assert text == Engine(tiny()).generate("And God said", 6).text
    drain(engine)
    check_empty(engine)
    for abandoned in (task, pump):
        abandoned._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_pump_that_is_collected_takes_no_lock() -> None:
    """It may be closed by the collector at any time, on a thread that computes a pass."""
    engine = Engine(scripted(spelled("abcdef")))
    engine.submit([65], 6)

    async def collected() -> None:
        with engine._lock:
            pump = engine._run()
            pump.send(None)
            pump.close()

    thread = threading.Thread(target=lambda: asyncio.run(collected()), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_stream_that_is_refused() -> None:
    engine = Engine(tiny())
    for prompt, count, options in (("", 5, {}), ("And", 0, {}), ("And", 5, {"stops": "x"})):
        with pytest.raises(RequestError):
            asyncio.run(listen(engine, prompt, count, **options))
    assert not engine.busy


# drafts


def test_a_draft_model_of_another_vocabulary_is_refused_at_once() -> None:
    for other, message in ((small(QWEN3_SMALL), "has 32 tokens, the target's 1024"),):
        with pytest.raises(RequestError, match=f"^draft model: .*{message}"):
            Engine(tiny(), draft=other)


def test_a_request_that_is_done_has_no_draft_and_names_are_compared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = list[Model]()
    monkeypatch.setattr(speculation, "_names", compared.append)
    model = small(QWEN3_SMALL)
    engine = Engine(model, draft=model)
    done, gone = (engine.submit([n] * 9, 9, stop_tokens=()) for n in (1, 2))
    assert done.draft is not gone.draft
    engine.step()
    engine.step()
    engine.cancel(gone)
    drain(engine)
    assert done.result().draft.accepted == 7
    assert (done.draft, gone.draft) == (None, None)
    assert compared == [model, model]


def test_a_draft_model_with_a_shorter_context_drafts_no_further() -> None:
    model, prompt = small(LLAMA_SMALL), tokens_of(245, 32).tolist()
    assert small(QWEN2_SMALL).config.max_positions == 256
    engine = Engine(model, draft=small(QWEN2_SMALL))
    assert engine.generate(prompt, 30, stop_tokens=()).tokens == generate(model, prompt, 30).tokens


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_draft_is_no_longer_than_what_is_left(count: int, calls: list[Call]) -> None:
    """The target as its own draft: whatever is proposed is right."""
    model = small(QWEN3_SMALL)
    result = Engine(model, draft=model, draft_tokens=20).generate(PROMPT, count, stop_tokens=())
    assert result.tokens == argmax_chain(model, PROMPT, count)
    assert result.draft.drafted == result.draft.accepted == count - 1
    ending = Engine(model, draft=model, draft_tokens=20).generate(
        tokens_of(1024 - count, 32).tolist(), 100, stop_tokens=(), exact_prefill=True
    )
    assert (len(ending.tokens), ending.stop) == (count + 1, "context")


def test_a_stop_token_inside_a_draft_ends_the_text_there() -> None:
    model = small(QWEN3_SMALL)
    chain = argmax_chain(model, PROMPT, 12)
    for token in chain[2:9]:
        length = chain.index(token) + 1
        engine = Engine(model, draft=model, draft_tokens=8)
        result = engine.generate(PROMPT, 12, stop_tokens=[token])
        assert (result.tokens, result.stop) == (chain[:length], "token")
        follow = engine.generate([*PROMPT, *result.tokens, 5], 4, stop_tokens=())
        assert follow.cache_n == len(PROMPT) + length - 1, "what was drafted beyond is not kept"
        again = generate(model, [*PROMPT, *result.tokens, 5], 4)
        assert follow.tokens == again.tokens
        check_empty(engine)


def test_a_stop_string_inside_a_draft() -> None:
    """A script that repeats itself, so that n-grams find it."""
    script = spelled("abcabcabcabXabc")
    engine = Engine(scripted(script), draft="ngram", draft_tokens=8)
    result = engine.generate([65], len(script), stop=["bX"], stop_tokens=())
    assert (result.text, result.stop) == ("abcabcabca", "string")
    assert result.draft.accepted > 0


# files


def test_a_cache_file_is_taken_up_by_another_engine(tmp_path: Path) -> None:
    model, path = small(QWEN3_SMALL), tmp_path / "prompt.cache"
    prompt = tokens_of(40, 32).tolist()
    engine = Engine(model, page_size=4)
    with pytest.raises(CacheError, match="no computed prompt to save"):
        engine.save_cache(path)
    engine.generate(prompt, 1, stop_tokens=())
    engine.save_cache(path)
    other = Engine(model, page_size=16)
    other.restore_cache(path)
    result = other.generate([*prompt, 3], 5, stop_tokens=())
    assert (result.cache_n, result.prompt_n) == (40, 1)
    assert result.tokens == generate(model, [*prompt, 3], 5).tokens
    with pytest.raises(CacheError):
        Engine(small(LLAMA_SMALL)).restore_cache(path)
    check_empty(other)


def test_a_file_remembers_that_it_is_not_exact(tmp_path: Path) -> None:
    model, path = small(QWEN3_SMALL), tmp_path / "prompt.cache"
    prompt = tokens_of(600, 32).tolist()
    engine = Engine(model)
    engine.generate(prompt, 1)
    engine.save_cache(path)
    other = Engine(model)
    other.restore_cache(path)
    assert other.generate(prompt[:100], 1).cache_n == 0
    assert other.generate([*prompt, 5], 1, exact_prefill=True).cache_n == 100
    assert other.generate([*prompt, 5, 5], 1, cache_salt="x").cache_n == 0
    fresh = Engine(model)
    fresh.restore_cache(path)
    assert fresh.generate([*prompt, 5], 1).cache_n == 600


# requests that cannot be computed


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, r"^tokens: at least one"),
        ([0, 32], {}, r"^tokens: id 32"),
        ([-1], {}, r"^tokens: id -1"),
        ([1] * 257, {}, r"^tokens: 257 positions"),
        (PROMPT, {"max_new_tokens": 0}, r"^max_new_tokens: 0 "),
        (PROMPT, {"max_new_tokens": -3}, r"^max_new_tokens: -3 "),
        (PROMPT, {"max_new_tokens": 1.5}, r"^max_new_tokens: 1.5 is no whole number"),
        (PROMPT, {"max_new_tokens": "3"}, r"^max_new_tokens: '3' is no whole number"),
        (PROMPT, {"temprature": 0.5}, r"^temprature: there is no such option; there are sampling,"),
        ("text", {}, r"^prompt: .*tokenizer\.json"),
        ("", {}, r"^prompt: .*tokenizer\.json"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(
    prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        Engine(small(QWEN2_SMALL)).generate(prompt, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", [[1.7], [[1, 2]], [None], ["7"], [True]])
def test_ids_that_are_no_integers_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"^(tokens|prompt): ") as error:
        Engine(small(QWEN2_SMALL)).generate(prompt, 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", ["", "\ud800"])
def test_text_that_gives_no_tokens_is_refused(prompt: str) -> None:
    with pytest.raises(RequestError) as error:
        Engine(tiny()).generate(prompt, 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"temperature": "a"},
        {"temperature": 10**400},
        {"top_p": None},
        {"top_k": 2.0},
        {"min_p": 0.5j},
    ],
)
def test_bad_sampling_is_refused_in_one_line(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(RequestError, match=f"^{name}: ") as error:
        Engine(small(QWEN2_SMALL)).generate(PROMPT, sampling=Sampling(**values))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bytes": 0}, "^cache_bytes: 0 is out of range"),
        ({"max_batched_tokens": 0}, "^max_batched_tokens: 0 is out of range"),
        ({"cache_reuse": -1}, "^cache_reuse: -1 is out of range"),
        ({"draft_tokens": 0}, "^draft_tokens: 0 is out of range"),
        ({"cache_bytes": 1e9}, "^cache_bytes: 1000000000.0 is no whole number"),
        ({"cache_bytes": "1GiB"}, "^cache_bytes: '1GiB' is no whole number"),
        ({"max_batched_tokens": 2.5}, "^max_batched_tokens: 2.5 is no whole number"),
        ({"page_size": 16.0}, "^page_size: 16.0 is no whole number"),
        ({"page_size": 3}, "^page_size: 3 "),
        ({"kv_dtype": "int3"}, "^kv_dtype: 'int3' "),
    ],
)
def test_an_engine_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        Engine(small(QWEN2_SMALL), **options)
    assert "\n" not in str(error.value)


def test_a_refused_request_leaves_the_engine() -> None:
    engine = Engine(small(QWEN2_SMALL))
    before = engine.generate(PROMPT, 5, stop_tokens=()).tokens
    with pytest.raises(RequestError):
        engine.generate([99], 5)
    assert engine.generate(PROMPT, 5, stop_tokens=()).tokens == before


def test_a_draft_that_fails_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(QWEN3_SMALL)
    prompts = [tokens_of(20, 32).tolist(), tokens_of(9, 31).tolist()]
    expected = [Engine(model).generate(prompt, 8, stop_tokens=()).tokens for prompt in prompts]
    original = NgramDraft.propose

    def propose(self: NgramDraft, context: Any, *arguments: Any) -> Proposal:
        if len(context) == 12:
            raise RequestError("draft: no more")
        return original(self, context, *arguments)

    monkeypatch.setattr(NgramDraft, "propose", propose)
    engine = Engine(model, draft="ngram")
    good, bad = (engine.submit(prompt, 8, stop_tokens=()) for prompt in prompts)
    while engine.busy:
        engine.step()
    assert good.result().tokens == expected[0]
    with pytest.raises(RequestError, match="no more"):
        bad.result()
    engine.prefixes.evict(1 << 40)
    assert engine.pool.used_bytes == 0
