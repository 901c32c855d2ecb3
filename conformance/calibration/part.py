"""What of the two catalogues a calibration tries: all, or a part (SPEC 20)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from conformance.faults import AnyFault, area, faults
from conformance.variants import AnyVariant, variants


@dataclass(frozen=True)
class Part:
    """An area of faults, globs of faults' names, globs of variants' names; all where none is given.

    A part that names faults alone has no variants, one that names variants alone no faults.
    """

    area: str | None = None
    faults: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is all that there is."""
        chosen = self.chosen_faults(), self.chosen_variants()
        return [*map(len, chosen)] == [len(faults()), len(variants())]

    def chosen_faults(self) -> list[AnyFault]:
        """The faults, by area and as the catalogue lists them."""
        if self.variants and self.area is None and not self.faults:
            return []
        return [
            fault
            for fault in faults()
            if self.area in (None, area(fault))
            and (not self.faults or _matches(fault.name, self.faults))
        ]

    def chosen_variants(self) -> list[AnyVariant]:
        """The variants, as the catalogue lists them."""
        if self == WHOLE:
            return list(variants())
        return [variant for variant in variants() if _matches(variant.name, self.variants)]

    def strangers(self) -> Iterator[tuple[str, str, list[str]]]:
        """Each glob that nothing matches: what it is of (fault, variant), itself, the names."""
        known = [fault.name for fault in Part(self.area).chosen_faults()]
        named = [variant.name for variant in variants()]
        asked = ("fault", self.faults, known), ("variant", self.variants, named)
        for what, globs, names in asked:
            for glob in globs:
                if not any(_matches(name, (glob,)) for name in names):
                    yield what, glob, names


WHOLE = Part()


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
