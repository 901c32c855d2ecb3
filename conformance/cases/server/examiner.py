"""A server's tokens and logprobs, judged by the reference's answers (SPEC 16.5, 16.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance import rules
from conformance.backends.server import Ask, Completion, Scored, Server
from conformance.cases.server.book import COUNT, LEVEL, Book, Ids
from conformance.golden import Golden
from conformance.operations import NotImplementedByBackendError
from conformance.rules import Verdict, error_model
from conformance.rules.noise import MODEL
from reference.arithmetic import F64

U32 = 2.0**-24


@dataclass(frozen=True)
class Examiner:
    """A server, the reference's answers, and u of the precision that the server declares."""

    server: Server
    book: Book
    u: float

    @property
    def short(self) -> str:
        """A prompt of a few words."""
        return self.book.text(0, 60)

    @property
    def prose(self) -> str:
        """A prompt of more than a hundred tokens: several blocks of attention."""
        return self.book.text(2000, 2350)

    @property
    def second(self) -> Ids:
        """A second turn: the short prompt, an answer, and more."""
        first = self.book.encode(self.short)
        answer = self.book.greedy(first, COUNT)
        return first + answer + self.book.encode("\n" + self.book.text(5000, 5060))

    def greedy(self, prompt: str | Ids, count: int = COUNT, **options: Any) -> Completion:
        """What the server says greedily."""
        return self.server.one(Ask(prompt, count, **options))

    def judged_tokens(self, prompt: str | Ids, answer: Completion) -> Verdict:
        """Each token of an answer after the answer's own text (SPEC 16.7)."""
        ids, tokens = self._ids(prompt), tuple(answer.tokens)
        if len(tokens) > COUNT:
            return Verdict("fail", None, f"{len(tokens)} tokens came, {COUNT} were asked for")
        unknown = [t for t in tokens if not 0 <= t < self.book.tokenizer.vocab_size]
        if unknown or not tokens:
            return Verdict("fail", None, f"its tokens {list(tokens)} are not all of the vocabulary")
        found = self.book.forced(ids, tokens).choices
        text = {"tokens": np.array(ids + tokens[:-1], np.int64)}
        golden = Golden(
            f"{LEVEL}/greedy",
            "16.7",
            "forced",
            {"last": len(tokens)},
            text,
            {"tokens": found.tokens},
            ("tokens",),
            found.gauges(),
            {"noise": MODEL},
        )
        verdict = rules.judge_tokens(golden, np.array(tokens, np.int64), self.u)
        if verdict.outcome == "pass" and len(tokens) < COUNT and answer.reason == "limit":
            return Verdict("fail", None, f"{len(tokens)} tokens came, {COUNT} were asked for")
        return verdict

    def judged_logprobs(self, prompt: str | Ids, answer: Completion) -> Verdict:
        """Each logprob of an answer, and that no likelier token is missing (SPEC 16.5)."""
        tokens, scored = tuple(answer.tokens), answer.scored
        if not any(s.top for s in scored):
            raise NotImplementedByBackendError("logprobs of the likeliest tokens in its answers")
        if len(scored) != len(tokens):
            return Verdict("fail", None, f"{len(scored)} logprobs came with {len(tokens)} tokens")
        forced = self.book.forced(self._ids(prompt), tokens)
        width = forced.logprobs.shape[1]
        softmax = error_model(f"dot({width})", U32) + error_model("ops(4)", U32)
        allowed = error_model(MODEL, self.u) * forced.noise
        allowed += softmax + error_model("ops(4)", U32) * np.abs(forced.logprobs)
        verdicts = [
            _row(row, one, forced.logprobs[row], allowed[row]) for row, one in enumerate(scored)
        ]
        return max(verdicts, key=lambda verdict: verdict.worst or 0.0)

    def _ids(self, prompt: str | Ids) -> Ids:
        return self.book.encode(prompt) if isinstance(prompt, str) else prompt


def _row(row: int, scored: Scored, expected: F64, allowed: F64) -> Verdict:
    """The logprobs that came with one token."""
    told = [(scored.token, scored.logprob), *scored.top]
    worst, message = 0.0, ""
    for token, logprob in told:
        if token is None or logprob is None or not token < len(expected):
            continue
        margin = abs(logprob - expected[token]) / float(allowed[token])
        if margin > worst:
            worst = margin
            message = (
                f"at token {row}: the logprob of {token} is {logprob:.7g}, {expected[token]:.7g} "
                f"expected; error {abs(logprob - expected[token]):.3g}, bound {allowed[token]:.3g}"
            )
    top = [token for token, _ in scored.top]
    if top and worst <= 1:
        least = min(float(expected[t] + allowed[t]) for t in top)
        missing = expected - allowed > least
        missing[top] = False
        if missing.any():
            token = int(np.argmax(np.where(missing, expected, -math.inf)))
            message = f"at token {row}: {token} is likelier than what is listed, and is missing"
            return Verdict("fail", math.inf, message)
    return Verdict("pass", worst) if worst <= 1 else Verdict("fail", worst, message)
