"""Where a whole model first leaves the reference, by comparing their traces (SPEC 19.2).

A session may offer `trace(tokens, attention)`: what `forward` does, answered by the tensors in
between. Compared in the order in which they are computed, the first that differs is the step to
look at: all that it was computed from is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
from numpy.typing import NDArray

from conformance.backends.tracing import Steps, Watcher, described, joined, trace
from conformance.bits import raw, shown
from conformance.diagnosis import places
from conformance.golden import Array, Golden
from conformance.operations import Sessions
from conformance.paths import named_model
from conformance.rules import error_model, noise
from reference.config import ModelConfig
from reference.model import Model, load_model
from reference.weights import Mode

F64 = NDArray[np.float64]
Ints = NDArray[np.int64]

TRACED = frozenset({"forward", "forced", "generate", "complete"})
"""Operations of a session that `trace` can follow."""

RUNS, STRAY = 16, 8
"""Disturbed runs, and how many of their root mean squares a step may stray: an element over its own
root mean square of 16 has Student's law, beyond 8 with probability 6 * 10^-7 (SPEC 16.5)."""


class TraceError(Exception):
    """What a backend gave as its trace cannot be compared; the text says why."""


@dataclass(frozen=True)
class Passes:
    """What is fed to a model, pass by pass, and to which (SPEC 17)."""

    model: str
    weights: Mode
    attention: str
    chunks: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> Ints:
        """All of them, (T,) int64."""
        return np.concatenate([np.array(chunk, np.int64) for chunk in self.chunks])


def passes_of(golden: Golden, attention: str) -> Passes:
    """The passes of a case: a prompt in its chunks, or a prompt and then the golden's own tokens.

    A backend that chose another token is thus judged by what it computes after the right ones.
    """
    about = golden.parameters
    if golden.operation in ("generate", "complete"):
        chosen = golden.outputs["tokens"][:-1]  # what follows the last one is not asked for
        chunks = [golden.inputs["prompt"], *chosen[:, None]]
    else:
        tokens = golden.inputs["tokens"]
        chunks = np.split(tokens, np.cumsum(about.get("chunks") or [len(tokens)])[:-1])
    listed = tuple(tuple(int(t) for t in chunk) for chunk in chunks)
    return Passes(about["model"], about["weights"], attention, listed)


def of_backend(sessions: Sessions, passes: Passes) -> Steps | None:
    """A backend's trace; None where it offers none. Raises TraceError, and as the backend does."""
    session = sessions.get(passes.model, passes.weights)
    offered = getattr(session, "trace", None)
    if not callable(offered):
        return None
    parts = []
    for chunk in passes.chunks:
        part = offered(tokens=np.array(chunk, np.int64), attention=passes.attention)
        if not isinstance(part, Mapping) or not part:
            raise TraceError(f"trace must return arrays by name, not {type(part).__name__}")
        parts.append({str(name): np.array(array) for name, array in part.items()})
    return joined(parts)


# --------------------------------------------------------------------------------- the reference


@cache
def _model(folder: str, weights: Mode) -> Model:
    return load_model(named_model(folder), weights)


@cache
def _reference(folder: str, weights: Mode, tokens: tuple[int, ...]) -> Steps:
    """The exact lane's steps; chunks change no bit (SPEC 10.2)."""
    return trace(_model(folder, weights), tokens)


@cache
def _spread(folder: str, weights: Mode, tokens: tuple[int, ...]) -> Mapping[str, F64] | None:
    """The noise of every step over u, by SPEC 16.5; None where it is not known.

    An element's own root mean square, or its row's where that is larger.
    """
    if weights != "float32":  # an activation that rounds to another code is no small change
        return None
    model, sizes, chosen = _model(folder, weights), list[F64](), dict[int, Ints]()
    exact = _disturbed(model, noise.recording(sizes), chosen, tokens)
    squares = {name: np.zeros(array.shape) for name, array in exact.items()}
    for run in range(RUNS):
        moved = _disturbed(model, noise.disturbing(sizes, f"trace/{run}"), chosen, tokens)
        for name in squares:
            squares[name] += (moved[name].astype(np.float64) - exact[name]) ** 2
    return {
        name: np.sqrt(np.maximum(total, total.mean(axis=-1, keepdims=True)) / RUNS) / noise.UNIT
        for name, total in squares.items()
    }


