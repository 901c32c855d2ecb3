"""Generation: tokens, where they end, and the text as it becomes final (SPEC 8.4, 13, 14)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.cache import KVCache
from reference.engine import FAST_FLOOR, Engine, Result, prefill_attention
from reference.errors import RequestError
from reference.model import AttentionKind, Model
from reference.sampling import Sampling, sample
from reference.tokenizer import TextStream, Tokenizer
from tests.oracle.arrays import Float32
from tests.reference.test_model import LLAMA_SMALL, QWEN2_SMALL, QWEN3_SMALL, small, tiny, tokens_of

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
    tokens: list[list[int]] = [[], []]
    steps = [engine.steps(text, done, 15) for text, done in zip(texts, tokens, strict=True)]
    for both in zip(*steps, strict=True):
        for logits, done in zip(both, tokens, strict=True):
            done.append(int(logits.argmax()))
    assert tokens == [generate(engine.model, text, 15).tokens for text in texts]


def test_steps_yield_the_logits_of_forward() -> None:
    model, tokens = small(QWEN3_SMALL), list[int]()
    for count, logits in enumerate(Engine(model).steps(PROMPT, tokens, 6)):
        whole = model.forward(PROMPT + tokens)[-1]
        assert logits.shape == (32,)
        assert logits.tobytes() == whole.tobytes()
        tokens.append(count)
    assert tokens == list(range(6))


# the floor (SPEC 8.4)

Call = tuple[int, str, bool]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every call of `forward`: how many tokens, which attention, and whether the last row alone."""
    seen: list[Call] = []
    original = Model.forward

    def spy(
        self: Model,
        tokens: Any,
        cache: KVCache | None = None,
        attention: AttentionKind = "exact",
        last_only: bool = False,
    ) -> Float32:
        seen.append((len(tokens), attention, last_only))
        return original(self, tokens, cache, attention, last_only)

    monkeypatch.setattr(Model, "forward", spy)
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
    assert calls == [(count, expected, True), (1, "exact", False), (1, "exact", False)]
    assert result.prompt_n == count


def test_the_floor_counts_the_prompt_and_not_the_output(calls: list[Call]) -> None:
    Engine(small(QWEN3_SMALL)).generate(tokens_of(505, 32).tolist(), 20, stop_tokens=())
    assert {attention for _, attention, _ in calls} == {"exact"}
    assert FAST_FLOOR == 512


def test_exact_prefill_gives_the_bits_of_decode() -> None:
    model, prompt = small(QWEN3_SMALL), tokens_of(512, 32).tolist()
    exact, fast = (
        next(Engine(model, wanted).steps(prompt, [], 1)).tobytes() for wanted in (True, False)
    )
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

    def forward(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        cache: KVCache | None = None,
        attention: AttentionKind = "exact",
        last_only: bool = False,
    ) -> Float32:
        assert cache is not None
        assert len(tokens) == 1
        cache.length += 1
        logits = np.zeros((1, self.config.vocab_size), np.float32)
        logits[0, self.script[cache.length - 1]] = 1
        return logits


def tokenizer() -> Tokenizer:
    found = tiny().tokenizer
    assert found is not None
    return found


def scripted(script: Sequence[int]) -> Scripted:
    base = tiny()
    return Scripted(
        base.config, base.weights, base.operations, base.tokenizer, base.eos_tokens, tuple(script)
    )


def say(script: Sequence[int], **options: Any) -> tuple[Result, list[str]]:
    """The result of a script, and the pieces that were streamed."""
    pieces: list[str] = []
    options = {"stop_tokens": (), **options}
    count = options.pop("count", len(script))
    result = Engine(scripted(script)).generate([65], count, on_text=pieces.append, **options)
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
        ("ab", ["", "b"], "a", 2),
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
        def forward(self, *arguments: Any, **options: Any) -> Float32:
            lengths.append(len(lengths))
            return super().forward(*arguments, **options)

    watching = Watching(*(getattr(model, name) for name in model.__dataclass_fields__))
    Engine(watching).generate(
        [65], 3, stop_tokens=(), on_text=lambda piece: seen.append((piece, len(lengths)))
    )
    assert seen == [("a", 1), ("b", 2), ("c", 3)]


def test_the_callers_error_passes_through() -> None:
    def fails(piece: str) -> None:
        raise LookupError("the screen is gone")

    with pytest.raises(LookupError, match="the screen is gone"):
        Engine(scripted(spelled("abc"))).generate([65], 3, on_text=fails)


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
    ],
)
def test_bad_sampling_is_refused_in_one_line(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(RequestError, match=f"^{name}: ") as error:
        Engine(small(QWEN2_SMALL)).generate(PROMPT, sampling=Sampling(**values))
    assert "\n" not in str(error.value)


def test_a_refused_request_leaves_the_engine() -> None:
    engine = Engine(small(QWEN2_SMALL))
    before = engine.generate(PROMPT, 5, stop_tokens=()).tokens
    with pytest.raises(RequestError):
        engine.generate([99], 5)
    assert engine.generate(PROMPT, 5, stop_tokens=()).tokens == before
