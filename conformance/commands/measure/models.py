"""What commands that measure share: a model, its configuration, a text, lengths, threads, runs."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.commands.common import count, numbers, text_of
from conformance.paths import data_folder, model_folder
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.config import ModelConfig
    from reference.loading import Checkpoint
    from reference.measure.source import Source
    from reference.model import Model
    from reference.tokenizer import Tokenizer
    from reference.weights import Arithmetic, Mode

TYPES = ("float64", "float32", "float16", "bfloat16", "int8", "int4")
"""What a value may be stored in, or computed in, where that is told."""


def add_model(parser: Any, default: str = "tiny-dense") -> None:
    """Add `-m` and `--random`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "-m", "--model", default=default, metavar="PATH", help=f"a model (default {default})"
    )
    which.add_argument(
        "--random",
        metavar="SIZES",
        help="random weights, of sizes such as layers=4,hidden=256; others are heads=4, kv=2, "
        "head_dim=64, ffn=704, vocab=1024, context=8192, experts=0, chosen=2 (what is not told)",
    )


def add_lengths(parser: Any, default: str) -> None:
    """Add `-p`, lengths of a prompt, and `--layers`, slices beside the whole model."""
    parser.add_argument(
        "-p",
        type=numbers,
        metavar="N,..",
        help=f"tokens of a prompt ({default} doubling, as far as the context goes)",
    )
    parser.add_argument(
        "--layers", type=numbers, default=[], metavar="N,..", help="slices beside the whole"
    )


def add_text(parser: Any) -> None:
    """Add `-f`."""
    parser.add_argument(
        "-f", "--file", metavar="FILE", help="the text (default: held-out text of the fixtures)"
    )


def add_runs(parser: Any, repetitions: int) -> None:
    """Add `-t`, `-r` and `--no-warmup`."""
    parser.add_argument("-t", "--threads", type=count, metavar="N", help="threads (all)")
    parser.add_argument(
        "-r", type=int, default=repetitions, metavar="N", help=f"repetitions ({repetitions})"
    )
    parser.add_argument("--no-warmup", action="store_true", help="keep the first run too")


def source_of(
    options: argparse.Namespace, weights: Mode = "float32", arithmetic: Arithmetic = "exact"
) -> Source:
    """The model that the options name. Raises RequestError."""
    from reference.measure.source import Dimensions, Source

    if options.random is not None:
        return Source(Dimensions.parse(options.random), weights, arithmetic)
    return Source(model_folder(options.model), weights, arithmetic)


def config_of(path: Path) -> ModelConfig:
    """A model's configuration; of a folder, its weights are left alone. Raises ConfigError."""
    from reference.config import parse_config
    from reference.errors import ConfigError
    from reference.loading import load_checkpoint
    from reference.loading.strict_json import read_object

    if path.is_file():
        return load_checkpoint(path).config
    file = path / "config.json"
    return parse_config(read_object(file, ConfigError), str(file))


def config_digest(config: ModelConfig) -> str:
    """Sha256 of a configuration, in hex: the digest of a model whose weights are not read."""
    return hashlib.sha256(repr(config).encode()).hexdigest()


def fitting(lengths: Sequence[int], room: int) -> list[int]:
    """Those lengths that fit, at least the longest that does: of lengths that nobody asked for."""
    return [n for n in lengths if n <= room] or [max(room, 1)]


def threads_of(options: argparse.Namespace) -> int:
    """How many threads are asked for, else as many as BLAS has. Raises RequestError."""
    from reference.threads import thread_count

    threads: int = options.threads or thread_count()
    check_threads(threads)
    return threads


def check_threads(count: int) -> None:
    """Raise RequestError where no work can be done by so many threads."""
    from reference.threads import limited_to

    if count == 0:
        raise RequestError("-t: 0 threads compute nothing; give 1 or more")
    try:
        with limited_to(count):
            pass
    except RequestError as error:
        raise RequestError(f"-t: {error}") from error


def text_named(options: argparse.Namespace) -> tuple[str, str]:
    """The text that `-f` names, else held-out text, and its file's name. Raises RequestError."""
    file = options.file or str(data_folder("fixtures") / "held-out.txt")
    return text_of(f"@{file}", "--file"), Path(file).name


def tokenizer_of(model: Model | Checkpoint) -> Tokenizer:
    """A model's tokenizer. Raises RequestError where it has none."""
    if model.tokenizer is None:
        raise RequestError("--model: it has no tokenizer.json, and the text needs one")
    return model.tokenizer


def encoded(tokenizer: Tokenizer, text: str) -> tuple[list[int], int | None]:
    """A text's token ids, and the one that the tokenizer puts before every text, if it does."""
    marked, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    begins = len(marked) > len(plain) and marked[1 : len(plain) + 1] == plain
    return (marked[: len(plain) + 1], marked[0]) if begins else (plain, None)


def prompt_of(model: Model, length: int | None = None) -> tuple[list[int], str]:
    """Tokens of a prompt, and what they are: held-out text, or at random without a tokenizer.

    length: None for all of the text. Raises RequestError where the text is shorter.
    """
    import numpy as np

    if model.tokenizer is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, model.config.vocab_size, length or 1 << 16).tolist(), "random tokens"
    text = (data_folder("fixtures") / "held-out.txt").read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text)
    if length is not None and len(tokens) < length:
        raise RequestError(f"text: {length} tokens are needed, and held-out.txt has {len(tokens)}")
    return tokens[:length], "held-out.txt"