def _disturbed(
    model: Model, move: noise.Move, chosen: dict[int, Ints], tokens: tuple[int, ...]
) -> Steps:
    """The steps of a disturbed run: what was moved is what is seen; experts are those `chosen`."""
    watcher = Watcher(model)
    parts = {field.name: getattr(model, field.name) for field in fields(model)}
    parts["operations"] = watcher.watched(noise.moved(move))
    logits = noise.SameExperts(**parts, move=move, chosen=chosen).forward(tokens)
    return {**watcher.steps, "logits": logits}


# ------------------------------------------------------------------------------------ comparing


def divergence(sessions: Sessions, golden: Golden, attention: str, u: float | None) -> str:
    """Where a backend first leaves the reference on a case, in a line; "" where it has no trace.

    u: unit roundoff of what the backend declares, whose noise it may have; None asks for bits.
    Raises TraceError, and whatever the backend raises.
    """
    passes = passes_of(golden, attention)
    mine = of_backend(sessions, passes)
    if mine is None:
        return ""
    tokens = tuple(passes.tokens.tolist())
    theirs = _reference(passes.model, passes.weights, tokens)
    if u is None:
        return compare(mine, theirs, _bits).line(theirs)
    spread = _spread(passes.model, passes.weights, tokens)
    if spread is None:
        return jump(mine, theirs)
    allowed = STRAY * max(u, 2.0**-24)
    config = _model(passes.model, passes.weights).config

    def margins(name: str, got: Array, wanted: Array) -> F64:
        own = np.abs(wanted).astype(np.float64) * 2.0**-24
        bound = allowed * spread[name] + own + _of_rope(name, wanted, config, u)
        return _over(np.abs(got.astype(np.float64) - wanted), bound)

    return compare(mine, theirs, margins).line(theirs)


Margins = Callable[[str, Array, Array], F64]
"""From a step's name, the backend's values and the reference's to error / bound, above 1 wrong."""


def _bits(name: str, got: Array, wanted: Array) -> F64:
    """Infinite where a bit differs."""
    return np.where(raw(got) != raw(wanted), np.inf, 0.0)


def _over(error: F64, bound: F64) -> F64:
    """Error over bound; what is not finite is infinitely wrong."""
    with np.errstate(all="ignore"):
        ratio = np.where(error > 0, error / bound, 0.0)
    return np.where(np.isfinite(error) & ~np.isnan(ratio), ratio, np.inf)


def _of_rope(name: str, wanted: Array, config: ModelConfig, u: float) -> F64 | float:
    """What rounding in a rotation adds, by the gauge of rope (SPEC 16.5): `ops(5)` and the angle.

    An angle is at most its position, and both elements of a pair at most the head's largest.
    """
    _, _, step = name.rpartition(".")
    if step not in ("q", "k") or config.rope_of(int(name.split(".")[1])) is None:
        return 0.0
    largest = np.abs(wanted).max(axis=-1, keepdims=True).astype(np.float64)
    angle = error_model("float32(1)", u) * np.arange(len(wanted))[:, None, None]
    return np.asarray((error_model("ops(5)", u) + angle) * 2 * largest)


