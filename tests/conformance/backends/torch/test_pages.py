"""The cache: pages, their hashes and reuse, bit for bit (SPEC 11)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from conformance.backends.torch.pages import BlockTables, OutOfPagesError
from tests.conformance.backends.torch.side_by_side import (
    FLOAT32,
    TORCH,
    both,
    nasty,
    packed,
    same,
)
from tests.oracle import cache as oracle

KV_TYPES = ("float32", "float16", "bfloat16", "int8")


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_store_kv(dtype: str) -> None:
    rng = np.random.default_rng(21)
    for width in (1, 32, 33):
        both("store_kv", x=nasty(rng, 60, 2, width, specials=0.1 / width), dtype=dtype)
        both("store_kv", x=nasty(rng, 60, 2, width), dtype=dtype)
    half = (2 * rng.integers(-(2**12), 2**12, (50, 1, 40)) + 1) * 2.0**-12  # ties among them
    both("store_kv", x=half.astype(np.float32), dtype=dtype)


def test_page_hashes() -> None:
    rng = np.random.default_rng(22)
    for size in (1, 4, 256):
        for count in (0, 1, 3, 4, 300):
            tokens = rng.integers(0, 2**31, count)
            digest, salt = rng.bytes(32).hex(), str(rng.choice(["", "a", "ü"]))
            for dtype in KV_TYPES:
                about = {"page_size": size, "digest": digest, "dtype": dtype, "salt": salt}
                both("page_hashes", tokens=tokens, **about)


def paged_case(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments of one call; all that is not the sequence's is poison."""
    size, pages = int(rng.choice([1, 4, 16, 64])), int(rng.integers(1, 9))
    length = int(rng.integers((pages - 1) * size + 1, pages * size + 1))
    kv, d = int(rng.choice([1, 2])), int(rng.choice([8, 33]))
    rows = int(rng.integers(1, min(length, 9) + 1))
    table = rng.permutation(pages + 3)[:pages]
    both_pages = np.full((2, pages + 3, size, kv, d), np.nan, np.float32)
    for j in range(length):
        at = table[j // size], j % size
        both_pages[:, *at] = rng.standard_normal((2, kv, d))
    return {
        "q": rng.standard_normal((rows, 2 * kv, d)).astype(np.float32),
        "k_pages": both_pages[0],
        "v_pages": both_pages[1],
        "block_table": table.astype(np.int64),
        "length": length,
        "scale": float(np.float32(0.3)),
        "window": [None, 5, 32][rng.integers(3)],
        "softcap": [None, 2.0][rng.integers(2)],
    }


def test_paged_attention() -> None:
    rng = np.random.default_rng(23)
    for _ in range(60):
        case = paged_case(rng)
        both("paged_attention", mode="exact", **case)
        fast = [b.paged_attention(mode="fast", **case) for b in (TORCH, FLOAT32)]
        same(*fast)
        exact = TORCH.paged_attention(mode="exact", **case)
        np.testing.assert_allclose(fast[0], exact, rtol=1e-4, atol=1e-4)


def test_paging() -> None:
    rng = np.random.default_rng(24)
    copied = 0
    for _ in range(200):
        script, lengths, size = [], dict[int, int](), int(rng.choice([1, 2, 4, 16]))
        for new in range(30):
            step = int(rng.choice(4, p=[0.5, 0.25, 0.15, 0.1])) if lengths else 0
            name = int(rng.choice(list(lengths))) if lengths and rng.random() < 0.8 else 100 + new
            name = name if step == 0 or name in lengths else next(iter(lengths))
            amount = int(rng.integers(0, 3 * size + 2))
            if step == 0:
                lengths[name] = lengths.get(name, 0) + amount
            elif step == 1:
                amount = new
                lengths[amount] = lengths[name]
            elif step == 2:
                amount = lengths[name] = int(rng.integers(0, lengths[name] + 1))
            else:
                del lengths[name]
                amount = 0
            script.append((step, name, amount))
        arguments: dict[str, Any] = {"script": np.array(script), "page_size": size}
        both("paging", **arguments)
        same(TORCH.paging(**arguments), np.array(oracle.paging(script, size)), script)
        copied += int(TORCH.paging(**arguments)[-1, 2])
    assert copied > 100


def branching(rng: np.random.Generator) -> list[list[int]]:
    """Prompts that begin as earlier ones do."""
    prompts: list[list[int]] = []
    for _ in range(rng.integers(2, 12)):
        base = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.8 else []
        kept = base[: rng.integers(0, len(base) + 1)]
        prompts.append([*kept, *rng.integers(0, 3, rng.integers(1, 9)).tolist()])
    return prompts


def test_prefix_reuse() -> None:
    """Where several kept sequences have the longest prefix, which is used is left open (11.3)."""
    rng = np.random.default_rng(25)
    for _ in range(100):
        both("prefix_reuse", **packed(branching(rng)), page_size=4, pages=1000)
    given_up = 0
    for _ in range(400):
        prompts, size = branching(rng), int(rng.choice([1, 4, 8]))
        pages = max(-(-len(p) // size) for p in prompts) + int(rng.integers(0, 6))
        arguments: dict[str, Any] = {**packed(prompts), "page_size": size}
        try:
            expected = oracle.prefix_reuse([tuple(p) for p in prompts], size, pages)
        except AssertionError:
            continue
        both("prefix_reuse", **arguments, pages=pages)
        same(TORCH.prefix_reuse(**arguments, pages=pages), np.array(expected), prompts)
        given_up += expected != TORCH.prefix_reuse(**arguments, pages=1000).tolist()
    assert given_up > 30


def test_what_pages_refuse() -> None:
    with pytest.raises(OutOfPagesError):
        TORCH.prefix_reuse(**packed([[1] * 9]), page_size=4, pages=2)
    with pytest.raises(ValueError, match="lengths of 3"):
        TORCH.prefix_reuse(np.arange(4), np.array([1, 2]), page_size=4, pages=2)
    for script, named in (([(0, 0, 1), (0, 1, 1), (1, 0, 1)], "1 is there"), ([(4, 0, 0)], "4 is")):
        with pytest.raises(ValueError, match=named):
            TORCH.paging(np.array(script), page_size=4)


def test_what_has_no_room_changes_nothing() -> None:
    blocks = BlockTables(4, limit=3)
    blocks.create(0)
    blocks.append(0, 6)
    blocks.fork(0, 1)
    before = blocks.counts(), dict(blocks.lengths), {n: list(t) for n, t in blocks.tables.items()}
    with pytest.raises(OutOfPagesError):
        blocks.append(1, 3)  # a copy and a page more
    assert before == (blocks.counts(), blocks.lengths, blocks.tables)
    blocks.append(1, 2)
    assert blocks.counts() == (3, 1, 1)
