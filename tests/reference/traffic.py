"""Requests of all kinds in one engine, each compared with itself alone (SPEC 14.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reference.cache import KVCache, KVType
from reference.engine import Engine
from reference.model import Model
from reference.request import Request
from reference.sampling import Sampling
from tests.oracle.arrays import Float32
from tests.reference.models import small

GREEDY = Sampling()


@dataclass(frozen=True)
class Asked:
    """A request, as plain data."""

    prompt: tuple[int, ...]
    count: int
    sampling: Sampling = GREEDY
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    salt: str = ""
    reuse: bool = True

    def options(self) -> dict[str, Any]:
        return {
            "sampling": self.sampling,
            "seed": self.seed,
            "stop_tokens": self.stop_tokens,
            "cache_salt": self.salt,
            "cache_prompt": self.reuse,
        }


@dataclass
class Sent:
    """A request on its way, and what came of it so far."""

    asked: Asked
    request: Request
    rows: list[Float32] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def send(engine: Engine, asked: Asked) -> Sent:
    rows: list[Float32] = []
    tokens: list[int] = []

    def take(token: int, logits: Float32) -> None:
        tokens.append(token)
        rows.append(logits.copy())

    request = engine.submit(asked.prompt, asked.count, on_token=take, **asked.options())
    return Sent(asked, request, rows, tokens)


def drain(engine: Engine, most: int = 5000) -> None:
    """Step until nothing is left to do."""
    for _ in range(most):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("the engine hangs")


def drafter(name: str | None) -> Literal["ngram"] | Model | None:
    """A draft by name: none, n-grams, or the small model of that configuration."""
    return name if name is None or name == "ngram" else small(name)  # type: ignore[return-value]


@cache
def alone(
    config: str, asked: Asked, kv_dtype: KVType, draft: str | None = None, draft_tokens: int = 4
) -> tuple[tuple[int, ...], bytes, str]:
    """Tokens, logits and reason of a request that has a fresh engine, with room, to itself."""
    engine = Engine(
        small(config),
        kv_dtype=kv_dtype,
        cache_bytes=1 << 24,
        draft=drafter(draft),
        draft_tokens=draft_tokens,
    )
    sent = send(engine, asked)
    drain(engine)
    return tuple(sent.tokens), bits(sent.rows), sent.request.result().stop


def expected(
    config: str, asked: Asked, kv_dtype: KVType, draft: str | None = None, draft_tokens: int = 4
) -> tuple[tuple[int, ...], bytes, str]:
    """`alone`; a greedy request is compared with plain decoding, whatever was drafted."""
    asked = replace(asked, salt="", reuse=True)
    if asked.sampling.temperature == 0:
        return alone(config, asked, kv_dtype)
    return alone(config, asked, kv_dtype, draft, draft_tokens)


def bits(rows: Sequence[Float32]) -> bytes:
    return b"".join(row.tobytes() for row in rows)


def room(
    model: Model,
    positions: int,
    page_size: int,
    kv_dtype: KVType = "float32",
    draft: str | None = None,
) -> int:
    """Bytes of the pages of so many positions, in every layer, and of a draft model's as many."""
    pools, drafted = [model.new_pool(None, page_size, kv_dtype)], drafter(draft)
    if isinstance(drafted, Model):
        pools.append(drafted.new_pool(None, page_size))
    pages = -(-positions // page_size)
    return sum(pool.bytes_for([pages] * len(pool.groups)) for pool in pools)


def held(engine: Engine) -> list[KVCache]:
    """Every cache that the engine knows of."""
    tasks = [*engine.scheduler.running, *engine.scheduler.waiting]
    caches = [kept.cache for kept in engine.prefixes._kept.values()]
    return caches + [c for task in tasks for c in (task.cache, task.source) if c is not None]


def check_owners(engine: Engine) -> None:
    """Each page has as many owners as tables that name it, and the bytes in use are theirs."""
    used = 0
    for number, group in enumerate(engine.pool.groups):
        tables = [np.array(held_.tables[number].pages, np.int64) for held_ in held(engine)]
        named: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *tables])
        owners = np.bincount(named, minlength=len(group.owners))
        np.testing.assert_array_equal(owners, group.owners)
        used += group.page_bytes * int((owners > 0).sum())
    assert engine.pool.used_bytes == used
    assert engine.pool.budget is None or used <= engine.pool.budget


def check_empty(engine: Engine) -> None:
    """Nothing is left but what is kept on purpose, and nothing at all once that is given up."""
    assert not engine.busy
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    check_owners(engine)
    engine.prefixes.evict(engine.pool.used_bytes)
    assert len(engine.prefixes) == 0
    assert engine.pool.used_bytes == 0
    assert all((group.owners == 0).all() for group in engine.pool.groups)
