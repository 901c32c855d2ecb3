"""Mistakes of prefix reuse and of saved caches (SPEC 11.3, 11.4)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conformance.backends.composed.cache import CacheBackend
from conformance.backends.composed.serving import Kept, ServingSession
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault, SessionFault, half
from reference.cache import PAGE_SIZE, KVCache, PagePool
from reference.cache.prefix import PrefixIndex
from reference.cache.sequence import first_seen
from reference.model import AttentionKind


class Hashes(Fault, CacheBackend):
    """A mistake in the operation `page_hashes`."""

    operations: ClassVar[tuple[str, ...]] = ("page_hashes",)


class Lookup(Fault, CacheBackend):
    """A mistake in the operation `prefix_reuse`."""

    operations: ClassVar[tuple[str, ...]] = ("prefix_reuse",)


class Turns(SessionFault, ServingSession):
    """A mistake in prompts that come one after the other."""

    operations: ClassVar[tuple[str, ...]] = ("turns",)


class Files(SessionFault, ServingSession):
    """A mistake in saving a sequence and going on from it."""

    operations: ClassVar[tuple[str, ...]] = ("resume",)


class ParentForgotten(Hashes):
    """A page's hash leaves out the pages before it: the same text elsewhere is a hit."""

    name = "prefix-hash-without-parent"
    reports = ("vllm-project/aibrix/issues/2329",)
    severity = "broken"

    def link(self, chain: Sequence[bytes], page: Ints) -> bytes:
        """From the root alone."""
        return super().link(chain[:1], page)


class SaltIgnored(Hashes):
    """The salt is left out of the hash, and one tenant finds what another has computed."""

    name = "prefix-salt-ignored"
    reports = ()
    severity = "wrong"

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """No salt."""
        return super().root(digest, dtype, "")


class KeysUntagged(Hashes):
    """The parts of the key are joined without marks between them, so that two keys may be one."""

    name = "prefix-key-parts-run-together"
    reports = ("vllm-project/vllm/issues/44701",)
    severity = "subtle"

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """One text."""
        return hashlib.sha256("".join(("bitforbit", digest, dtype, salt)).encode()).digest()


class TypeIgnored(Hashes):
    """The type of the cache is left out of the hash."""

    name = "prefix-type-ignored"
    reports = ()
    severity = "wrong"

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """float32 for all."""
        return super().root(digest, "float32", salt)


class DigestIgnored(Hashes):
    """The model is left out of the hash: another model's pages are a hit."""

    name = "prefix-model-ignored"
    reports = ()
    severity = "broken"

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """One digest for all."""
        return super().root("00" * 32, dtype, salt)


class RootPredictable(Hashes):
    """The chain starts from nothing, whatever the key."""

    name = "prefix-chain-without-root"
    reports = ("vllm-project/vllm/pull/12621",)
    severity = "wrong"

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """Zeros."""
        return bytes(32)


class PartialPageHashed(Hashes):
    """The last page is hashed though it is partly filled."""

    name = "prefix-partial-page-hashed"
    reports = ()
    severity = "wrong"

    def hashed_pages(self, tokens: Ints, size: int) -> list[Ints]:
        """All pages."""
        return [tokens[i : i + size] for i in range(0, len(tokens), size)]


class LastWholePageLeft(Hashes):
    """A page that the tokens fill to the last slot is not hashed."""

    name = "prefix-page-at-the-edge-not-hashed"
    reports = ("vllm-project/vllm/issues/50235",)
    severity = "subtle"

    def hashed_pages(self, tokens: Ints, size: int) -> list[Ints]:
        """Less than, for at most."""
        return super().hashed_pages(tokens[:-1], size)


class TokensCut(Hashes):
    """Token ids are hashed by their low byte."""

    name = "prefix-token-ids-cut"
    reports = ("waybarrios/vllm-mlx/pull/444",)
    severity = "broken"

    def token_bytes(self, page: Ints) -> bytes:
        """Modulo 256."""
        return (page % 256).astype("<u4").tobytes()


class TokensUnordered(Hashes):
    """The tokens of a page are hashed in sorted order."""

    name = "prefix-tokens-unordered"
    reports = ()
    severity = "subtle"

    def token_bytes(self, page: Ints) -> bytes:
        """As a set."""
        return super().token_bytes(np.sort(page))


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
    reports = ()
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


class OnePositionTooMany(Turns):
    """The first token that differs from what is kept is taken from it too."""

    name = "prefix-one-token-too-many"
    reports = ()
    severity = "subtle"

    def common(self, kept: Ints, prompt: Ints) -> int:
        """One more, where there is one."""
        return min(super().common(kept, prompt) + 1, len(kept), len(prompt) - 1)


