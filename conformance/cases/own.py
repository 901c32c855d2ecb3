"""Goldens of a model of one's own: what each of a few prompts must give (SPEC 15.4)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases.recipe import BOTH, Recipe
from conformance.errors import GoldenError
from conformance.golden import (
    FORMAT,
    SPEC_VERSION,
    Array,
    OwnModel,
    id_of,
    read_all,
    read_manifest,
    read_own,
)
from conformance.rules.gauges import Gauge
from conformance.rules.noise import choices, gauge_of_logits, models_of, unit_of
from reference.model import Model, load_model


@dataclass(frozen=True)
class Prompt:
    """A prompt: a name, fit for a file, and its tokens."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class OwnGoldens:
    """All that decides the goldens of a model: the same job gives the same bytes anywhere.

    weights: as `load_model` takes them. last: rows of logits kept of each prompt. new_tokens: of
    the greedy continuation. bounds: whether to compute what other precisions may do, which takes
    some 200 forward passes a prompt (SPEC 16.5), of weights as stored alone.
    """

    model: OwnModel
    prompts: tuple[Prompt, ...]
    weights: str
    last: int
    new_tokens: int
    bounds: bool

    @property
    def options(self) -> dict[str, Any]:
        """What the manifest says beside the model; the prompts are in the goldens."""
        names = ("weights", "last", "new_tokens", "bounds")
        return {name: getattr(self, name) for name in names}

    @property
    def fingerprint(self) -> str:
        """sha256 of the job, in hex; where the model lies and the order of prompts are no part."""
        model = (self.model.name, self.model.digest)
        prompts = sorted((prompt.name, prompt.tokens) for prompt in self.prompts)
        about = [FORMAT, SPEC_VERSION, model, prompts, self.options]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def recipes(self) -> Iterator[Recipe]:
        """Logits at once, in chunks and token by token, forced choices and a continuation."""
        common = {"model": self.model.name, "weights": self.weights}
        for prompt in self.prompts:
            tokens = np.array(prompt.tokens, np.int64)
            last = min(self.last, len(tokens))
            name, rows = f"{self.model.name}/{prompt.name}", {**common, "last": last}
            for way, chunks in _ways(len(tokens), last).items():
                yield Recipe(
                    f"model/forward/{name}{way}",
                    "10.2",
                    rows if chunks is None else {**rows, "chunks": chunks},
                    {"tokens": tokens},
                    BOTH if self.bounds else ("bits",),
                    partial(_spread, self) if self.bounds else None,
                )
            yield Recipe(
                f"generation/forced/{name}",
                "16.7",
                rows,
                {"tokens": tokens},
                ("bits", "tokens") if self.bounds else ("bits",),
                partial(_choices, self) if self.bounds else None,
            )
            count = {"max_new_tokens": self.new_tokens, "exact_prefill": True}
            yield Recipe(
                f"generation/generate/{name}",
                "14",
                {**common, **count},
                {"prompt": tokens},
                ("bits", "gauge", "tokens") if self.bounds else ("bits",),
                partial(_continued, self) if self.bounds else None,
            )


def _ways(length: int, last: int) -> dict[str, list[int] | None]:
    """How a prompt is fed, by the end of an id: whole, in chunks that halve, and as decoding does.

    A prompt of one token has no other way than whole.
    """
    ways: dict[str, list[int] | None] = {"": None}
    if length > 1:
        single = min(last, length - 1)
        ways["/decode"] = [length - single] + [1] * single
    if length > 3:
        ways["/chunked"] = list(_halves(length))
    return ways


def _halves(length: int) -> Iterator[int]:
    """Half of what is left, again and again: 40 is 20, 10, 5, 3, 1, 1."""
    while length:
        yield (half := -(-length // 2))
        length -= half


def made_of(folder: Path) -> OwnGoldens | None:
    """The job that a folder's goldens were made by; None for the suite's own.

    Raises GoldenError where the folder is not whole.
    """
    own = read_own(folder)
    if own is None:
        return None
    model, options = own
    start = f"generation/generate/{model.name}/"
    wanted = {i for i in map(id_of, read_manifest(folder)) if i.startswith(start)}
    prompts = tuple(
        Prompt(golden.id.removeprefix(start), tuple(golden.inputs["prompt"].tolist()))
        for golden in read_all(folder, wanted)
    )
    try:
        return OwnGoldens(model, prompts, **options)
    except TypeError as error:
        raise GoldenError(f"{folder}: 'job' in the manifest is malformed ({error})") from error


def _spread(job: OwnGoldens, arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    return _noise(job, arguments["tokens"], len(outputs["y"]))


def _continued(
    job: OwnGoldens, arguments: Mapping[str, Any], outputs: Mapping[str, Array]
) -> Gauge:
    """Along the golden's own text, whose last token nothing is computed from."""
    text = np.concatenate([arguments["prompt"], outputs["tokens"][:-1]])
    return _noise(job, text, len(outputs["tokens"]))


def _choices(job: OwnGoldens, arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    model, tokens, last = _loaded(job), arguments["tokens"], arguments["last"]
    found = choices(model, _seed(tokens), tokens, last, unit_of(job.weights)).gauges()
    logits = _noise(job, tokens, last) if model.config.sparse is not None else None
    if logits is None:
        return Gauge(found, {"noise": models_of(job.weights)["noise"]})
    return Gauge({**found, "steady": logits.terms["steady"][:, 0].copy()}, logits.models)


def _noise(job: OwnGoldens, tokens: NDArray[np.int64], last: int) -> Gauge:
    """What rounding does to the last rows' logits (SPEC 16.5)."""
    return _found(job, tokens.tobytes(), last)


@lru_cache(maxsize=1)
def _found(job: OwnGoldens, text: bytes, last: int) -> Gauge:
    """The same, kept: a prompt is fed in several ways, one after the other."""
    tokens = np.frombuffer(text, np.int64)
    return gauge_of_logits(_loaded(job), job.weights, _seed(tokens), tokens, last)


def _seed(tokens: NDArray[np.int64]) -> str:
    """A name of the disturbances that depends on the prompt alone."""
    return f"own/{hashlib.sha256(tokens.tobytes()).hexdigest()}"


def _loaded(job: OwnGoldens) -> Model:
    return _model(job.model.path, job.weights)


@cache
def _model(path: str, weights: str) -> Model:
    return load_model(path, weights)  # type: ignore[arg-type]
