"""Draws for what the cache does without a model: types, tables, hashes, reuse (SPEC 11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases.recipe import packed
from conformance.fuzzing.draw import Draw
from conformance.fuzzing.drawn import Drawer, Drawn
from conformance.operations import APPEND, FORK, FREE, TRUNCATE

Ints = NDArray[np.int64]
SIZES = (16, 1, 2, 4, 8, 32, 64, 128, 256)
SALTS = {"none": "", "short": "a", "accent": "tenant \u00e9", "long": 100 * "0"}
DTYPES = ("float32", "float16", "bfloat16", "int8")


def store_kv(draw: Draw) -> Drawn:
    """Every type (SPEC 11.2)."""
    about = {"dtype": draw.pick("dtype", DTYPES)}
    shape = draw.size("rows", 33), draw.size("heads", 4), draw.size("head_dim", 129)
    return Drawn(about, {"x": draw.data("x", *shape)})


def page_hashes(draw: Draw) -> Drawn:
    """Chains of any length, keys of any kind (SPEC 11.3)."""
    about = {
        "page_size": draw.pick("page_size", SIZES),
        "digest": draw.pick("digest", ("a", "f", "e")) * 64,
        "dtype": draw.pick("dtype", DTYPES),
        "salt": SALTS[draw.pick("salt", tuple(SALTS))],
    }
    most = draw.pick("ids", (1 << 10, 1 << 31))
    return Drawn(about, {"tokens": draw.integers("tokens", most, draw.size("tokens", 600, 0))})


def paging(draw: Draw) -> Drawn:
    """Scripts of sequences that grow, fork, go back and end (SPEC 11.1)."""
    size, lines = draw.pick("page_size", SIZES), draw.size("lines", 40)
    words, lengths = draw.integers("script", 1 << 30, lines, 3), dict[int, int]()
    script, unused = [], 0
    for kind, which, amount in words.tolist():
        names = list(lengths)
        if not names or kind % 8 == 0:
            lengths[unused] = amount % (3 * size)
            script.append((APPEND, unused, lengths[unused]))
            unused += 1
            continue
        name = names[which % len(names)]
        if kind % 8 <= 2:
            count = amount % (2 * size + 3)
            if (amount >> 20) % 3 == 0:  # to the end of a page
                count = size - lengths[name] % size
            lengths[name] += count
            script.append((APPEND, name, count))
        elif kind % 8 <= 4:
            lengths[unused] = lengths[name]
            script.append((FORK, name, unused))
            unused += 1
        elif kind % 8 <= 6:
            lengths[name] = amount % (lengths[name] + 1)
            script.append((TRUNCATE, name, lengths[name]))
        else:
            del lengths[name]
            script.append((FREE, name, 0))
    return Drawn({"page_size": size}, {"script": np.array(script, np.int64)})


def prefix_reuse(draw: Draw) -> Drawn:
    """Prompts that go on from parts of earlier ones, with room for all or for few (SPEC 11.3)."""
    size, count = draw.pick("page_size", (16, 1, 4, 32)), draw.size("prompts", 9)
    longest = draw.size("longest", 97)
    words = draw.integers("prompts", 1 << 30, count, 3)
    prompts: list[Ints] = []
    for i, (parent, common, more) in enumerate(words.tolist()):
        length = 1 + more % longest
        fresh = draw.integers(f"prompt {i}", 1000, length)
        if prompts:
            before = prompts[parent % len(prompts)][: common % (length + 1)]
            fresh = np.concatenate([before, fresh])[:length]
        prompts.append(fresh)
    least = -(-max(map(len, prompts)) // size)
    pages = draw.pick("room", (64, 2, 3, 1)) * (least + 1)
    about: dict[str, Any] = {"page_size": size, "pages": pages}
    return Drawn(about, packed(prompts))


PAGES: Mapping[str, Drawer] = {
    "store_kv": store_kv,
    "page_hashes": page_hashes,
    "paging": paging,
    "prefix_reuse": prefix_reuse,
}
