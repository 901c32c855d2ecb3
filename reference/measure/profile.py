"""What a prefill's time goes to, by the length of the prompt, and in a slice of the model.

The steps of a pass are timed from outside, around the operations that a model is made with. Where
rows are shared out to threads, the time of that stretch is split as the threads' own times are, so
that the parts of a pass always add up to its time. What is inside attention is told apart by doing
its three steps one after another on the same shapes (`stepwise`), and is named so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from reference.arithmetic import F32
from reference.attention import Scores, default_scale
from reference.errors import RequestError
from reference.measure.machine import Machine, Spread
from reference.measure.source import sliced
from reference.measure.stepwise import STEPS as INSIDE
from reference.measure.stepwise import drawn, stepwise
from reference.measure.turns import check_repetitions, fields, in_turns
from reference.model import AttentionKind, Model, Operations
from reference.threads import limited_to, single_blas
from reference.weights import GatedMLP, Weights

STEPS = ("attention", "projections", "feedforward", "experts", "norms", "head", "rest")
"""Parts of a pass. feedforward: of dense layers. experts: routers and gathering too. rest: the
embedding, rope, residuals, the cache, and what is between."""

Clock = Callable[[], float]


@dataclass
class Stopwatch:
    """Seconds of each step of one pass. What runs on several threads at once is a stretch of it."""

    clock: Clock = perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    within: dict[str, float] | None = None
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, step: str, seconds: float) -> None:
        """Count a step, alone or within a stretch."""
        with self.lock:
            into = self.seconds if self.within is None else self.within
            into[step] = into.get(step, 0.0) + seconds

    def timed(self, step: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, counted as a step."""

        def watched(*arguments: Any) -> Any:
            started = self.clock()
            result = work(*arguments)
            self.add(step, self.clock() - started)
            return result

        return watched

    def stretch(self, work: Callable[[], Any]) -> tuple[Any, float, dict[str, float]]:
        """What `work` gives, how long it took, and the steps that threads counted meanwhile."""
        self.within = {}
        started = self.clock()
        try:
            result = work()
        finally:
            taken, within, self.within = self.clock() - started, self.within, None
        return result, taken, within


@dataclass(frozen=True)
class Profiled(Model):
    """A model whose passes are timed by step."""

    watch: Stopwatch = field(default_factory=Stopwatch)

    @classmethod
    def of(cls, model: Model, clock: Clock = perf_counter) -> Profiled:
        """The same model, watched."""
        watch = Stopwatch(clock)
        return cls(
            model.config,
            model.weights,
            watched(model.operations, model.weights, watch),
            model.tokenizer,
            model.eos_tokens,
            watch=watch,
        )

    def _experts(self, *arguments: Any) -> F32:
        """A layer of experts, whose products are of the same stretch."""
        y, taken, _ = self.watch.stretch(lambda: super(Profiled, self)._experts(*arguments))
        self.watch.add("experts", taken)
        return np.asarray(y)


def watched(do: Operations, weights: Weights, watch: Stopwatch) -> Operations:
    """The operations, each of whose calls is counted.

    A linear layer that is no layer's own is the head, whole or in slices; what experts compute is
    part of their stretch.
    """
    names: dict[int, str] = {}
    for layer in weights.layers:
        names |= dict.fromkeys((id(layer.qkv), id(layer.output)), "projections")
        if isinstance(layer.mlp, GatedMLP):
            mlp = (layer.mlp.gate_up, layer.mlp.down)
            names |= dict.fromkeys(map(id, mlp), "feedforward")

    def linear(layer: Any, x: F32) -> F32:
        name = names.get(id(layer), "head")
        return np.asarray(watch.timed(name, do.linear)(layer, x))

    def by_rows(work: Callable[..., Sequence[F32]], *arrays: F32) -> tuple[F32, ...]:
        tile = watch.timed("tile", work)
        result, taken, within = watch.stretch(lambda: do.by_rows(tile, *arrays))
        of_threads = within.pop("tile")
        for name, seconds in within.items():
            watch.add(name, taken * seconds / of_threads)
        return tuple(result)

    return replace(
        do,
        linear=linear,
        by_rows=by_rows,
        rms_norm=watch.timed("norms", do.rms_norm),
        attend=watch.timed("attention", do.attend),
        activations={n: watch.timed("feedforward", f) for n, f in do.activations.items()},
    )


@dataclass(frozen=True)
class Pass:
    """One prefill: its seconds, and those of each step, which add up to them."""

    seconds: float
    steps: dict[str, float]

    def share(self, step: str) -> float:
        """A step's part of the whole."""
        return self.steps[step] / self.seconds


