"""Of many failures, which to show, and what they have in common."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance.diagnosis import FAIR

Case = Mapping[str, Any]


def area_of(case: Case) -> str:
    """A case's level and operation."""
    return "/".join(case["id"].split("/")[:2])


def chosen(groups: Sequence[list[Case]], limit: int) -> list[list[Case]]:
    """At most `limit` of the groups, in their order; operations take turns for a place.

    So one mistake that fails dozens of cases does not hide another one.
    """
    turns: Counter[str] = Counter()
    places = []
    for at, group in enumerate(groups):
        area = area_of(group[0])
        places.append((turns[area], at))
        turns[area] += 1
    return [groups[at] for at in sorted(at for _, at in sorted(places)[:limit])]


def nearest_faults(failed: Iterable[Case]) -> list[tuple[str, str, int]]:
    """What failures were likeliest caused by: faults, what is wrong, and how many name them first.

    Faults that no case tells apart are one entry, split by blanks; the most frequent comes first.
    """
    found: Counter[str] = Counter()
    about: defaultdict[str, str] = defaultdict(str)
    for case in failed:
        for line in case.get("diagnosis", ()):
            fault = re.search(r"with (?:any of )?((?:`[^`]+`(?:, )?)+)[^(]*(?:\((.*)\))?", line)
            if fault or line == FAIR:
                names = " ".join(re.findall("`([^`]+)`", fault[1])) if fault else FAIR
                about[names] = about[names] or ((fault[2] or "") if fault else "")
                found[names] += 1
                break
    return [(name, about[name], n) for name, n in found.most_common()]
