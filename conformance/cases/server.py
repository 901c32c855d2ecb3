"""What an HTTP server shows of a model that the reference has too (SPEC 17 and 18).

Its text, its tokens and their logprobs are judged within what rounding at the declared precision
can move, step by step along the server's own text; counts, stops and streams must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from conformance import rules
from conformance.backends.server import TOP, Ask, Completion, Scored, Server, Vocabulary
from conformance.golden import Golden
from conformance.operations import NotImplementedByBackendError
from conformance.paths import data_folder, model_folder
from conformance.results import Result, guarded, result_of
from conformance.rules import Verdict, error_model, noise
from conformance.rules.noise import MODEL, Choices, choices_of, disturbed, per_roundoff
from conformance.selection import Selection
from reference.arithmetic import F64
from reference.engine import Engine
from reference.errors import RequestError
from reference.measure.prefix import log_softmax
from reference.model import Model, load_model
from reference.tokenizer import Tokenizer

LEVEL = "server"
COUNT = 12
"""Tokens that most cases ask for."""

RUNS = 16
WIDER = math.sqrt(noise.RUNS / RUNS) * 12 / noise.STRAY
"""Fewer disturbed runs than goldens have, for they are computed while a server is judged, and as
much wider: Student's law with 16 degrees of freedom leaves 2 * 10^-9 beyond 12 root mean squares,
as that with 64 does beyond 7 (SPEC 16.4)."""

U32 = 2.0**-24

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
    return np.stack([log_softmax(row.astype(np.float32)) for row in logits])


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


Check = Callable[[Examiner], Verdict]


def _same(got: object, expected: object, what: str) -> Verdict:
    if got == expected:
        return Verdict("pass")
    return Verdict("fail", None, f"{what}: {expected!r} expected, {got!r} got"[:400])


# The cases.


def _bits(at: Examiner) -> Verdict:
    raise NotImplementedByBackendError(
        "logits to show: over HTTP go texts, ids and rounded logprobs, and no bits of them"
    )


def _greedy(of: Callable[[Examiner], str | Ids]) -> Check:
    def check(at: Examiner) -> Verdict:
        prompt = of(at)
        answer = at.greedy(prompt, top=TOP)
        verdict = at.judged_tokens(prompt, answer)
        if verdict.outcome == "pass":
            text = at.book.tokenizer.decode(answer.tokens)
            if text != answer.text:
                return _same(answer.text, text, "the text of its tokens")
        return verdict

    return check


def _scores(of: Callable[[Examiner], str | Ids]) -> Check:
    def check(at: Examiner) -> Verdict:
        prompt = of(at)
        return at.judged_logprobs(prompt, at.greedy(prompt, top=TOP))

    return check


TEXTS = (
    "",
    " ",
    "In the beginning God created the heaven and the earth.",
    "  two  spaces,\n\n\ttabs and lines \r\n",
    "3.14159 1e-5 HTTPServer don't WE'LL",
    "na\u00efve \u4f60\u597d \u0420\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f600",
    "<|endoftext|>and then",
)
"""Texts that tell tokenizers apart."""


def _tokenize(at: Examiner) -> Verdict:
    for text in TEXTS:
        got = at.server.tokenize(text)
        if got != list(at.book.encode(text)):
            return _same(got, list(at.book.encode(text)), f"tokens of {text!r}")
    return Verdict("pass")


def _prompt_count(at: Examiner) -> Verdict:
    for text in TEXTS[2:]:
        answer = at.greedy(text, 1)
        counted = answer.prompt_tokens
        if counted is None:
            raise NotImplementedByBackendError("count of a prompt's tokens in its answers")
        if counted != len(at.book.encode(text)):
            return _same(counted, len(at.book.encode(text)), f"prompt tokens of {text!r}")
    return Verdict("pass")


def _reuse_counts(at: Examiner) -> Verdict:
    """Reused and computed tokens make up the prompt, at least one of them computed."""
    prompt = at.second
    for turn in (prompt[:20], prompt[:20], prompt):
        answer = at.greedy(turn, 2)
        cached, computed = answer.cache_n, answer.prompt_n
        if cached is None or computed is None:
            raise NotImplementedByBackendError("counts of reused and computed tokens")
        if cached + computed != len(turn) or computed < 1:
            return Verdict(
                "fail",
                None,
                f"a prompt of {len(turn)} tokens: {cached} reused and {computed} computed",
            )
    return Verdict("pass")


def _second_turn(judge: Callable[[Examiner, Ids, Completion], Verdict]) -> Check:
    """What follows a reused prefix is what follows the same prompt computed afresh."""

    def check(at: Examiner) -> Verdict:
        prompt = at.second
        at.greedy(prompt[:-12], 1)
        answer = at.greedy(prompt, top=TOP)
        if not answer.cache_n:
            raise NotImplementedByBackendError(
                "reuse to judge: it tells no count"
                if answer.cache_n is None
                else "reuse to judge: it computed the whole second turn"
            )
        return judge(at, prompt, answer)

    return check


def _company(at: Examiner) -> Verdict:
    """Requests that come at once get what each gets alone."""
    prompts: list[str | Ids] = [at.short, at.second, at.prose, at.short]
    answers = at.server.complete(*(Ask(prompt, COUNT, top=TOP) for prompt in prompts))
    verdicts = [at.judged_tokens(p, answer) for p, answer in zip(prompts, answers, strict=True)]
    return max(verdicts, key=lambda v: (v.outcome == "fail", v.worst or 0.0))


def _repeated(at: Examiner) -> Completion:
    """A greedy answer of which the server has just given the same text twice."""
    at.greedy(at.short)  # from here on its cache is the same each time
    once, again = at.greedy(at.short), at.greedy(at.short)
    if once.text != again.text:
        raise NotImplementedByBackendError(
            f"greedy text that repeats itself: {once.text!r}, then {again.text!r}"[:400]
        )
    return again


def _stop(at: Examiner) -> Verdict:
    """The text ends before a stop string, wherever in a token that begins."""
    whole = _repeated(at).text
    middle = len(whole) // 2
    word = whole[middle : middle + 4]
    if not word:
        return Verdict("fail", None, f"its greedy text is {whole!r}")
    answer = at.greedy(at.short, stop=(word,))
    verdict = _same(answer.text, whole[: whole.index(word)], f"the text before {word!r}")
    if verdict.outcome == "pass" and answer.reason not in ("word", "stop"):
        return Verdict("fail", None, f"it stopped at {word!r} and says {answer.reason!r}")
    return verdict


def _stream(at: Examiner) -> Verdict:
    """The pieces of a stream are the whole text, and tell the same reason."""
    whole, streamed = _repeated(at), at.greedy(at.short, stream=True)
    return _same(
        (streamed.text, streamed.reason), (whole.text, whole.reason), "streamed against whole"
    )


def _drawn(at: Examiner, seed: int) -> str:
    return at.greedy(at.short, COUNT, temperature=1.0, seed=seed).text


def _same_seed(at: Examiner) -> Verdict:
    """A seed gives the same text again."""
    _drawn(at, 7)
    return _same(_drawn(at, 7), _drawn(at, 7), "the same seed twice")


def _other_seeds(at: Examiner) -> Verdict:
    """Of four seeds, not all give the same text."""
    if len({_drawn(at, seed) for seed in range(7, 11)}) > 1:
        return Verdict("pass")
    return Verdict("fail", None, "four seeds at temperature 1 give the same text")


def _limit(at: Examiner) -> Verdict:
    """As many tokens come as were asked for, and the limit is told to be why there are no more."""
    for count in (1, 5):
        answer = at.greedy(at.short, count)
        if answer.predicted_n is None:
            raise NotImplementedByBackendError("count of its tokens")
        if (answer.predicted_n, answer.reason) != (count, "limit"):
            return _same((answer.predicted_n, answer.reason), (count, "limit"), "count and reason")
    return Verdict("pass")


@dataclass(frozen=True)
class Case:
    """A case of servers: its id, the section it tests, and a check."""

    id: str
    section: str
    check: Check

    @property
    def rule(self) -> str:
        """The part of the id behind the colon."""
        return self.id.rsplit(":", 1)[1]


CASES = tuple(
    Case(f"{LEVEL}/{name}", section, check)
    for name, section, check in (
        ("logits/any:bits", "16.1", _bits),
        ("tokenize/texts:equal", "14.1", _tokenize),
        ("prompt/count:equal", "14.1", _prompt_count),
        ("greedy/short:tokens", "14.1", _greedy(lambda at: at.short)),
        ("greedy/prose:tokens", "14.1", _greedy(lambda at: at.prose)),
        ("greedy/ids:tokens", "14.1", _greedy(lambda at: at.book.encode(at.short))),
        ("logprobs/short:noise", "16.5", _scores(lambda at: at.short)),
        ("logprobs/prose:noise", "16.5", _scores(lambda at: at.prose)),
        ("reuse/count:equal", "11.3", _reuse_counts),
        ("reuse/second_turn:tokens", "11.3", _second_turn(Examiner.judged_tokens)),
        ("reuse/second_turn:noise", "11.3", _second_turn(Examiner.judged_logprobs)),
        ("company/four:tokens", "14.2", _company),
        ("length/limit:equal", "14.1", _limit),
        ("stop/within:equal", "14.1", _stop),
        ("stream/whole:equal", "14.1", _stream),
        ("seed/same:equal", "13.2", _same_seed),
        ("seed/others:equal", "13.2", _other_seeds),
    )
)


def selected(selection: Selection) -> list[Case]:
    """The cases that a selection takes."""
    return [case for case in CASES if selection.takes(case.id)]


def judged(server: Server, book: Book, selection: Selection) -> Iterator[Result]:
    """The result of each selected case; what a server does fails its case alone."""
    at = Examiner(server, book, rules.unit_roundoff(server.numerics))
    for case in selected(selection):
        verdict = guarded(partial(case.check, at))
        yield result_of(case.id, case.section, case.rule, verdict)
