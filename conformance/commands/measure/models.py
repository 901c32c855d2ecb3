"""Options of commands that measure a model: which one, with how many threads, how often."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from conformance.commands.common import count
from conformance.commands.measure.bench import numbers
from conformance.paths import data_folder, model_folder
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.measure.source import Source
    from reference.model import Model
    from reference.weights import Arithmetic, Mode


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


def threads_of(options: argparse.Namespace) -> int:
    """How many threads are asked for. Raises RequestError where BLAS cannot have so many."""
    from reference.threads import limited_to, thread_count

    threads: int = options.threads or thread_count()
    try:
        with limited_to(threads):
            return threads
    except RequestError as error:
        raise RequestError(f"-t: {error}") from error


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
