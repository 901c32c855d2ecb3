"""What the order of float32 sums and FMA do to a text, and what the exact contract makes of it.

One model continues the same prompts again and again, its linear layers summed in the orders of
other people's kernels (SPEC 3): all of them correct, each with other bits. Beside them the exact
lane is given as many ways to be computed: other orders of the terms of a block, other chunks, other
threads. Decisions are discrete, the likeliest token and the experts chosen, so most prompts show no
difference at all until a margin is smaller than what an order moves. The nearest ties of a text are
therefore looked for, and their prompts continued too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import (
    BLOCK,
    F32,
    Aligned,
    Order,
    added,
    align,
    matmul,
    matmul_float32,
    sequential,
    to_float32,
)
from reference.errors import RequestError
from reference.experts import Routing
from reference.measure.machine import Spread
from reference.measure.router import joined
from reference.measure.turns import fields
from reference.model import AttentionKind, Model, Part
from reference.threads import limited_to
from reference.weights import ExactLinear, Linear, PlainLinear, add

Lane = Literal["float32", "exact"]
Product = Callable[[Linear, F32], F32]

LEAST = 8
"""Tokens of a prompt at least."""

SHIFT = 5
"""Tokens by which a text is shifted when it is cut once more."""

TOGETHER = 16
"""Windows of a pass of the search for ties."""


@dataclass(frozen=True)
class Arm:
    """One way to compute a lane. product: of linear layers, None as the engine does it.

    chunk: tokens of a prompt's passes, None for one pass. threads: None for all.
    """

    name: str
    lane: Lane
    product: Product | None = None
    chunk: int | None = None
    threads: int | None = None

    def of(self, model: Model) -> Model:
        """The model, computed so."""
        if self.product is None:
            return model
        return replace(model, operations=replace(model.operations, linear=self.product))


def ordered(order: Order, fma: bool) -> Product:
    """Linear layers in a float32 order of SPEC 3."""

    def product(layer: Linear, x: F32) -> F32:
        assert isinstance(layer, PlainLinear)
        return add(matmul_float32(x, layer.weight, order, fma), layer.bias)

    return product


def permuted(order: Sequence[int]) -> Product:
    """Exact linear layers, the terms of each block in another order."""

    def product(layer: Linear, x: F32) -> F32:
        assert isinstance(layer, ExactLinear)
        here = align(x)
        left, right = (Aligned(v.values[..., order], v.finite) for v in (here, layer.weight))
        return add(matmul(left, right), layer.bias)

    return product


def one_by_one(layer: Linear, x: F32) -> F32:
    """Exact linear layers, each block's terms added one by one, without BLAS."""
    assert isinstance(layer, ExactLinear)
    pairs = zip(align(x).values, layer.weight.values, strict=True)
    return add(to_float32(added(np.stack([sequential(a, b) for a, b in pairs]))), layer.bias)


FLOAT32 = (
    Arm("blas", "float32", ordered("blas", False)),
    *(
        Arm(f"{order}{'-fma' if fma else ''}", "float32", ordered(order, fma))
        for order in ("sequential", "pairwise", "lanes8")
        for fma in (False, True)
    ),
)
"""The orders of SPEC 3."""

EXACT = (
    Arm("engine", "exact"),
    Arm("engine-again", "exact"),
    Arm("one-thread", "exact", threads=1),
    Arm("chunks-of-7", "exact", chunk=7),
    Arm("token-by-token", "exact", chunk=1),
    Arm("terms-reversed", "exact", permuted(range(BLOCK)[::-1])),
    Arm("terms-shuffled", "exact", permuted(np.random.default_rng(0).permutation(BLOCK).tolist())),
    Arm("terms-one-by-one", "exact", one_by_one),
)
"""The first one is what all others are compared with."""