class EditIgnored(Turns):
    """A kept sequence is used as far as it goes if its beginning is the prompt's."""

    name = "prefix-tokens-not-compared"
    reports = ("openvinotoolkit/openvino.genai/issues/3722",)
    severity = "broken"

    def common(self, kept: Ints, prompt: Ints) -> int:
        """Eight tokens decide for all."""
        if super().common(kept, prompt) < 8:
            return super().common(kept, prompt)
        return min(len(kept), len(prompt) - 1)


class NotCut(Turns):
    """What is kept is not cut back to the prefix, and the rest of the prompt comes after all."""

    name = "prefix-kept-sequence-not-cut"
    reports = ("nicedreamzapp/claude-code-local/issues/46",)
    severity = "broken"

    def reuse(self, prompt: Ints) -> int:
        """The whole sequence stays."""
        self._whole = True
        found = super().reuse(prompt)
        self._whole = False
        return found

    def cut(self, length: int) -> None:
        """Not while a prefix is taken."""
        if not getattr(self, "_whole", False):
            super().cut(length)


class SuffixFromZero(Turns):
    """The tokens after a reused prefix are placed from position 0 on."""

    name = "prefix-suffix-placed-from-zero"
    reports = ("nod-ai/amd-shark-ai/issues/2235",)
    severity = "broken"

    def turn(self, prompt: Ints, max_new_tokens: int) -> Any:
        """Note that a prompt comes."""
        self._prompt = True
        return super().turn(prompt, max_new_tokens)

    def positions(self, count: int) -> Ints:
        """The first call of a turn forgets the prefix."""
        first, self._prompt = self._prompt, False
        return np.arange(count) if first else super().positions(count)


class ReusedInHalf(Turns):
    """What is kept for later prompts is kept in float16."""

    name = "prefix-kept-in-float16"
    reports = ()
    severity = "subtle"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Rounded."""
        self.keys, self.values = (
            [[half(x) for x in layer] for layer in part] for part in (self.keys, self.values)
        )
        super().retain(prompt, tokens)


class ChosenCounted(Turns):
    """The last token chosen counts as computed, and the kept tokens are one more than the keys."""

    name = "prefix-last-chosen-counts"
    reports = ()
    severity = "subtle"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """All tokens."""
        self.kept.append(Kept(np.append(prompt, tokens).astype(np.int64), self.state(), self.exact))


class WindowKeptInHalf(Turns):
    """What layers with a window hold of a kept sequence is kept in float16, the rest as it is."""

    name = "prefix-window-kept-in-float16"
    reports = ()
    severity = "subtle"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Rounded."""
        self.keys, self.values = (
            [
                layer if window is None else [half(x) for x in layer]
                for layer, window in zip(part, self.config.windows, strict=True)
            ]
            for part in (self.keys, self.values)
        )
        super().retain(prompt, tokens)


class NeverTrimmed(Turns):
    """Pages behind a window are held for ever, and found."""

    name = "prefix-window-never-trimmed"
    reports = ()
    severity = "subtle"

    def dropped(self, length: int, window: int | None) -> int:
        """Nothing."""
        return 0


class TrimmedByPosition(Turns):
    """What is behind a window counts as dropped although its page is held."""

    name = "prefix-window-trimmed-by-position"
    reports = ()
    severity = "subtle"

    def dropped(self, length: int, window: int | None) -> int:
        """Not whole pages."""
        return first_seen(length, window)


