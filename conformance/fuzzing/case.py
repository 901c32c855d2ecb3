"""From choices to a golden, by the reference itself (SPEC 15, 20)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from conformance.cases import recipes
from conformance.cases.recipe import Recipe
from conformance.fuzzing.attention import ATTENTION, PAGED
from conformance.fuzzing.draw import Asked, Choice, Draw, Value
from conformance.fuzzing.drawn import Drawer
from conformance.fuzzing.experts import EXPERTS
from conformance.fuzzing.kernels import ELEMENTARY, KERNELS
from conformance.fuzzing.pages import PAGES
from conformance.fuzzing.tokens import TOKENS
from conformance.golden import Golden, digest
from conformance.rules import ASK_BITS, asked, contract_of, numerics_of
from reference.errors import RequestError

LEVELS: Mapping[str, Mapping[str, Drawer]] = {
    "elementary": ELEMENTARY,
    "kernel": {**KERNELS, **ATTENTION, **EXPERTS, **TOKENS},
    "cache": {**PAGED, **PAGES},
}
OPERATIONS: Mapping[str, tuple[str, Drawer]] = {
    name: (level, drawer) for level, drawers in LEVELS.items() for name, drawer in drawers.items()
}
"""The level and the drawer of every operation that can be drawn."""

WRITTEN = re.compile(r"(\w+)/(\d+)/(\d+)")


@dataclass(frozen=True)
class Case:
    """One draw: of an operation, a seed and a number. given: choices that are not drawn."""

    operation: str
    seed: int
    index: int
    given: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """Give the words that `--case` reads: `attention/7/12 rows=1`."""
        choices = (f"{name}={_written(value)}" for name, value in self.given.items())
        return " ".join([f"{self.operation}/{self.seed}/{self.index}", *choices])

    @classmethod
    def read(cls, text: str) -> Case:
        """From those words. Raises RequestError."""
        first, *rest = text.split() or [""]
        match = WRITTEN.fullmatch(first)
        if match is None or match[1] not in OPERATIONS:
            raise RequestError(f"--case: {first!r} is no OPERATION/SEED/NUMBER that can be drawn")
        if not all("=" in word for word in rest):
            raise RequestError(f"--case: {' '.join(rest)!r} are no choices, NAME=VALUE each")
        given = {name: _read(value) for name, value in (word.split("=", 1) for word in rest)}
        return cls(match[1], int(match[2]), int(match[3]), given)

    @property
    def suffix(self) -> str:
        """What tells its golden from that of the same draw with other choices given."""
        return f"_{digest(str(self).encode())[:8]}" if self.given else ""

    def refused(self, asked: Asked) -> list[str]:
        """Given choices that this case does not have, or not with these values."""
        made = {choice.name: choice.value for choice in self.draw(asked).choices}
        return [name for name, value in self.given.items() if made.get(name, ...) != value]

    def draw(self, asked: Asked) -> Made:
        """Make the choices, and the golden of them by the reference.

        asked: what the backend claims, which decides what it can be given.
        """
        level, drawer = OPERATIONS[self.operation]
        at = f"{level}/{self.operation}/fuzz_{self.seed}_{self.index}"
        draw = Draw(at, asked, self.given)
        drawn = drawer(draw)
        like = _catalogue()[self.operation]
        rules = like.rules if drawn.bounded else tuple(r for r in like.rules if r in ASK_BITS)
        case = replace(self, given=draw.forced)
        recipe = replace(
            like,
            id=at + case.suffix,
            parameters=drawn.parameters,
            inputs=drawn.inputs,
            rules=rules,
            gauge=like.gauge if "gauge" in rules else None,
            note=f"drawn: {case}",
            operation=self.operation,
        )
        return Made(case, recipe, tuple(draw.made))


@dataclass(frozen=True)
class Made:
    """A case that was drawn: its recipe, and the choices that it was made of.

    case: by the fewest choices that must be given to draw it again.
    """

    case: Case
    recipe: Recipe
    choices: tuple[Choice, ...]

    def golden(self, numerics: Mapping[str, Any]) -> Golden:
        """The golden, with the rules that such a backend is asked for.

        One that reaches the contract is asked for all (SPEC 18), another one for its bounds, and
        for bits where any arithmetic gives the same (SPEC 20).
        """
        numerics = numerics_of(numerics, self.case.operation)
        contract = contract_of(numerics)
        contracts = contract == "exact" and numerics.get("fma")
        golden = (self.recipe if contracts else _uncontracted(self.recipe)).make()
        if not golden.forms:  # these inputs show no contraction, or none is asked for
            golden = replace(golden, rules=tuple(rule for rule in golden.rules if rule != "either"))
        return replace(golden, rules=asked(golden, numerics, contract))


def _uncontracted(recipe: Recipe) -> Recipe:
    """Without the forms of SPEC 16.9, which take longer than the rest and are not asked for."""
    rules = tuple(rule for rule in recipe.rules if rule != "either")
    return replace(recipe, rules=rules, forms=None)


@cache
def _catalogue() -> Mapping[str, Recipe]:
    """For every operation the stored golden's recipe with the most rules: section, gauge, forms."""
    found: dict[str, Recipe] = {}
    for recipe in recipes():
        operation = recipe.operation or recipe.id.split("/")[1]
        rules = tuple(rule for rule in recipe.rules if not rule.startswith("bias"))
        best = found.get(operation)
        if operation in OPERATIONS and (best is None or len(rules) > len(best.rules)):
            found[operation] = replace(recipe, rules=rules)
    return found


def _written(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(text: str) -> Value:
    """A number, true, false, null, or a word."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text
