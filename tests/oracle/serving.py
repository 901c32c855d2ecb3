"""Turns, drafts and batches of greedy requests, each text by itself (SPEC 11.3, 13.5, 14.2).

One thing is shared with the engine: a model, of which `Model.forward` computes a whole text, with
no cache that outlives the call, and whose configuration says its windows and positions.
tests/reference compares it with transformers. What is reused, drafted and accepted is found here by
comparing everything with everything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from conformance.paths import model_folder
from reference.model import Model, load_model
from reference.weights import Mode
from tests.oracle.cache import common

Tokens = tuple[int, ...]
Row = list[float]


@cache
def _model(name: str, weights: Mode) -> Model:
    return load_model(model_folder(name), weights)


@cache
def greedy(name: str, weights: Mode, prompt: Tokens, count: int) -> tuple[list[int], list[Row]]:
    """`count` tokens after a prompt, and the logits that chose each.

    A pass over the whole text gives both: tokens that it chooses itself, one after the other, are
    the greedy ones, whatever was guessed at first. Each pass settles one more token at least.
    """
    tokens: list[int] = []
    found = _guess(name, weights, prompt, count)
    rows: list[Row] = []
    while tokens != found:
        tokens = found
        text = (*prompt, *tokens[:-1])
        rows = _model(name, weights).forward(text)[len(prompt) - 1 :].tolist()
        found = [row.index(max(row)) for row in rows]
    return tokens, rows


def _guess(name: str, weights: Mode, prompt: Tokens, count: int) -> list[int]:
    """What decoding with a cache chooses, to save passes."""
    model, tokens = _model(name, weights), list(prompt)
    held = model.new_cache()
    for _ in range(count):
        row = model.forward(tokens[held.length :], held, last_only=True)[-1]
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


def context(name: str, weights: Mode) -> int:
    """Positions that a model has."""
    return _model(name, weights).config.max_positions


def end_tokens(name: str) -> list[int]:
    """The ids that end a model's text: of generation_config.json, or else of config.json."""
    for file in ("generation_config.json", "config.json"):
        path = model_folder(name) / file
        found = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []


def ended(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """How many tokens a text has, the one that ends it included."""
    return min([tokens.index(end) + 1 for end in ends if end in tokens], default=len(tokens))


def windows(name: str, weights: Mode) -> list[int]:
    """The windows of a model's layers."""
    return [w for w in _model(name, weights).config.windows if w is not None]


def reused(
    prompts: Sequence[Tokens], answers: Sequence[Sequence[int]], windows: Sequence[int] = ()
) -> list[int]:
    """What each prompt has in common with one before it and its answer, less the last token.

    One counts only where it still holds, in pages of 16, all that the next token sees.
    """
    texts = [(*prompt, *answer[:-1]) for prompt, answer in zip(prompts, answers, strict=True)]
    found = []
    for i, prompt in enumerate(prompts):
        lengths = [(common(prompt, text), len(text)) for text in texts[:i]]
        whole = [n for n, length in lengths if all(_held(n, length, w) for w in windows)]
        found.append(max(whole, default=0))
    return found


def _held(position: int, length: int, window: int) -> bool:
    """Whether all that `position` sees lies on pages that `length`, or a later one, sees too."""
    sees = range(max(0, position - window + 1), position)
    return all(j // 16 * 16 + 15 >= length - window + 1 for j in sees)


def draft(context: Sequence[int], count: int) -> list[int]:
    """N-gram lookup, all sizes and places (SPEC 13.3)."""
    length = len(context)
    places = [
        (size, end)
        for size in (1, 2, 3)
        for end in range(size, length)
        if context[end - size : end] == context[length - size :]
    ]
    if not places:
        return []
    _, end = max(places)
    return [context[end + i % (length - end)] for i in range(count)]


def accepted(prompt: Tokens, answer: Sequence[int], longest: int) -> list[int]:
    """Drafted tokens that are right, pass by pass, where the answer is known (SPEC 13.5)."""
    done, passes = 1, []
    while done < len(answer):
        drafted = draft([*prompt, *answer[:done]], min(longest, len(answer) - done))
        right = 0
        while right < len(drafted) and drafted[right] == answer[done + right]:
            right += 1
        passes.append(right)
        done += right + 1
    return passes
