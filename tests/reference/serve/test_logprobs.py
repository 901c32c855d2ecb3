"""How tokens and their probabilities are shown."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

from reference.serve.logprobs import UNLIKELY, LegacyLogprobs, Scored, log_softmax, score
from reference.tokenizer import Tokenizer
from tests.reference.models import tiny

LOGITS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20)


def byte_level() -> Tokenizer:
    found = tiny().tokenizer
    assert found is not None
    return found


def with_bytes() -> Tokenizer:
    """SentencePiece's manner: a letter for spaces, tokens for bytes, no space at the start."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "a"]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {name: id_ for id_, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["</s>"])
    return Tokenizer(library)


@given(LOGITS)
def test_logprobs_are_right_to_a_few_ulp(values: list[float]) -> None:
    logits = np.array(values, np.float32)
    with mp.workprec(200):
        total = mp.log(mp.fsum(mp.exp(mp.mpf(float(x))) for x in logits))
        expected = [float(mp.mpf(float(x)) - total) for x in logits]
    np.testing.assert_allclose(log_softmax(logits), expected, rtol=1e-15, atol=1e-14)


def test_the_likeliest_come_first_and_ties_by_id() -> None:
    scored = score(0, np.array([-1, 3, 2, 3], np.float32), 3)
    assert [token for token, _ in scored.top] == [1, 3, 2]
    assert scored.logprob == log_softmax(np.array([-1, 3, 2, 3], np.float32))[0]
    assert score(1, np.array([0, 0], np.float32), 9).top == ((0, -np.log(2.0)), (1, -np.log(2.0)))


def test_a_token_that_cannot_be() -> None:
    scored = score(1, np.array([0, -np.inf], np.float32), 2)
    assert scored == Scored(1, UNLIKELY, ((0, 0.0), (1, UNLIKELY)))


@given(st.text(max_size=40))
def test_the_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text) if text else []
    assert b"".join(map(tokenizer.bytes_of, ids)) == text.encode()


def test_the_bytes_of_every_kind_of_token() -> None:
    tokenizer = with_bytes()
    ids = {tokenizer.token(id_): id_ for id_ in range(tokenizer.vocab_size)}
    for name, raw in (("</s>", b"</s>"), ("▁the", b" the"), ("▁", b" "), ("a", b"a")):
        assert tokenizer.bytes_of(ids[name]) == raw
    assert [tokenizer.bytes_of(2 + byte) for byte in range(256)] == [bytes([b]) for b in range(256)]
    assert tokenizer.bytes_of(999) == tokenizer.bytes_of(-1) == b""
    assert byte_level().bytes_of(0) == b"<|endoftext|>"


def test_a_token_that_is_no_text_is_shown_by_its_bytes() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("🙂")
    assert len(ids) == 4
    assert [tokenizer.shown(id_) for id_ in ids] == [
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x99",
        "bytes:\\x82",
    ]
    assert tokenizer.shown(0) == "<|endoftext|>"


@pytest.mark.parametrize("cut", range(12))
def test_offsets_are_those_of_the_text_however_it_is_cut(cut: int) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂é the end")
    whole = LegacyLogprobs(tokenizer, 10).take([Scored(id_) for id_ in ids])
    text = "".join("\x00" * 10 + "a🙂é the end")
    parts = LegacyLogprobs(tokenizer, 10)
    offsets = [
        offset
        for part in (ids[:cut], ids[cut:])
        for offset in parts.take([Scored(id_) for id_ in part])["text_offset"]
    ]
    assert offsets == whole["text_offset"]
    for offset, name in zip(offsets, whole["tokens"], strict=True):
        if not name.startswith("bytes:"):
            assert text[offset:].startswith(name)


def test_the_chosen_token_is_always_among_the_likeliest() -> None:
    tokenizer = byte_level()
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    lists = LegacyLogprobs(tokenizer, 0).take([Scored(a[0], -3.0, ((b[0], -0.5),)), Scored(b[0])])
    assert lists["top_logprobs"] == [{"b": -0.5, "a": -3.0}, None]
    assert lists["token_logprobs"] == [-3.0, None]
