"""Tokenizers: a stream's pieces are final, and together they are the decoded text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from reference.errors import RequestError, TokenizerError
from reference.tokenizer import TextStream, Tokenizer

FIXTURE = Path(__file__).parents[2] / "fixtures" / "tiny-dense" / "tokenizer.json"
ROOMY = 100_000


# ------------------------------------------------------------------------ tokenizers of every kind


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: tokens are strings of bytes."""
    library = tokenizers.Tokenizer.from_file(str(FIXTURE))
    library.add_special_tokens(["<|system|>"])
    library.add_tokens(["<tool>", "中"])
    return library


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: tokens are strings, and there is one for each byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "▁▁", "ab", "你", "好", "é", "🙂", "<0xzz>", "\ufffd"]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    return library


def words_with(decoder: Any, words: Sequence[str]) -> tokenizers.Tokenizer:
    """A vocabulary of whole words under some decoder."""
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "[END]", *words])}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    library.add_special_tokens(["[UNK]", "[END]"])
    if decoder is not None:
        library.decoder = decoder
    return library


WORDS = ["▁", "▁▁", "▁a", "b", "##c", "##", "d</w>", "</w>", "e", ".", "'s", " ", "é", "🙂", "n't"]


@cache
def kinds() -> dict[str, Tokenizer]:
    strip = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    late = decoders.Sequence([decoders.Fuse(), decoders.Replace("▁.", ".")])
    libraries = {
        "byte level": byte_level(),
        "byte fallback": byte_fallback(),
        "word piece": words_with(decoders.WordPiece(), WORDS),
        "metaspace": words_with(decoders.Metaspace(), WORDS),
        "metaspace, never first": words_with(decoders.Metaspace("▁", "never"), WORDS),
        "suffix": words_with(decoders.BPEDecoder(), WORDS),
        "strip": words_with(strip, WORDS),
        "none": words_with(None, WORDS),
        "ctc": words_with(decoders.CTC("e", "b"), WORDS),
        "late replacement": words_with(late, WORDS),
    }
    return {name: Tokenizer(library) for name, library in libraries.items()}


KINDS = sorted(kinds())


