"""Greedy texts of a backend's own, each judged as long as it is the golden's (SPEC 16.7).

Where a near tie goes the other way, so does all that follows: two texts are compared up to and with
the first token that differs, and what lies behind it is no error of either.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.golden import Array, Golden
from conformance.rules.contract import ASK_BITS

OWN_TEXT = frozenset({"generate", "complete", "turns", "speculate", "serve", "resume"})
"""Operations of a session that go on from their own tokens (SPEC 17)."""

TEXT = ("tokens", "logits")
"""Their outputs by token, (n,) and (n, V), or of R texts (R, n) and (R, n, V); all others are
counts of what was reused or accepted."""

LARGEST_PAGE = 256
"""Positions that a page may have (SPEC 11.1)."""


def parted(golden: Golden, tokens: Array) -> list[tuple[int, int]]:
    """Which texts are not the golden's, and the first place of each where it is not.

    tokens: (n,) or (R, n) integers, as the golden's.
    """
    different = np.atleast_2d(tokens != golden.outputs["tokens"])
    return [(int(text), int(different[text].argmax())) for text in np.flatnonzero(different.any(1))]


def followed(golden: Golden, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """The answer, but the golden's own behind the place where a text parts, and its counts."""
    places = parted(golden, outputs["tokens"])
    found = {**golden.outputs, **{name: outputs[name] for name in TEXT}}
    if not places:
        return found
    found |= {name: outputs[name].copy() for name in TEXT}
    for name in TEXT:
        mine, own = (by_text(golden, x) for x in (found[name], golden.outputs[name]))
        for text, place in places:
            mine[text, place + 1 :] = own[text, place + 1 :]
    return found


def of_one_length(golden: Golden, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """An answer that parts before it ends, with the golden's own behind; any other as it is.

    Texts that end by themselves, and differ in a token, need not be of one length (SPEC 14.1).
    """
    own, mine = golden.outputs["tokens"], outputs["tokens"]
    if golden.operation != "complete" or mine.ndim != 1 or len(outputs["logits"]) != len(mine):
        return outputs
    different = np.flatnonzero(mine[: len(own)] != own[: len(mine)])
    if not len(different):
        return outputs
    behind = int(different[0]) + 1
    parts = {name: (outputs[name][:behind], golden.outputs[name][behind:]) for name in TEXT}
    alike = all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in parts.values())
    return {name: np.concatenate(pair) for name, pair in parts.items()} if alike else outputs


def also_the_goldens(golden: Golden, mine: Mapping[str, Array], other: Mapping[str, Array]) -> int:
    """Of two answers with the same tokens, more or fewer than the golden's, how many it has, too.

    0 where texts do not end by themselves, or tokens differ.
    """
    alike = golden.operation == "complete" and np.array_equal(mine["tokens"], other["tokens"])
    return min(len(mine["tokens"]), len(golden.outputs["tokens"])) if alike else 0


def by_text(golden: Golden, x: Array) -> Array:
    """An array by token, of one text or R, as a view (R, n, ...)."""
    return x[None] if golden.outputs["tokens"].ndim == 1 else x


def miscounted(golden: Golden, outputs: Mapping[str, Array]) -> str:
    """What is wrong with the counts of texts that are the golden's, in words; empty if nothing.

    Who reuses less, whole pages alone, or drafts otherwise, is slower and not wrong; who holds
    more than the golden may reuse more. A file of which not even the whole pages are gone on with
    is not restored.
    """
    own = golden.outputs
    for name in [name for name in own if name not in TEXT]:
        x, expected = outputs[name], own[name]
        shaped = x.ndim == 1 if name == "accepted" else x.shape == expected.shape
        if x.dtype != expected.dtype or not shaped:
            return f"{name}: expected {expected.dtype} {expected.shape}, got {x.dtype} {x.shape}"
    if "cache_n" in own:
        reused, most = outputs["cache_n"], reusable(golden)
        least = most // LARGEST_PAGE * LARGEST_PAGE if golden.operation == "resume" else 0 * most
        for request in np.flatnonzero((reused < least) | (reused > most)):
            return (
                f"cache_n of request {request}: {least[request]} to {most[request]} tokens can be "
                f"reused, {reused[request]} are said to be"
            )
    if "prompt_n" in own:
        counted, whole = (x["cache_n"] + x["prompt_n"] for x in (outputs, own))
        for request in np.flatnonzero(counted != whole):
            return (
                f"cache_n + prompt_n of request {request}: its prompt has {whole[request]} tokens, "
                f"{counted[request]} are counted"
            )
    return _misdrafted(golden, outputs["accepted"]) if "accepted" in own else ""


def reusable(golden: Golden) -> Array:
    """The most tokens of each prompt that can be reused, as `cache_n` is shaped.

    Of `turns` what it has in common with an earlier text as far as that was computed, and all but
    its last token at most: who holds what lies behind a window finds more than the golden, which
    trims it.
    """
    if golden.operation != "turns":
        return golden.outputs["cache_n"]
    ends = np.cumsum(golden.inputs["lengths"])[:-1]
    prompts = np.split(golden.inputs["tokens"], ends)
    computed = [
        np.concatenate([prompt, chosen[:-1]])
        for prompt, chosen in zip(prompts, golden.outputs["tokens"], strict=True)
    ]
    return np.array(
        [
            max((_in_common(text, prompt[:-1]) for text in computed[:i]), default=0)
            for i, prompt in enumerate(prompts)
        ]
    )


def _in_common(a: Array, b: Array) -> int:
    """The length of the longest common prefix of two texts."""
    n = min(len(a), len(b))
    return int(np.append(a[:n] != b[:n], True).argmax())


def _misdrafted(golden: Golden, accepted: Array) -> str:
    """The same of tokens accepted by each pass behind the prompt's, which adds one of its own."""
    most, behind = golden.parameters["draft_tokens"], len(golden.outputs["tokens"]) - 1
    for some in accepted[(accepted < 0) | (accepted > most)]:
        return f"accepted: a pass can accept 0 to {most} drafts, and {some} are said to be"
    made = (accepted + 1).cumsum()
    if behind > made[-1:].sum() or (made[:-1] >= behind).any():
        return f"accepted: {len(made)} passes with these cannot be what {behind} tokens took"
    return ""


def judged_part(golden: Golden, rule: str, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """What a rule looks at: all of an answer, but of a text that parts nothing further."""
    bits = rule in ASK_BITS or golden.operation not in OWN_TEXT
    if not bits:
        outputs = of_one_length(golden, outputs)
    if bits or any(outputs[name].shape != golden.outputs[name].shape for name in TEXT):
        return dict(outputs)
    return followed(golden, outputs)
