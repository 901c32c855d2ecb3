"""Prefix reuse: as long as a comparison with every sequence kept finds, and of nothing else.

SPEC 11.3.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache as cached
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reference.cache import KVCache, PagePool, PageShape
from reference.cache.prefix import Ints, PageHash, PrefixIndex, page_hash, root_hash
from reference.engine import Engine
from reference.errors import CacheError
from reference.model import Model
from tests.oracle.arrays import Float32
from tests.reference.models import (
    LLAMA_SMALL,
    MISTRAL_SMALL,
    QWEN2_SMALL,
    QWEN3_SMALL,
    small,
    tiny,
    tokens_of,
)
from tests.reference.traffic import (
    Asked,
    bits,
    check_empty,
    check_owners,
    drain,
    expected,
    room,
    send,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def one_bit(before: bytes, tokens: Ints) -> bytes:
    """A page hash with two values, so that nearly everything collides."""
    return bytes([(sum(before) + int(tokens.sum())) % 2])


def constant(before: bytes, tokens: Ints) -> bytes:
    return b"0"


HASHES = {"sha256": page_hash, "one bit": one_bit, "constant": constant}


# the hashes


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    st.sampled_from(["", "s", "a\0b", "é"]),
    st.sampled_from(["float32", "int8"]),
)
def test_the_chain_is_what_the_text_says(tokens: list[int], salt: str, dtype: str) -> None:
    root = hashlib.sha256(b"bitforbit\0" + b"ab12\0" + dtype.encode() + b"\0" + salt.encode())
    assert root_hash("ab12", dtype, salt) == root.digest()
    packed = b"".join(struct.pack("<I", token) for token in tokens)
    assert page_hash(b"before", np.array(tokens)) == hashlib.sha256(b"before" + packed).digest()


def test_the_root_depends_on_each_of_its_parts() -> None:
    parts = [("m", "float32", ""), ("n", "float32", ""), ("m", "int8", ""), ("m", "float32", "x")]
    assert len({root_hash(*each) for each in parts}) == 4


# against a comparison with every sequence


def marks(tokens: Sequence[int]) -> Float32:
    """One row a position that depends on all tokens up to it, as keys of a model do."""
    rows, seen = [], 1
    for token in tokens:
        seen = (seen * 31 + token + 1) % 65521
        rows.append(seen)
    return np.array(rows, np.float32).reshape(-1, 1, 1)


def fill(cache: KVCache, tokens: Sequence[int]) -> None:
    """Append the tokens that the cache does not hold yet."""
    start = cache.length
    rows = marks(tokens)[start:]
    if len(rows):
        for view in cache.extend(len(rows)):
            view.write(rows, -rows)
        cache.commit(len(rows))


def content(cache: KVCache) -> list[Float32]:
    return [view.stored(view.start, cache.length)["k"][0, :, 0] for view in cache.views()]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


TOKENS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "", "mine"])


class Kept(RuleBasedStateMachine):
    """Sequences are kept, matched and evicted, and a plain list does the same."""

    index: PrefixIndex

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from([(None,), (3,), (None, 3), (2, 5)]),
        hash_page=st.sampled_from(sorted(HASHES)),
    )
    def start(self, page_size: int, windows: tuple[int | None, ...], hash_page: str) -> None:
        shape = PageShape(1, 1, windows, page_size, aligned=False)
        self.pool = PagePool(shape, 40 * shape.layer_bytes() * len(windows))
        self.index = PrefixIndex(self.pool, "digest", HASHES[hash_page])
        self.kept: list[tuple[list[int], str, KVCache]] = []  # the least recently used first

    def best(self, tokens: list[int], salt: str, exact: bool) -> int:
        lengths = [
            length
            for other, whose, cache in self.kept
            if whose == salt
            and (cache.exact or not exact)
            and cache.reaches(length := common(other, tokens[:-1]))
        ]
        return max(lengths, default=0)

    @rule(tokens=TOKENS, salt=SALTS, exact=st.sampled_from([True, True, False]))
    def keep(self, tokens: list[int], salt: str, exact: bool) -> None:
        """As a request would: match, compute the rest, keep the result."""
        wanted = self.best(tokens, salt, exact)
        cache, source = self.index.match(tokens, salt, exact)
        assert cache.length == wanted
        self.use(source)
        fill(cache, tokens)
        cache.exact &= exact
        cache.trim()
        self.kept = [
            (other, whose, held)
            for other, whose, held in self.kept
            if held.length  # else it was evicted to make room
            and not (
                whose == salt
                and other == tokens[: len(other)]
                and cache.reaches(len(other))
                and (cache.exact or not held.exact)
            )
        ]
        self.index.keep([*tokens, 99], salt, cache)
        self.kept.append((tokens, salt, cache))

    def use(self, source: Any) -> None:
        """What was matched is now the most recently used."""
        self.kept.sort(key=lambda one: source is not None and one[2] is source.cache)

    @rule(tokens=TOKENS, salt=SALTS, exact=st.booleans())
    def match(self, tokens: list[int], salt: str, exact: bool) -> None:
        wanted = self.best(tokens, salt, exact)
        cache, source = self.index.match(tokens, salt, exact)
        assert cache.length == wanted < len(tokens)
        assert (source is None) == (wanted == 0)
        for view, rows in zip(cache.views(), content(cache), strict=True):
            np.testing.assert_array_equal(rows, marks(tokens)[view.start : wanted, 0, 0])
        self.use(source)
        cache.free()

    @rule(salt=SALTS)
    def latest(self, salt: str) -> None:
        found, own = self.index.latest(salt), [one for one in self.kept if one[1] == salt]
        assert (found is None) == (not own)
        if found is not None:
            assert found.cache is own[-1][2]
            assert found.tokens.tolist() == own[-1][0]

    @rule(pages=st.integers(1, 6))
    def evict(self, pages: int) -> None:
        """The least recently used first, and no more than needed."""
        size = pages * self.pool.groups[0].page_bytes
        before = self.pool.used_bytes
        self.index.evict(size)
        gone = [one for one in self.kept if not one[2].length]
        assert gone == self.kept[: len(gone)]
        assert before - self.pool.used_bytes >= size or len(gone) == len(self.kept)
        self.kept = self.kept[len(gone) :]

    @invariant()
    def pages_have_owners(self) -> None:
        if not hasattr(self, "index"):
            return
        assert len(self.index) == len(self.kept)
        for number, group in enumerate(self.pool.groups):
            named = [p for _, _, cache in self.kept for p in cache.tables[number].pages]
            owners = np.bincount(np.array(named, np.int64), minlength=len(group.owners))
            np.testing.assert_array_equal(owners, group.owners)

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.evict(self.pool.used_bytes)
            assert self.pool.used_bytes == len(self.index) == 0
            assert self.index._by_hash == {}


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=60, stateful_step_count=25)


def index_of(budget: int | None = None, hash_page: PageHash = page_hash) -> PrefixIndex:
    shape = PageShape(1, 1, (None,), 4, aligned=False)
    return PrefixIndex(
        PagePool(shape, None if budget is None else budget * shape.layer_bytes()), "m", hash_page
    )


def keep(index: PrefixIndex, tokens: Sequence[int], salt: str = "", exact: bool = True) -> KVCache:
    cache = KVCache(index._pool)
    fill(cache, tokens)
    cache.exact = exact
    index.keep([*tokens, 1], salt, cache)
    return cache


def reused(index: PrefixIndex, tokens: Sequence[int], salt: str = "", exact: bool = True) -> int:
    cache, _ = index.match(tokens, salt, exact)
    length = cache.length
    cache.free()
    return length


@pytest.mark.parametrize("name", HASHES)
def test_whole_and_partial_pages(name: str) -> None:
    """Pages of 4: a prefix of any length is found, in the first page too."""
    index = index_of(hash_page=HASHES[name])
    keep(index, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    keep(index, [1, 2, 3, 4, 9])
    for length in range(1, 11):
        prompt = [*range(1, length + 1), 50, 51]
        assert reused(index, prompt) == length
    assert reused(index, [50, 1, 2, 3]) == 0
    assert reused(index, [1, 2, 3, 4, 9, 9]) == 5


@pytest.mark.parametrize("name", HASHES)
def test_a_collision_hides_no_sequence_without_a_whole_page(name: str) -> None:
    index = index_of(hash_page=HASHES[name])
    keep(index, [0, 1, 2])
    keep(index, [0, 9, 9, 9, 9, 9])
    assert reused(index, [0, 1, 2, 7, 7, 7, 7, 7]) == 3


@pytest.mark.parametrize("length", range(1, 11))
def test_the_last_token_is_computed(length: int) -> None:
    index = index_of()
    keep(index, range(10))
    assert reused(index, range(length)) == length - 1


def test_what_is_not_exact_is_for_those_who_ask_for_it() -> None:
    index = index_of()
    keep(index, range(10), exact=False)
    keep(index, range(6))
    assert len(index) == 2
    assert reused(index, range(20)) == 6
    assert reused(index, range(20), exact=False) == 10
    keep(index, range(12))
    assert len(index) == 1, "what is exact serves all"
    assert reused(index, range(20), exact=False) == 12


def test_a_sequence_that_is_not_exact_replaces_none_that_is() -> None:
    index = index_of()
    keep(index, range(6))
    keep(index, range(10), exact=False)
    assert reused(index, range(20)) == 6


def test_the_least_recently_used_goes_first() -> None:
    index = index_of(budget=6)
    first, second, third = (keep(index, [start] * 8) for start in (1, 2, 3))
    assert reused(index, [1] * 9) == 8
    fourth = keep(index, [4] * 8)
    assert [c.length for c in (first, second, third, fourth)] == [8, 0, 8, 8]
    keep(index, [5] * 13)
    assert [c.length for c in (first, third, fourth)] == [0, 0, 8]


def test_eviction_stops_once_there_is_room() -> None:
    index = index_of(budget=6)
    caches = [keep(index, [start] * 8) for start in (1, 2, 3)]
    index.evict(1)
    assert [cache.length for cache in caches] == [0, 8, 8]
    assert index._pool.make_room(2 * index._pool.groups[0].page_bytes)
    assert len(index) == 2


def test_a_copy_takes_no_page_where_only_kept_sequences_share_it() -> None:
    """The prompt needs all pages, and so the one that it would copy if anyone else held it."""
    index = index_of(budget=2)
    keep(index, [1] * 6)
    cache, _ = index.match([1] * 6 + [2, 2], "")
    cache.extend(2)
    assert (len(cache.tables[0].pages), len(index)) == (2, 0)


def test_nothing_is_given_up_where_a_copy_is_made_all_the_same() -> None:
    """Another sequence in use has the page too, so that giving up the kept one is not enough."""
    index = index_of(budget=2)
    keep(index, [1] * 6)
    (cache, _), (other, _) = (index.match([1] * 6 + [2, 2], "") for _ in range(2))
    with pytest.raises(CacheError, match="are in use"):
        cache.extend(2)
    assert (len(index), cache.length, other.length) == (1, 6, 6)


def test_a_long_chat_is_kept_once() -> None:
    index = index_of()
    for length in range(1, 40):
        keep(index, range(length))
        assert len(index) == 1
    keep(index, [0, 1, 2, 99])
    keep(index, range(40), "mine")
    assert len(index) == 3


# in the engine: what changes the values is in the key


def run(engine: Engine, asked: Asked, **options: Any) -> tuple[int, bytes]:
    """How many tokens were reused, and the bits of all logits."""
    rows: list[Float32] = []
    result = engine.generate(
        asked.prompt,
        asked.count,
        stop_tokens=(),
        on_token=lambda token, logits: rows.append(logits.copy()),
        **options,
    )
    assert result.cache_n + result.prompt_n == len(asked.prompt)
    return result.cache_n, bits(rows)


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("config", [LLAMA_SMALL, MISTRAL_SMALL, QWEN2_SMALL])
def test_collisions_are_harmless(config: str, name: str) -> None:
    engine = Engine(small(config), page_size=4)
    index = PrefixIndex(engine.pool, engine.model.digest, HASHES[name])
    engine.prefixes = engine.scheduler.prefixes = index
    rng = np.random.default_rng(3)
    stem, reused_ = rng.integers(0, 32, 40).tolist(), 0
    for cut in [40, 33, 21, 40, 7, 33, 21]:
        asked = Asked((*stem[:cut], *rng.integers(0, 32, 5).tolist()), 5)
        cache_n, logits = run(engine, asked)
        reused_ += cache_n
        assert logits == expected(config, asked, "float32")[1]
        check_owners(engine)
    assert reused_ >= (10 if config == MISTRAL_SMALL else 0)
    if config == LLAMA_SMALL:
        assert reused_ >= 33 + 21 + 40 + 7 + 33 + 21
    check_empty(engine)


@pytest.mark.parametrize("config", [LLAMA_SMALL, QWEN3_SMALL])
@given(data=st.data())
@settings(max_examples=12)
def test_reuse_counts_as_a_comparison_with_all_would(config: str, data: st.DataObject) -> None:
    engine = Engine(small(config), page_size=data.draw(st.sampled_from([1, 4, 16])))
    known: list[list[int]] = []
    for _ in range(5):
        prompt = data.draw(st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=24))
        result = engine.generate(prompt, 2, stop_tokens=())
        assert result.cache_n == max((common(prompt[:-1], one) for one in known), default=0)
        assert result.cache_n + result.prompt_n == len(prompt)
        assert result.prompt_n >= 1
        known.append(prompt + result.tokens[:-1])
    check_empty(engine)


def test_salts_and_options_part_requests() -> None:
    engine, asked = Engine(small(LLAMA_SMALL)), Asked((5, 6, 7, 8, 9, 10), 4)
    assert run(engine, asked, cache_salt="a")[0] == 0
    assert run(engine, asked)[0] == 0
    assert run(engine, asked, cache_salt="b")[0] == 0
    assert run(engine, asked, cache_salt="a")[0] == 5
    assert run(engine, asked, cache_prompt=False)[0] == 0
    fresh = Engine(small(LLAMA_SMALL))
    run(fresh, asked, cache_prompt=False)
    assert len(fresh.prefixes) == 0
    assert fresh.pool.used_bytes == 0


@cached
def digests() -> dict[str, str]:
    model = small(LLAMA_SMALL)
    head = model.weights.final_norm.copy()
    head[3] = np.nextafter(head[3], np.float32(2))
    models: dict[str, Model] = {
        "itself": model,
        "another family": small(QWEN3_SMALL),
        "int4": small(LLAMA_SMALL, "int4"),
        "int4 by row": small(LLAMA_SMALL, "int4-row"),
        "float32 arithmetic": small(LLAMA_SMALL, "float32", "float32"),
        "one bit of one weight": replace(model, weights=replace(model.weights, final_norm=head)),
        "a window": replace(model, config=replace(model.config, windows=(5, 5))),
        "another epsilon": replace(model, config=replace(model.config, rms_norm_eps=2e-5)),
    }
    return {name: one.digest for name, one in models.items()}


def test_models_that_compute_other_values_have_other_digests() -> None:
    assert len(set(digests().values())) == len(digests())
    again = replace(small(LLAMA_SMALL), eos_tokens=(7,))
    assert again.digest == digests()["itself"], "where a text ends changes no value"


def test_the_key_has_the_model_and_the_type() -> None:
    indexes = [
        PrefixIndex(small(LLAMA_SMALL).new_pool(1 << 20, 4, kv_dtype), digest)
        for kv_dtype in ("float32", "int8")
        for digest in list(digests().values())[:3]
    ]
    roots = {index._hashes(np.arange(9), "")[0] for index in indexes}
    ends = {index._hashes(np.arange(9), "")[2] for index in indexes}
    assert len(roots) == len(ends) == len(indexes)


# fast attention (SPEC 8.4)


def test_a_request_that_is_due_exact_values_gets_them() -> None:
    """Pages of a prompt above the floor serve others above the floor alone."""
    stem = tuple(tokens_of(600, 32).tolist())
    engine = Engine(small(LLAMA_SMALL))
    run(engine, Asked(stem, 3))
    short, long = Asked((*stem[:300], 3), 4), Asked((*stem, 3, 4), 4)
    assert run(engine, short) == (0, run(Engine(small(LLAMA_SMALL)), short)[1])
    exact = run(engine, long, exact_prefill=True)
    assert exact == (301 - 1, run(Engine(small(LLAMA_SMALL), True), long)[1])
    again = Asked((*stem, 9), 3)
    assert run(engine, again, exact_prefill=True) == (
        600,
        run(Engine(small(LLAMA_SMALL), True), again)[1],
    )


def test_what_goes_on_from_fast_pages_is_not_exact_either() -> None:
    stem = tuple(tokens_of(600, 32).tolist())
    engine = Engine(small(LLAMA_SMALL))
    for prompt, cache_n in ((stem, 0), ((*stem, 3), 600), ((*stem, 3, 4), 601)):
        assert run(engine, Asked(prompt, 1))[0] == cache_n
    assert run(engine, Asked((*stem, 3, 4, 5), 1), exact_prefill=True)[0] == 0


def test_long_prompts_share_what_fast_attention_computed() -> None:
    stem = tuple(tokens_of(600, 32).tolist())
    engine = Engine(small(LLAMA_SMALL))
    run(engine, Asked(stem, 3))
    assert run(engine, Asked((*stem, 3), 3))[0] == 600
    assert run(engine, Asked((*stem[:550], 3), 3))[0] == 550


def test_exact_turns_go_on_from_exact_turns() -> None:
    """A chat whose turns stay below the floor stays exact, however long it grows."""
    text = tokens_of(1000, 32).tolist()
    engine = Engine(small(LLAMA_SMALL))
    for length in (400, 700, 1000):
        cache_n, logits = run(engine, Asked(tuple(text[:length]), 1))
        assert cache_n == (length - 300 if length > 400 else 0)
    assert logits == run(Engine(small(LLAMA_SMALL), True), Asked(tuple(text), 1))[1]


# room


def test_retained_sequences_make_way_for_requests_and_never_the_reverse() -> None:
    model = small(LLAMA_SMALL)
    engine = Engine(model, page_size=4, cache_bytes=room(model, 100, 4))
    asked = [Asked(tuple(tokens_of(30 + i, 32).tolist()), 8) for i in range(5)]
    for one in asked:
        assert run(engine, one)[1] == expected(LLAMA_SMALL, one, "float32")[1]
        check_owners(engine)
    assert len(engine.prefixes) == 2
    assert run(engine, asked[4])[0] == 33, "the most recent ones are there"
    assert run(engine, asked[0])[0] == 0
    check_empty(engine)


def test_requests_in_one_pass_share_pages() -> None:
    model = small(QWEN3_SMALL)
    engine = Engine(model, page_size=4)
    stem = tuple(tokens_of(40, 32).tolist())
    run(engine, Asked(stem, 1))
    used = engine.pool.used_bytes
    sent = [send(engine, Asked((*stem, token), 6)) for token in range(5)]
    engine.step()
    shared = engine.pool.used_bytes - used
    assert shared <= room(model, 5 * 8, 4), "ten pages each are there already"
    drain(engine)
    for one in sent:
        assert one.request.result().cache_n == 40
        assert bits(one.rows) == expected(QWEN3_SMALL, one.asked, "float32")[1]
    check_empty(engine)


def test_the_trained_model_goes_on_from_a_turn() -> None:
    model = tiny()
    assert model.tokenizer is not None
    first = model.tokenizer.encode("And God said, Let there be light")
    engine = Engine(model)
    answer = engine.generate(first, 8, stop_tokens=())
    turn = [*first, *answer.tokens, *model.tokenizer.encode(" and it was")]
    results = [run(one, Asked(tuple(turn), 5)) for one in (engine, Engine(model))]
    assert results[0][1] == results[1][1]
    assert [cache_n for cache_n, _ in results] == [len(first) + 7, 0]
