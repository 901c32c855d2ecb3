"""Cache files: what was saved comes back to the bit; what was altered is refused (SPEC 11.4)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save_file
from safetensors.numpy import save as to_safetensors

from reference.cache import KVCache, KVType, PagePool, PageShape
from reference.cache.pages import LayerPages
from reference.cache.snapshot import restore, save
from reference.errors import CacheError
from reference.model import Model
from tests.oracle.arrays import assert_same
from tests.reference.cache.plain import KV_TYPES, PAGE_SIZES, rows, same
from tests.reference.models import MISTRAL_SMALL, QWEN2_SMALL, QWEN3_SMALL, small, tokens_of
from tests.reference.refusals import told

HEADS, WIDTH = 2, 6
SHAPE = PageShape(HEADS, WIDTH, (None, 5), 4)
DIGEST = "d" * 64
SALT = 'salt "\u00e4\U0001f511\n'


def filled(pool: PagePool, count: int, seed: int = 1, bad: float = 0.0) -> KVCache:
    cache, rng = KVCache(pool), np.random.default_rng(seed)
    if count:
        for view in cache.extend(count):
            view.write(*rows(rng, count, pool.shape.kv_heads, pool.shape.head_dim, bad))
        cache.commit(count)
    return cache


def written(folder: Path, shape: PageShape = SHAPE, count: int = 11, salt: str = "") -> Path:
    path = folder / "prompt.cache"
    cache = filled(PagePool(shape), count)
    cache.trim()
    save(path, cache, list(range(count)), DIGEST, salt)
    return path


def refusal(path: Path, pool: PagePool, digest: str = DIGEST) -> str:
    """The text of the error; the pool has given nothing away."""
    before = ([group.owners.tolist() for group in pool.groups], pool.used_bytes)
    with pytest.raises(CacheError) as caught:
        restore(path, pool, digest)
    assert before[1] == pool.used_bytes
    assert before[0] == [group.owners.tolist() for group in pool.groups]
    return told(caught, f"{path}: ", "cache: ")


# What comes back.


@pytest.mark.parametrize("dtype", KV_TYPES)
@given(
    count=st.integers(0, 70),
    sizes=st.tuples(st.sampled_from(PAGE_SIZES), st.sampled_from(PAGE_SIZES)),
    windows=st.sampled_from([(None,), (None, 5), (1, 17, 1)]),
    aligned=st.booleans(),
    originals=st.booleans(),
    trim=st.booleans(),
)
@settings(max_examples=25)
def test_everything_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: KVType,
    count: int,
    sizes: tuple[int, int],
    windows: tuple[int | None, ...],
    aligned: bool,
    originals: bool,
    trim: bool,
) -> None:
    """In pages of any size, non-finite values included; what was dropped is known to be so."""
    path = tmp_path_factory.getbasetemp() / "any.cache"
    shape = PageShape(HEADS, WIDTH, windows, sizes[0], dtype, aligned, originals)
    cache = filled(PagePool(shape), count, bad=0.01)
    cache.exact = trim or count == 0
    if trim:
        cache.trim()
    tokens = np.random.default_rng(count).integers(0, 2**31, count).tolist()
    save(path, cache, tokens, DIGEST, SALT)
    pool = PagePool(replace(shape, page_size=sizes[1]))
    found, salt, again = restore(path, pool, DIGEST)
    assert (found, salt) == (tokens, SALT)
    assert (again.length, again.exact) == (count, cache.exact)
    for one, two in zip(cache.views(), again.views(), strict=True):
        assert one.start == two.start
        assert same(one.stored(one.start, count), two.stored(one.start, count))
    assert [again.reaches(n) for n in range(count)] == [cache.reaches(n) for n in range(count)]
    again.free()
    assert pool.used_bytes == 0


def continuation(model: Model, cache: KVCache, tokens: Any) -> list[Any]:
    parts = np.split(tokens, [1, 2, 30])
    logits = []
    for part in parts:
        logits.append(model.forward(part, cache))
        cache.trim()
    return logits


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("config", [MISTRAL_SMALL, QWEN2_SMALL, QWEN3_SMALL])
def test_continuing_is_as_if_it_had_never_stopped(
    tmp_path: Path, config: str, dtype: KVType
) -> None:
    model = small(config)
    cache = KVCache(model.new_pool(page_size=8, kv_dtype=dtype))
    model.forward(tokens_of(60, 32), cache)
    cache.trim()
    save(tmp_path / "a", cache, tokens_of(60, 32).tolist(), model.digest)
    _, _, again = restore(
        tmp_path / "a", model.new_pool(page_size=32, kv_dtype=dtype), model.digest
    )
    rest = tokens_of(50, 32)
    expected = continuation(model, cache, rest)
    for a, b in zip(expected, continuation(model, again, rest), strict=True):
        assert_same(b, a)


def test_the_same_cache_gives_the_same_bytes(tmp_path: Path) -> None:
    first = written(tmp_path).read_bytes()
    assert written(tmp_path, replace(SHAPE, page_size=2)).read_bytes() != first  # more was dropped
    assert written(tmp_path).read_bytes() == first
    content, end = first[:-32], first[-32:]
    assert hashlib.sha256(content).digest() == end
    with safe_open(written(tmp_path), "np") as file:
        about = json.loads(file.metadata()["cache"])
        assert file.get_tensor("tokens").tolist() == list(range(11))
        assert file.get_tensor("layers.1.k").shape == (HEADS, 7, WIDTH)
    assert about == {
        "format": "bitforbit-cache",
        "version": 1,
        "model": DIGEST,
        "kv_dtype": "float32",
        "salt": "",
        "exact": True,
    }


# What is refused.


def test_a_file_cut_at_any_byte_of_its_header_is_refused(tmp_path: Path) -> None:
    path, pool = written(tmp_path), PagePool(SHAPE)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in [*range(header + 40), *range(header + 40, len(content), 61), len(content) - 1]:
        path.write_bytes(content[:length])
        refusal(path, pool)
    path.write_bytes(content)
    assert restore(path, pool, DIGEST)[0] == list(range(11))


def test_a_file_in_which_any_bit_was_changed_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, PageShape(1, 2, (None,), 4), 3)
    content = path.read_bytes()
    for place in range(len(content)):
        pool = PagePool(PageShape(1, 2, (None,), 4))
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        refusal(path, pool)
    end = 8 + int.from_bytes(content[:8], "little")
    assert content[end - 1 : end] == b" "  # JSON's own space, that nothing but the sha256 guards
    spaced = content[: end - 1] + b"\t" + content[end:]
    for longer in (content + b"\0", content[:-1], spaced):
        path.write_bytes(longer)
        refusal(path, PagePool(PageShape(1, 2, (None,), 4)))


def sealed(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change tensors and metadata of a file, and give it the right sha256 again."""
    tensors = load(path.read_bytes())
    with safe_open(path, "np") as file:
        about = json.loads(file.metadata()["cache"])
    change(tensors, about)
    content = to_safetensors(tensors, {"cache": json.dumps(about, sort_keys=True)})
    path.write_bytes(content[:-32] + hashlib.sha256(content[:-32]).digest())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t, a: a.update(version=2), "version 2 of the format is not known, only 1"),
        (lambda t, a: a.update(format="x"), "this is not a cache file"),
        (lambda t, a: a.pop("format"), "this is not a cache file"),
        (lambda t, a: a.pop("salt"), "metadata: salt is not a text"),
        (lambda t, a: a.update(salt=[1]), "metadata: salt is not a text"),
        (lambda t, a: a.update(exact=1), "metadata: exact is neither true nor false"),
        (lambda t, a: a.update(model="e"), "model is 'e', not 'ddd"),
        (lambda t, a: a.update(kv_dtype="int8"), "kv_dtype is 'int8', not 'float32'"),
        (lambda t, a: t.pop("layers.0.v"), "tensor 'layers.0.v' is not as this cache has it"),
        (lambda t, a: t.pop("layers.0.k"), "tensor 'layers.0.k' is not as"),
        (lambda t, a: t.pop("tokens"), "tensor 'layers.0.k' is not as|lacks positions|'tokens'"),
        (lambda t, a: t.update(more=np.zeros(3, np.float32)), "tensor 'more' is not as"),
        (lambda t, a: t.update(tokens=np.zeros((11, 1), np.int64)), "tensor 'tokens' is not as"),
        (lambda t, a: a.update(salt="\ud800"), "metadata: salt is no Unicode text"),
        (lambda t, a: t.update(tokens=np.zeros(11, np.float32)), "tensor 'tokens' is not as"),
        (lambda t, a: t.update(tokens=np.arange(12)), "it lacks positions that come next"),
        (lambda t, a: t.update(tokens=np.arange(10)), "it lacks positions that come next"),
        (
            lambda t, a: t.update({"layers.1.k": t["layers.1.k"][:, :-1].copy()}),
            "tensor 'layers.1.v' is not as",
        ),
        (
            lambda t, a: t.update({"layers.1.k": t["layers.1.k"].astype(np.float16)}),
            "tensor 'layers.1.k' is not as",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Any, Any], None], expected: str
) -> None:
    path, pool = written(tmp_path), PagePool(SHAPE)
    sealed(path, lambda tensors, about: None)
    restore(path, pool, DIGEST)[2].free()
    sealed(path, change)
    text = refusal(path, pool)
    assert any(part in text for part in expected.split("|"))


