"""How fast prefill and decode are, in llama-bench's vocabulary.

`pp512` computes a prompt of 512 tokens; `tg128` computes 128 passes of one token, each chosen by
the one before; `pp512+tg128` does both; `@ d4096` has 4,096 tokens in the cache before, which are
not timed. All arms of a test take turns, so that what disturbs the machine disturbs all alike, and
a ratio is the median of ratios within a turn, never one of pooled times. Where there are several
arms, the first one runs a second time: its ratio to itself shows how much of a ratio is noise.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from reference.config import show
from reference.errors import RequestError, reason
from reference.measure.machine import Machine, Spread
from reference.measure.turns import check_repetitions, in_turns
from reference.model import AttentionKind, Model
from reference.threads import limited_to

FORMAT, VERSION = "bitforbit-bench", 1
"""What a row says that it is. A row of another version is refused."""

PASS = 2048
"""Tokens of one pass at most, as in the engine."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Trial:
    """prompt, output: tokens computed; output alone follows one token. depth: tokens held before.

    Raises RequestError where nothing would be computed.
    """

    prompt: int
    output: int
    depth: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt, self.output, self.depth) < 0 or self.prompt + self.output == 0:
            raise RequestError(f"test: {self.name} has nothing to compute, or less than nothing")

    @property
    def name(self) -> str:
        """What llama-bench calls it."""
        parts = [f"{kind}{n}" for kind, n in (("pp", self.prompt), ("tg", self.output)) if n]
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def given(self) -> int:
        """Tokens of the first pass: the prompt, or the one that output follows."""
        return max(self.prompt, 1)

    @property
    def decodes(self) -> int:
        """Passes of one token after that."""
        return self.output if self.prompt else self.output - 1


@dataclass(frozen=True)
class Sample:
    """One run of a test. seconds: until the last token; first: until the first one.

    cache_n, prompt_n: prompt tokens held before and computed; None where a server does not say.
    predicted_n: tokens chosen.
    """

    seconds: float
    first: float
    cache_n: int | None
    prompt_n: int | None
    predicted_n: int

    def rate(self, trial: Trial) -> float:
        """Tokens computed a second; what the cache held does not count."""
        prompt = trial.depth + trial.given if self.prompt_n is None else self.prompt_n
        return (prompt + self.predicted_n - 1) / self.seconds


class Arm(Protocol):
    """What is measured.

    labels: model, digest, arithmetic, weights, attention, memory, threads, server.
    """

    @property
    def labels(self) -> Mapping[str, str | int | None]:
        """What tells it from others."""

    def of(self, trial: Trial) -> Arm:
        """The arm as it runs that test. Raises RequestError where it cannot."""

    def ready(self, trial: Trial) -> Callable[[], Sample]:
        """Fill the cache to the test's depth; what is returned runs the test once."""


