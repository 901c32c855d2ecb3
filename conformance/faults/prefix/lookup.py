"""Mistakes of looking a prefix up, and of counting what is reused (SPEC 11.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from conformance.backends.composed.cache import CacheBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault
from reference.cache import KVCache, PagePool
from reference.cache.prefix import PrefixIndex


class Lookup(Fault, CacheBackend):
    """A mistake in the operation `prefix_reuse`."""

    operations: ClassVar[tuple[str, ...]] = ("prefix_reuse",)


class LastTokenReused(Lookup):
    """A prompt that is known as a whole leaves no token to compute."""

    name = "prefix-last-token-not-computed"
    reports = ("ggml-org/llama.cpp/pull/7160", "vllm-project/vllm/pull/11186")
    severity = "broken"

    def looked_up(self, prompt: Ints) -> Ints:
        """The last token too."""
        return np.append(prompt, 0)


class WholePageRecomputed(Lookup):
    """A prompt that ends with a known page computes that page again."""

    name = "prefix-last-page-computed-again"
    reports = ("vllm-project/vllm/issues/50235",)
    severity = "subtle"

    def usable(self, found: int, length: int, size: int) -> int:
        """A page less, where all but one token is known."""
        return max(0, found - size) if found == length - 1 else found


class WholePagesOnly(Lookup):
    """What is known of a page that is only partly the same is not used."""

    name = "prefix-whole-pages-only"
    reports = ()
    severity = "subtle"

    def usable(self, found: int, length: int, size: int) -> int:
        """Down to a page's edge."""
        return found - found % size


class PartialPageCounted(Lookup):
    """The last page of a prefix counts as a whole though it is only partly the same."""

    name = "prefix-partial-page-counted"
    reports = ("sgl-project/sglang/issues/22819",)
    severity = "broken"

    def reported(self, used: int, length: int, size: int) -> int:
        """Up to a page's edge."""
        return min(length - 1, -(-used // size) * size)


class CountForcedToOne(Lookup):
    """A prompt that is known but for its last token is said to be computed whole."""

    name = "prefix-full-hit-not-counted"
    reports = ("ollama/ollama/pull/16428",)
    severity = "subtle"

    def reported(self, used: int, length: int, size: int) -> int:
        """Nothing reused."""
        return 0 if used == length - 1 else used


class LatestAlone(Lookup):
    """Only the sequence used last is looked at."""

    name = "prefix-latest-sequence-alone"
    reports = ()
    severity = "subtle"

    def retain(self, index: PrefixIndex, prompt: Ints, cache: KVCache) -> None:
        """All others are given up."""
        index.evict(index.reclaimable())
        super().retain(index, prompt, cache)


class ByArrival(PrefixIndex):
    """What is found does not count as used."""

    def match(self, tokens: Sequence[int], salt: str, exact: bool = True) -> tuple[KVCache, Any]:
        """The order stays that of arrival."""
        order = list(self._kept)
        found = super().match(tokens, salt, exact)
        for number in order:
            self._kept.move_to_end(number)
        return found


class FirstComeFirstOut(Lookup):
    """The sequence that came first is given up first, even if it was just used."""

    name = "prefix-evicted-by-arrival"
    reports = ("ml-explore/mlx-lm/pull/1496", "antonellof/ferrox/pull/14")
    severity = "subtle"

    def index(self, pool: PagePool) -> PrefixIndex:
        """Not by use."""
        return ByArrival(pool, "")


class OldestOfEqual(PrefixIndex):
    """Of equally long prefixes, that of the sequence used first is found."""

    def match(self, tokens: Sequence[int], salt: str, exact: bool = True) -> tuple[KVCache, Any]:
        """As if the order of use were the other way round; what is found is used last all the same.

        The order itself stays.
        """
        order = list(self._kept)
        for number in reversed(order):
            self._kept.move_to_end(number)
        found = super().match(tokens, salt, exact)
        numbers = {id(kept): number for number, kept in self._kept.items()}
        for number in (*order, *([] if found[1] is None else [numbers[id(found[1])]])):
            self._kept.move_to_end(number)
        return found


class OldestServes(Lookup):
    """Of two sequences that serve alike the older is used, and the other may be given up."""

    name = "prefix-older-of-equal-used"
    reports = ()
    severity = "subtle"

    def index(self, pool: PagePool) -> PrefixIndex:
        """The one used first."""
        return OldestOfEqual(pool, "")


class IdsOf16Bits(Lookup):
    """Token ids are compared by 16 bits."""

    name = "prefix-compared-by-16-bits"
    reports = ()
    severity = "broken"

    def looked_up(self, prompt: Ints) -> Ints:
        """Modulo 65,536; what is kept is cut alike."""
        return prompt & 0xFFFF

    def retain(self, index: PrefixIndex, prompt: Ints, cache: KVCache) -> None:
        """Modulo 65,536."""
        super().retain(index, prompt & 0xFFFF, cache)
