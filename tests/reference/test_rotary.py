"""Rotary constants against mpmath, angles and rotation against the oracle (SPEC 7)."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.rotary import POSITIONS, RopeKind, RopeParameters, cos_sin, rope_constants, rotate
from tests.oracle import layers as oracle
from tests.oracle import nasty
from tests.oracle.arrays import assert_bits, assert_same, bits

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor")
YARN_FIELDS = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
LONGROPE_FIELDS = ("short_factor", "long_factor", "attention_factor")
FIELDS = ("factor", *LLAMA3_FIELDS, *YARN_FIELDS, "short_factor", "long_factor")


def twin(rope: RopeParameters) -> oracle.Rope:
    """The same numbers for the oracle."""
    given_values = asdict(rope)
    return oracle.Rope(
        rope.kind,
        rope.theta,
        rope.rotary_dim,
        old=rope.original_max_positions,
        **{name: given_values[name] for name in FIELDS},
    )


def yarn(theta: float, d: int, factor: float, old: int, **rest: Any) -> RopeParameters:
    return RopeParameters("yarn", theta, d, factor, old, **rest)


def llama3(
    theta: float, d: int, factor: float, old: int, low: float, high: float
) -> RopeParameters:
    return RopeParameters("llama3", theta, d, factor, old, low, high)


def longrope(theta: float, d: int, factor: float, old: int, **rest: Any) -> RopeParameters:
    short = tuple(1 + i / 37 for i in range(d // 2))
    far = tuple(1.3 + i * i / 11 for i in range(d // 2))
    return RopeParameters(
        "longrope", theta, d, factor, old, short_factor=short, long_factor=far, **rest
    )


KNOWN = {
    "llama 2": RopeParameters("default", 10000.0, 128),
    "llama 3": RopeParameters("default", 500000.0, 128),
    "qwen 3": RopeParameters("default", 1000000.0, 128),
    "small": RopeParameters("default", 10000.0, 2),
    "partial": RopeParameters("default", 10000.0, 20),
    "power of two": RopeParameters("default", 65536.0, 32),
    "odd theta": RopeParameters("default", 10000.1, 80),
    "vicuna": RopeParameters("linear", 10000.0, 128, 8.0),
    "linear third": RopeParameters("linear", 10000.0, 64, 3.0),
    "dynamic": RopeParameters("dynamic", 10000.0, 128, 2.0, 2048),
    "dynamic short": RopeParameters("dynamic", 10000.0, 64, 4.0, 16),
    "dynamic fraction": RopeParameters("dynamic", 500000.0, 80, 1.5, 100),
    "llama 3.1": llama3(500000.0, 128, 8.0, 8192, 1.0, 4.0),
    "llama 3.2": llama3(500000.0, 64, 32.0, 8192, 1.0, 4.0),
    "llama 3 fraction": llama3(10000.0, 48, 2.5, 100, 0.7, 3.3),
    "qwen yarn": yarn(1000000.0, 128, 4.0, 32768),
    "yarn untruncated": yarn(150000.0, 64, 32.0, 4096, truncate=False),
    "yarn mscale": yarn(10000.0, 64, 40.0, 4096, mscale=0.707, mscale_all_dim=1.0),
    "yarn equal mscale": yarn(10000.0, 64, 40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
    "yarn zero mscale": yarn(10000.0, 64, 40.0, 4096, mscale=0.0, mscale_all_dim=1.0),
    "yarn one mscale": yarn(10000.0, 64, 40.0, 4096, mscale=0.707),
    "yarn given": yarn(10000.0, 64, 40.0, 4096, attention_factor=1.1, mscale=2.0),
    "yarn shrinking": yarn(10000.0, 64, 0.5, 4096),
    "yarn narrow": yarn(10000.0, 64, 4.0, 4096, beta_fast=8.0, beta_slow=8.0, truncate=False),
    "yarn all slow": yarn(10000.0, 32, 4.0, 4, beta_fast=32.0, beta_slow=1.0),
    "yarn long": yarn(100.0, 32, 4.0, 32768, beta_fast=512.0, beta_slow=1.0),
    "yarn longest": yarn(100.0, 32, 4.0, 32768, beta_fast=512.0, beta_slow=0.5),
    "phi 3": longrope(10000.0, 96, 32.0, 4096),
    "longrope short": longrope(10000.0, 20, 4.0, 16),
    "longrope given": longrope(10000.0, 20, 4.0, 2048, attention_factor=1.19),
    "longrope unstretched": longrope(10000.0, 20, 1.0, 2048),
    "yarn betas": yarn(10000.0, 96, 16.0, 1000, beta_fast=64.0, beta_slow=2.0),
}


def same_constants(rope: RopeParameters, position: int) -> None:
    inv_freq, factor = rope_constants(rope, position)
    expected, expected_factor = oracle.rope_constants(twin(rope), position)
    assert_bits(inv_freq, expected)
    assert_bits(factor, expected_factor)


@pytest.mark.parametrize("name", KNOWN)
def test_constants_are_the_oracles(name: str) -> None:
    rope = KNOWN[name]
    by_position = rope.kind in ("dynamic", "longrope")
    positions = (0, 15, 16, 17, 2047, 2048, 5000) if by_position else (0, 9999)
    for position in positions:
        same_constants(rope, position)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    theta=st.floats(2.0, 1e7),
    half=st.integers(2, 24),
    factor=st.floats(1.0, 64.0),
    old=st.integers(8, 100000),
    position=st.integers(0, 200000),
    low=st.floats(0.25, 4.0),
    more=st.floats(0.25, 40.0),
    truncate=st.booleans(),
)
def test_constants_of_any_configuration(
    kind: RopeKind,
    theta: float,
    half: int,
    factor: float,
    old: int,
    position: int,
    low: float,
    more: float,
    truncate: bool,
) -> None:
    rope = RopeParameters(
        kind, theta, 2 * half, factor, old, low, low + more, low + more, low, truncate
    )
    same_constants(rope, position)


def test_constants_of_transformers_are_near() -> None:
    """The formulas of SPEC 7.2 against those that models are run with, which round more often."""
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for rope in KNOWN.values():
        if rope.kind == "default" or rope.theta == 10000.1:
            continue
        names = {
            "llama3": LLAMA3_FIELDS,
            "yarn": YARN_FIELDS,
            "longrope": LONGROPE_FIELDS,
        }.get(rope.kind, ())
        parameters: dict[str, Any] = {
            "rope_type": rope.kind,
            "rope_theta": rope.theta,
            "factor": rope.factor,
            **{name: getattr(rope, name) for name in names if getattr(rope, name) is not None},
        }
        if rope.kind in ("llama3", "yarn", "longrope"):
            parameters["original_max_position_embeddings"] = rope.original_max_positions
        config = LlamaConfig(
            hidden_size=4 * rope.rotary_dim,
            num_attention_heads=4,
            head_dim=rope.rotary_dim,
            max_position_embeddings=rope.original_max_positions or 2048,
            rope_parameters=parameters,
        )
        length = 4 * (rope.original_max_positions or 2048)
        theirs, their_factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu", seq_len=length)
        ours, factor = rope_constants(rope, length - 1)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=3e-6, err_msg=str(rope))
        assert math.isclose(factor, their_factor, rel_tol=1e-6), rope


def test_constants_are_rounded_once() -> None:
    """1 / factor next to halfway between two float32, nearer than float64 can tell."""
    halfway = 1 + (2 * np.arange(40) + 1) * 2.0**-24
    decided_otherwise = 0
    for factor in (1 / halfway).tolist():
        rope = RopeParameters("linear", 10000.0, 2, factor)
        same_constants(rope, 0)
        decided_otherwise += int(rope_constants(rope)[0][0] != np.float32(1 / factor))
    assert decided_otherwise


def test_what_is_kept_of_positions_is_bounded() -> None:
    """A server would otherwise grow by every position that `dynamic` rope comes to."""
    assert rope_constants.cache_info().maxsize == POSITIONS


def test_a_dynamic_token_turns_by_its_own_position() -> None:
    rope = KNOWN["dynamic short"]
    inside, _ = rope_constants(rope, 15)
    assert_same(rope_constants(rope, 0)[0], inside)
    assert (rope_constants(rope, 16)[0][1:] < inside[1:]).all()
    positions = np.arange(40)
    cos, sin = cos_sin(rope, positions)
    for p in positions:
        one = cos_sin(rope, positions[p : p + 1])
        assert_same(one[0], cos[p : p + 1])
        assert_same(one[1], sin[p : p + 1])


@pytest.mark.parametrize(
    "name",
    ["llama 2", "partial", "dynamic short", "llama 3.1", "yarn given", "longrope short", "phi 3"],
)
def test_angles_are_the_oracles(name: str) -> None:
    rope = KNOWN[name]
    positions = np.array([0, 1, 2, 15, 16, 17, 101, 4096, 123457, 2**24 - 1])
    cos, sin = cos_sin(rope, positions)
    assert cos.shape == sin.shape == (len(positions), rope.rotary_dim // 2)
    expected = [oracle.cos_sin(twin(rope), int(p)) for p in positions]
    assert_bits(cos, [c for c, _ in expected])
    assert_bits(sin, [s for _, s in expected])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "d"), [(2, 2), (4, 2), (20, 20), (33, 20), (64, 32)])
def test_rotation_is_the_oracles(width: int, d: int, interleaved: bool) -> None:
    rng = np.random.default_rng(width)
    positions = np.array([0, 1, 2, 100, 5000])
    cos, sin = cos_sin(RopeParameters("default", 10000.0, d), positions)
    x = nasty.with_specials(rng, nasty.matrix(rng, 15, width), 0.2).reshape(5, 3, width)
    before = x.copy()
    found = rotate(x, cos, sin, interleaved)
    assert_same(x, before)
    turned = [
        [oracle.rotate(head, cosines, sines, interleaved) for head in token]
        for token, cosines, sines in zip(
            nasty.tolist(x), nasty.tolist(cos), nasty.tolist(sin), strict=True
        )
    ]
    assert_bits(found[..., :d], np.array(turned)[..., :d])
    assert_same(found[..., d:].copy(), x[..., d:].copy())


def test_the_rest_of_a_head_passes_through_bit_for_bit() -> None:
    x = np.ones((1, 1, 6), np.float32)
    payload = np.array([0x7FC12345, 0xFFC00001], np.uint32)
    x[0, 0, 4:] = payload.view(np.float32)
    cos, sin = cos_sin(RopeParameters("default", 10000.0, 4), np.array([3]))
    assert np.array_equal(bits(rotate(x, cos, sin)[0, 0, 4:].copy()), payload)


def test_position_zero_changes_no_value() -> None:
    x = np.random.default_rng(2).standard_normal((1, 4, 64)).astype(np.float32)
    cos, sin = cos_sin(RopeParameters("default", 10000.0, 64), np.array([0]))
    for interleaved in (False, True):
        assert_same(rotate(x, cos, sin, interleaved), x)


def test_the_two_pairings_are_one_rotation_of_permuted_elements() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((7, 2, 32)).astype(np.float32)
    cos, sin = cos_sin(RopeParameters("default", 10000.0, 32), np.arange(50, 57))
    order = np.arange(32).reshape(2, 16).T.ravel()  # half to interleaved
    shuffled = np.ascontiguousarray(rotate(x, cos, sin)[..., order])
    assert_same(rotate(np.ascontiguousarray(x[..., order]), cos, sin, interleaved=True), shuffled)
    assert (rotate(x, cos, sin) != rotate(x, cos, sin, interleaved=True)).any()


def test_tokens_and_heads_do_not_know_each_other() -> None:
    rng = np.random.default_rng(4)
    x = nasty.matrix(rng, 60, 32).reshape(20, 3, 32)
    rope = RopeParameters("default", 10000.0, 32)
    cos, sin = cos_sin(rope, np.arange(20))
    whole = rotate(x, cos, sin)
    for t in (0, 7, 19):
        one = cos_sin(rope, np.array([t]))
        assert_same(rotate(x[t : t + 1, 1:2], *one), whole[t : t + 1, 1:2])
