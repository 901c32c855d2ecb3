"""Mistakes of the hashes that prefixes are found by (SPEC 11.3)."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from conformance.backends.composed.cache import CacheBackend
from conformance.backends.reference import Ints
from conformance.faults.fault import Fault


class Hashes(Fault, CacheBackend):
    """A mistake in the operation `page_hashes`."""

    operations: ClassVar[tuple[str, ...]] = ("page_hashes",)


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
    reports = ("sgl-project/sglang/issues/37160", "llm-d/llm-d-router/issues/1389")
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
    reports = ("sgl-project/sglang/pull/24794",)
    severity = "wrong"

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """float32 for all."""
        return super().root(digest, "float32", salt)


class DigestIgnored(Hashes):
    """The model is left out of the hash: another model's pages are a hit."""

    name = "prefix-model-ignored"
    reports = ("sgl-project/sglang/pull/24794",)
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


class HashedIdsOf16Bits(Hashes):
    """Token ids are hashed by 16 bits."""

    name = "prefix-ids-of-16-bits"
    reports = ()
    severity = "broken"

    def token_bytes(self, page: Ints) -> bytes:
        """Modulo 65,536."""
        return super().token_bytes(page & 0xFFFF)


class SaltNormalised(Hashes):
    """A salt is normalised, stripped and put in lower case: two tenants may be one."""

    name = "prefix-salt-normalised"
    reports = ()
    severity = "wrong"

    def root(self, digest: str, dtype: str, salt: str) -> bytes:
        """NFKC."""
        return super().root(digest, dtype, unicodedata.normalize("NFKC", salt).strip().lower())
