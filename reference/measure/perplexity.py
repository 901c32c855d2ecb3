"""Perplexity of a text, and the divergence of one model from another on it.

Perplexity is `exp(mean of -ln p(token | those before it))` over the tokens that count. Which those
are, is convention. By chunks, as llama.cpp has it: the text is cut into windows of `context` tokens
that do not overlap, and of each only the tokens after its middle count, so that each has at least
half a window before it. By stride, as transformers' guide has it: windows overlap, each is `stride`
further than the one before, and the tokens that no window had before count; every token but the
first counts once.

The divergence `KL(base || model) = sum of p (ln p - ln q)` is computed in float64 from the base's
logits. They are stored as the float32 values that they were: 16-bit log-probabilities with a floor,
a usual economy, have an error of their own that is larger than that of a good quantization.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from reference.arithmetic import F32, F64
from reference.errors import RequestError, reason
from reference.measure.machine import Spread
from reference.model import AttentionKind, Model, Part

FORMAT, VERSION = "bitforbit-logits", "1"
"""What a file of logits says that it is. A file of another version is refused."""

QUANTILES = (0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01)
"""Of the divergence over tokens."""

ROWS = 16
"""Rows of logits of which float64 copies are made at a time."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """Tokens [start, stop) of the text; those of [first, stop) count, and are after start."""

    start: int
    stop: int
    first: int

    @property
    def counted(self) -> int:
        """How many tokens count."""
        return self.stop - self.first


def by_chunks(count: int, context: int) -> list[Window]:
    """Windows that do not overlap; what is left at the end of `count` tokens is not used."""
    starts = range(0, count - context + 1, context)
    return [Window(start, start + context, start + context // 2 + 1) for start in starts]


def by_stride(count: int, context: int, stride: int) -> list[Window]:
    """Windows that overlap, up to the end of `count` tokens."""
    windows, first = list[Window](), 1
    for start in range(0, count, stride):
        stop = min(start + context, count)
        windows.append(Window(start, stop, first))
        first = stop
        if stop == count:
            break
    return windows


def log_probabilities(logits: F32) -> F64:
    """Logarithms of the softmax, (T, V) float32 -> (T, V) float64, computed in float64."""
    z = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity less infinity; NaN is found by who asks
        z -= z.max(axis=-1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=-1, keepdims=True)))


Logits = Callable[[Ints], F32]
"""Someone else's logits of tokens that follow nothing: (T,) ids -> (T, V) float32."""


