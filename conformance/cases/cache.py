"""The cache: pages read in place, types, block tables, hashes, and what is given up (SPEC 11)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cases.contraction import rope_forms
from conformance.cases.recipe import BOTH, Recipe, array32, packed
from conformance.generator import integers, normal
from conformance.golden import Array
from conformance.operations import APPEND, FORK, FREE, TRUNCATE
from conformance.rules import gauges
from conformance.rules.gauges import Gauge
from reference.arithmetic import F32

Ints = NDArray[np.int64]


def _gauge(arguments: Mapping[str, Any], outputs: Mapping[str, Array]) -> Gauge:
    """That of attention over the positions in order."""
    table, length = arguments["block_table"], arguments["length"]
    k, v = (
        arguments[f"{n}_pages"][table].reshape(-1, *arguments[f"{n}_pages"].shape[2:])[:length]
        for n in ("k", "v")
    )
    options = {n: arguments[n] for n in ("scale", "window", "softcap")}
    return gauges.attention(arguments["q"], k, v, outputs["y"], **options)


def _paged(
    name: str,
    rows: int,
    length: int,
    table: Sequence[int],
    size: int,
    note: str,
    heads: tuple[int, int, int] = (2, 1, 32),
    **options: Any,
) -> Recipe:
    """Rows over pages; what is not the sequence's, or lies behind its end, is NaN and infinity.

    heads: of queries, of keys and values, and their width.
    """
    at, (query_heads, kv_heads, width) = f"cache/paged_attention/{name}", heads
    k, v = np.full((2, max(table) + 3, size, kv_heads, width), np.nan, np.float32)
    v[:] = np.inf
    for index, page in enumerate(table):
        count = min(size, length - index * size)
        k[page, :count] = normal(f"{at}/k/{index}", size, kv_heads, width)[:count]
        v[page, :count] = normal(f"{at}/v/{index}", size, kv_heads, width)[:count]
    scale = float(np.float32(width**-0.5))
    parameters = {"length": length, "scale": scale, "window": None, "softcap": None, **options}
    inputs: dict[str, Array] = {
        "q": normal(f"{at}/q", rows, query_heads, width),
        "k_pages": k,
        "v_pages": v,
        "block_table": np.array(table, np.int64),
    }
    return Recipe(at, "11.1", parameters, inputs, BOTH, _gauge, note)


def _attention() -> Iterator[Recipe]:
    """Page sizes on both sides of a block, orders of pages, ends inside a page."""
    yield _paged("in_order", 3, 70, range(5), 16, "pages that lie one behind the other")
    yield _paged("reversed", 3, 70, [6, 5, 3, 2, 0], 16, "pages in descending order")
    yield _paged("scattered", 5, 80, [7, 2, 9, 0, 4], 16, "the last page is full")
    yield _paged("pages_of_1", 2, 37, [(7 * i) % 41 for i in range(37)], 1, "one position a page")
    yield _paged("pages_of_8", 40, 61, [3, 9, 1, 0, 12, 5, 7, 2], 8, "prefill over a warm cache")
    yield _paged("pages_of_64", 1, 65, [2, 0], 64, "one position in the last page")
    yield _paged("last_page_of_one", 1, 33, [4, 1, 3], 16, "one position in the last page")
    yield _paged("window", 4, 90, [8, 1, 6, 3, 0, 5], 16, "pages behind the window", window=20)
    yield _paged(
        "window_page_edge", 1, 64, [3, 1, 2, 0], 16, "the window ends at a page's edge", window=32
    )
    yield _paged("softcap", 2, 40, [2, 0, 1], 16, "softcap over scattered pages", softcap=5.0)
    note = "a page holds its slots one after the other, each with all its heads"
    yield _paged("kv_heads_3", 5, 37, [4, 1, 3, 0, 2], 8, note, heads=(6, 3, 8))
    note = "one row with every option, a scale of its own among them"
    about: dict[str, Any] = {"window": 20, "softcap": 5.0, "scale": 0.5}
    yield _paged("decode_everything", 1, 43, [5, 2, 0, 3, 6, 1], 8, note, heads=(4, 2, 8), **about)
    table = [(7 * i) % 311 for i in range(300)]
    yield _paged("many_pages", 1, 300, table, 1, "more pages than 8 bits number", heads=(1, 1, 2))


def _stored() -> Iterator[Recipe]:
    """What each type gives back: ties, subnormals, overflow, rows of zeros."""
    edges = array32(
        [
            [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11],
            [65504, 65519.99, 65520, -1e30],
            [2**-24, 2**-25, 3 * 2**-26, 2**-149],
            [0.0, -0.0, 127.0, -127.0],
            [0.5, 1.5, 127.0, -2.5],
            [3.4e38, -3.4e38, 1e-40, 0.0],
        ]
    )[:, None]
    spoilt = array32([[np.nan, 1, 2, -0.0], [1, np.inf, 2, 0], [-np.inf, 3, -3, 1], [1, 2, 3, -4]])
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        values = {
            "edges": edges,
            "normal": normal(f"cache/store_kv/{dtype}", 5, 2, 33),
            "not_finite": spoilt[:, None],
        }
        for name, x in values.items():
            yield Recipe(f"cache/store_kv/{dtype}_{name}", "11.2", {"dtype": dtype}, {"x": x})


_SCRIPTS: dict[str, tuple[int, str, list[tuple[int, int, int]]]] = {
    "append": (16, "one page a 16 positions", [(APPEND, 0, n) for n in (1, 15, 1, 16, 40)]),
    "fork_and_write": (
        16,
        "the first to write a shared page that is partly filled copies it, the second does not",
        [(APPEND, 0, 20), (FORK, 0, 1), (APPEND, 1, 1), (APPEND, 0, 1), (FREE, 0, 0), (FREE, 1, 0)],
    ),
    "fork_at_an_edge": (
        16,
        "a full page is never copied",
        [(APPEND, 0, 32), (FORK, 0, 1), (APPEND, 1, 5), (APPEND, 0, 40), (FREE, 1, 0)],
    ),
    "truncate": (
        16,
        "a page goes when its first position does",
        [
            (APPEND, 0, 50),
            (TRUNCATE, 0, 49),
            (TRUNCATE, 0, 48),
            (TRUNCATE, 0, 33),
            (TRUNCATE, 0, 0),
        ],
    ),
    "truncate_shared": (
        16,
        "going back into a shared page and writing there copies it",
        [
            (APPEND, 0, 40),
            (FORK, 0, 1),
            (TRUNCATE, 1, 20),
            (APPEND, 1, 1),
            (APPEND, 1, 30),
            (FREE, 0, 0),
            (FREE, 1, 0),
        ],
    ),
    "three_forks": (
        8,
        "of three that write, two copy",
        [
            (APPEND, 0, 12),
            (FORK, 0, 1),
            (FORK, 1, 2),
            (APPEND, 0, 1),
            (APPEND, 1, 1),
            (APPEND, 2, 1),
            (FREE, 1, 0),
            (APPEND, 2, 9),
        ],
    ),
    "pages_of_1": (
        1,
        "pages of one position are never partly filled",
        [(APPEND, 0, 5), (FORK, 0, 1), (APPEND, 1, 2), (TRUNCATE, 0, 3), (APPEND, 0, 1)],
    ),
    "nothing": (4, "appending nothing takes nothing", [(APPEND, 0, 0), (FORK, 0, 1), (FREE, 0, 0)]),
    "nothing_to_a_shared_page": (
        4,
        "nor does it copy a shared page; the first to write there does",
        [
            (APPEND, 0, 6),
            (FORK, 0, 1),
            (APPEND, 1, 0),
            (APPEND, 0, 0),
            (APPEND, 1, 1),
            (APPEND, 0, 0),
            (APPEND, 0, 1),
        ],
    ),
}


def _tables() -> Iterator[Recipe]:
    for name, (size, note, script) in _SCRIPTS.items():
        inputs = {"script": np.array(script, np.int64)}
        yield Recipe(f"cache/paging/{name}", "11.1", {"page_size": size}, inputs, note=note)


def _hashes() -> Iterator[Recipe]:
    """The chain: whole pages alone, and every ingredient of the root."""
    tokens = integers("cache/page_hashes", 1024, 37)
    plain = {"page_size": 16, "digest": "00" * 32, "dtype": "float32", "salt": ""}
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "pages_of_16": (37, {}),
        "pages_of_8": (37, {"page_size": 8}),
        "salt": (37, {"salt": "tenant é"}),
        "type": (37, {"dtype": "int8"}),
        "digest": (37, {"digest": "ff" * 32}),
        "short": (15, {}),
        "one_page": (16, {}),
    }
    for name, (count, options) in cases.items():
        inputs = {"tokens": tokens[:count]}
        yield Recipe(f"cache/page_hashes/{name}", "11.3", {**plain, **options}, inputs)
    large = {"tokens": np.array([0, 255, 256, 65_535, 65_536, 131_072, 2**24 + 1, 2**31 - 1])}
    note = "ids of up to 31 bits; a salt is kept as it is: capitals, spaces, uncomposed letters"
    about = {**plain, "page_size": 2, "salt": " Te\u0301nant \ufb01 "}
    yield Recipe("cache/page_hashes/large_ids", "11.3", about, large, note=note)


def _reused() -> Iterator[Recipe]:
    """Prompts one after the other: what each finds of those before."""
    a, b, c = (integers(f"cache/prefix_reuse/{n}", 1024, 60) for n in "abc")

    def joined(*parts: Ints) -> Ints:
        return np.concatenate(parts)

    cases: dict[str, tuple[int, str, list[Ints]]] = {
        "growing": (
            64,
            "a conversation that grows",
            [a[:20], joined(a[:20], b[:9]), joined(a[:20], b[:30])],
        ),
        "same_twice": (
            64,
            "the last token of a prompt is always computed",
            [a[:33], a[:33], a[:32]],
        ),
        "partial_page": (64, "prefixes need not end with a page", [a[:40], joined(a[:21], b[:5])]),
        "within_a_page": (64, "nor fill one", [a[:40], joined(a[:3], b[:5]), joined(a[:9], c[:5])]),
        "longest_wins": (
            64,
            "the longest of several",
            [joined(a[:16], b[:8]), joined(a[:30], c[:8]), joined(a[:30], b[:9])],
        ),
        "branches": (
            64,
            "an edit in the middle keeps what comes before it",
            [a[:50], joined(a[:25], b[:1], a[26:50]), joined(a[:50], c[:3])],
        ),
        "least_recently_used": (
            9,
            "room for three; the fourth takes the place of the one not used last",
            [a[:40], b[:40], c[:40], joined(a[:40], c[40:44]), b[:40], c[:40], a[:40]],
        ),
        "used_last": (
            9,
            "room for three; one that was only looked into counts as used",
            [a[:40], b[:40], c[:40], joined(a[:20], c[50:60]), a[:40], b[:40]],
        ),
        "equal_prefixes": (
            8,
            "of two that serve alike, the one used last is used, and the other is given up",
            [
                joined(a[:20], b[:20]),
                joined(a[:20], c[:20]),
                joined(a[:20], b[40:44]),
                b[:40],
                joined(a[:20], c[:20]),
            ],
        ),
        "ids_apart": (
            64,
            "ids that are equal in 8 or in 16 bits are not the same",
            [a[:20], a[:20] + 65_536 * (np.arange(20) == 9), a[:20] + 256 * (np.arange(20) == 5)],
        ),
        "one_token": (64, "nothing of a prompt of one token is reused", [a[:1], a[:1], a[:2]]),
    }
    for name, (pages, note, prompts) in cases.items():
        parameters = {"page_size": 16, "pages": pages}
        yield Recipe(f"cache/prefix_reuse/{name}", "11.3", parameters, packed(prompts), note=note)


def _moved() -> Iterator[Recipe]:
    """Keys turned to other positions: the sum of their shifts, back and forth."""
    k: F32 = normal("cache/rope/k", 7, 2, 32)
    inv_freq = array32([10000.0 ** (-i / 16) for i in range(16)])
    parameters = {"factor": 1.0, "interleaved": False}
    for name, shifts in (
        ("back", [-1, -7, -32, -255, -1000, -4095, 0]),
        ("forth", [1, 7, 32, 255, 1000, 4095, 65535]),
    ):
        positions: Array = np.array(shifts, np.int64)
        inputs = {"x": k, "positions": positions, "inv_freq": inv_freq}
        at = f"cache/rope/shift_{name}"
        yield Recipe(at, "11.5", parameters, inputs, ("bits", "either"), forms=rope_forms)


def recipes() -> Iterator[Recipe]:
    """Every golden of the cache that needs no model."""
    yield from _attention()
    yield from _stored()
    yield from _tables()
    yield from _hashes()
    yield from _reused()
    yield from _moved()