@dataclass(frozen=True)
class Answer:
    """What follows a prompt. margins: of each choice, the largest logit less the next one.

    logits: that chose the first token, (V,). routed: by sparse layer, all positions computed.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    logits: F32
    routed: dict[int, Routing]


def answer(model: Model, arm: Arm, prompt: Sequence[int], count: int) -> Answer:
    """Continue a prompt by the likeliest token, `count` times. Attention is the lane's."""
    kind: AttentionKind = "exact" if arm.lane == "exact" else "fast"
    model, cache = arm.of(model), model.new_cache()
    parts: dict[int, list[Routing]] = {}
    chunk = arm.chunk or len(prompt)
    given: list[list[int]] = [list(prompt[i : i + chunk]) for i in range(0, len(prompt), chunk)]
    rows: list[F32] = []
    limited: AbstractContextManager[None] = (
        nullcontext() if arm.threads is None else limited_to(arm.threads)
    )
    with limited:
        while given:
            logits = model.forward(
                given.pop(0),
                cache,
                kind,
                last_only=True,
                routed=lambda layer, routing: parts.setdefault(layer, []).append(routing),
            )[0]
            if not given:
                rows.append(logits)
                if len(rows) < count:
                    given.append([int(logits.argmax())])
    return Answer(
        tuple(int(row.argmax()) for row in rows),
        tuple(margin(row) for row in rows),
        rows[0],
        {layer: joined(routings) for layer, routings in parts.items()},
    )


def margin(logits: F32) -> float:
    """The largest of (V,) less the next one."""
    first, second = np.partition(logits.astype(np.float64), -2)[[-1, -2]]
    return float(first - second)


def moved_margin(base: F32, other: F32) -> float:
    """How far other logits (V,) move the two largest of the base's against each other."""
    best = np.argsort(-base, kind="stable")[:2]
    gaps = [np.subtract(*row[best].astype(np.float64)) for row in (base, other)]
    return float(abs(gaps[1] - gaps[0]))


def first_flip(base: Answer, other: Answer) -> int | None:
    """The step of the first token that differs."""
    pairs = zip(base.tokens, other.tokens, strict=True)
    return next((step for step, (a, b) in enumerate(pairs) if a != b), None)


def first_expert_flip(base: Answer, other: Answer, known: int) -> tuple[int, int, float] | None:
    """Position, layer and margin in the base of the first decision that names other experts.

    known: positions whose tokens are the same in both.
    """
    found: list[tuple[int, int, float]] = []
    for layer, here in base.routed.items():
        sets = [np.sort(r.experts[:known], axis=1) for r in (here, other.routed[layer])]
        flipped = np.flatnonzero((sets[0] != sets[1]).any(axis=1))
        if len(flipped):
            found.append((int(flipped[0]), layer, float(here.margins[flipped[0]])))
    return min(found, default=None)


@dataclass(frozen=True)
class Prompt:
    """tokens: of a text. chosen: `spaced`, or `near a tie`, of this margin in float32."""

    tokens: tuple[int, ...]
    chosen: str
    margin: float | None = None


