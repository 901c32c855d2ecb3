"""Mistakes of where a text ends by itself (SPEC 12.1, 14.1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from conformance.backends.reference import Ints
from conformance.faults.fault import SessionFault
from reference.arithmetic import F32


class Ending(SessionFault):
    """A mistake in which token ends a text, or in what is then returned."""

    operations: ClassVar[tuple[str, ...]] = ("complete",)


class EndsIgnored(Ending):
    """No token ends a text: it goes on to the length that is asked for."""

    name = "ending-ignored"
    reports = ()
    severity = "broken"

    def ending(self, folder: Path, ids: Sequence[int]) -> Sequence[int]:
        """None."""
        return ()


class FirstIdAlone(Ending):
    """Of several end tokens the first one counts alone."""

    name = "ending-first-id-alone"
    reports = ()
    severity = "wrong"

    def ending(self, folder: Path, ids: Sequence[int]) -> Sequence[int]:
        """The others are text."""
        return ids[:1]


class LastIdAlone(Ending):
    """Of several end tokens the last one counts alone."""

    name = "ending-last-id-alone"
    reports = ()
    severity = "wrong"

    def ending(self, folder: Path, ids: Sequence[int]) -> Sequence[int]:
        """Each takes the place of the one before it."""
        return ids[-1:]


def _told(folder: Path, file: str) -> list[int]:
    """The end tokens in a file of a folder, one or a list."""
    path = folder / file
    told = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    return told if isinstance(told, list) else [] if told is None else [told]


class ConfigurationAlone(Ending):
    """End tokens are read from config.json alone, not from generation_config.json before it."""

    name = "ending-of-config-alone"
    reports = ()
    severity = "wrong"

    def ending(self, folder: Path, ids: Sequence[int]) -> Sequence[int]:
        """One file."""
        return _told(folder, "config.json")


class GenerationConfigurationAlone(Ending):
    """End tokens are read from generation_config.json alone, also where there is no such file."""

    name = "ending-of-generation-config-alone"
    reports = ()
    severity = "broken"

    def ending(self, folder: Path, ids: Sequence[int]) -> Sequence[int]:
        """The other file."""
        return _told(folder, "generation_config.json")


class BothConfigurations(Ending):
    """The end tokens of both configurations count together."""

    name = "ending-of-both-configurations"
    reports = ()
    severity = "subtle"

    def ending(self, folder: Path, ids: Sequence[int]) -> Sequence[int]:
        """That of config.json, too."""
        return [*ids, *_told(folder, "config.json")]


class EndDropped(Ending):
    """The token that ends a text is not among those that are returned."""

    name = "ending-token-dropped"
    reports = ()
    severity = "subtle"

    def ended(self, prompt: Ints, tokens: Ints) -> int:
        """One less."""
        count = super().ended(prompt, tokens)
        return count - 1 if tokens[count - 1] in self.ends else count


class OneBehindEnd(Ending):
    """A token more is chosen behind the one that ends a text."""

    name = "ending-one-token-late"
    reports = ()
    severity = "subtle"

    def ended(self, prompt: Ints, tokens: Ints) -> int:
        """One more, where it is asked for."""
        return super().ended(prompt, tokens) + 1


class PromptEnds(Ending):
    """An end token in the prompt ends the text at its first token."""

    name = "ending-by-the-prompt"
    reports = ()
    severity = "broken"

    def ended(self, prompt: Ints, tokens: Ints) -> int:
        """All tokens are looked at, and not the new ones."""
        return 1 if np.isin(prompt, self.ends).any() else super().ended(prompt, tokens)


class FirstTokenNotLookedAt(Ending):
    """The first token, which comes of the prompt's pass, ends nothing."""

    name = "ending-first-token-not-looked-at"
    reports = ()
    severity = "subtle"

    def ended(self, prompt: Ints, tokens: Ints) -> int:
        """Decode steps alone look for an end."""
        return 1 + super().ended(prompt, tokens[1:])


class EndPadded(Ending):
    """A text that has ended is filled with its end token to the length that is asked for."""

    name = "ending-padded"
    reports = ()
    severity = "subtle"

    def complete(self, prompt: Ints, max_new_tokens: int) -> tuple[Ints, F32]:
        """As a row of a batch whose others go on."""
        tokens, rows = self.generate(prompt, max_new_tokens, exact_prefill=False)
        ended = self.ended(prompt, tokens)
        tokens[ended:] = tokens[ended - 1]
        return tokens, rows


class EndsForbidden(Ending):
    """End tokens are never chosen: a least length that nobody asked for forbids them."""

    name = "ending-tokens-forbidden"
    reports = ()
    severity = "broken"

    def choose(self, logits: F32) -> int:
        """The likeliest of the others."""
        allowed = logits.copy()
        allowed[list(self.ends)] = -np.inf
        return super().choose(allowed)