def run(model: Profiled, tokens: Sequence[int], kind: AttentionKind) -> Pass:
    """One prefill on an empty cache; logits of the last token alone."""
    watch, cache = model.watch, model.new_cache()
    watch.seconds.clear()
    started = watch.clock()
    model.forward(tokens, cache, kind, last_only=True)
    seconds = watch.clock() - started
    steps = {step: watch.seconds.get(step, 0.0) for step in STEPS}
    steps["rest"] = seconds - sum(steps.values())
    return Pass(seconds, steps)


def inside(
    model: Model, length: int, kind: AttentionKind, repetitions: int = 1
) -> dict[str, float]:
    """CPU seconds of QK, softmax and AV of a whole pass, done one after another (`stepwise`).

    Each thread's own time, which other programs do not lengthen; medians of the repetitions. Layers
    with the same window are measured once, on random values.
    """
    config = model.config
    total = dict.fromkeys(INSIDE, 0.0)
    cap = None if config.attention_softcap is None else np.float32(config.attention_softcap)
    q, k, v = drawn(length, config.heads, config.kv_heads, config.head_dim)
    for window in dict.fromkeys(config.windows):
        scores = Scores(default_scale(config.query_scalar or config.head_dim), window, cap)
        with single_blas():  # its threads' time would not be seen
            runs = [
                stepwise(q, k, v, scores, kind, clock=thread_time)[1] for _ in range(repetitions)
            ]
        for step in INSIDE:
            seconds = median(run.seconds[step] for run in runs)
            total[step] += seconds * config.windows.count(window)
    return total


@dataclass(frozen=True)
class Fit:
    """Seconds of a prefill of n tokens as `linear * n + quadratic * n^2`, by least squares.

    Residuals are relative, `1 - fitted / measured` at each length; their squares are made least.
    """

    lengths: tuple[int, ...]
    linear: float
    quadratic: float
    residuals: tuple[float, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], seconds: Sequence[float]) -> Fit:
        """The fit of three lengths or more, of which two could not leave a residual."""
        n, t = np.asarray(lengths, np.float64), np.asarray(seconds, np.float64)
        terms = np.stack([n / t, n * n / t], axis=1)
        found, *_ = np.linalg.lstsq(terms, np.ones(len(n)), rcond=None)
        linear, quadratic = found.tolist()
        return cls(tuple(lengths), linear, quadratic, tuple((1 - terms @ found).tolist()))

    def share(self, length: int) -> float:
        """The quadratic part of a prefill's time."""
        return self.quadratic * length / (self.linear + self.quadratic * length)

    def figures(self) -> dict[str, Any]:
        """As keys of a row. even: the length at which both parts are equal, None where none is."""
        both = self.linear > 0 and self.quadratic > 0
        return {
            "fit_lengths": list(self.lengths),
            "fit_linear": self.linear,
            "fit_quadratic": self.quadratic,
            "fit_residuals": list(self.residuals),
            "fit_largest_residual": max(map(abs, self.residuals)),
            "fit_quadratic_share": self.share(max(self.lengths)),
            "fit_even": self.linear / self.quadratic if both else None,
        }


NO_FIT = dict.fromkeys(
    (
        "fit_lengths",
        "fit_linear",
        "fit_quadratic",
        "fit_residuals",
        "fit_largest_residual",
        "fit_quadratic_share",
        "fit_even",
    )
)
FITTED = 3
"""Lengths that a fit needs."""


