"""Text to tokens and back, and text that becomes final as tokens arrive (SPEC 12.1, 14.1)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from reference.errors import BitforbitError, RequestError, TokenizerError

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not UTF-8, or not yet whole."""

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A `tokenizer.json`, which alone decides how text becomes tokens (SPEC 12.1).

    vocab_size: one more than the largest token id. eos_ids: the ids that end a text. special_ids:
    the ids that have no text. final_early: whether text that has been decoded stays as it is when
    more tokens come.
    """

    def __init__(self, library: tokenizers.Tokenizer, eos_ids: Iterable[int] = ()) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = 1 + max(library.get_vocab().values(), default=-1)
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        decoder = _decoder(library)
        self.final_early = _is_final_early(decoder)
        self._byte_level = any(step["type"] == "ByteLevel" for step in _steps(decoder))

    @classmethod
    def load(cls, path: str | Path, vocab_size: int, eos_ids: Iterable[int] = ()) -> Tokenizer:
        """Read a `tokenizer.json` for a model with embeddings of `vocab_size` tokens (SPEC 12.1).

        Raises TokenizerError where the file is unreadable, holds an id the model has no embedding
        for, or encodes at random (BPE dropout).
        """
        library = _read(Path(path))
        if getattr(library.model, "dropout", None):
            raise TokenizerError(
                f"{path}: model.dropout is {library.model.dropout}, so that text is cut at random; "
                "set it to null"
            )
        tokenizer = cls(library, eos_ids)
        if tokenizer.vocab_size > vocab_size:
            raise TokenizerError(
                f"{path}: the largest token id is {tokenizer.vocab_size - 1}, but vocab_size in "
                f"config.json is {vocab_size}; check that the tokenizer belongs to the model"
            )
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as the file says.

        add_special_tokens: whether the file's post-processor adds its tokens (one that begins a
        text, say); False for a text that has them already. Nothing else adds any. Special tokens
        that are spelled out in the text become their ids. Truncation and padding that the file may
        ask for are off. Raises RequestError for text that is not Unicode (a lone surrogate) or that
        the tokenizer has no token for.
        """
        if lone := _SURROGATE.search(text):
            raise RequestError(
                f"prompt: character {lone.start()} is the lone surrogate {lone[0]!a}, which "
                "is no Unicode text; remove it"
            )
        with _library_errors(RequestError, "prompt: it cannot be encoded", "give other text"):
            return list(self._library.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids; special tokens and ids without a token have none.

        Bytes that are not UTF-8 become U+FFFD. Raises RequestError for a negative or huge id, and
        TokenizerError where the decoder of the file fails.
        """
        ids = [int(token) for token in tokens]
        if ids and not (min(ids) >= 0 and max(ids) < 2**31):
            raise RequestError(f"tokens: ids from {min(ids)} to {max(ids)}; give ids from 0 up")
        with _library_errors(TokenizerError, "decoder: it fails", "check tokenizer.json"):
            return self._library.decode(ids, skip_special_tokens=True)

    def token(self, id_: int) -> str | None:
        """Name of a token in the vocabulary (not its text), None for an id without one."""
        return self._library.id_to_token(id_) if 0 <= id_ < self.vocab_size else None

    def bytes_of(self, id_: int) -> bytes:
        """The bytes that a token adds to a text that has begun; for a special token, its name.

        An id without a token has none.
        """
        name = self.token(id_)
        if name is None:
            return b""
        if id_ in self.special_ids:
            return name.encode()
        if self._byte_level and all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        if _is_byte(name):
            return bytes([int(name[3:5], 16)])
        return self.decode([id_, id_])[len(self.decode([id_])) :].encode()

    def shown(self, id_: int) -> str:
        r"""A token as text; `bytes:\xf0\x9f` where its bytes are not UTF-8 by themselves."""
        raw = self.bytes_of(id_)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextStream:
    """The text of tokens that arrive one by one, in pieces that are final (SPEC 14.1).

    The pieces that `feed` returns, and what `finish` returns at the end, are together exactly
    `decode` of all the tokens, whatever they are: no piece is ever taken back. So bytes that are
    not yet a whole character are held back, and so is a run of tokens that stand for single bytes
    (`<0xE4>`), which some decoders replace as a whole if it turns out not to be UTF-8.

    Only the tokens since the last piece are decoded, behind those of that piece as their context: a
    decoder may treat the first or last token of a text specially, but no token changes the text of
    one further away.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """Take one token and return the text that became final, often ""."""
        name = self._tokenizer.token(token)
        if name is None or token in self._tokenizer.special_ids:
            return ""
        self._pending.append(token)
        if not self._tokenizer.final_early or _is_byte(name):
            return ""
        alone = self._tokenizer.decode(self._pending)
        if not alone or alone.endswith(REPLACEMENT):
            return ""
        return self._flush()

    def finish(self) -> str:
        """Text that was held back; the next token starts a new text."""
        piece = self._flush()
        self._context = []
        return piece

    def _flush(self) -> str:
        """The text of the tokens held back, which become the context of those to come."""
        before = len(self._tokenizer.decode(self._context))
        piece = self._tokenizer.decode(self._context + self._pending)[before:]
        self._context, self._pending = self._pending, []
        return piece


def _read(path: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer from a file. Raises TokenizerError."""
    what, remedy = f"{path}: it is no tokenizer", "fetch or save the file again"
    with _library_errors(TokenizerError, what, remedy):
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())


@contextmanager
def _library_errors(error: type[BitforbitError], what: str, remedy: str) -> Iterator[None]:
    """Turn whatever the library raises into `error`; its panics are no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as reason:
        why = " ".join(str(reason).split())[:200]
        raise error(f"{what}: {why}; {remedy}") from None


def _is_byte(name: str) -> bool:
    """Whether a token stands for one byte, as SentencePiece writes it: `<0x..>`."""
    return _BYTE.fullmatch(name) is not None


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level token stands for.

    Printable bytes stand for themselves, the others are written as the letters from U+0100 on
    (`bytes_to_unicode` in GPT-2's encoder.py).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_letters()


# Steps of decoders: those that change tokens one by one (or runs of byte tokens), those that join
# them, and those that may follow on the whole text.
_TO_TOKENS = {"Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Strip"}
_JOINING = {"Fuse", "ByteLevel"}
_TO_TEXT = {"Fuse", "Strip"}


def _decoder(library: tokenizers.Tokenizer) -> Mapping[str, Any]:
    """The description of the decoder; {} if there is none, and tokens are joined by spaces."""
    if library.decoder is None:
        return {}
    description: dict[str, Any] = json.loads(library.decoder.__getstate__())
    return description


def _steps(decoder: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The steps of a decoder, in order."""
    steps: Sequence[Mapping[str, Any]] = decoder.get("decoders", [decoder] if decoder else [])
    return steps


def _is_final_early(decoder: Mapping[str, Any]) -> bool:
    """Whether decoded text, except a broken character at its end, stays when more tokens come.

    It does with the steps above, as long as none changes the text after its tokens were joined.
    With any other decoder no text is final before the end.
    """
    allowed = _TO_TOKENS | _JOINING
    for step in _steps(decoder):
        if step["type"] not in allowed:
            return False
        if step["type"] in _JOINING:
            allowed = _TO_TEXT
    return True
