"""Tokenizers rebuilt from GGUF files, against those that they were written from.

Byte-level ones against the families' classes of transformers, and against the fixture's
`tokenizer.json`; SentencePiece ones against the library itself, on a model trained here.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from gguf import GGUFWriter
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from reference.errors import TokenizerError
from reference.loading.gguf.file import open_gguf
from reference.loading.gguf.vocabulary import PRES, GGUFTokenizer, read_tokenizer
from reference.tokenizer import TextStream, Tokenizer
from tests.reference.loading.gguf_files import add_byte_level
from tests.reference.loading.texts import ROOT, mixed_lines

FIXTURE = ROOT / "fixtures" / "tiny-dense" / "tokenizer.json"
ROOMY = 100_000
Change = Callable[[GGUFWriter], object]


def rebuilt(folder: Path, fill: Change, vocab_size: int = ROOMY) -> GGUFTokenizer:
    """The tokenizer of a file that `fill` writes."""
    out = GGUFWriter(folder / "vocabulary.gguf", "llama")
    fill(out)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    tokenizer = read_tokenizer(open_gguf(folder / "vocabulary.gguf"), vocab_size)
    assert tokenizer is not None
    return tokenizer


# --------------------------------------------------------------------------------------- byte level


def test_several_chat_templates_are_no_matter_of_the_tokenizer(tmp_path: Path) -> None:
    def fill(out: GGUFWriter) -> None:
        add_byte_level(out, FIXTURE, "gpt-2")
        out.add_chat_template(
            [{"name": name, "template": name} for name in ("default", "tool_use")]
        )

    assert rebuilt(tmp_path, fill).vocab_size == Tokenizer.load(FIXTURE, ROOMY).vocab_size


def test_the_fixtures_tokenizer_comes_back(tmp_path: Path) -> None:
    own = Tokenizer.load(FIXTURE, ROOMY)
    tokenizer = rebuilt(tmp_path, lambda out: add_byte_level(out, FIXTURE, "gpt-2"))
    assert tokenizer.vocab_size == own.vocab_size
    assert tokenizer.special_ids == own.special_ids
    for line in [*mixed_lines(1200), "a<|endoftext|>b", "<|endoftext|>", ""]:
        ids = own.encode(line)
        assert tokenizer.encode(line) == ids
        assert tokenizer.decode(ids) == own.decode(ids) == line.replace("<|endoftext|>", "")
    rng = Random(1)
    for _ in range(200):
        ids = [rng.randrange(own.vocab_size) for _ in range(9)]
        assert tokenizer.decode(ids) == own.decode(ids)
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.feed, ids), stream.finish()]) == own.decode(ids)


def merges_of(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


@cache
def unsplit() -> Path:
    """A `tokenizer.json` whose merges go beyond words, so that words decide what they make.

    A fifth of the merges is left out, so that some tokens are found only as whole words.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([line[:60] for line in mixed_lines(1200)], trainer)
    description = json.loads(library.to_str())
    description["model"]["merges"] = [
        merge for index, merge in enumerate(description["model"]["merges"]) if index % 5
    ]
    path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    path.write_text(json.dumps(description))
    return path


@cache
def in_words(pattern: str, whole: bool = False) -> tokenizers.Tokenizer:
    """The merges within words of a pattern, as the families' converters build it."""
    model = json.loads(unsplit().read_text())["model"]
    library = tokenizers.Tokenizer(
        models.BPE(model["vocab"], merges_of(model), ignore_merges=whole, fuse_unk=False)
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    return library


def of_digits() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(unsplit()))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return library


def composed() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(unsplit()))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return library


def of_family(pre: str) -> Callable[[str], list[int]]:
    """The family's own tokenizer, made of that vocabulary and its merges."""
    model = json.loads(unsplit().read_text())["model"]
    merges: Any = merges_of(model)
    if pre == "gpt-2":
        gpt2 = GPT2Tokenizer(vocab=model["vocab"], merges=merges)
        return lambda text: list(gpt2.encode(text))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        qwen2 = Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
        return lambda text: list(qwen2.encode(text))
    if pre in ("smollm", "olmo"):
        library = of_digits() if pre == "smollm" else composed()
    else:
        merged = pre in ("gpt-4o", "dbrx", "smaug-bpe")
        library = in_words(GGUF_PRE_TOKENIZER_SPLITS[pre], not merged)
    return lambda text: list(library.encode(text).ids)


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_tokenizers_are_their_families_own(tmp_path: Path, pre: str) -> None:
    own = of_family(pre)
    tokenizer = rebuilt(tmp_path, lambda out: add_byte_level(out, unsplit(), pre))
    for line in mixed_lines(1200):
        assert tokenizer.encode(line) == own(line), line


