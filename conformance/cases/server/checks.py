"""The cases of servers: what each asks, and what must come back (SPEC 17, 18)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from conformance import rules
from conformance.backends.server import TOP, Ask, Completion, Server
from conformance.cases.server.book import COUNT, LEVEL, Book, Ids
from conformance.cases.server.examiner import Examiner
from conformance.operations import NotImplementedByBackendError
from conformance.results import Result, guarded, result_of
from conformance.rules import Verdict
from conformance.selection import Selection

Check = Callable[[Examiner], Verdict]


def _same(got: object, expected: object, what: str) -> Verdict:
    if got == expected:
        return Verdict("pass")
    return Verdict("fail", None, f"{what}: {expected!r} expected, {got!r} got"[:400])


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
