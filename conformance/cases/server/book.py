"""What the reference says to each prompt, computed when a case asks for it (SPEC 16.5, 16.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice

import numpy as np

from conformance.backends.server import Vocabulary
from conformance.paths import data_folder, model_folder
from conformance.rules import noise
from conformance.rules.noise import Choices, choices_of, disturbed, per_roundoff
from reference.arithmetic import F64
from reference.engine import Engine
from reference.errors import RequestError
from reference.measure.perplexity import log_probabilities
from reference.model import Model, load_model
from reference.tokenizer import Tokenizer

LEVEL = "server"
COUNT = 12
"""Tokens that most cases ask for."""

RUNS = 16
WIDER = math.sqrt(noise.RUNS / RUNS) * 12 / noise.STRAY
"""Fewer disturbed runs than goldens have, for they are computed while a server is judged, and as
much wider: Student's law with 16 degrees of freedom leaves 2 * 10^-9 beyond 12 root mean squares,
as that with 64 does beyond 7 (SPEC 16.5)."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Forced:
    """What may follow each prefix of a text from the end of its prompt on, n of them.

    choices: the tokens that may come first. logprobs, noise: (n, V) float64, noise in units of u.
    """

    choices: Choices
    logprobs: F64
    noise: F64


class Book:
    """The reference's answers, each computed once and only when a case needs it."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._greedy: dict[tuple[Ids, int], Ids] = {}
        self._forced: dict[tuple[Ids, Ids], Forced] = {}

    @classmethod
    def load(cls, path: str) -> Book:
        """A model in a folder or GGUF file. Raises RequestError where it has no tokenizer."""
        model = load_model(model_folder(path))
        if model.tokenizer is None:
            raise RequestError(f"--model: {path} has no tokenizer, and a server is asked in text")
        return cls(model, model.tokenizer)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Ids by the ways in which servers name tokens."""
        return Vocabulary(self.tokenizer, self.model.config.vocab_size)

    def text(self, start: int, stop: int) -> str:
        """A piece of held-out text, in characters, of whole words."""
        return _held_out()[start:stop].rsplit(" ", 1)[0]

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        return tuple(self.tokenizer.encode(text))

    def greedy(self, prompt: Ids, count: int) -> Ids:
        """The exact lane's continuation, its end of text included as any token."""
        key = (prompt, count)
        if key not in self._greedy:
            result = Engine(self.model, exact_prefill=True).generate(
                list(prompt), count, stop_tokens=()
            )
            self._greedy[key] = tuple(result.tokens)
        return self._greedy[key]

    def forced(self, prompt: Ids, answer: Ids) -> Forced:
        """What may come at each step of an answer to a prompt; its own text is what it follows."""
        key = (prompt, answer[:-1])
        if key not in self._forced:
            tokens = np.array([*prompt, *answer[:-1]], np.int64)
            name = f"server/{len(prompt)}/{len(answer)}"
            logits, changes = disturbed(self.model, name, tokens, len(answer))
            moves = [WIDER * change for change in islice(changes, RUNS)]
            exact = _logprobs(logits)
            squares = sum((_logprobs(logits + move) - exact) ** 2 for move in moves)
            size = per_roundoff(squares).astype(np.float64)
            self._forced[key] = Forced(choices_of(logits, moves), exact, size)
        return self._forced[key]


@cache
def _held_out() -> str:
    return " ".join((data_folder("fixtures") / "held-out.txt").read_text().split())


def _logprobs(logits: F64) -> F64:
    return np.stack([log_probabilities(row.astype(np.float32)) for row in logits])