@dataclass(frozen=True)
class Profile:
    """Prompts of which lengths, computed by the whole model, and by slices of its first layers.

    threads: of all runs. Raises RequestError for what cannot be run.
    """

    model: Model
    lengths: Sequence[int]
    threads: int
    slices: Sequence[int] = ()
    attention: AttentionKind = "fast"
    repetitions: int = 3
    warm_up: int = 1

    def __post_init__(self) -> None:
        check_repetitions(self.repetitions)
        check_lengths(self.lengths, self.model)
        for layers in self.slices:
            sliced(self.model, layers)

    @cached_property
    def arms(self) -> list[tuple[str, Profiled]]:
        """Scope and model of each arm; beside slices the whole runs once more, to do nothing."""
        whole = Profiled.of(self.model)
        slices = [("slice", Profiled.of(sliced(self.model, n))) for n in self.slices]
        again = [("whole", Profiled.of(self.model))] if slices else []
        return [("whole", whole), *slices, *again]

    @property
    def runs(self) -> int:
        """Runs in all, and the stepwise ones."""
        passes = len(self.arms) * (self.repetitions + self.warm_up)
        return len(self.lengths) * (passes + len(self.slices) + 1)

    def rows(
        self, machine: Machine, on_run: Callable[[], object] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """A row for each length and arm, and at the end the fit of each arm."""
        arms, kind = self.arms, self.attention
        rng = np.random.default_rng(0)
        times: dict[int, list[float]] = {index: [] for index in range(len(arms))}
        for length in self.lengths:
            tokens = rng.integers(0, self.model.config.vocab_size, length).tolist()
            steps: dict[int, dict[str, float]] = {}
            with limited_to(self.threads):
                runs = [partial(run, arm, tokens, kind) for _, arm in arms]
                turns = in_turns(runs, self.repetitions, self.warm_up, on_run)
                for _, arm in arms[: 1 + len(self.slices)]:
                    steps[arm.config.layers] = inside(arm, length, kind, self.repetitions)
                    on_run()
            for index, (_, arm) in enumerate(arms):
                passes = [turn[index] for turn in turns]
                times[index].append(median(p.seconds for p in passes))
                yield {
                    **self._told(machine, index),
                    "test": f"pp{length}",
                    "cache_n": 0,
                    "prompt_n": length,
                    **_figures(passes, steps[arm.config.layers]),
                    **self._against(index, turns),
                    **NO_FIT,
                }
        if len(self.lengths) >= FITTED:
            for index in range(1 + len(self.slices)):
                yield {
                    **self._told(machine, index),
                    "test": "fit",
                    "cache_n": 0,
                    "prompt_n": None,
                    **_no_figures(self.repetitions),
                    **self._against(0, []),
                    **Fit.of(self.lengths, times[index]).figures(),
                }

    def _told(self, machine: Machine, index: int) -> dict[str, Any]:
        """What is said of all rows of an arm."""
        scope, arm = self.arms[index]
        last = bool(self.slices) and index == len(self.slices) + 1
        return {
            **asdict(machine),
            "digest": arm.digest,
            "threads": self.threads,
            "attention": self.attention,
            "scope": scope,
            "layers": arm.config.layers,
            "of_layers": self.model.config.layers,
            "role": "do nothing" if last else "",
        }

    def _against(self, index: int, turns: Sequence[Sequence[Pass]]) -> dict[str, Any]:
        """How far an arm misleads, against the whole of its turn.

        scaled: its time times the whole's layers by its own, to the whole's time. shift: of
        attention's share.
        """
        if index == 0 or not turns:
            return {**fields("scaled", None), **fields("attention_shift", None)}
        scale = self.model.config.layers / self.arms[index][1].config.layers
        ratios = [scale * turn[index].seconds / turn[0].seconds for turn in turns]
        shifts = [turn[index].share("attention") - turn[0].share("attention") for turn in turns]
        return {
            **fields("scaled", Spread.of(ratios)),
            **fields("attention_shift", Spread.of(shifts)),
        }


def check_lengths(lengths: Sequence[int], model: Model) -> None:
    """Raise RequestError for a prompt that is none, or longer than the model's context."""
    context = model.config.max_positions
    if not lengths or min(lengths) < 1:
        raise RequestError("lengths: a prompt has 1 token or more; give some, as 1024,2048")
    if max(lengths) > context:
        raise RequestError(
            f"lengths: {max(lengths)} positions are needed, and the model's context has "
            f"{context}; give shorter ones, or --random context={max(lengths)}"
        )


def _figures(passes: Sequence[Pass], stepwise: dict[str, float]) -> dict[str, Any]:
    """Seconds, and the shares of the median run (the lower one of two), which add up to 1."""
    ordered = sorted(passes, key=lambda p: p.seconds)
    middle, total = ordered[(len(ordered) - 1) // 2], sum(stepwise.values())
    told: dict[str, Any] = {
        "repetitions": len(passes),
        **fields("seconds", Spread.of([p.seconds for p in passes])),
    }
    for step in STEPS:
        shares = [p.share(step) for p in passes]
        told[f"{step}_share"] = middle.share(step)
        told |= {f"{step}_share_least": min(shares), f"{step}_share_most": max(shares)}
    for step in INSIDE:
        told[f"{step}_share_stepwise"] = middle.share("attention") * stepwise[step] / total
    return told


def _no_figures(repetitions: int) -> dict[str, Any]:
    nothing = Pass(1.0, dict.fromkeys(STEPS, 0.0))
    told = _figures([nothing], dict.fromkeys(INSIDE, 1.0))
    return {**dict.fromkeys(told), "repetitions": repetitions}
