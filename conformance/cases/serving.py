"""Requests in turns, from files, with drafts, side by side (SPEC 11.3, 11.4, 13.5, 14.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from conformance.cases.model import MODEL, continued, prompt
from conformance.cases.recipe import EXACT, SESSIONS, Recipe, packed
from conformance.generator import integers
from conformance.operations import call

Ints = NDArray[np.int64]
PARAMETERS = {"model": MODEL, "weights": "float32"}

RULES = ("bits", "gauge", "tokens")
"""Reuse, company and drafts change no logit, in whatever arithmetic it is computed (SPEC 16.7)."""

WINDOWS = (("mistral", 9, "all layers"), ("qwen2", 7, "one layer of three"))
"""Families of the random models with a window, its length, and the layers that have it."""


def _turns() -> Iterator[Recipe]:
    """An agent's conversation: the whole of it is sent again at every turn."""
    text = prompt(600)
    edited = np.concatenate([text[:70], text[500:505], text[75:120]])
    growing = [text[:30], text[:75], text[:76], text[:140]]
    for name, prompts, note in (
        ("growing", growing, "each turn adds to the last"),
        ("edited", [text[:120], edited, text[:120]], "an edit in the middle, and taken back"),
        (
            "edited_at_a_page",
            [text[:80], np.concatenate([text[:64], text[300:316]]), text[:80]],
            "an edit right behind 64 tokens, where pages of up to 64 end, and taken back",
        ),
        ("same", [text[:48]] * 3, "the same prompt; its last token is computed again"),
        ("two_users", [text[:60], text[300:360], text[:80], text[300:380]], "in turns"),
        ("answered", _answered(text[:20], text[40:50]), "the answers come back in the next prompt"),
        ("short", [text[:20], _edited(text[:24], 9), text[:20]], "an edit, and taken back"),
    ):
        yield Recipe(
            f"generation/turns/{name}",
            "11.3",
            {**PARAMETERS, "max_new_tokens": 4},
            packed(prompts),
            RULES,
            continued,
            note,
        )


def _windowed() -> Iterator[Recipe]:
    """Prompts over layers with a window W: what lies behind it is dropped in whole pages of 16.

    What is kept of the first is 99 positions, of which those from 80 on are held: they serve a
    prefix of 80 + W - 1 tokens, and not one of a token less.
    """
    for family, window, layers in WINDOWS:
        at, parameters = f"generation/turns/window_{family}", {**PARAMETERS}
        parameters["model"] = f"random-{family}"
        text, u, v, w, x = (
            integers(f"{at}/{name}", 64, count)
            for name, count in (("text", 96), ("u", 60), ("v", 20), ("w", 30), ("x", 30))
        )
        longer = _answered(text, u, parameters)[1]
        held = 80 + window - 1
        parts = (longer[:100], v), (text[: held - 1], w), (text[:held], x)
        prompts = [text, longer, *(np.concatenate(part) for part in parts)]
        note = f"random-{family}: a window of {window} in {layers}; the third finds the first again"
        about = {**parameters, "max_new_tokens": 4}
        yield Recipe(at, "11.3", about, packed(prompts), RULES, continued, note)


def _answered(first: Ints, more: Ints, parameters: Mapping[str, str] = PARAMETERS) -> list[Ints]:
    """A prompt, and that prompt with its answer and more."""
    about = {**parameters, "max_new_tokens": 4, "exact_prefill": True}
    answer = call(EXACT, SESSIONS, "generate", {**about, "prompt": first})["tokens"]
    return [first, np.concatenate([first, answer, more])]


def _edited(tokens: Ints, place: int) -> Ints:
    """With another token in one place."""
    other = tokens.copy()
    other[place] += 1
    return other


