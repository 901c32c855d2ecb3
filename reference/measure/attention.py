"""What fast attention gains over exact attention, and what it costs, by the length of the prompt.

The floor (SPEC 8.4) rests on these figures: below it there is little to gain, and what is lost does
not grow with the length. Memory is shown beside it: both lanes work on tiles, so what they need
grows with the length; with the scores of all rows held it would grow with its square, for the same
operations.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from reference.arithmetic import F32
from reference.attention import (
    AlignedKeyValues,
    KeyValues,
    Scores,
    attend_exact,
    attend_fast,
    default_scale,
)
from reference.experts import Routing
from reference.measure.machine import Machine, Spread
from reference.measure.perplexity import log_probabilities
from reference.measure.profile import check_lengths
from reference.measure.router import flips
from reference.measure.source import sliced
from reference.measure.stepwise import drawn, prepared, stepwise
from reference.measure.turns import check_repetitions, fields, in_turns
from reference.model import AttentionKind, Model, Part
from reference.scheduler import FAST_FLOOR
from reference.threads import limited_to

LAST = 256
"""Rows whose logits are compared: the last ones, which see the most keys."""

MOST_HELD = 1 << 32
"""Bytes of scores that are held at once at most; beyond that nothing is measured."""

KINDS: tuple[AttentionKind, ...] = ("exact", "fast")

Clock = Callable[[], float]


@dataclass(frozen=True)
class Prefill:
    """One prefill. logits: of its last rows, (n, V). routed: by sparse layer."""

    seconds: float
    logits: F32
    routed: dict[int, Routing]


def prefill(
    model: Model, tokens: Sequence[int], kind: AttentionKind, clock: Clock = perf_counter
) -> Prefill:
    """A prompt computed on an empty cache, in one pass."""
    routed: dict[int, Routing] = {}
    started = clock()
    part = Part(tokens, model.new_cache(), kind, min(LAST, len(tokens)))
    (logits,) = model.forward_batch([part], routed.__setitem__)
    return Prefill(clock() - started, logits, routed)


def differences(exact: F32, fast: F32) -> dict[str, float]:
    """How far logits (n, V) are from the exact ones.

    cosine: of a row, the smallest and the median. logit_change: the largest. kl: of fast from
    exact, in nats. top_flips: rows whose likeliest token is another one.
    """
    a, b = exact.astype(np.float64), fast.astype(np.float64)
    sizes = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    # Logits that are all zero have no direction, and count as alike where the others are zero too.
    alike = (a == b).all(axis=1)
    cosine = np.where(sizes > 0, (a * b).sum(axis=1) / np.where(sizes > 0, sizes, 1), alike)
    p, q = log_probabilities(exact), log_probabilities(fast)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    return {
        "rows": len(exact),
        "cosine_least": float(cosine.min()),
        "cosine_median": float(np.median(cosine)),
        "logit_change": float(np.abs(a - b).max()),
        "kl_mean": float(kl.mean()),
        "kl_most": float(kl.max()),
        "top_flips": int((exact.argmax(axis=1) != fast.argmax(axis=1)).sum()),
    }


def expert_flips(exact: dict[int, Routing], fast: dict[int, Routing]) -> dict[str, Any]:
    """Decisions of all routers that name other experts, over all rows; None without experts.

    margin: the largest margin in the exact pass of one that flipped, None without a flip.
    """
    if not exact:
        return dict.fromkeys(("expert_decisions", "expert_flips", "expert_flip_margin"))
    layers = [flips(exact[layer], fast[layer]) for layer in exact]
    margins = [each["largest"] for each in layers if each["largest"] is not None]
    return {
        "expert_decisions": sum(each["decisions"] for each in layers),
        "expert_flips": sum(each["flips"] for each in layers),
        "expert_flip_margin": max(margins, default=None),
    }


def peak(work: Callable[[], object]) -> int:
    """Bytes of arrays that `work` has at once, beyond those that were there before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def engine(q: F32, kv: AlignedKeyValues | KeyValues, scores: Scores) -> F32:
    """The engine's own attention of T rows over as many keys: (T, Hq, D) float32."""
    if isinstance(kv, AlignedKeyValues):
        return attend_exact(q, kv, len(q), scores)
    return attend_fast(q, kv, len(q), scores)