def test_a_file_of_another_cache_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert "model is 'ddd" in refusal(path, PagePool(SHAPE), "e" * 64)
    for changes in (
        {"dtype": "bfloat16"},
        {"originals": True},
        {"kv_heads": 1},
        {"head_dim": 8},
        {"windows": (None, 5, 5)},
        {"windows": (None,)},
        {"windows": (5, None)},
        {"windows": (None, 9)},
    ):
        refusal(path, PagePool(replace(SHAPE, **dict[str, Any](changes))))
    moved = written(tmp_path, replace(SHAPE, originals=True))
    assert "'layers.0.original'" in refusal(moved, PagePool(SHAPE))


def test_what_is_no_cache_file_is_refused(tmp_path: Path) -> None:
    path, pool = tmp_path / "a", PagePool(SHAPE)
    for content in (b"", b"hello, world", b"\xff" * 100, b"\0" * 100):
        path.write_bytes(content)
        refusal(path, pool)
    for metadata in (None, {"cache": "[]"}, {"cache": "{"}, {"cache": "[" * 9999}, {"x": ""}):
        save_file({"a": np.zeros(3, np.float32)}, path, metadata)
        refusal(path, pool)
    refusal(tmp_path / "absent", pool)
    refusal(tmp_path, pool)


def test_a_pool_without_room_gives_nothing_away(tmp_path: Path) -> None:
    path = written(tmp_path)
    pool = PagePool(SHAPE, 4 * SHAPE.layer_bytes())
    assert "raise cache_bytes" in refusal(path, pool)
    pool = PagePool(SHAPE, 5 * SHAPE.layer_bytes())
    assert restore(path, pool, DIGEST)[2].length == 11
    assert pool.used_bytes == pool.budget


