"""Pages, types, hashes and the reuse of prefixes, by position and by brute force (SPEC 11)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from tests.oracle import aligned, quantization
from tests.oracle.numbers import BINARY16, BINARY32, NAN, Format, multiply, narrow

BFLOAT16 = Format(8, -126, 127)
FORMATS = {"float32": BINARY32, "float16": BINARY16, "bfloat16": BFLOAT16}

Tokens = tuple[int, ...]
Page = set[int]
"""A page is the set of the sequences that hold it, and is known by its identity."""


def gather(pages: Any, table: Sequence[int], length: int) -> list[Any]:
    """What lies in the pages at each position of a sequence."""
    size = len(pages[0])
    return [pages[table[j // size]][j % size] for j in range(length)]


def store(row: Sequence[float], dtype: str) -> list[float]:
    """One token's head, rounded to a type and read back."""
    if dtype != "int8":
        return [narrow(x, FORMATS[dtype]) for x in row]
    if not aligned.finite(row):
        return [NAN] * len(row)
    codes, scale = quantization.quantize_int8(row)
    return [multiply(float(code), scale) for code in codes]


def hashes(tokens: Sequence[int], size: int, *root: str) -> list[bytes]:
    """The chain; root is digest, dtype and salt."""
    seen = hashlib.sha256(b"bitforbit")
    for part in root:
        seen.update(b"\0")
        seen.update(part.encode("utf-8"))
    chain = [seen.digest()]
    whole = len(tokens) - len(tokens) % size
    for start in range(0, whole, size):
        seen = hashlib.sha256(chain[-1])
        for token in tokens[start : start + size]:
            seen.update(bytes(token >> shift & 255 for shift in (0, 8, 16, 24)))
        chain.append(seen.digest())
    return chain


def paging(script: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Counts after each line of a script, position by position."""
    pages: list[Page] = []
    tables: dict[int, list[Page]] = {}
    lengths: dict[int, int] = {}
    copied = 0

    def fresh(owner: int) -> Page:
        pages.append({owner})
        return pages[-1]

    def truncate(name: int, length: int) -> None:
        while lengths[name] > length:
            lengths[name] -= 1
            if lengths[name] % size == 0:
                tables[name].pop().remove(name)

    counts = []
    for step, name, amount in script:
        if step == 0:
            table, start = tables.setdefault(name, []), lengths.setdefault(name, 0)
            for position in range(start, start + amount):
                if position % size == 0:
                    table.append(fresh(name))
                elif table[-1] != {name}:
                    table[-1].remove(name)
                    table[-1] = fresh(name)
                    copied += 1
            lengths[name] += amount
        elif step == 1:
            tables[amount], lengths[amount] = list(tables[name]), lengths[name]
            for page in tables[name]:
                page.add(amount)
        else:
            truncate(name, amount)
            if step == 3:
                del tables[name], lengths[name]
        counts.append([sum(map(bool, pages)), sum(len(page) > 1 for page in pages), copied])
    return counts


def common(prompt: Tokens, kept: Tokens) -> int:
    """The longest prefix of a prompt, less its last token, that a kept sequence begins with."""
    return max(n for n in range(len(prompt)) if prompt[:n] == kept[:n])


Named = set[tuple[int, int]]
"""Pages by their index in a sequence, and the number of the prompt that filled them first."""


def prefix_reuse(prompts: Sequence[Tokens], size: int, pages: int) -> list[int]:
    """Every prompt against every kept sequence; `kept` has the least recently used first."""
    kept: list[tuple[Tokens, Named]] = []
    found = []
    for number, prompt in enumerate(prompts):
        lengths = [common(prompt, tokens) for tokens, _ in kept]
        reused = max(lengths, default=0)
        held: Named = set()
        if reused:
            used_last = max(i for i, length in enumerate(lengths) if length == reused)
            kept.append(kept.pop(used_last))
            held = {page for page in kept[-1][1] if page[0] * size < reused}
        while len(_pages_of(prompt, number, held, reused // size, size, kept) | _of(kept)) > pages:
            kept.pop(0)
        table = _pages_of(prompt, number, held, reused // size, size, kept)
        kept = [other for other in kept if other[0] != prompt[: len(other[0])]]
        kept.append((prompt, table))
        found.append(reused)
    return found


def _of(kept: Sequence[tuple[Tokens, Named]]) -> Named:
    return {page for _, table in kept for page in table}


def _pages_of(
    prompt: Tokens,
    number: int,
    held: Named,
    whole: int,
    size: int,
    kept: Sequence[tuple[Tokens, Named]],
) -> Named:
    """A prompt's pages: those held, but one after `whole` that is another's too, and its own."""
    shared = {page for page in held if page[0] < whole or page not in _of(kept)}
    known = {index for index, _ in shared}
    indices = range(-(-len(prompt) // size))
    return shared | {(index, number) for index in indices if index not in known}
