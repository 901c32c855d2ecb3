"""Text as it becomes final: whole characters, and the result that sums it up (SPEC 14)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.engine import Engine
from reference.model import Part
from reference.tokenizer import TextStream
from tests.oracle.arrays import Float32
from tests.reference.engine.decoding import PROMPT, generate
from tests.reference.engine.script import Scripted, say, scripted, spelled, tokenizer
from tests.reference.models import QWEN3_SMALL, small

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


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