class TrimmedTooFar(Turns):
    """The page in which a window begins is dropped with those behind it."""

    name = "prefix-window-page-too-many-trimmed"
    reports = ()
    severity = "wrong"

    def dropped(self, length: int, window: int | None) -> int:
        """Rounded up."""
        return -(-first_seen(length, window) // PAGE_SIZE) * PAGE_SIZE


class ExtendedGivenUp(Turns):
    """A sequence is given up for one that extends it, though that cannot be cut back so far."""

    name = "prefix-extended-sequence-given-up"
    reports = ()
    severity = "subtle"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Whatever the windows hold."""
        filled = np.append(prompt, tokens)[:-1]
        self.kept = [
            kept for kept in self.kept if self.common(kept.tokens, filled) < len(kept.tokens)
        ]
        super().retain(prompt, tokens)


class LastComputedTwice(Turns):
    """The last token of a known prompt is computed again behind itself."""

    name = "prefix-last-token-twice"
    reports = ()
    severity = "subtle"

    def reuse(self, prompt: Ints) -> int:
        """The kept copy of it stays."""
        found = super().reuse(prompt)
        if found and found == len(prompt) - 1:
            self.forward(prompt[-1:])
        return found


class SharedWritten(Turns):
    """What is computed after a reused prefix is written over what is kept."""

    name = "prefix-kept-sequence-overwritten"
    reports = ("tenstorrent/tt-xla/pull/4190",)
    severity = "wrong"

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """The newest keys land in the older sequences too."""
        super().retain(prompt, tokens)
        self.cut(self.length)
        for kept in self.kept[:-1]:
            length, keys, values = kept.state
            for old, new in ((keys, self.keys), (values, self.values)):
                for layer, row in zip(old, new, strict=True):
                    layer[:] = [_over(np.concatenate(layer), row[0])]
            assert length == len(keys[0][0])


def _over(old: Any, new: Any) -> Any:
    """The first eight positions of what is new, over what is old."""
    return np.concatenate([new[: min(8, len(old))], old[min(8, len(old)) :]])


class RestoreDoesNothing(Files):
    """Restoring reads the file, and nothing of it is found afterwards."""

    name = "prefix-restore-does-nothing"
    reports = ("ggml-org/llama.cpp/issues/26676",)
    severity = "subtle"

    def restored(self, path: Path) -> Kept:
        """No tokens."""
        return Kept(np.zeros(0, np.int64), super().restored(path).state)


class RestoredInHalf(Files):
    """Keys and values are saved in float16."""

    name = "prefix-saved-in-float16"
    reports = ("ggml-org/llama.cpp/issues/1257",)
    severity = "subtle"

    def save(self, path: Path, kept: Kept) -> None:
        """Rounded."""
        length, keys, values = kept.state
        rounded = [[[half(x) for x in layer] for layer in part] for part in (keys, values)]
        super().save(path, Kept(kept.tokens, (length, rounded[0], rounded[1])))


class KeysForValues(Files):
    """Values are restored from the keys' place in the file."""

    name = "prefix-values-restored-from-keys"
    reports = ()
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """One for both."""
        kept = super().restored(path)
        return Kept(kept.tokens, (kept.state[0], kept.state[1], kept.state[1]))


class PositionsNotRestored(Files):
    """The count of positions is not restored: what follows is placed from 0 on."""

    name = "prefix-positions-not-restored"
    reports = ()
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """Remember that it was."""
        self._offset = super().restored(path).state[0]
        return super().restored(path)

    def positions(self, count: int) -> Ints:
        """Less by the restored ones."""
        return super().positions(count) - getattr(self, "_offset", 0)


class LayersShifted(Files):
    """Each layer is restored from the one before it."""

    name = "prefix-layers-restored-one-off"
    reports = ()
    severity = "broken"

    def restored(self, path: Path) -> Kept:
        """Rolled by one."""
        kept = super().restored(path)
        length, keys, values = kept.state
        return Kept(kept.tokens, (length, keys[-1:] + keys[:-1], values[-1:] + values[:-1]))


class FileTailLost(Files):
    """The last position of the file is restored as zeros."""

    name = "prefix-last-position-restored-empty"
    reports = ()
    severity = "subtle"

    def restored(self, path: Path) -> Kept:
        """Nothing there."""
        kept = super().restored(path)
        for part in kept.state[1:]:
            for layer in part:
                layer[0][-1] = 0
        return kept


class FastServesAll(Turns):
    """A sequence that fast attention computed serves every prompt."""

    name = "prefix-fast-serves-exact"
    reports = ()
    severity = "subtle"
    contract = True

    def exact_ones(self) -> list[Kept]:
        """All."""
        return self.kept


class FastServesNone(Turns):
    """A sequence that fast attention computed serves no prompt."""

    name = "prefix-fast-never-reused"
    reports = ()
    severity = "subtle"
    contract = True

    def retain(self, prompt: Ints, tokens: Sequence[int]) -> None:
        """Exact ones alone are kept."""
        if self.exact:
            super().retain(prompt, tokens)


class AttentionMode(Turns):
    """A prompt's suffix after a reused prefix is computed by fast attention."""

    name = "prefix-suffix-computed-fast"
    reports = ()
    severity = "subtle"
    contract = True

    def forward(self, tokens: Ints, attention: AttentionKind = "exact") -> Any:  # type: ignore[override]
        """Several tokens behind others."""
        several = len(tokens) > 1 and self.length > 0
        return super().forward(tokens, "fast" if several else attention)