@dataclass(frozen=True)
class Found:
    """The comparison of two traces.

    equal: steps compared before the first wrong one, or all. missing: steps of the reference that
    the backend did not trace, before the first wrong one. worst: the largest margin among the
    equal. wrong: the first step that differs, its values and margins; None where none does.
    """

    equal: int
    missing: tuple[str, ...]
    worst: float
    wrong: tuple[str, Array, F64] | None
    bits: bool

    def line(self, theirs: Mapping[str, Array]) -> str:
        """What the report says."""
        whole = "equal" if self.bits else f"within the bound (at most {self.worst:.2g} of it)"
        if self.wrong is None:
            of = f"all {self.equal} steps that were traced are {whole}"
            return f"trace: {of}: no mistake shows in what `trace` computes{self._missing()}"
        name, got, margin = self.wrong
        words, axes = described(name)
        flat = int(np.flatnonzero(margin > 1)[0])
        wanted, index = theirs[name], places.index_of(flat, theirs[name])
        where = places.at(index, axes)
        parts = [f"trace: first {'differs' if self.bits else 'leaves its bound'} at {words}"]
        parts.append(f"{where}: {shown(wanted, flat)} expected, {shown(got, flat)} got")
        if not self.bits:
            parts[-1] += f", {float(margin.flat[flat]):.3g} of its bound"
        wrong = margin > 1
        spread = places.spread(wrong, axes)
        parts.append(f"{int(wrong.sum()):,} of {wrong.size:,} values: {spread}")
        if not self.bits and name.endswith("experts"):
            parts.append("rounding may decide a near tie either way")
        before = {0: "it is the first that was traced", 1: f"the step traced before is {whole}"}
        parts.append(before.get(self.equal, f"the {self.equal} traced before are {whole}"))
        return "; ".join([", ".join(parts[:2]), *parts[2:]]) + self._missing()

    def _missing(self) -> str:
        if not self.missing:
            return ""
        named, more = ", ".join(self.missing[-3:]), len(self.missing) - 3
        return f"; not traced: {named}" + (f" and {more} more" if more > 0 else "")


def compare(mine: Mapping[str, Array], theirs: Mapping[str, Array], margins: Margins) -> Found:
    """Compare two traces step by step, in the reference's order, up to the first difference.

    Raises TraceError for a step that no model has, or of another shape or type.
    """
    equal, worst, missing = 0, 0.0, []
    for name, wanted, got in _steps(mine, theirs):
        if got is None:
            missing.append(name)
            continue
        integer = wanted.dtype.kind == "i"
        margin = _bits(name, got, wanted) if integer else margins(name, got, wanted)
        if (margin > 1).any():
            return Found(equal, tuple(missing), worst, (name, got, margin), margins is _bits)
        worst = max(worst, float(margin.max(initial=0.0)))
        equal += 1
    return Found(equal, tuple(missing), worst, None, margins is _bits)


def _steps(
    mine: Mapping[str, Array], theirs: Mapping[str, Array]
) -> Iterator[tuple[str, Array, Array | None]]:
    """Each step of the reference, and the backend's values or None. Raises TraceError."""
    unknown = sorted(set(mine) - set(theirs))
    if unknown:
        raise TraceError(
            f"{unknown[0]!r} is no step of this model; its steps are embedding, layer.0.q, ... "
            "(SPEC 19.2)"
        )
    for name, wanted in theirs.items():
        got = mine.get(name)
        if got is not None and (got.shape != wanted.shape or got.dtype != wanted.dtype):
            raise TraceError(
                f"{name}: expected {wanted.dtype} {wanted.shape}, got {got.dtype} {got.shape}"
            )
        yield name, wanted, None if got is None else np.ascontiguousarray(got)


def jump(mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> str:
    """Where the relative error grows most from one step to the next; for want of a bound."""
    before, found = 2.0**-24, ("", 0.0, 0.0)
    for name, wanted, got in _steps(mine, theirs):
        if got is None or wanted.dtype.kind == "i":
            continue
        error = float(np.linalg.norm(got.astype(np.float64) - wanted))
        relative = error / max(float(np.linalg.norm(wanted.astype(np.float64))), 1e-30)
        relative = relative if np.isfinite(relative) else np.inf
        if relative / before > (found[2] / found[1] if found[1] else 1.0):
            found = (name, before, relative)
        before = max(relative, 2.0**-24)
    name, before, relative = found
    if not name:
        return "trace: no step's relative error exceeds 2^-24"
    return (
        f"trace: the relative error grows most at {described(name)[0]}: from {before:.2g} to "
        f"{relative:.2g} (no bound is known for this model's steps)"
    )