def memory(model: Model, length: int, kind: AttentionKind) -> dict[str, int | None]:
    """Peak bytes and operations of one layer's attention without a window, tiled and held.

    tiled: the engine's own. by_step, held: the three steps of `stepwise`, tile by tile, and each of
    all rows at once; their operations are counted as they are done. None where too much is held.
    """
    config = model.config
    heads, scores = config.heads, Scores(default_scale(config.head_dim))
    q, k, v = drawn(length, heads, config.kv_heads, config.head_dim)
    kv = prepared(k, v, kind)
    found: dict[str, int | None] = {"tiled_bytes": peak(lambda: engine(q, kv, scores))}
    for name, held in (("by_step", False), ("held", True)):
        measured = None
        if not held or 4 * heads * length * length // 2 <= MOST_HELD:

            def work(held: bool = held) -> None:
                nonlocal measured
                measured = stepwise(q, k, v, scores, kind, held)[1]

            found[f"{name}_bytes"] = peak(work)
        else:
            found[f"{name}_bytes"] = None
        found[f"{name}_operations"] = None if measured is None else measured.operations
    return {f"{kind}_{name}": value for name, value in found.items()}


@dataclass(frozen=True)
class Comparison:
    """Prompts of which lengths, exact and fast, by the whole model and by slices of it.

    tokens: of a text, whose first ones are each prompt. Raises RequestError.
    """

    model: Model
    tokens: Sequence[int]
    lengths: Sequence[int]
    threads: int
    slices: Sequence[int] = ()
    repetitions: int = 3
    warm_up: int = 1

    def __post_init__(self) -> None:
        check_repetitions(self.repetitions)
        check_lengths(self.lengths, self.model)
        for layers in self.slices:
            sliced(self.model, layers)

    @property
    def models(self) -> list[tuple[str, Model]]:
        """Scope and model."""
        slices = [("slice", sliced(self.model, layers)) for layers in self.slices]
        return [("whole", self.model), *slices]

    @property
    def runs(self) -> int:
        """Runs in all: those timed, two for memory of a pass, and one for memory of a layer."""
        each = 3 * (self.repetitions + self.warm_up) + 2
        return len(self.lengths) * ((1 + len(self.slices)) * each + 1)

    def rows(
        self, machine: Machine, on_run: Callable[[], object] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """A row for each length and model. Its arms take turns: exact, fast, and exact again."""
        models = self.models
        for length in self.lengths:
            tokens = list(self.tokens[:length])
            with limited_to(self.threads):
                layer = {
                    k: v for kind in KINDS for k, v in memory(self.model, length, kind).items()
                }
                on_run()
            for scope, model in models:
                with limited_to(self.threads):
                    arms = [partial(prefill, model, tokens, kind) for kind in (*KINDS, "exact")]
                    turns = in_turns(arms, self.repetitions, self.warm_up, on_run)
                    peaks = {}
                    for kind in KINDS:
                        peaks[f"{kind}_pass_bytes"] = peak(partial(prefill, model, tokens, kind))
                        on_run()
                exact, fast, _ = turns[-1]
                yield {
                    **asdict(machine),
                    "digest": model.digest,
                    "threads": self.threads,
                    "scope": scope,
                    "layers": model.config.layers,
                    "of_layers": self.model.config.layers,
                    "test": f"pp{length}",
                    "cache_n": 0,
                    "prompt_n": length,
                    "floor": FAST_FLOOR,
                    "above_floor": length >= FAST_FLOOR,
                    "repetitions": self.repetitions,
                    **_times(turns),
                    **differences(exact.logits, fast.logits),
                    **expert_flips(exact.routed, fast.routed),
                    **peaks,
                    **layer,
                }


def _times(turns: Sequence[Sequence[Prefill]]) -> dict[str, Any]:
    """Seconds, and ratios within a turn: exact to fast, and exact to itself, which is noise."""
    exact, fast, again = ([turn[index].seconds for turn in turns] for index in range(3))
    ratios = [a / b for a, b in zip(exact, fast, strict=True)]
    noise = [a / b for a, b in zip(exact, again, strict=True)]
    return {
        **fields("exact_seconds", Spread.of(exact)),
        **fields("fast_seconds", Spread.of(fast)),
        **fields("gain", Spread.of(ratios)),
        **fields("do_nothing", Spread.of(noise)),
    }