def _files() -> Iterator[Recipe]:
    """A prompt saved, and what is gone on with from the file alone; its path is the suite's."""
    text = prompt(320)
    asked, answered = _answered(text[100:130], text[40:50])
    for name, saved, longer, note in (
        ("short", text[:20], text[:24], "the last page is partly filled"),
        ("at_a_page", text[:64], text[:71], "pages of up to 64 end where the file does"),
        ("same", text[50:98], text[50:98], "nothing is added; the last token is computed again"),
        ("answered", asked, answered, "the answer, which was not computed, comes back behind it"),
        ("of_300", text[:300], text[:309], "more than the largest page holds"),
    ):
        inputs = {"prompt": saved, "longer": longer}
        about = {**PARAMETERS, "max_new_tokens": 4}
        yield Recipe(f"generation/resume/{name}", "11.4", about, inputs, RULES, continued, note)
    for family, window, layers in WINDOWS:
        at = f"generation/resume/window_{family}"
        about = {**PARAMETERS, "model": f"random-{family}", "max_new_tokens": 4}
        whole = integers(f"{at}/text", 64, 112)
        note = f"random-{family}: a window of {window} in {layers}, of which the file holds the end"
        inputs = {"prompt": whole[:101], "longer": whole}
        yield Recipe(at, "11.4", about, inputs, RULES, continued, note)


def repetitive() -> Ints:
    """Text that says the same again, so that n-grams are found, (70,) int64."""
    once = prompt(40)
    return np.concatenate([once, once[:30]])


def _speculation() -> Iterator[Recipe]:
    """Greedy, drafts by n-gram lookup: what each pass accepted."""
    for name, section, text, count, drafted in (
        ("repetitive", "13.3", repetitive(), 24, 4),
        ("long_drafts", "13.3", repetitive(), 24, 9),
        ("prose", "13.3", prompt(60), 12, 3),
        ("no_draft", "13.5", prompt(20), 4, 0),
        ("longer_than_left", "13.5", repetitive(), 5, 8),
        ("across_a_page", "13.5", repetitive()[6:], 24, 9),
    ):
        yield Recipe(
            f"generation/speculate/{name}",
            section,
            {**PARAMETERS, "max_new_tokens": count, "draft_tokens": drafted},
            {"prompt": text},
            RULES,
            continued,
        )


def _sizes() -> Recipe:
    """Text of five tokens, in which n-grams of every size occur, and go on differently."""
    at = "generation/speculate/sizes"
    return Recipe(
        at,
        "13.3",
        {**PARAMETERS, "model": "random-qwen2", "max_new_tokens": 16, "draft_tokens": 4},
        {"prompt": integers(f"{at}/prompt", 5, 24)},
        RULES,
        continued,
        "n-grams of up to 2, 3 or 4 tokens, or of 2 at least, draft different tokens",
    )


def _far_back() -> Recipe:
    """What is drafted stands 90 tokens back, before other text."""
    text = prompt(600)
    again, between = text[:14], text[300:370]
    about = {**PARAMETERS, "max_new_tokens": 6, "exact_prefill": True}
    asked = {**about, "prompt": np.concatenate([between, again])}
    answer = call(EXACT, SESSIONS, "generate", asked)["tokens"]
    return Recipe(
        "generation/speculate/far_back",
        "13.3",
        {**PARAMETERS, "max_new_tokens": 8, "draft_tokens": 4},
        {"prompt": np.concatenate([again, answer, between, again])},
        RULES,
        continued,
        "the only occurrences of the last tokens are at the beginning",
    )


def _batches() -> Iterator[Recipe]:
    """Requests side by side: each gives what it gives alone."""
    text = prompt(600)
    prompts = [text[:5], text[100:171], text[200:233], text[:64]]
    again = repetitive()
    for name, together, new, budget, drafted, note in (
        ("four", prompts, 5, 48, 0, "prefill chunks and decode steps in the same passes"),
        ("small", [text[:5], text[50:84], text[20:32]], 3, 16, 0, "chunks beside decode steps"),
        ("drafted", [again[:44], text[:9]], 6, 64, 3, "one drafts, and the other does not"),
    ):
        yield Recipe(
            f"generation/serve/{name}",
            "14.2",
            {
                **PARAMETERS,
                "max_new_tokens": new,
                "page_size": 16,
                "max_batched_tokens": budget,
                "draft_tokens": drafted,
            },
            packed(together),
            RULES,
            continued,
            note,
        )


def recipes() -> Iterator[Recipe]:
    """Every golden of serving."""
    yield from _turns()
    yield from _windowed()
    yield from _files()
    yield from _speculation()
    yield _sizes()
    yield _far_back()
    yield from _batches()