@dataclass(frozen=True)
class Local:
    """A model in this process. attention: of prompts; a decode step is exact (SPEC 8.4).

    labels: name, arithmetic, weights and memory of the model. most: tokens of one pass, and no more
    than the model's memory has room for (SPEC 12.3).
    """

    model: Model
    name: str
    arithmetic: str
    weights: str
    attention: AttentionKind
    threads: int
    clock: Clock = perf_counter
    memory: str | None = None
    most: int = PASS

    @property
    def labels(self) -> Mapping[str, str | int | None]:
        """What tells it from others."""
        return {
            "model": self.name,
            "digest": self.model.digest,
            "arithmetic": self.arithmetic,
            "weights": self.weights,
            "attention": self.attention,
            "memory": self.memory,
            "threads": self.threads,
            "server": None,
        }

    def of(self, trial: Trial) -> Local:
        """The same; where no prompt is computed, attention is that of decode steps."""
        context = self.model.config.max_positions
        needed = trial.depth + trial.given + trial.decodes
        if needed > context:
            raise RequestError(
                f"{trial.name}: {needed} positions are needed, and the model's context has "
                f"{context}; lower -d, -p or -n"
            )
        plain = self.arithmetic == "float32" or trial.prompt
        return self if plain else replace(self, attention="exact")

    def _pass(self) -> int:
        """Tokens of one pass."""
        memory = self.model.memory
        if memory is None:
            return self.most
        return bisect_left(range(1, self.most + 1), True, key=lambda n: not memory.holds(n, 1))

    def ready(self, trial: Trial) -> Callable[[], Sample]:
        """A run computes new random tokens, and leaves the cache as deep as it was."""
        cache, rng, most = self.model.new_cache(), np.random.default_rng(0), self._pass()

        def compute(count: int) -> int:
            tokens = rng.integers(0, self.model.config.vocab_size, count)
            for start in range(0, count, most):
                part = tokens[start : start + most]
                logits = self.model.forward(part, cache, self.attention, last_only=True)
            return int(logits[-1].argmax())

        def run() -> Sample:
            with limited_to(self.threads):
                started = self.clock()
                token = compute(trial.given)
                first = self.clock()
                for _ in range(trial.decodes):
                    row = self.model.forward([token], cache, last_only=True)
                    token = int(row[-1].argmax())
                ended = self.clock()
            prompt_n = cache.length - trial.depth - trial.decodes
            cache.truncate(trial.depth)
            times = (ended - started, first - started)
            return Sample(*times, trial.depth, prompt_n, trial.decodes + 1)

        if trial.depth:
            with limited_to(self.threads):
                compute(trial.depth)
        return run


@dataclass(frozen=True)
class Row:
    """A line of the table: an arm's figures in one test. ratio: to the first arm, turn by turn.

    role: `first`, `do nothing` (the first once more), or empty. cache: `cold` where every run's
    prompt was computed whole, `warm` where any was not, `unknown` where a server does not say.
    Rates in tokens a second, times in seconds.
    """

    trial: Trial
    labels: Mapping[str, str | int | None]
    role: str
    samples: tuple[Sample, ...]
    ratio: Spread | None

    @property
    def rate(self) -> Spread:
        """Tokens a second."""
        return Spread.of([sample.rate(self.trial) for sample in self.samples])

    @property
    def first(self) -> Spread:
        """Seconds to the first token."""
        return Spread.of([sample.first for sample in self.samples])

    @property
    def cache(self) -> str:
        """Whether prompts were computed whole, by what was counted and not by what was asked."""
        held = [sample.cache_n for sample in self.samples]
        if any(held):
            return "warm"
        return "unknown" if None in held else "cold"

    def figures(self, machine: Machine) -> dict[str, Any]:
        """The row as one flat object, fit for JSON."""
        spreads = {"rate": self.rate, "ttft": self.first}
        if self.ratio is not None:
            spreads["ratio"] = self.ratio
        return {
            "format": FORMAT,
            "version": VERSION,
            **asdict(machine),
            **self.labels,
            "test": self.trial.name,
            **{f"n_{name}": n for name, n in asdict(self.trial).items()},
            "role": self.role,
            "cache": self.cache,
            **{name: _counts(self.samples, name) for name in ("cache_n", "prompt_n")},
            "repetitions": len(self.samples),
            **{f"{n}_{k}": v for n, s in spreads.items() for k, v in _fields(s).items()},
            "samples_seconds": [sample.seconds for sample in self.samples],
        }


def _fields(spread: Spread) -> dict[str, float]:
    return {name: value for name, value in asdict(spread).items() if name != "repetitions"}


def _counts(samples: Sequence[Sample], name: str) -> int | None:
    """The median of a count, None where a run has none."""
    counts = [getattr(sample, name) for sample in samples]
    return None if None in counts else statistics.median_low(counts)


