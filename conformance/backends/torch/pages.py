"""Pages of the cache: block tables, types, hashes, reuse of prefixes (SPEC 11.1 to 11.3)."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from conformance.backends.torch.arithmetic import canonical
from conformance.backends.torch.quantization import quantize_int8

Tokens = Sequence[int]

APPEND, FORK, TRUNCATE, FREE = range(4)
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def gather(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """Positions (length, Hkv, D) of a sequence, from pages (n, P, Hkv, D) and its table (11.1)."""
    return pages[table].flatten(0, 1)[:length]


def store(x: Tensor, dtype: str) -> Tensor:
    """x (T, Hkv, D) float32 rounded to a type once, and read back as float32 (11.2)."""
    if dtype != "int8":
        return canonical(x.to(FLOATS[dtype]).float())
    codes, scale, _ = quantize_int8(x.flatten(0, 1))
    return canonical(codes.float() * scale[:, None]).view(x.shape)


def hashes(tokens: Tokens, page_size: int, digest: str, dtype: str, salt: str) -> list[bytes]:
    """The chain h_0, h_1, ... over whole pages (11.3)."""
    root = b"bitforbit\0" + digest.encode() + b"\0" + dtype.encode() + b"\0" + salt.encode()
    chain = [hashlib.sha256(root).digest()]
    for page in range(len(tokens) // page_size):
        ids = tokens[page * page_size : (page + 1) * page_size]
        words = b"".join(token.to_bytes(4, "little") for token in ids)
        chain.append(hashlib.sha256(chain[-1] + words).digest())
    return chain


class OutOfPagesError(Exception):
    """The pool has fewer free pages than a sequence needs."""


class BlockTables:
    """Which pages each sequence has, in a pool of `limit` pages or of any number (11.1).

    Sequences go by numbers of the caller's choice. No page holds anything here.
    """

    def __init__(self, page_size: int, limit: int | None = None) -> None:
        self.page_size, self.limit = page_size, limit
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.holders: Counter[int] = Counter()
        self.copied = 0
        self._numbers = itertools.count()

    def counts(self) -> tuple[int, int, int]:
        """Pages in use, pages in more than one table, pages copied so far."""
        return len(self.holders), sum(n > 1 for n in self.holders.values()), self.copied

    def _must_copy(self, name: int, count: int) -> bool:
        """Whether `count` positions are written to a last page that is in another table too."""
        partly = self.lengths[name] % self.page_size != 0
        return count > 0 and partly and self.holders[self.tables[name][-1]] > 1

    def missing(self, name: int, count: int) -> int:
        """Pages that must become free before `count` positions can be appended."""
        if self.limit is None:
            return 0
        pages = -(-(self.lengths[name] + count) // self.page_size)
        taken = pages - len(self.tables[name]) + self._must_copy(name, count)
        return len(self.holders) + taken - self.limit

    def create(self, name: int) -> None:
        """A sequence of no positions."""
        if name in self.tables:
            raise ValueError(f"sequence {name} is there already")
        self.tables[name], self.lengths[name] = [], 0

    def append(self, name: int, count: int) -> None:
        """Count positions more; nothing is changed where there is no room for them."""
        if self.missing(name, count) > 0:
            raise OutOfPagesError(f"sequence {name}: no pages for {count} positions")
        table = self.tables[name]
        if self._must_copy(name, count):
            self._release(table.pop())
            table.append(self._take())
            self.copied += 1
        self.lengths[name] += count
        while len(table) * self.page_size < self.lengths[name]:
            table.append(self._take())

    def fork(self, name: int, other: int) -> None:
        """A second sequence with the same pages."""
        self.create(other)
        self.tables[other] = list(self.tables[name])
        self.lengths[other] = self.lengths[name]
        self.holders.update(self.tables[name])

    def truncate(self, name: int, length: int) -> None:
        """Drop the pages whose first position is `length` or later."""
        self.lengths[name] = min(self.lengths[name], length)
        table = self.tables[name]
        while (len(table) - 1) * self.page_size >= self.lengths[name]:
            self._release(table.pop())

    def free(self, name: int) -> None:
        """Drop all pages."""
        self.truncate(name, 0)
        del self.tables[name], self.lengths[name]

    def _take(self) -> int:
        page = next(self._numbers)
        self.holders[page] = 1
        return page

    def _release(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]


def run(script: Sequence[Sequence[int]], page_size: int) -> list[tuple[int, int, int]]:
    """Counts after each line of a script (17)."""
    blocks = BlockTables(page_size)
    counts = []
    for step, name, amount in script:
        if step == APPEND:
            if name not in blocks.tables:
                blocks.create(name)
            blocks.append(name, amount)
        elif step == FORK:
            blocks.fork(name, amount)
        elif step == TRUNCATE:
            blocks.truncate(name, amount)
        elif step == FREE:
            blocks.free(name)
        else:
            raise ValueError(f"{step} is no step of a script")
        counts.append(blocks.counts())
    return counts


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in pairs)


def reusable(kept: Tokens, prompt: Tokens) -> int:
    """How much of a prompt a kept sequence has: never its last token (11.3)."""
    return min(common_prefix(kept, prompt), len(prompt) - 1)


class PrefixStore:
    """Sequences kept in block tables, the least recently used first (11.3)."""

    def __init__(self, blocks: BlockTables) -> None:
        self.blocks = blocks
        self.kept: dict[int, Tokens] = {}
        self._names = itertools.count()

    def compute(self, prompt: Tokens) -> int:
        """Hold a prompt and keep it: how many of its tokens were found."""
        name, reused = next(self._names), 0
        latest_first = list(self.kept)[::-1]
        found = max(latest_first, key=lambda n: reusable(self.kept[n], prompt), default=None)
        if found is not None:
            reused = reusable(self.kept[found], prompt)
        if found is None or reused == 0:
            self.blocks.create(name)
        else:
            self.kept[found] = self.kept.pop(found)  # the last of all now
            self.blocks.fork(found, name)
            self.blocks.truncate(name, reused)
        while self.kept and self.blocks.missing(name, len(prompt) - reused) > 0:
            self._give_up(next(iter(self.kept)))
        self.blocks.append(name, len(prompt) - reused)
        for other, tokens in list(self.kept.items()):
            if common_prefix(tokens, prompt) == len(tokens):
                self._give_up(other)
        self.kept[name] = prompt
        return reused

    def _give_up(self, name: int) -> None:
        del self.kept[name]
        self.blocks.free(name)


def split(tokens: Tokens, lengths: Sequence[int]) -> Iterator[Tokens]:
    """Prompts that lie one behind the other."""
    if sum(lengths) != len(tokens) or min(lengths, default=1) < 1:
        raise ValueError(f"lengths of {sum(lengths)} in all for {len(tokens)} tokens")
    start = 0
    for length in lengths:
        yield tokens[start : start + length]
        start += length