def windows(tokens: Sequence[int], length: int, most: int) -> NDArray[np.int64]:
    """A text cut into windows, (n, length) of `most` tokens together, and one at least.

    After its end it is cut again, from further in, so that the same token follows another prompt.
    """
    text, found, wanted = np.array(tokens, np.int64), [], max(1, most // length)
    for start in range(0, length, SHIFT):
        count = min(wanted, max(0, len(text) - start) // length)
        found.append(text[start : start + count * length].reshape(count, length))
        wanted -= count
    return np.concatenate(found)


def prompts(
    model: Model,
    found: NDArray[np.int64],
    spaced: int,
    ties: int,
    on_pass: Callable[[], object] = lambda: None,
) -> list[Prompt]:
    """Prompts out of windows (n, length) of a text. model: float32.

    Spaced ones are whole windows, at equal distances. Those near a tie end where the choice of the
    next token has the smallest margin, of all positions of all windows, each prompt once.
    """
    places = np.linspace(0, len(found) - 1, spaced).astype(int).tolist()
    chosen = [Prompt(tuple(found[place].tolist()), "spaced") for place in places]
    margins = np.full(found.shape, np.inf)
    for first in range(0, len(found) if ties else 0, TOGETHER):
        batch = [Part(row, model.new_cache(), "fast") for row in found[first : first + TOGETHER]]
        for row, logits in enumerate(model.forward_batch(batch), first):
            margins[row, LEAST - 1 :] = [margin(each) for each in logits[LEAST - 1 :]]
        on_pass()
    nearest: dict[tuple[int, ...], float] = {}
    for flat in np.argsort(margins, axis=None, kind="stable").tolist():
        row, last = divmod(flat, found.shape[1])
        if len(nearest) == ties or margins[row, last] == np.inf:
            break
        nearest.setdefault(tuple(found[row, : last + 1].tolist()), float(margins[row, last]))
    return chosen + [Prompt(tokens, "near a tie", value) for tokens, value in nearest.items()]


def search_passes(count: int) -> int:
    """Passes of a search for ties in so many windows."""
    return -(-count // TOGETHER)


@dataclass(frozen=True)
class Orders:
    """The same prompts in every order. plain: the model in float32. output: tokens that follow.

    Raises RequestError for what cannot be run.
    """

    exact: Model
    plain: Model
    output: int = 32
    arms: tuple[Arm, ...] = (*EXACT, *FLOAT32)

    def __post_init__(self) -> None:
        if self.output < 1:
            raise RequestError(f"output: {self.output} is out of range; it must be 1 or more")

    def check(self, prompt: int) -> None:
        """Raise RequestError for prompts that are too short, or too long for the context."""
        most = self.exact.config.max_positions
        if prompt < LEAST:
            raise RequestError(f"prompt: {prompt} is out of range; it must be {LEAST} or more")
        if prompt + self.output > most:
            raise RequestError(
                f"prompt: {prompt + self.output} positions are needed, and the model's context "
                f"has {most}; give a shorter prompt or output"
            )

    def rows(
        self, prompt: Prompt, on_run: Callable[[], object] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """A row for each lane."""
        answers: list[Answer] = []
        for arm in self.arms:
            model = self.exact if arm.lane == "exact" else self.plain
            answers.append(answer(model, arm, prompt.tokens, self.output))
            on_run()
        base = answers[0]
        for lane in ("float32", "exact"):
            mine = [(arm, a) for arm, a in zip(self.arms, answers, strict=True) if arm.lane == lane]
            if not mine:
                continue
            yield {
                "lane": lane,
                "chosen": prompt.chosen,
                "cache_n": 0,
                "prompt_n": len(prompt.tokens),
                "output_n": self.output,
                **self._figures(base, mine, len(prompt.tokens)),
            }

    def _figures(
        self, base: Answer, mine: Sequence[tuple[Arm, Answer]], length: int
    ) -> dict[str, Any]:
        """What a lane's arms gave, compared with the first exact one.

        repetitions: how many arms. continuation: which text each arm gave, by number. logit_change:
        the largest change of a logit that chooses the first token. margin_change: by how much the
        base's two likeliest tokens moved against each other, which is what a flip must overcome.
        """
        texts = list(dict.fromkeys(a.tokens for _, a in mine))
        changes = [float(np.abs(a.logits.astype(np.float64) - base.logits).max()) for _, a in mine]
        moved = [moved_margin(base.logits, a.logits) for _, a in mine]
        return {
            "repetitions": len(mine),
            "arms": [arm.name for arm, _ in mine],
            "continuation": [texts.index(a.tokens) for _, a in mine],
            "bits": len({a.logits.tobytes() for _, a in mine}),
            "first_tokens": len({a.tokens[0] for _, a in mine}),
            "continuations": len(texts),
            "base_margin": base.margins[0],
            "base_least_margin": min(base.margins),
            **fields("logit_change", Spread.of(changes)),
            **fields("margin_change", Spread.of(moved)),
            **self._flips(base, mine, length),
        }

    def _flips(
        self, base: Answer, mine: Sequence[tuple[Arm, Answer]], length: int
    ) -> dict[str, Any]:
        """The first token and the first choice of experts that differ from the base's, if any.

        length: of the prompt. A later choice of experts, of other tokens, is not compared.
        """
        tokens, experts = [], []
        for arm, a in mine:
            step = first_flip(base, a)
            if step is not None:
                tokens.append((step, arm.name, base.margins[step], a.margins[step]))
            known = length + (self.output - 1 if step is None else step)
            if (flip := first_expert_flip(base, a, known)) is not None:
                experts.append((*flip, arm.name))
        token = min(tokens, key=lambda f: f[0], default=(None,) * 4)
        expert = min(experts, key=lambda f: f[:2], default=(None,) * 4)
        of_token = ("flip_step", "flip_arm", "flip_margin", "flip_own_margin")
        of_expert = tuple(f"expert_flip_{name}" for name in ("position", "layer", "margin", "arm"))
        return {
            "flipped": len(tokens),
            **dict(zip(of_token, token, strict=True)),
            "experts_flipped": len(experts) if base.routed else None,
            **dict(zip(of_expert, expert, strict=True)),
        }