@dataclass(frozen=True)
class Bench:
    """Which arms run which tests, and how often. warm_up: runs before that are thrown away.

    Raises RequestError for what cannot be run, before anything is.
    """

    arms: Sequence[Arm]
    trials: Sequence[Trial]
    repetitions: int = 5
    warm_up: int = 1

    def __post_init__(self) -> None:
        check_repetitions(self.repetitions)
        if not self.arms or not self.trials:
            raise RequestError("bench: there is nothing to measure; name an arm and a test")
        for trial in self.trials:
            self.arms_of(trial)

    def arms_of(self, trial: Trial) -> list[Arm]:
        """The arms of a test, each once, and the first once more where there are others."""
        arms: dict[tuple[Any, ...], Arm] = {}
        for arm in self.arms:
            mine = arm.of(trial)
            arms.setdefault(tuple(mine.labels.values()), mine)
        first, *others = arms.values()
        return [first, *others, first] if others else [first]

    @property
    def runs(self) -> int:
        """Runs in all, those that warm up included."""
        turns = self.repetitions + self.warm_up
        return turns * sum(len(self.arms_of(trial)) for trial in self.trials)

    def rows(self, on_run: Callable[[], object] = lambda: None) -> Iterator[Row]:
        """Run test after test; yields the rows of each. on_run is called after each run."""
        for trial in self.trials:
            arms = self.arms_of(trial)
            runs = [arm.ready(trial) for arm in arms]
            turns = in_turns(runs, self.repetitions, self.warm_up, on_run)
            yield from _rows(trial, arms, turns)


def _rows(trial: Trial, arms: Sequence[Arm], turns: Sequence[Sequence[Sample]]) -> Iterator[Row]:
    """The rows of a test, from the samples of each turn."""
    last = len(arms) - 1
    for index, arm in enumerate(arms):
        ratios = [turn[index].rate(trial) / turn[0].rate(trial) for turn in turns]
        role = "" if last == 0 else {0: "first", last: "do nothing"}.get(index, "")
        samples = tuple(turn[index] for turn in turns)
        ratio = Spread.of(ratios) if index else None
        yield Row(trial, arm.labels, role, samples, ratio)


def _is_label(x: object) -> bool:
    return x is None or isinstance(x, str | int)


def _is_count(x: object) -> bool:
    return type(x) is int and 0 <= x < 2**53


def _is_told(x: object) -> bool:
    return x is None or _is_count(x)


def _is_figure(x: object) -> bool:
    """Whether this is a time or a rate that a clock may have given."""
    return isinstance(x, int | float) and 1e-100 < x < 1e100


_LABELS = ("model", "digest", "arithmetic", "weights", "attention", "threads", "server", "cpu")
_KEYS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys((*_LABELS, "test", "role"), _is_label),
    **dict.fromkeys(("n_prompt", "n_output", "n_depth", "repetitions"), _is_count),
    **dict.fromkeys(("cache_n", "prompt_n"), _is_told),
    **{f"{n}_{k}": _is_figure for n in ("rate", "ttft") for k in ("median", "least", "most")},
}
"""What is computed with of a row, and what it may be."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows that `-o json` or `-o jsonl` wrote. Raises RequestError for anything else.

    Their counts are counts, and their rates and times above 0.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
        whole = text.startswith("[")
        rows = json.loads(text) if whole else [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{path}: it is no bench file in json or jsonl ({reason(error)})"
        ) from error
    if not isinstance(rows, list) or not rows:
        raise RequestError(f"{path}: there is no row in it; measure again")
    for number, row in enumerate(rows, 1):
        told = (row.get("format"), row.get("version")) if isinstance(row, dict) else (None, None)
        if told[0] != FORMAT:
            raise RequestError(f"{path}: row {number} is no row of {FORMAT}")
        if told[1] != VERSION:
            raise RequestError(
                f"{path}: row {number} is of version {told[1]}; this program reads {VERSION}; "
                "measure again"
            )
    for number, row in enumerate(rows, 1):
        for key, is_right in _KEYS.items():
            if key not in row or not is_right(row[key]):
                what = show(row[key]) if key in row else "missing"
                raise RequestError(
                    f"{path}: row {number} is incomplete or wrong: {key} is {what}; measure again"
                )
    return rows