def test_the_tests_text_tells_the_kinds_apart(tmp_path: Path) -> None:
    """Else equality would say little: each kind of words gives its own tokens somewhere."""
    seen = set()
    for pre in ("gpt-2", "llama-bpe", "qwen2", "smollm", "olmo", "tekken", "gpt-4o", "dbrx"):
        tokenizer = rebuilt(tmp_path, lambda out, p=pre: add_byte_level(out, unsplit(), p))  # type: ignore[misc]
        seen.add(str([tokenizer.encode(line) for line in mixed_lines(1200)]))
    assert len(seen) == 8


# ------------------------------------------------------------------------------------ SentencePiece

SYMBOLS = ["<turn>", "\u2581\u2581\u2581", "\n\n"]


@cache
def trained(prefix: bool, symbols: bool) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model as Llama's and Gemma's: BPE, bytes for what is rare, no changes."""
    model = BytesIO()
    text = (ROOT / "fixtures" / "held-out.txt").read_text()
    text += (ROOT / "reference" / "attention.py").read_text()
    text += "\u4f60\u597d \u4e16\u754c \u0420\u0443\u0441\u0441\u043a\u0438\u0439 aaaaaaaa " * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=SYMBOLS if symbols else [],
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def type_of(own: sentencepiece.SentencePieceProcessor, index: int) -> gguf.TokenType:
    if own.is_unknown(index):
        return gguf.TokenType.UNKNOWN
    if own.is_control(index):
        return gguf.TokenType.CONTROL
    if own.is_byte(index):
        return gguf.TokenType.BYTE
    given = own is trained(True, True) or own is trained(False, True)
    is_symbol = given and own.id_to_piece(index) in SYMBOLS
    return gguf.TokenType.USER_DEFINED if is_symbol else gguf.TokenType.NORMAL


def add_spm(
    out: GGUFWriter,
    own: sentencepiece.SentencePieceProcessor,
    prefix: bool,
    bos: bool | None = None,
) -> None:
    """Add a SentencePiece tokenizer as a converter does."""
    every = range(own.get_piece_size())
    out.add_tokenizer_model("llama")
    out.add_token_list([own.id_to_piece(index) for index in every])
    out.add_token_scores([own.get_score(index) for index in every])
    out.add_token_types([type_of(own, index) for index in every])
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    if not prefix:
        out.add_add_space_prefix(False)
    if bos is not None:
        out.add_add_bos_token(bos)


def plain_lines() -> list[str]:
    """Lines in which no special token is spelled: SentencePiece sees text where others see one."""
    lines = [line for line in mixed_lines(1800) if "<unk>" not in line and "\0" not in line]
    assert len(lines) > 1400
    return lines


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("symbols", [False, True])
def test_sentencepiece_tokenizers_are_the_librarys_own(
    tmp_path: Path, prefix: bool, symbols: bool
) -> None:
    own = trained(prefix, symbols)
    tokenizer = rebuilt(tmp_path, lambda out: add_spm(out, own, prefix, False))
    rng = Random(3)
    compared = 0
    for line in plain_lines():
        if symbols and "\u2581" in line:
            continue  # such tokens are looked for before spaces become U+2581, as in llama.cpp
        if symbols and not prefix:
            line = line.replace("the", rng.choice(SYMBOLS)).replace(SYMBOLS[1], "   ")
        if symbols and prefix and any(s in f" {line}".replace(" ", "\u2581") for s in SYMBOLS):
            continue  # the prefix stands before each stretch of text, not only the first
        compared += 1
        ids = own.encode(line)
        assert tokenizer.encode(line) == ids, line
        assert tokenizer.decode(ids) == own.decode(ids), line
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.feed, ids), stream.finish()]) == own.decode(ids)
    assert compared > 500


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers_are_their_families_own(tmp_path: Path, prefix: bool) -> None:
    own = trained(prefix, False)
    every = range(own.get_piece_size())
    vocab = {own.id_to_piece(index): index for index in every}
    merges = generate_merges(vocab, {own.id_to_piece(i): own.get_score(i) for i in every})
    made = LlamaTokenizer if prefix else GemmaTokenizer
    special = {} if prefix else {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    special |= {} if prefix else {"mask_token": "<unk>"}
    family = made(vocab=vocab, merges=merges, **special)
    tokenizer = rebuilt(tmp_path, lambda out: add_spm(out, own, prefix, False))
    model = json.loads(tokenizer._library.to_str())["model"]
    assert merges_of(model) == [(left, right) for left, right in merges]
    for line in plain_lines():
        if prefix and line.startswith((" ", "\u2581")):
            continue  # this class puts no space before a space, unlike SentencePiece and llama.cpp
        assert tokenizer.encode(line) == family.encode(line, add_special_tokens=False), line


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece's rule: the best union of neighbours first, of equals the leftmost."""
    symbols = list(text)
    while True:
        unions = [left + right for left, right in itertools.pairwise(symbols)]
        ranked = [(-scores[union], at) for at, union in enumerate(unions) if union in scores]
        if not ranked:
            return symbols
        at = min(ranked)[1]
        symbols[at : at + 2] = [unions[at]]


