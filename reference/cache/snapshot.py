"""A sequence's cache to a file and back (SPEC 11.4).

The file is safetensors. Its last tensor is the sha256 of every byte before it, so that a file in
which a single bit was changed is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as to_safetensors

from reference.cache.pages import PagePool
from reference.cache.prefix import is_salt
from reference.cache.sequence import KVCache, first_seen
from reference.config import show
from reference.errors import CacheError, WeightsError
from reference.loading.safetensors_file import DTYPES, SafetensorsFile, open_safetensors
from reference.loading.strict_json import parse_object

FORMAT, VERSION = "bitforbit-cache", 1

Arrays = dict[str, NDArray[Any]]

_DIGEST = 32
_DTYPES = {
    **DTYPES, "I64": np.dtype("<i8"), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)
}  # fmt: skip
_ANEW = "delete it, and compute the prompt again"


def save(path: Path, cache: KVCache, tokens: Sequence[int], digest: str, salt: str = "") -> None:
    """Write what a cache holds, and the tokens that filled it, at once or not at all (SPEC 11.4).

    tokens: one for each position. digest: of the model. salt: the user's (SPEC 11.3). Raises
    CacheError where the file cannot be written; one that was there before is then unchanged.
    """
    if len(tokens) != cache.length:
        raise CacheError(
            f"{path}: the cache holds {cache.length} positions, not {len(tokens)}; "
            "give the tokens that filled it"
        )
    if not is_salt(salt):
        raise CacheError(f"{path}: the salt {show(salt)} is no Unicode text; give one that is")
    tensors: Arrays = {"tokens": np.array(tokens, "<i8")}
    for index, view in enumerate(cache.views()):
        stored = view.stored(view.start, view.length)
        tensors |= {_name(index, kind): array for kind, array in stored.items()}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "model": digest,
        "kv_dtype": cache.pool.shape.dtype,
        "salt": salt,
        "exact": cache.exact,
    }
    # The library orders tensors by falling size of their type, then by name: this one is the last.
    tensors["sha256"] = np.zeros(_DIGEST, np.uint8)
    content = to_safetensors(tensors, {"cache": json.dumps(about, sort_keys=True)})
    body = memoryview(content)[:-_DIGEST]
    _write(path, body, hashlib.sha256(body).digest())


def _name(layer: int, kind: str) -> str:
    return f"layers.{layer}.{kind}"


def _write(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file under another name, and rename it once it is on the disk."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as reason:
        raise CacheError(f"{path}: {reason.strerror}; check the path and the room there") from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def restore(path: Path, pool: PagePool, digest: str) -> tuple[list[int], str, KVCache]:
    """The tokens, the salt and the cache that `save` wrote, in pages of a pool (SPEC 11.4).

    digest: of the model. Raises CacheError where the file is not a whole cache file of this model
    and of the pool's shape, or where the pool has no room; nothing has changed then.
    """
    try:
        file = open_safetensors(path, _DTYPES)
        about = _about(file)
        _same(file, "model", about["model"], digest)
        _same(file, "kv_dtype", about["kv_dtype"], pool.shape.dtype)
        starts = _starts(file, pool)
        tensors = _unaltered(file)
    except WeightsError as reason:
        raise CacheError(str(reason)) from None
    tokens = tensors["tokens"].tolist()
    cache = _filled(KVCache(pool, starts), len(tokens), tensors, about["exact"])
    return tokens, about["salt"], cache


def _about(file: SafetensorsFile) -> dict[str, Any]:
    """The metadata of a cache file of this version. Raises CacheError for any other file."""
    text = file.metadata.get("cache")
    if not isinstance(text, str):
        raise CacheError(f"{file.path}: this is not a cache file; check the path")
    about = parse_object(text.encode(errors="replace"), f"{file.path}: metadata", CacheError)
    if about.get("format") != FORMAT:
        raise CacheError(f"{file.path}: this is not a cache file; check the path")
    if about.get("version") != VERSION:
        raise CacheError(
            f"{file.path}: version {show(about.get('version'))} of the format is not known, only "
            f"{VERSION}; {_ANEW}"
        )
    for key in ("model", "kv_dtype", "salt"):
        if not isinstance(about.get(key), str):
            raise CacheError(f"{file.path}: metadata: {key} is not a text; {_ANEW}")
    if not is_salt(about["salt"]):
        raise CacheError(f"{file.path}: metadata: salt is no Unicode text; {_ANEW}")
    if not isinstance(about.get("exact"), bool):
        raise CacheError(f"{file.path}: metadata: exact is neither true nor false; {_ANEW}")
    return about


def _same(file: SafetensorsFile, key: str, found: str, expected: str) -> None:
    if found != expected:
        raise CacheError(
            f"{file.path}: {key} is {show(found)}, not {show(expected)}; restore it where it was "
            "saved, or compute the prompt again"
        )


def _starts(file: SafetensorsFile, pool: PagePool) -> list[int]:
    """The first position of each group. Raises CacheError for tensors that the pool has not."""
    rows = {n: e.shape[-2] if len(e.shape) > 1 else 0 for n, e in file.entries.items()}
    length = math.prod(file.entries["tokens"].shape) if "tokens" in file.entries else 0
    expected: dict[str, tuple[tuple[int, ...], Any]] = {
        "tokens": ((length,), np.int64),
        "sha256": ((_DIGEST,), np.uint8),
    }
    starts = []
    for group in pool.groups:
        held = rows.get(_name(group.layers[0], "k"), 0)
        starts.append(length - held)
        for layer in group.layers:
            kinds = pool.shape.stored(held).items()
            expected |= {_name(layer, kind): of_kind for kind, of_kind in kinds}
    for name in sorted(expected.keys() | file.entries.keys()):
        entry = file.entries.get(name)
        if name not in expected or entry is None or (entry.shape, entry.dtype) != expected[name]:
            raise CacheError(
                f"{file.path}: tensor {show(name)} is not as this cache has it; restore it with "
                "the model and the options that it was saved with"
            )
    for start, group in zip(starts, pool.groups, strict=True):
        if not 0 <= start <= first_seen(length, group.window):
            raise CacheError(f"{file.path}: it lacks positions that come next; {_ANEW}")
    return starts


def _unaltered(file: SafetensorsFile) -> Arrays:
    """All tensors but the sha256. Raises CacheError where that is not the sha256 of the others."""
    tensors, seen = dict(file.stored(list(file.entries))), hashlib.sha256(file.header)
    digest = tensors.pop("sha256")
    for array in tensors.values():
        seen.update(array.reshape(-1).view(np.uint8).data)
    if digest.tobytes() != seen.digest():
        raise CacheError(f"{file.path}: it was altered after it was written; {_ANEW}")
    return tensors


def _filled(
    cache: KVCache, length: int, tensors: Mapping[str, NDArray[Any]], exact: bool
) -> KVCache:
    """The cache, filled with `length` positions of these tensors. Raises CacheError, emptied."""
    kinds = cache.pool.shape.stored(0)
    try:
        for layer, view in enumerate(cache.extend(length)):
            view.put({kind: tensors[_name(layer, kind)] for kind in kinds})
    except BaseException:
        cache.free()
        raise
    cache.commit(length, exact)
    return cache