@dataclass(frozen=True)
class Evaluation:
    """What is computed. tokens: of the text. context: tokens of a window.

    stride: 0 for windows by chunks. chunks: of them at most, None for all. bos: the token that
    every window by chunks begins with in place of its own, None for none. other: another engine's
    logits, in place of the model's own; digest: what they are known by. Raises RequestError.
    """

    model: Model
    tokens: Ints
    context: int = 512
    stride: int = 0
    chunks: int | None = None
    attention: AttentionKind = "exact"
    bos: int | None = None
    other: Logits | None = None
    clock: Callable[[], float] = perf_counter

    def __post_init__(self) -> None:
        most = self.model.config.max_positions
        if not 4 <= self.context <= most:
            raise RequestError(
                f"context: {self.context} is out of range; the model's has 4 to {most} positions"
            )
        if not 0 <= self.stride < self.context:
            raise RequestError(
                f"stride: {self.stride} is out of range; it must be below the context of "
                f"{self.context}, or 0 for chunks"
            )
        if self.chunks is not None and self.chunks < 1:
            raise RequestError(f"chunks: {self.chunks} is out of range; it must be 1 or more")
        if len(self.tokens) < self.context:
            raise RequestError(
                f"text: its {len(self.tokens)} tokens do not fill a window of {self.context}; give "
                "a longer text, or a shorter context (--context)"
            )

    @cached_property
    def windows(self) -> list[Window]:
        """The windows, in order."""
        count = len(self.tokens)
        if self.stride:
            return by_stride(count, self.context, self.stride)[: self.chunks]
        return by_chunks(count, self.context)[: self.chunks]

    @property
    def counted(self) -> int:
        """Tokens that count, of all windows."""
        return sum(window.counted for window in self.windows)

    @property
    def digest(self) -> str:
        """What made the logits, in hex; nothing where another engine did, which has none."""
        return self.model.digest if self.other is None else ""

    def identity(self) -> dict[str, str]:
        """What two runs must have in common to be compared."""
        windows = [(w.start, w.stop, w.first) for w in self.windows]
        bos = None if self.stride else self.bos
        told = (self.tokens[: windows[-1][1]].tolist(), windows, bos)
        return {
            "format": FORMAT,
            "version": VERSION,
            "vocabulary": str(self.model.config.vocab_size),
            "context": str(self.context),
            "stride": str(self.stride),
            "text": hashlib.sha256(json.dumps(told).encode()).hexdigest(),
        }

    @cached_property
    def runs(self) -> list[list[Window]]:
        """The windows that pass each layer together: one alone, if layers need not be made."""
        count, memory = 1, self.model.memory
        if memory is not None:
            most = max(window.counted for window in self.windows)
            count = memory.at_once(self.context, most)
        return [self.windows[at : at + count] for at in range(0, len(self.windows), count)]

    def logits(self, windows: Sequence[Window]) -> Iterator[F32]:
        """What the tokens that count are predicted by, (counted, V) for each window."""
        parts = []
        for window in windows:
            # The last token is predicted, and predicts nothing that counts.
            given = self.tokens[window.start : window.stop - 1].copy()
            if self.bos is not None and not self.stride:
                given[0] = self.bos
            parts.append(Part(given, None, self.attention, window.counted))
        if self.other is not None:
            for part in parts:
                yield self.other(np.asarray(part.tokens))[-part.logits :]
            return
        for logits in self.model.forward_batches([[part] for part in parts]):
            yield logits[0]

    def run(self) -> Iterator[Scores]:
        """The scores of window after window. Raises RequestError for logits that are NaN.

        Windows that pass the layers together have the seconds of all but their logits in common.
        """
        for windows in self.runs:
            found, started, common = self.logits(windows), self.clock(), 0.0
            for window in windows:
                logits = next(found)
                seconds = self.clock() - started
                if window is windows[0]:
                    common = seconds / len(windows)
                    seconds = 0.0
                targets = self.tokens[window.first : window.stop]
                yield Scores(window, logits, targets, surprises(logits, targets), common + seconds)
                started = self.clock()


def surprises(logits: F32, targets: Ints) -> F64:
    """`-ln p` of each target, (T, V) and (T,) -> (T,) nats. RequestError where it is infinite."""
    found = np.empty(len(targets))
    for at in range(0, len(targets), ROWS):  # of few rows at a time: a vocabulary may be large
        few = slice(at, at + ROWS)
        rows = -log_probabilities(logits[few])
        found[few] = rows[np.arange(len(rows)), targets[few]]
    if not np.isfinite(found).all():
        raise RequestError("perplexity: a logit is not finite, so a token has no probability")
    return found


@dataclass(frozen=True)
class Scores:
    """A window's. logits: (T, V). targets: (T,) ids. surprise: (T,) nats. seconds: of the pass."""

    window: Window
    logits: F32
    targets: Ints
    surprise: F64
    seconds: float


@dataclass(frozen=True)
class Mean:
    """A mean, and its standard error, as if tokens were independent."""

    value: float
    error: float

    @classmethod
    def of(cls, values: F64) -> Mean:
        """The mean of (T,) values; of a single one the error is 0."""
        error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
        return cls(float(values.mean()), error)

    def exp(self) -> Mean:
        """Its exponential, with the error that follows to first order."""
        value = float(np.exp(self.value))
        return Mean(value, value * self.error)


def perplexity(scores: Sequence[Scores]) -> dict[str, Any]:
    """Figures of the windows that were computed; the error is a standard error."""
    all_of_them = np.concatenate([s.surprise for s in scores])
    whole = Mean.of(all_of_them).exp()
    each = Spread.of([float(np.exp(s.surprise.mean())) for s in scores])
    rate = Spread.of([(s.window.stop - s.window.start - 1) / s.seconds for s in scores])
    return {
        "repetitions": len(scores),
        "tokens": len(all_of_them),
        "perplexity": whole.value,
        "perplexity_error": whole.error,
        **{f"window_{k}": getattr(each, k) for k in ("median", "least", "most")},
        **{f"rate_{k}": getattr(rate, k) for k in ("median", "least", "most")},
    }