def test_merges_are_by_score_whatever_the_vocabulary(tmp_path: Path) -> None:
    """Random vocabularies of two letters, where tokens overlap and repeat in every way."""
    rng = Random(5)
    for _ in range(40):
        words = {"".join(rng.choices("ab", k=rng.randrange(2, 7))) for _ in range(16)}
        tokens = ["<unk>", "a", "b", *sorted(words)]
        scores = [0.0, -100.0, -101.0, *map(float, rng.sample(range(-90, 0), len(words)))]

        def fill(out: GGUFWriter, tokens: list[str] = tokens, scores: list[float] = scores) -> None:
            out.add_tokenizer_model("llama")
            out.add_token_list(tokens)
            out.add_token_scores(scores)
            out.add_token_types(
                [gguf.TokenType.UNKNOWN] + [gguf.TokenType.NORMAL] * len(tokens[1:])
            )
            out.add_unk_token_id(0)
            out.add_add_space_prefix(False)

        tokenizer = rebuilt(tmp_path, fill)
        known = {t: s for t, s in zip(tokens, scores, strict=True) if t != "<unk>"}
        for _ in range(40):
            text = "".join(rng.choices("ab", k=rng.randrange(30)))
            names = [tokenizer.token(index) for index in tokenizer.encode(text)]
            assert names == merged(text, known), (tokens, scores, text)


def test_the_prefix_stands_before_each_stretch_of_text(tmp_path: Path) -> None:
    own = trained(True, True)
    tokenizer = rebuilt(tmp_path, lambda out: add_spm(out, own, True, False))
    day = own.encode("the day")
    turn = own.piece_to_id("<turn>")
    assert tokenizer.encode("the day<turn>the day</s>the day") == [*day, turn, *day, 2, *day]
    assert tokenizer.encode("") == []


# --------------------------------------------------------------------------- beginnings and endings


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [
        (None, None, [1, 9]),
        (True, None, [1, 9]),
        (False, None, [9]),
        (False, True, [9, 2]),
        (True, True, [1, 9, 2]),
    ],
)
def test_bos_comes_once(
    tmp_path: Path, bos: bool | None, eos: bool | None, expected: list[int]
) -> None:
    own = trained(True, False)

    def fill(out: GGUFWriter) -> None:
        add_spm(out, own, True, bos)
        if eos is not None:
            out.add_add_eos_token(eos)

    tokenizer = rebuilt(tmp_path, fill)
    day = own.encode("the day")
    whole = [index for e in expected for index in (day if e == 9 else [e])]
    assert tokenizer.encode("the day") == whole
    assert tokenizer.encode("the day", add_special_tokens=False) == day
    assert tokenizer.eos_ids == (2,)
    once = whole if 1 in expected else [1, *whole]
    assert tokenizer.encode("<s>the day") == once
    assert tokenizer.encode("<s><s>the day") == [1, *once]
    assert tokenizer.encode("<s>the day", add_special_tokens=False) == [1, *day]
    assert tokenizer.decode(once).strip() == "the day"


