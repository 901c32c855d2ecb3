"""`bitforbit perplexity`: how well a model predicts a text, and how far it is from another."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.commands.common import MODES, count
from conformance.commands.measure.models import (
    add_text,
    encoded,
    text_named,
    threads_of,
    tokenizer_of,
)
from conformance.commands.measure.plot import Line, Panel, add_plot, check_plot, write_and_draw
from conformance.commands.measure.rows import Columns, Row, add_form, shown, span, watched
from conformance.commands.memory import add_memory, layer_bar
from conformance.errors import BackendError
from conformance.operations import NotImplementedByBackendError, Sessions, call
from conformance.paths import model_folder
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.arithmetic import F32
    from reference.measure.perplexity import Base, Divergence, Evaluation, Ints, Logits, Scores

DESCRIPTION = """\
Perplexity of a text, in windows of --context tokens of which those after the middle count (as
llama.cpp has it), or with --stride in windows that overlap (as transformers' guide has it).

  bitforbit perplexity --model PATH -f text.txt --save-logits base.safetensors
  bitforbit perplexity --model PATH -f text.txt --weights int4 --kl-divergence base.safetensors

The second compares with the first, token by token. Logits are stored in float32, 4 bytes times the
vocabulary for each token that counts. A model has a divergence of exactly 0 from itself.

  bitforbit perplexity --model PATH --backend my_backend.py --kl-divergence base.safetensors
  bitforbit perplexity --model PATH --process './my_backend' --kl-divergence base.safetensors

compare another engine: its `load`, `reset` and `forward`, which `bitforbit check` calls too.
"""

ABOUT = ("cpu", "cores", "blas", "numpy", "system", "model", "text")
COLUMNS: Columns = {
    "digest": lambda row: row["digest"][:12] or "-",
    "backend": partial(shown, name="backend"),
    **{name: partial(shown, name=name) for name in ("arithmetic", "weights", "attention")},
    **{name: partial(shown, name=name) for name in ("threads", "context", "stride", "tokens")},
    "perplexity": lambda row: f"{row['perplexity']:.4f} ± {row['perplexity_error']:.4f}",
    "of a window": partial(span, name="window"),
    "windows": partial(shown, name="repetitions"),
    "cache_n": partial(shown, name="cache_n"),
    "prompt_n": partial(shown, name="prompt_n"),
    "t/s": partial(span, name="rate", form=".0f"),
}
COMPARED: Columns = {
    "base": lambda row: (row["base_digest"] or "-")[:12],
    "times the base's": lambda row: f"{row['ratio']:.4f} ± {row['ratio_error']:.4f}",
    "KL, nats": lambda row: f"{row['kl_mean']:.3g} ± {row['kl_error']:.2g}",
    "median": lambda row: f"{row['kl_q50']:.3g}",
    "90 %": lambda row: f"{row['kl_q90']:.3g}",
    "99 %": lambda row: f"{row['kl_q99']:.3g}",
    "99.9 %": lambda row: f"{row['kl_q99.9']:.3g}",
    "largest": lambda row: f"{row['kl_largest']:.3g}",
    "same top": lambda row: f"{row['same_top']:.2%} ± {row['same_top_error']:.2%}",
    "rms shift of p": lambda row: f"{row['shift_rms']:.2%}",
}


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "perplexity", help="measure perplexity and divergence", description=DESCRIPTION, **style
    )
    parser.add_argument(
        "-m", "--model", default="tiny-dense", metavar="PATH", help="default tiny-dense"
    )
    add_text(parser)
    parser.add_argument("-c", "--context", type=count, default=512, metavar="N", help="(512)")
    parser.add_argument("--stride", type=int, default=0, metavar="N", help="0: by chunks (0)")
    parser.add_argument("--chunks", type=count, metavar="N", help="windows at most (all)")
    parser.add_argument("-t", "--threads", type=count, metavar="N", help="(all)")
    for name, among in (
        ("arithmetic", ("exact", "float32")),
        ("attention", ("exact", "fast")),
        ("weights", MODES),
    ):
        parser.add_argument(f"--{name}", choices=among, default=among[0], help=f"({among[0]})")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--backend", metavar="BACKEND", help="another engine: as `check` names it")
    other.add_argument("--process", metavar="COMMAND", help="another engine: a program's command")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--save-logits", type=Path, metavar="FILE", help="write a base to compare")
    files.add_argument("--kl-divergence", type=Path, metavar="BASE", help="compare with a base")
    add_memory(parser)
    add_form(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compute, and print one row."""
    check_plot(options.plot)
    import numpy as np

    from reference.measure.perplexity import Base, Evaluation
    from reference.model import AttentionKind, load_model

    folder = model_folder(options.model)
    backend = options.backend or options.process
    if backend and (options.memory is not None or options.arithmetic != "exact"):
        raise RequestError("--backend, --process: neither --memory nor --arithmetic is theirs")
    # Of a model that another engine computes, the tokenizer and the sizes are wanted.
    model = (
        load_model(folder, arithmetic="float32")
        if backend
        else load_model(folder, options.weights, options.arithmetic, options.memory)
    )
    text, name = text_named(options)
    tokens, bos = encoded(tokenizer_of(model), text)
    # float32 arithmetic has one attention alone (SPEC 1.4)
    attention: AttentionKind = "fast" if options.arithmetic == "float32" else options.attention
    evaluation = Evaluation(
        model,
        np.array(tokens, np.int64),
        options.context,
        options.stride,
        options.chunks,
        attention,
        bos,
    )
    base = Base(options.kl_divergence, evaluation) if options.kl_divergence else None
    if options.save_logits is not None and not options.save_logits.parent.is_dir():
        raise RequestError(f"--save-logits: {options.save_logits.parent} is no folder")
    about = {
        "model": folder.resolve().name,
        "digest": "" if backend else model.digest,
        "backend": backend,
        "arithmetic": None if backend else options.arithmetic,
        "weights": options.weights,
        "attention": attention,
        "text": name,
    }
    columns = {**COLUMNS, **(COMPARED if base else {})}
    with ExitStack() as stack:
        if backend:
            other = _other(options, folder, model.config.vocab_size, stack)
            evaluation = replace(evaluation, other=other)
        rows = _rows(options, evaluation, base, about)
        return write_and_draw(options.output, options.plot, columns, ABOUT, rows, panels)


def _other(options: argparse.Namespace, folder: Path, vocabulary: int, stack: ExitStack) -> Logits:
    """Logits by another engine's session; its program, if it is one, ends with the stack.

    What it raises, or answers that is no (T, V) float32, is a BackendError.
    """
    import numpy as np

    from conformance.backends import Opening

    opening = Opening(options.backend or "", process=options.process)
    backend = stack.enter_context(opening.opened())
    sessions = Sessions(backend, {folder.name: str(folder.resolve())})
    asked = {"model": folder.name, "weights": options.weights, "attention": options.attention}

    @contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except NotImplementedByBackendError as error:
            raise BackendError(f"{opening}: it has no `{error}`, which logits need") from error
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise BackendError(f"{opening}: it failed ({reason})") from error

    def logits(tokens: Ints) -> F32:
        with named():
            found = call(backend, sessions, "forward", {**asked, "tokens": tokens})["y"]
        if found.dtype != np.float32 or found.shape != (len(tokens), vocabulary):
            raise BackendError(
                f"{opening}: forward answered {found.dtype} of shape {found.shape}; it must be "
                f"float32 of shape {(len(tokens), vocabulary)}"
            )
        return found

    with named():
        sessions.get(folder.name, options.weights)  # loading is not timed
    return logits


QUANTILES = ("kl_q50", "kl_q90", "kl_q99", "kl_q99.9", "kl_largest")


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Perplexity of each window along the text, and how far tokens are from the base's."""
    (row,) = rows
    each: list[float] = row["windows"]
    windows = Line("of a window", list(range(1, len(each) + 1)), each, kind="points")
    levels = {"of the text": row["perplexity"]}
    found = [Panel("perplexity", "window", "perplexity", [windows], levels=levels)]
    told = [name for name in QUANTILES if row.get(name, 0) > 0]  # a logarithm has no 0
    if told:
        names = [name.removeprefix("kl_").replace("q", "quantile ") for name in told]
        line = Line("from the base", names, [row[name] for name in told], kind="points")
        levels = {"mean": row["kl_mean"]} if row["kl_mean"] > 0 else {}
        found.append(Panel("divergence of tokens", "", "KL, nats", [line], "y", levels=levels))
    return found


@contextmanager
def _bar(evaluation: Evaluation) -> Iterator[Callable[[Scores], object]]:
    """A bar of windows, or of layers where they are made one at a time."""
    if evaluation.model.memory is None:
        with watched("windows", len(evaluation.windows)) as advance:
            yield lambda done: advance()
    else:
        with layer_bar(evaluation.model, len(evaluation.runs)) as bar:
            yield lambda done: bar.tokens(done.window.counted)


def _rows(
    options: argparse.Namespace, evaluation: Evaluation, base: Base | None, about: dict[str, Any]
) -> Iterator[Row]:
    """One row: of all windows, or of those that an interrupt left."""
    import numpy as np

    from reference.measure.machine import this_machine
    from reference.measure.perplexity import (
        comparison,
        divergence,
        perplexity,
        writing,
    )
    from reference.threads import limited_to

    scores: list[Scores] = []
    differences: list[Divergence] = []
    interrupted, threads = False, threads_of(options)
    try:
        with ExitStack() as stack:
            save: Callable[[Scores], object] = lambda scores: None  # noqa: E731
            if options.save_logits is not None:
                save = stack.enter_context(writing(options.save_logits, evaluation))
            stack.enter_context(limited_to(threads))
            advance = stack.enter_context(_bar(evaluation))
            for done in evaluation.run():
                save(done)
                if base is not None:
                    differences.append(divergence(base.next(done.window.counted), done))
                scores.append(replace(done, logits=done.logits[:0]))  # the rest may be large
                advance(done)
    except KeyboardInterrupt:
        interrupted = True
    if scores:
        yield {
            **asdict(this_machine()),
            **about,
            "threads": threads,
            "context": evaluation.context,
            "stride": evaluation.stride,
            "cache_n": 0,
            "prompt_n": sum(s.window.stop - s.window.start - 1 for s in scores),
            **perplexity(scores),
            "windows": [float(np.exp(s.surprise.mean())) for s in scores],
            **({"base_digest": base.digest} if base else {}),
            **(comparison(differences) if base else {}),
        }
    if interrupted:
        raise KeyboardInterrupt
