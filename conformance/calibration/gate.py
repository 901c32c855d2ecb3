"""An experiment: what comparing 64 tokens of text says, and what margins and noise say (SPEC 20).

A reference continues a prompt greedily. A backend is given the reference's own tokens, one by one,
so that one run answers for all gates: the naive one passes where all 64 choices are the
reference's, which is where free text would be the same; the rule `tokens` (SPEC 16.7) and the rule
for logits (SPEC 16.5) ask whether rounding can explain what differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from conformance.backends.composed import OwnOrderBackend
from conformance.cases.model import MODEL
from conformance.faults import AnyFault, applied, area, description, fault, faults
from conformance.golden import Golden
from conformance.operations import Sessions
from conformance.paths import data_folder, model_folder
from conformance.pools import pool
from conformance.rules import judge, unit_roundoff
from conformance.rules.noise import MODEL as NOISE
from conformance.rules.noise import choices_of, disturbed, per_roundoff
from conformance.variants import AnyVariant, variants
from reference.engine import Engine
from reference.model import load_model

Ints = NDArray[np.int64]

TOKENS = 64
"""Tokens of text that the naive gate compares."""

PROMPT = 24
"""Tokens of a prompt."""

VARIANTS = (
    "reference-float32", "reversed", "split-k-16", "tiles-16", "online-softmax-32",
    "split-keys-5", "float64", "tf32", "bfloat16", "kv-bfloat16", "kv-float16",
)  # fmt: skip
"""Legitimate implementations that run whole models, float32 and less as declared."""


@dataclass(frozen=True)
class Task:
    """A prompt, the reference's continuation, and what may differ.

    text: the prompt and the continuation but for its last token. tokens, logits: goldens to judge
    the choices and the logits by.
    """

    text: Ints
    tokens: Golden
    logits: Golden


@dataclass
class Row:
    """What the gates make of one implementation; each list holds the prompts that a gate rejects.

    fault: whether it must be rejected, or must not.
    """

    name: str
    about: str
    fault: bool
    runs: int = 0
    naive: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    noise: list[int] = field(default_factory=list)


GATES = ("naive", "tokens", "noise")


def interval(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    z, rate = 1.959964, hits / of
    middle = (rate + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def model_faults() -> list[AnyFault]:
    """Faults in how a model is put together; those of loading leave this one as it is."""
    return [f for f in faults() if area(f) == "model" and "forward" in f.operations]


def prompts(count: int) -> list[Ints]:
    """Pieces of held-out text, far from each other."""
    tokenizer = load_model(model_folder(MODEL)).tokenizer
    assert tokenizer is not None
    words = (data_folder("fixtures") / "held-out.txt").read_text().split()
    starts = np.linspace(0, len(words) - 4 * PROMPT, count).astype(int)
    found = [tokenizer.encode(" ".join(words[at : at + 4 * PROMPT])) for at in starts]
    return [np.array(ids[:PROMPT], np.int64) for ids in found]


def task(prompt: Ints) -> Task:
    """Continue a prompt on the exact lane, and measure what rounding can move."""
    model = load_model(model_folder(MODEL))
    result = Engine(model).generate(prompt.tolist(), TOKENS, stop_tokens=())
    text = np.array([*prompt, *result.tokens[:-1]], np.int64)
    logits, changes = disturbed(model, f"gate/{prompt.tolist()}", text, TOKENS)
    moves = list(changes)
    found = choices_of(logits, moves)
    noise = per_roundoff(sum(move**2 for move in moves))
    given: tuple[dict[str, Any], dict[str, Any]] = ({"last": TOKENS}, {"tokens": text})
    exact = {"y": logits.astype(np.float32)}
    terms = {"noise": NOISE}
    return Task(
        text,
        Golden("generation/forced/gate", "16.7", "forced", given[0], given[1],
               {"tokens": found.tokens}, ("tokens",), found.gauges(), terms),
        Golden("model/forward/gate", "10.2", "forward", given[0], given[1], exact, ("gauge",),
               {"noise": noise}, terms),
    )  # fmt: skip


def answer(backend: Any, sessions: Sessions, task: Task) -> NDArray[np.float32]:
    """Logits of the choices: the prompt in one pass, then a token at a time, as text is made."""
    session = sessions.get(MODEL, "float32")
    rows = [session.forward(tokens=task.text[:PROMPT], attention="fast")[-1:]]
    rows += [session.forward(tokens=task.text[at : at + 1], attention="exact")
             for at in range(PROMPT, len(task.text))]  # fmt: skip
    return np.concatenate(rows)


def judged(name: str, wrong: bool, tasks: Sequence[Task]) -> Row:
    """Run one implementation on all prompts."""
    backend, about = _made(name, wrong)
    row, sessions, u = Row(name, about, wrong), Sessions(backend), unit_roundoff(backend.numerics)
    for index, one in enumerate(tasks):
        with np.errstate(all="ignore"):
            logits = answer(backend, sessions, one)
        tokens = {"tokens": logits.argmax(axis=1)}
        row.runs += 1
        if (tokens["tokens"] != one.tokens.outputs["tokens"]).any():
            row.naive.append(index)
        if judge("tokens", one.tokens, tokens, u).outcome == "fail":
            row.tokens.append(index)
        if judge("gauge", one.logits, {"y": logits}, u).outcome == "fail":
            row.noise.append(index)
    return row


@cache
def _variants() -> dict[str, AnyVariant]:
    return {v.name: v for v in variants()}


def _made(name: str, wrong: bool) -> tuple[Any, str]:
    """A backend, and what it is."""
    if wrong:
        return applied(fault(name), OwnOrderBackend), description(fault(name))
    return _variants()[name](), description(_variants()[name])


def _prepare() -> None:
    threadpool_limits(limits=1, user_api="blas")


def measure(count: int, workers: int | None = None) -> Iterator[Task | Row]:
    """Make the tasks of `count` prompts, then try all; yields each as it comes."""
    with pool(workers, _prepare) as crew:
        tasks = []
        for made in crew.map(task, prompts(count)):
            tasks.append(made)
            yield made
        names = [(name, False) for name in VARIANTS] + [(f.name, True) for f in model_faults()]
        waiting = [crew.submit(judged, name, wrong, tasks) for name, wrong in names]
        for done in waiting:
            yield done.result()


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The report of `bitforbit gate --json`."""
    return {"summary": summary(rows), "rows": [vars(row) for row in rows]}


def summary(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By gate: false alarms over all runs of variants, with their interval, and faults seen.

    seen: faults that some prompt shows. seen_by_one: the mean share of prompts that show a fault,
    which is how often a gate of one prompt sees it.
    """
    good, bad = [r for r in rows if not r.fault], [r for r in rows if r.fault]
    runs = sum(r.runs for r in good)
    found = {}
    for gate in GATES:
        alarms = sum(len(getattr(r, gate)) for r in good)
        low, high = interval(alarms, runs)
        found[gate] = {
            "false_alarms": alarms,
            "runs": runs,
            "rate": alarms / runs,
            "interval": [low, high],
            "faults": len(bad),
            "seen": sum(bool(getattr(r, gate)) for r in bad),
            "seen_by_one": sum(len(getattr(r, gate)) / r.runs for r in bad) / len(bad),
        }
    return found
