"""The fork of four-bit weights, measured: group scales, or sums that have no order (SPEC 5.6).

One scale a row leaves integers to be added, which have no order, and costs accuracy; one scale a
group of 32 is the accurate one, and its scaled float32 sums depend on their order. The third way
adds the scaled sums in float64, where nothing rounds, because a float16 scale is a multiple of
2^-24. Here are all three on the weights of a trained model: what the weights lose, what the text
loses, and whether sums of real activations change when their groups are added in another order.

Each format is a matrix of blocks with a scale each (SPEC 5.7), that of a row repeated: so one and
the same engine and kernel, int8 activations on integer codes, runs them all (SPEC 5.5). Activations
are int8 in all of them, and not in the base; Q8_0 shows what that alone costs, or nearly so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32, F64
from reference.errors import RequestError
from reference.loading.huggingface import Checkpoint
from reference.measure.bootstrap import Bootstrap, interval_fields
from reference.measure.formats import Quantized, projections
from reference.measure.group_order import activations
from reference.measure.machine import Spread
from reference.measure.perplexity import Evaluation, Scores, divergence
from reference.measure.turns import fields
from reference.model import Model, build_model

BASE = "float32"
"""What the others are compared with: weights as stored, exact arithmetic."""


@dataclass(frozen=True)
class Text:
    """What one format made of the windows: (positions,) each, and the tokens a second of each."""

    surprise: F64
    nats: F64
    same: NDArray[np.bool_]
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Experiment:
    """Formats of one model on one text. tokens: (n,) of it. context: tokens of a window.

    positions: that count, at least; whole windows are computed. Raises RequestError where the text
    has fewer, QuantizationError where a matrix has no such form.
    """

    checkpoint: Checkpoint
    tokens: NDArray[np.int64]
    formats: tuple[str, ...]
    positions: int
    context: int = 512
    bos: int | None = None

    @cached_property
    def base(self) -> Model:
        """The model as it is stored."""
        return build_model(self.checkpoint, "float32", "exact")

    @cached_property
    def quantized(self) -> dict[str, Quantized]:
        """Its matrices by format."""
        names = [name for _, joined in projections(self.base) for name in joined]
        return {kind: Quantized.of(self.checkpoint.tensors, names, kind) for kind in self.formats}

    def model(self, kind: str) -> Model:
        """The model in a format, with int8 activations (SPEC 5.5)."""
        blocks = self.quantized[kind].blocks
        return build_model(replace(self.checkpoint, blocks=blocks), "native", "exact")

    @cached_property
    def evaluations(self) -> dict[str, Evaluation]:
        """Of the base and of each format, on the same windows."""
        models = {BASE: self.base, **{kind: self.model(kind) for kind in self.formats}}
        whole = Evaluation(self.base, self.tokens, self.context, bos=self.bos)
        each = whole.windows[0].counted
        chunks = -(-self.positions // each)
        if chunks > len(whole.windows):
            raise RequestError(
                f"positions: {self.positions} are wanted, and the text has {whole.counted} in "
                f"windows of {self.context}; give a longer text, or ask for fewer"
            )
        return {kind: replace(whole, model=m, chunks=chunks) for kind, m in models.items()}

    def run(self) -> Iterator[dict[str, Scores]]:
        """The scores of window after window, by format, the base's first."""
        for found in zip(*(each.run() for each in self.evaluations.values()), strict=True):
            yield dict(zip(self.evaluations, found, strict=True))

    def read(self) -> dict[tuple[str, ...], F32]:
        """Real activations, for `order_figures`."""
        return activations(self.base, self.tokens[: min(64, self.context)].tolist())


def reduced(scores: Mapping[str, Scores]) -> dict[str, Text]:
    """What is kept of a window: logits are large."""
    base, found = scores[BASE], {}
    for kind, each in scores.items():
        apart = divergence(base.logits, each)
        rate = (each.window.stop - each.window.start - 1) / each.seconds
        found[kind] = Text(each.surprise, apart.nats, apart.same_top, (rate,))
    return found


def joined(parts: Sequence[Mapping[str, Text]]) -> dict[str, Text]:
    """Windows one after another."""

    def of(kind: str) -> Text:
        each = [part[kind] for part in parts]
        surprise, nats, same = (
            np.concatenate([getattr(text, name) for text in each])
            for name in ("surprise", "nats", "same")
        )
        return Text(surprise, nats, same, tuple(rate for text in each for rate in text.rates))

    return {kind: of(kind) for kind in parts[0]}


def text_figures(parts: Sequence[Mapping[str, Text]]) -> dict[str, dict[str, Any]]:
    """Figures of each format over the windows that were computed, with intervals of 95 %.

    perplexity; ratio: to the base's; to_int4: to that of `int4`; kl: KL(base || format) in nats;
    same_top: share of positions whose likeliest token is the base's.
    """
    bootstrap = Bootstrap([len(part[BASE].surprise) for part in parts])
    whole, told = joined(parts), {}
    group = whole.get("int4")
    for kind, text in whole.items():
        beside = None if group is None else bootstrap.mean(text.surprise - group.surprise).exp()
        told[kind] = {
            "positions": len(text.surprise),
            "repetitions": len(parts),
            **interval_fields("perplexity", bootstrap.mean(text.surprise).exp()),
            **interval_fields("ratio", bootstrap.mean(text.surprise - whole[BASE].surprise).exp()),
            **interval_fields("to_int4", beside),
            **interval_fields("kl", bootstrap.mean(text.nats)),
            **interval_fields("same_top", bootstrap.mean(text.same)),
            **fields("rate", Spread.of(text.rates)),
        }
    return told
