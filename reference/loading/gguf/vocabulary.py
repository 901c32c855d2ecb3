"""The tokenizer that a GGUF file holds, as a `tokenizer.json` would describe it (SPEC 12.2)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from reference.config import Section, show
from reference.errors import ConfigError, TokenizerError
from reference.loading.gguf.file import GGUFFile
from reference.tokenizer import Tokenizer

Json = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, by their numbers in a file."""

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

# Parts of the regular expressions by which byte-level tokenizers cut text into words (PRES).
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str) -> str:
    """The words of Llama 3, Qwen 2 and others, which differ in how they cut numbers."""
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTIONS}|{letters}|{numbers}|{_OTHER}[\r\n]*|{_SPACES}"


def _cased_words(numbers: str, contractions: str = "") -> str:
    """The words of GPT-4o and Tekken, which begin anew where lower case turns to upper case."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = (f"{before}{_UPPER}*{_LOWER}+", f"{before}{_UPPER}+{_LOWER}*")
    cased = "|".join(word + contractions for word in words)
    return rf"{cased}|{numbers}|{_OTHER}[\r\n/]*|{_SPACES}"


@dataclass(frozen=True)
class Pre:
    """What a byte-level tokenizer does before it merges.

    pattern: the regular expression of words; None is GPT-2's own. nfc: text is composed first.
    whole: a word that is in the vocabulary is that token, whatever the merges say. bos: a text
    begins with the BOS token, unless the file says otherwise. digits: each digit is a word.
    """

    pattern: str | None = None
    nfc: bool = False
    whole: bool = False
    bos: bool = False
    digits: bool = False


_LLAMA3 = Pre(_words(r"\p{N}{1,3}"), whole=True, bos=True)
_TRIPLES = Pre(_words(r"\p{N}{1,3}"))
_QWEN2 = Pre(_words(r"\p{N}"), nfc=True)

PRES: Mapping[str, Pre] = {
    "gpt-2": Pre(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _TRIPLES,
    "smaug-bpe": _TRIPLES,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": Pre(digits=True),
    "olmo": Pre(nfc=True),
    "tekken": Pre(_cased_words(r"\p{N}"), whole=True, bos=True),
    "gpt-4o": Pre(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")),
}
"""The values of `tokenizer.ggml.pre` that are supported."""

_READ_ELSEWHERE = frozenset(
    {
        "tokenizer.ggml.pre",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.token_type_count",
        "tokenizer.ggml.add_sep_token",
        "tokenizer.huggingface.json",
        *(
            f"tokenizer.ggml.{name}_token_id"
            for name in (
                *("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask", "cls"),
                *("prefix", "suffix", "middle"),
                *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
            )
        ),
    }
)
"""Keys that change no result, or are read elsewhere."""

CHAT_TEMPLATE = "tokenizer.chat_template"
"""The key of the template that `reference.chat` reads. Keys that it is the beginning of hold other
templates, which are not used."""

SPECIAL_TEXTS: Mapping[str, str] = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "seperator": "sep_token",
    "padding": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
}
"""Special tokens that a chat template may write: the file's names, and the template's."""

ENDS = ("eos", "eot", "eom")
"""The tokens that end a text: of the text, of a turn, of a message."""


class GGUFTokenizer(Tokenizer):
    """A tokenizer that puts no BOS token before a text which begins with one (SPEC 12.2).

    bos: the id of the token that is put before texts, None for none.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, eos_ids: Sequence[int], bos: int | None
    ) -> None:
        super().__init__(library, eos_ids)
        self.bos = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as `Tokenizer.encode`."""
        ids = super().encode(text, add_special_tokens)
        doubled = add_special_tokens and self.bos is not None and ids[:2] == [self.bos, self.bos]
        return ids[1:] if doubled else ids


@dataclass(frozen=True)
class Vocabulary:
    """What both kinds of tokenizers have. types: the type of each token. keys: all metadata."""

    path: Path
    keys: Section
    tokens: Sequence[str]
    types: Sequence[int]

    def of_type(self, *types: int) -> dict[str, int]:
        """Ids of the tokens of these types, by their text."""
        return {
            t: i
            for i, (t, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in types
        }


def special_ids(file: GGUFFile, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """The ids that end a text, and the BOS id, None where there is none. Raises ConfigError."""
    keys = _section(file)
    ends = [_token_id(keys, name, vocab_size) for name in ENDS]
    bos = _token_id(keys, "bos", vocab_size)
    return tuple(dict.fromkeys(end for end in ends if end is not None)), bos


def special_texts(file: GGUFFile) -> dict[str, str]:
    """The texts of a file's special tokens, by the names that chat templates have for them.

    Raises ConfigError for an id that no token has.
    """
    keys = _section(file)
    if not keys.has("tokenizer.ggml.tokens"):
        return {}
    texts = _list(keys, "tokenizer.ggml.tokens", str)
    ids = {called: _token_id(keys, name, len(texts)) for name, called in SPECIAL_TEXTS.items()}
    return {called: texts[index] for called, index in ids.items() if index is not None}


def read_tokenizer(file: GGUFFile, vocab_size: int) -> GGUFTokenizer | None:
    """Rebuild the tokenizer of a file; None where it has none (SPEC 12.2).

    Raises TokenizerError where it is incomplete, contradicts itself or the model, or is of a kind
    that is not supported.
    """
    if file.metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return None
    try:
        ends, bos = special_ids(file, vocab_size)
        vocabulary, kind = _vocabulary(file, vocab_size)
        describe, starts = (_spm, True) if kind == "llama" else (_byte_level, _pre(vocabulary).bos)
        description, keys = describe(vocabulary), vocabulary.keys
        first = bos if keys.flag("tokenizer.ggml.add_bos_token", default=starts) else None
        last = ends[0] if keys.flag("tokenizer.ggml.add_eos_token") and ends else None
        keys.refuse_the_rest(_READ_ELSEWHERE)
    except ConfigError as error:
        raise TokenizerError(str(error)) from None
    description |= {"post_processor": _around(vocabulary, first, last)}
    return GGUFTokenizer(_build(description, file.path), ends, first)


def _section(file: GGUFFile) -> Section:
    """The metadata of the tokenizer."""
    found = {
        key: value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.") and not key.startswith(CHAT_TEMPLATE)
    }
    return Section(found, str(file.path))


def _token_id(keys: Section, name: str, vocab_size: int) -> int | None:
    """The id of a special token, None where the file has none."""
    key = f"tokenizer.ggml.{name}_token_id"
    return keys.integer(key, most=vocab_size - 1, least=0) if keys.has(key) else None


def _list(keys: Section, key: str, kind: type, count: int | None = None) -> list[Any]:
    """A list of that type, and of that length where one is given."""
    values = keys.value(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        keys.refuse(key, f"give a list of type {kind.__name__}")
    if count is not None and len(values) != count:
        keys.contradicts(key, f"a list of {len(values)}", f"the {count} tokens", "convert it again")
    return values


def _vocabulary(file: GGUFFile, vocab_size: int) -> tuple[Vocabulary, str]:
    """The tokens with their types, and the kind of tokenizer."""
    keys = _section(file)
    kind = keys.choice("tokenizer.ggml.model", ("llama", "gpt2"))
    tokens = _list(keys, "tokenizer.ggml.tokens", str)
    if not 0 < len(tokens) <= vocab_size:
        other = f"the model's embedding, of {vocab_size}"
        keys.contradicts(
            "tokenizer.ggml.tokens", f"a list of {len(tokens)}", other, "convert it again"
        )
    types = _list(keys, "tokenizer.ggml.token_type", int, len(tokens))
    for index, found in enumerate(types):
        if not NORMAL <= found <= BYTE:
            keys.refuse(
                "tokenizer.ggml.token_type", f"{found}, of token {index}, is no type of a token"
            )
    if kind == "llama":  # converters write spaces within such tokens in either way
        tokens = [
            text.replace(SPACE, " ") if kind_ == USER_DEFINED else text
            for text, kind_ in zip(tokens, types, strict=True)
        ]
    (most, times), *_ = Counter(tokens).most_common(1)
    if times > 1:
        keys.refuse("tokenizer.ggml.tokens", f"the token {show(most)} occurs {times} times")
    return Vocabulary(file.path, keys, tokens, types), kind


# ------------------------------------------------------------------------------------ SentencePiece


def _spm(vocabulary: Vocabulary) -> Json:
    """SentencePiece's BPE: the pair whose union has the best score is merged first (SPEC 12.2)."""
    keys = vocabulary.keys
    scores = _list(keys, "tokenizer.ggml.scores", float, len(vocabulary.tokens))
    if keys.flag("tokenizer.ggml.remove_extra_whitespaces"):
        keys.refuse("tokenizer.ggml.remove_extra_whitespaces", "only false is supported")
    if keys.has("tokenizer.ggml.precompiled_charsmap") and keys.value(
        "tokenizer.ggml.precompiled_charsmap"
    ):
        raise ConfigError(
            f"{vocabulary.path}: tokenizer.ggml.precompiled_charsmap is not supported; convert a "
            "model whose tokenizer normalizes nothing"
        )
    prefix = keys.flag("tokenizer.ggml.add_space_prefix", default=True)
    unknown = _token_id(keys, "unknown", len(vocabulary.tokens))
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    of_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps: list[Json] = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    before: list[Json] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    return {
        "added_tokens": _added(vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": [*before, of_space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: index for index, text in enumerate(vocabulary.tokens)},
            "merges": _merges_by_score(vocabulary, scores),
        },
    }


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a normal token of two, best score first.

    Among the ways to make one token, and among tokens of equal score, a longer left part comes
    first, as in the families' own `tokenizer.json` (SPEC 12.2).
    """
    normal = vocabulary.of_type(NORMAL)
    ranked: list[tuple[float, int, str, str]] = []
    for text, index in normal.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[index], -cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


# --------------------------------------------------------------------------------------- byte level


def _pre(vocabulary: Vocabulary) -> Pre:
    """What comes before the merges, by the name that the file gives."""
    keys = vocabulary.keys
    return PRES[keys.choice("tokenizer.ggml.pre", PRES)]


def _byte_level(vocabulary: Vocabulary) -> Json:
    """BPE over letters that stand for bytes, with the merges that the file lists (SPEC 12.2)."""
    pre, keys = _pre(vocabulary), vocabulary.keys
    if keys.flag("tokenizer.ggml.add_space_prefix"):
        keys.refuse("tokenizer.ggml.add_space_prefix", "only false is supported for gpt2")
    merges = [tuple(merge.split(" ")) for merge in _list(keys, "tokenizer.ggml.merges", str)]
    wrong = next((index for index, merge in enumerate(merges) if len(merge) != 2), None)
    if wrong is not None:
        keys.refuse(
            "tokenizer.ggml.merges", f"merge {wrong} is not two tokens with one space between"
        )
    cut: list[Json] = []
    if pre.digits:
        cut.append({"type": "Digits", "individual_digits": True})
    if pre.pattern is not None:
        pattern = {"Regex": pre.pattern}
        cut.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "added_tokens": _added(vocabulary),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*cut, {**letters, "use_regex": pre.pattern is None}],
        },
        "decoder": {**letters, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole,
            "vocab": {text: index for index, text in enumerate(vocabulary.tokens)},
            "merges": merges,
        },
    }


# ---------------------------------------------------------------------------------------- the whole


def _added(vocabulary: Vocabulary) -> list[Json]:
    """Tokens that are found in a text before anything else; control tokens have no text."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": text, **plain, "special": kind != USER_DEFINED}
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text
    ]


def _around(vocabulary: Vocabulary, first: int | None, last: int | None) -> Json | None:
    """The post-processor that puts these tokens before and after a text."""
    text: Json = {"Sequence": {"id": "A", "type_id": 0}}
    single: list[Json] = [text]
    special: dict[str, Json] = {}
    for place, index in ((0, first), (2, last)):
        if index is not None and index < len(vocabulary.tokens):
            name = vocabulary.tokens[index]
            special[name] = {"id": name, "ids": [index], "tokens": [name]}
            single.insert(place, {"SpecialToken": {"id": name, "type_id": 0}})
    if not special:
        return None
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }


def _build(description: Json, path: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer for a description. Its panics are no `Exception`."""
    whole = {"version": "1.0", "truncation": None, "padding": None, **description}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(whole))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as reason:
        why = " ".join(str(reason).split())[:200]
        raise TokenizerError(
            f"{path}: tokenizer.ggml makes no tokenizer: {why!a}; convert the model again"
        ) from None
