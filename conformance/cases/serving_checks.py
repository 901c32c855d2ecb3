"""Where the bits come from is invisible: pages, chunks, company, drafts, files (SPEC 11 to 14)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from conformance.cases.checks import Caller, compare
from conformance.cases.model import MODEL, prompt
from conformance.cases.recipe import packed
from conformance.cases.serving import repetitive
from conformance.operations import Outputs
from conformance.rules import Verdict

Ints = NDArray[np.int64]
Check = Callable[[Caller], Verdict]

NEW_TOKENS = 6
_MODEL = {"model": MODEL, "weights": "float32"}
_PLAIN = {"page_size": 16, "max_batched_tokens": 64, "draft_tokens": 0}


def _prompts() -> list[Ints]:
    """Four, of which two begin alike, and one repeats itself."""
    text = prompt(400)
    return [text[:5], text[100:171], text[:64], repetitive()]


def _serve(do: Caller, prompts: Sequence[Ints], **options: int) -> Outputs:
    arguments = {**_MODEL, **_PLAIN, **options, "max_new_tokens": NEW_TOKENS}
    return do("serve", **arguments, **packed(prompts))


def _alone(do: Caller, prompts: Sequence[Ints]) -> Outputs:
    """Each prompt by itself, as `generate` computes it."""
    arguments = {**_MODEL, "max_new_tokens": NEW_TOKENS, "exact_prefill": False}
    answers = [do.once("generate", **arguments, prompt=prompt) for prompt in prompts]
    return {name: np.stack([answer[name] for answer in answers]) for name in answers[0]}


def _together(what: str, **options: int) -> Check:
    def check(do: Caller) -> Verdict:
        prompts = _prompts()
        return compare(_alone(do, prompts), _serve(do, prompts, **options), what)

    return check


def _reordered(do: Caller) -> Verdict:
    prompts = _prompts()
    backwards = _serve(do, prompts[::-1])
    turned = {name: array[::-1] for name, array in backwards.items()}
    return compare(_serve(do, prompts), turned, "the order of arrival")


def _less_company(do: Caller) -> Verdict:
    prompts = _prompts()
    whole = {name: array[1:3] for name, array in _serve(do, prompts).items()}
    return compare(whole, _serve(do, prompts[1:3]), "with two more requests and without")


def _alike(do: Caller) -> Verdict:
    """What sorts requests by length must keep apart those that tie."""
    text = prompt(220)
    prompts = [text[:20], text[100:120], text[200:]]
    return compare(_alone(do, prompts), _serve(do, prompts), "requests of one length")


def _reused(do: Caller) -> Verdict:
    """A conversation, an edit in its middle, and the same prompt twice, against each alone."""
    text = prompt(300)
    edited = np.concatenate([text[:70], text[200:205], text[75:120]])
    prompts = [text[:30], text[:75], edited, text[:120], text[:120]]
    answer = do("turns", **_MODEL, max_new_tokens=NEW_TOKENS, **packed(prompts))
    reused = {name: answer[name] for name in ("tokens", "logits")}
    if not (answer["cache_n"][1:] > 0).all():
        return Verdict("fail", None, f"nothing was reused: cache_n is {answer['cache_n'].tolist()}")
    return compare(_alone(do, prompts), reused, "from reused prefixes against each prompt alone")


def _reused_at_the_floor(do: Caller) -> Verdict:
    """What fast attention computed serves 512 tokens, not 511; those that are exact go first.

    The last prompt is exact because of what it reuses of the third, so its bits are fixed.
    """
    text = prompt(520)
    prompts = [text[:512], text[:512], text[:511], text]
    answer = do("turns", **_MODEL, max_new_tokens=1, **packed(prompts))
    counts = answer["cache_n"].tolist()
    if counts != [0, 511, 0, 511]:
        return Verdict("fail", None, f"cache_n should be [0, 511, 0, 511], and is {counts}")
    exact = {**_MODEL, "max_new_tokens": 1, "exact_prefill": True}
    alone = do.once("generate", **exact, prompt=text)
    reused = {name: answer[name][3] for name in alone}
    return compare(alone, reused, "after what fast attention computed, against alone")


def _resumed(do: Caller) -> Verdict:
    """Saved, forgotten, restored, and gone on with."""
    text = prompt(120)
    arguments = {**_MODEL, "max_new_tokens": NEW_TOKENS}
    answer = do("resume", **arguments, prompt=text[:75], longer=text)
    count = int(answer.pop("cache_n")[0])
    if count < 75:
        return Verdict("fail", None, f"75 tokens were saved, and {count} reused")
    never_stopped = {name: array[0] for name, array in _alone(do, [text]).items()}
    return compare(never_stopped, answer, "restored from a file against never stopped")


def checks() -> dict[str, tuple[str, Check]]:
    """Section and check by name."""
    found: dict[str, tuple[str, Check]] = {
        "serve/order": ("14.2", _reordered),
        "serve/company": ("10.4", _less_company),
        "serve/alike": ("14.2", _alike),
        "turns/alone": ("11.3", _reused),
        "turns/floor": ("11.3", _reused_at_the_floor),
        "resume/alone": ("11.4", _resumed),
    }
    for size in (1, 4, 256):
        check = _together(f"pages of {size}", page_size=size)
        found[f"serve/pages_of_{size}"] = ("11.1", check)
    for budget in (4, 33, 4096):
        check = _together(f"passes of {budget} tokens", max_batched_tokens=budget)
        found[f"serve/passes_of_{budget}"] = ("14.2", check)
    for count in (1, 3, 9):
        check = _together(f"drafts of {count}", draft_tokens=count)
        found[f"serve/drafts_of_{count}"] = ("13.5", check)
    return found
