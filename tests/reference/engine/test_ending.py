"""What ends a text: stop tokens, stop strings, the context (SPEC 14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference.engine import Engine
from tests.reference.engine.decoding import PROMPT, argmax_chain, generate
from tests.reference.engine.script import say, scripted, spelled, tokenizer
from tests.reference.models import QWEN2_SMALL, QWEN3_SMALL, small, tiny, tokens_of

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


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