def test_byte_level_tokenizers_begin_as_their_kind_says(tmp_path: Path) -> None:
    for pre, begins in (("gpt-2", False), ("llama-bpe", True), ("qwen2", False), ("tekken", True)):

        def fill(out: GGUFWriter, pre: str = pre) -> None:
            add_byte_level(out, FIXTURE, pre)
            out.add_bos_token_id(0)
            out.add_eot_token_id(5)

        tokenizer = rebuilt(tmp_path, fill)
        assert (tokenizer.encode("the day")[0] == 0) == begins
        assert tokenizer.encode("<|endoftext|>the day").count(0) == 1
        assert tokenizer.eos_ids == (5,)


# ---------------------------------------------------------------------------------- what is refused


def replaced(key: str, value: Any) -> Change:
    """The fixture's vocabulary, or for keys of SentencePiece the trained one, but for one key."""

    def fill(out: GGUFWriter) -> None:
        if key.startswith("spm:"):
            add_spm(out, trained(True, False), True)
        else:
            add_byte_level(out, FIXTURE, "gpt-2")
        name = f"tokenizer.ggml.{key.removeprefix('spm:')}"
        out.kv_data[0].pop(name, None)
        if isinstance(value, list):
            out.add_array(name, value)
        elif isinstance(value, bool):
            out.add_bool(name, value)
        elif isinstance(value, int):
            out.add_uint32(name, value)
        elif value is not None:
            out.add_string(name, value)

    return fill


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model", "bert", "'tokenizer.ggml.model' is 'bert'; supported are llama, gpt2"),
        ("model", 3, "'tokenizer.ggml.model' is 3; supported"),
        ("pre", "default", "'tokenizer.ggml.pre' is 'default'; supported are gpt-2, llama-bpe"),
        ("pre", None, "tokenizer.ggml.pre is missing"),
        ("tokens", None, "tokenizer.ggml.tokens is missing"),
        ("tokens", "a", "'tokenizer.ggml.tokens' is 'a'; give a list of type str"),
        ("tokens", [1, 2], "'tokenizer.ggml.tokens' is [1, 2]; give a list of type str"),
        ("tokens", ["a", "b"], "token_type is 'a list of 1024', which contradicts the 2 tokens"),
        ("token_type", None, "tokenizer.ggml.token_type is missing"),
        ("token_type", [1], "token_type is 'a list of 1', which contradicts the 1024 tokens"),
        ("token_type", [7] * 1024, "7, of token 0, is no type of a token"),
        ("merges", None, "tokenizer.ggml.merges is missing"),
        ("merges", ["ab"], "merge 0 is not two tokens with one space between"),
        ("merges", ["a b c"], "merge 0 is not two tokens"),
        ("merges", ["nowhere found"], "tokenizer.ggml makes no tokenizer: "),
        ("add_bos_token", "yes", "'tokenizer.ggml.add_bos_token' is 'yes'; give true or false"),
        ("add_space_prefix", True, "only false is supported for gpt2"),
        ("bos_token_id", 200_000, "'tokenizer.ggml.bos_token_id' is 200000; give an integer"),
        ("add_prefix", True, "'tokenizer.ggml.add_prefix' is True; this key is not supported"),
        ("spm:scores", None, "tokenizer.ggml.scores is missing"),
        ("spm:scores", [0.5], "scores is 'a list of 1', which contradicts the 900 tokens"),
        ("spm:scores", ["a"], "give a list of type float"),
        ("spm:remove_extra_whitespaces", True, "only false is supported"),
        ("spm:precompiled_charsmap", [1], "precompiled_charsmap is not supported"),
        ("spm:unknown_token_id", 900, "'tokenizer.ggml.unknown_token_id' is 900; give an int"),
    ],
)
def test_bad_vocabularies_are_named(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        rebuilt(tmp_path, replaced(key, value))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'vocabulary.gguf'}: ")
    assert expected in text
    assert text.isprintable()


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="contradicts the model's embedding, of 1023; conv"):
        rebuilt(tmp_path, lambda out: add_byte_level(out, FIXTURE, "gpt-2"), 1023)


def test_a_token_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    tokens = [f"t{index}" for index in range(1023)] + ["t5"]
    with pytest.raises(TokenizerError, match="the token 't5' occurs 2 times"):
        rebuilt(tmp_path, replaced("tokens", tokens))