def test_a_restore_that_fails_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pool, put, left = written(tmp_path), PagePool(SHAPE), LayerPages.put, [1]

    def failing(self: LayerPages, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        put(self, *arguments)

    monkeypatch.setattr(LayerPages, "put", failing)
    with pytest.raises(MemoryError):
        restore(path, pool, DIGEST)
    assert pool.used_bytes == 0
    assert not any(group.owners.any() for group in pool.groups)


# How it is written.


def test_a_salt_that_cannot_be_hashed_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"the salt '\\ud800' is no Unicode text; give"):
        written(tmp_path, salt="\ud800")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *arguments: full(0))
            with pytest.raises(CacheError, match="No space left on device; check the path"):
                written(tmp_path, count=5)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path, count=5)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    cache = filled(PagePool(SHAPE), 3)
    absent = tmp_path / "absent" / "a"
    with pytest.raises(CacheError, match=rf"^{absent}: No such file or directory; check the path"):
        save(absent, cache, [1, 2, 3], DIGEST)
    with pytest.raises(CacheError, match="Is a directory; check the path"):
        save(tmp_path, cache, [1, 2, 3], DIGEST)
    with pytest.raises(CacheError, match="the cache holds 3 positions, not 2; give the tokens"):
        save(tmp_path / "a", cache, [1, 2], DIGEST)
    assert list(tmp_path.iterdir()) == []
