"""Text as it becomes final: the pieces are the text, and no piece is ever taken back (SPEC 14)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.output import OutputText
from reference.tokenizer import Tokenizer
from tests.reference.engine.script import spelled
from tests.reference.models import tiny


def tokenizer() -> Tokenizer:
    found = tiny().tokenizer
    assert found is not None
    return found


def fed(tokens: list[int], stop: list[str]) -> tuple[list[str], int | None, str, OutputText]:
    """The pieces by token, how many tokens were needed for a stop string, and the whole text."""
    sent: list[str] = []
    output = OutputText(tokenizer(), stop, sent.append)
    pieces: list[str] = []
    for count, token in enumerate(tokens, 1):
        before = len(sent)
        stopped = output.feed(token)
        pieces.append("".join(sent[before:]))
        assert stopped == output.stopped
        if stopped:
            return pieces, count, output.finish(), output
    before = len(sent)
    text = output.finish()
    return [*pieces, "".join(sent[before:])], None, text, output


ALPHABET = "ab \n🙂é"
TOKENS = st.lists(st.integers(0, 1023), max_size=20) | st.text(ALPHABET, max_size=16).map(spelled)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


@given(TOKENS, STOPS)
@settings(max_examples=150)
def test_the_text_ends_before_the_first_stop_string(tokens: list[int], stop: list[str]) -> None:
    pieces, used, text, output = fed(tokens, stop)
    decoded = tokenizer().decode(tokens[:used])
    places = [decoded.find(s) for s in stop if s in decoded]
    assert text == "".join(pieces) == decoded[: min(places, default=len(decoded))]
    assert output.stopped == bool(places)


@given(st.text(ALPHABET, max_size=16), STOPS)
@settings(max_examples=150)
def test_nothing_is_held_back_without_need(text: str, stop: list[str]) -> None:
    """All but whole characters, and the longest end that may yet become a stop string."""
    sent: list[str] = []
    output = OutputText(tokenizer(), stop, sent.append)
    for count, token in enumerate(spelled(text), 1):
        if output.feed(token):
            return
        seen = text.encode()[: len(text.encode()) and count].decode(errors="ignore")
        held = max((n for s in stop for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
        assert "".join(sent) == seen[: len(seen) - held]
    output.finish()
    assert "".join(sent) == text


def test_pieces_are_never_empty_and_never_sent_again() -> None:
    sent: list[str] = []
    output = OutputText(tokenizer(), ["xyz"], sent.append)
    for token in spelled("axybxyc"):
        assert not output.feed(token)
    assert output.finish() == "axybxyc"
    assert sent == ["a", "xyb", "xyc"]
    assert output.finish() == "axybxyc"
    assert len(sent) == 3


def test_of_stop_strings_that_end_together_the_longest_is_cut() -> None:
    for stop in (["b", "xab", "ab"], ["xab", "b"]):
        *_, text, output = fed(spelled("yxab"), stop)
        assert (text, output.stopped) == ("y", True)


def test_what_comes_after_a_stop_string_is_nothing() -> None:
    sent: list[str] = []
    output = OutputText(tokenizer(), ["b"], sent.append)
    assert [output.feed(token) for token in spelled("abcb")] == [False, True, True, True]
    assert output.finish() == "a"
    assert sent == ["a"]


def test_a_stop_string_that_only_the_end_completes() -> None:
    """The broken character becomes U+FFFD when nothing more comes; that may be a stop string."""
    output = OutputText(tokenizer(), ["\ufffd"], lambda piece: None)
    for token in spelled("a🙂")[:-1]:
        assert not output.feed(token)
    assert output.finish() == "a"
    assert output.stopped


def test_a_model_without_a_tokenizer_has_no_text() -> None:
    output = OutputText(None, ["a"], lambda piece: pytest.fail("there is no text"))
    assert not output.feed(5)
    assert output.finish() == ""
    assert not output.stopped