def stream(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    text = TextStream(tokenizer)
    return [*(text.feed(token) for token in tokens), text.finish()]


# --------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_the_pieces_are_the_decoded_text_at_every_cut(kind: str, data: st.DataObject) -> None:
    tokenizer = kinds()[kind]
    ids = st.integers(0, tokenizer.vocab_size + 2)
    tokens = data.draw(st.lists(ids, max_size=12))
    whole = TextStream(tokenizer)
    final = ""
    for cut in range(len(tokens) + 1):
        text = tokenizer.decode(tokens[:cut])
        assert "".join(stream(tokenizer, tokens[:cut])) == text
        final += whole.feed(tokens[cut - 1]) if cut else ""
        assert text.startswith(final)
    assert final + whole.finish() == tokenizer.decode(tokens)


def bytes_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Tokens of these bytes, one each, in the manner of the tokenizer."""
    if tokenizer is kinds()["byte fallback"]:
        return [3 + byte for byte in data]
    return [BYTE_IDS[byte] for byte in data]


def byte_letters() -> list[str]:
    """The letters by which byte-level vocabularies spell the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


VOCABULARY = json.loads(FIXTURE.read_text())["model"]["vocab"]
BYTE_IDS = [VOCABULARY[letter] for letter in byte_letters()]
BROKEN = st.sampled_from(
    [b"\xff", b"\xe4\xbd", b"\xf0\x9f\x99", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5", b""]
)
WHOLE = st.sampled_from(["你", "é", "🙂", "👩‍👩‍👧", "한", "a", " ", "\ufffd", "क्षि"]).map(
    str.encode
)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@settings(max_examples=300)
@given(data=st.data())
def test_whole_and_broken_characters_in_bytes(kind: str, data: st.DataObject) -> None:
    tokenizer = kinds()[kind]
    ordinary = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    spelled = st.one_of(WHOLE, BROKEN).map(lambda part: bytes_of(tokenizer, part))
    parts = data.draw(st.lists(st.one_of(spelled, spelled, ordinary), max_size=10))
    tokens = [token for part in parts for token in part]
    pieces = stream(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)


def test_a_character_comes_when_its_last_byte_has_come() -> None:
    tokenizer = kinds()["byte level"]
    tokens = bytes_of(tokenizer, "a你🙂".encode())
    assert stream(tokenizer, tokens) == ["a", "", "", "你", "", "", "", "🙂", ""]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = kinds()["byte fallback"]
    you, a = bytes_of(tokenizer, "你".encode()), 3 + 256 + 1
    assert stream(tokenizer, [*you, a]) == ["", "", "", "你a", ""]
    broken = [*you, *bytes_of(tokenizer, b"\xff"), a]
    assert stream(tokenizer, broken) == ["", "", "", "", "\ufffd" * 4 + "a", ""]


def test_ordinary_text_is_never_held_back() -> None:
    tokenizer = kinds()["byte level"]
    tokens = tokenizer.encode("In the beginning God created the heaven and the earth.")
    pieces = stream(tokenizer, tokens)
    assert all(pieces[:-1])
    assert pieces[-1] == ""


def test_a_broken_end_comes_at_the_finish() -> None:
    tokenizer = kinds()["byte level"]
    assert stream(tokenizer, bytes_of(tokenizer, b"a\xe4\xbd")) == ["a", "", "", "\ufffd"]


def test_a_finished_stream_starts_again() -> None:
    tokenizer = kinds()["byte fallback"]
    text, space_a = TextStream(tokenizer), 3 + 256 + 3
    assert [text.feed(space_a), text.feed(space_a), text.finish()] == ["a", " a", ""]
    assert [text.feed(space_a), text.finish()] == ["a", ""]
    assert [text.feed(3 + 0xE4), text.finish(), text.feed(space_a)] == ["", "\ufffd", "a"]


def test_only_decoders_that_never_look_back_are_final_early() -> None:
    late = [name for name, tokenizer in kinds().items() if not tokenizer.final_early]
    assert late == ["ctc", "late replacement"]


def test_a_long_stream_costs_no_more_per_token() -> None:
    tokenizer = kinds()["byte level"]
    lengths: list[int] = []

    class Counting(Tokenizer):
        def decode(self, tokens: Iterable[int]) -> str:
            ids = list(tokens)
            lengths.append(len(ids))
            return super().decode(ids)

    stream(Counting(byte_level()), tokenizer.encode("the earth and " * 300))
    assert max(lengths) <= 2


# ------------------------------------------------------------------------------ encoding, decoding


def test_encoding_round_trips() -> None:
    tokenizer = Tokenizer.load(FIXTURE, 1024, [0])
    text = "  Naïve 中文 🙂\n\ttabs\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (1024, (0,))


def test_special_tokens_are_ids_in_and_nothing_out() -> None:
    tokenizer = Tokenizer.load(FIXTURE, 1024)
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert tokenizer.decode([0, *tokenizer.encode("the"), 0]) == "the"


def test_the_post_processor_of_the_file_adds_its_tokens_once() -> None:
    library = byte_fallback()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    assert Tokenizer(library).encode("ab")[:2] == [1, 259]
    assert Tokenizer(library).encode("ab").count(1) == 1


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", ROOMY)
    assert tokenizer.encode("abcdefgh") == kinds()["byte level"].encode("abcdefgh")


def test_ids_without_a_token_have_no_text() -> None:
    assert kinds()["byte level"].decode([5000, 34, 2**31 - 1]) == kinds()["byte level"].decode([34])


@pytest.mark.parametrize("tokens", [[-1], [3, 2**31], [10**30]])
def test_impossible_ids_are_refused(tokens: list[int]) -> None:
    with pytest.raises(RequestError, match=r"^tokens: ids from .*; give ids from 0 up$"):
        kinds()["byte level"].decode(tokens)


def test_a_decoder_that_fails_is_named() -> None:
    library = words_with(decoders.Strip(" ", 0, 9), [" "])
    with pytest.raises(TokenizerError, match=r"^decoder: it fails: .*; check tokenizer\.json$"):
        Tokenizer(library).decode([2])


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"^prompt: character 1 is the lone surrogate '\\ud800', which"
    ):
        kinds()["byte level"].encode("a\ud800")


def test_a_byte_is_two_hexadecimal_digits() -> None:
    names = ["<0xGG>", "<0x-1>", "<0x 1>", "<0x4a>"]
    vocabulary = {name: id_ for id_, name in enumerate(names)}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=names[0]))
    tokenizer = Tokenizer(library)
    assert [tokenizer.shown(id_).strip() for id_ in range(4)] == [*names[:3], "J"]


# ----------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff\xff", b'{"version": "1.0", "model": {}}', b"{" * 100]
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(path, ROOMY)
    text = str(caught.value)
    assert text.startswith(f"{path}: it is no tokenizer: ")
    assert text.endswith("; fetch or save the file again")
    assert "\n" not in text


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"absent\.json: it is no tokenizer: .*No such file"):
        Tokenizer.load(tmp_path / "absent.json", ROOMY)


def test_the_largest_id_counts_and_not_the_number_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    words_with(None, []).save(str(path))
    raw = json.loads(path.read_text())
    raw["model"]["vocab"]["far"] = 40
    path.write_text(json.dumps(raw))
    with pytest.raises(
        TokenizerError, match="the largest token id is 40, but vocab_size in config"
    ):
        Tokenizer.load(path, 40)
    assert Tokenizer.load(path, 41).vocab_size == 41


def test_random_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    raw = json.loads(FIXTURE.read_text())
    raw["model"]["dropout"] = 0.5
    path.write_text(json.dumps(raw))
    with pytest.raises(TokenizerError, match=r"model\.dropout is 0\.5, .*; set it to null"):
        Tokenizer.load(path, ROOMY)