# ------------------------------------------------------------------------------------- divergence


@dataclass(frozen=True)
class Divergence:
    """How a model differs from its base, token by token, (T,) each.

    nats: KL(base || model). same_top: whether both find the same token likeliest, the lowest id of
    several. shift: probability of the right token, less the base's. surprise: less the base's.
    """

    nats: F64
    same_top: NDArray[np.bool_]
    shift: F64
    surprise: F64


def divergence(base: F32, scores: Scores) -> Divergence:
    """The difference of a window's scores from the base's logits, (T, V)."""
    nats = np.empty(len(base))
    for at in range(0, len(base), ROWS):
        few = slice(at, at + ROWS)
        p, q = log_probabilities(base[few]), log_probabilities(scores.logits[few])
        with np.errstate(invalid="ignore"):
            terms = np.exp(p) * (p - q)
        nats[few] = np.where(np.exp(p) > 0, terms, 0.0).sum(axis=-1)
    before = surprises(base, scores.targets)
    return Divergence(
        nats,
        base.argmax(axis=-1) == scores.logits.argmax(axis=-1),
        np.exp(-scores.surprise) - np.exp(-before),
        scores.surprise - before,
    )


def comparison(parts: Sequence[Divergence]) -> dict[str, float]:
    """Figures of a divergence. ratio: perplexity over the base's, from paired tokens."""
    nats, same, shift, surprise = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("nats", "same_top", "shift", "surprise")
    )
    mean, top, ratio = Mean.of(nats), Mean.of(same.astype(np.float64)), Mean.of(surprise).exp()
    return {
        "kl_mean": mean.value,
        "kl_error": mean.error,
        "kl_largest": float(nats.max()),
        **{f"kl_q{q * 100:g}": float(np.quantile(nats, q)) for q in QUANTILES},
        "kl_least": float(nats.min()),
        "same_top": top.value,
        "same_top_error": top.error,
        "shift_mean": float(shift.mean()),
        "shift_rms": float(np.sqrt((shift**2).mean())),
        "ratio": ratio.value,
        "ratio_error": ratio.error,
    }


# ---------------------------------------------------------------------------------- files of logits


@contextmanager
def writing(path: Path, evaluation: Evaluation) -> Iterator[Callable[[Scores], object]]:
    """Write the logits of window after window, (tokens, V) float32, as one safetensors file.

    The file appears when all is written, and not at all otherwise. Raises RequestError.
    """
    if not path.name or path.is_dir():
        raise RequestError(f"{path}: it is no name of a file; give one for the logits")
    shape = [evaluation.counted, evaluation.model.config.vocab_size]
    size = 4 * shape[0] * shape[1]
    header = {
        "__metadata__": evaluation.identity() | {"digest": evaluation.digest},
        "logits": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            try:
                file.write(len(text).to_bytes(8, "little") + text)
                yield lambda scores: file.write(np.ascontiguousarray(scores.logits, "<f4").data)
                file.flush()
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"{path}: cannot write it ({error.strerror})") from error


class Base:
    """Logits that `writing` wrote of the same text. Raises RequestError for any other file."""

    def __init__(self, path: Path, evaluation: Evaluation) -> None:
        try:
            file: Any = safe_open(path, "numpy")
            told = file.metadata() or {}
            self._logits = file.get_slice("logits")
            shape, dtype = tuple(self._logits.get_shape()), self._logits.get_dtype()
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{path}: it is no file of logits ({reason(error)})") from error
        for key, wanted in evaluation.identity().items():
            if told.get(key) != wanted:
                raise RequestError(
                    f"{path}: {key} is {told.get(key)}, and here it is {wanted}; write the base "
                    "again, from the same text and with the same options"
                )
        if (dtype, shape) != ("F32", (evaluation.counted, evaluation.model.config.vocab_size)):
            raise RequestError(
                f"{path}: its logits are {dtype} of shape {shape}; write the base again"
            )
        self.digest = told.get("digest")
        self._read = 0

    def next(self, count: int) -> F32:
        """The logits of the next tokens, (count, V) float32."""
        rows = self._logits[self._read : self._read + count]
        self._read += count
        return np.asarray(rows, np.float32)
