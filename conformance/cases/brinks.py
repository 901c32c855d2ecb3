"""Where a hair decides: what is drawn and kept at a threshold, codes next to halves (SPEC 5, 13).

Random data hardly ever lies where float32, or even float64, decides otherwise than the integers and
quotients of the specification. These inputs do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.cases.recipe import Recipe, array32
from conformance.cases.sampling import PLAIN
from conformance.cases.speculation import POSITION, REQUEST
from conformance.generator import normal
from conformance.golden import Array
from reference.arithmetic import F32
from reference.elementary import log

EDGES = {
    "at": (3, 681, 1_526_905, float.fromhex("-0x1.f79ddp+3"), "the end of 627: 628 is drawn"),
    "at_another": (0, 11, 188_335, float.fromhex("-0x1.0d512ep+4"), "the end of 5: 6 is drawn"),
    "below": (3, 23, 1_054_822, float.fromhex("-0x1.034a4cp+4"), "one less than the end of 20"),
    "near": (3, 23, 1_054_822, float.fromhex("-0x1.037b62p+4"), "312 more than the end of 20"),
}
"""Forbidden tokens; equal ones; the position of a word, of seed 1 and request 3, that nearly meets
the end of one; and the logit of a rare token, whose weight before them sets how nearly.

exp(0) is 1 in any arithmetic, and the rare token's weight an integer from which no error of a few
units moves it: what is drawn depends on sums and comparisons alone.
"""

TOP_POSITION = 1_413_791
"""The word of this position, seed 1 and request 3, is 0.99999963 of 2^64."""

RARE, RARE_WEIGHT = float.fromhex("-0x1.e7fddap+3"), 262_013
"""A logit below the largest, 0, and its weight, which is 262,013.016 before it is rounded."""

ACCEPTED = {
    "equal": (21_076_759, 2, [2**40, 679_477_175_084], "u q W is w Q 2^64: it is not accepted"),
    "barely": (21_076_759, 2, [2**40, 679_477_175_085], "u q W is barely less: it is accepted"),
    "barely_not": (
        509_237, 3, [2**40, 2**40, 515_984_845_904], "u q W is more by a part in 2^56, not less"
    ),
}  # fmt: skip
"""Of a word of seed 1 and REQUEST: its position, how many equal tokens the target has, and the
weights of the draft's law, of which the first is the token drafted."""


@dataclass
class _Draw:
    """A call of `sample`: its note, what is not as in PLAIN, and where the word comes from."""

    note: str
    logits: F32
    options: Mapping[str, Any] = field(default_factory=dict)
    previous: tuple[int, ...] = ()
    seed: int = 1
    request: int = 3
    position: int = 17

    def recipe(self, name: str) -> Recipe:
        """Its golden."""
        at = {"seed": self.seed, "request": self.request, "position": self.position}
        seen = np.array(self.previous, np.int64)
        inputs: dict[str, Array] = {"logits": self.logits, "previous": seen}
        parameters = {**PLAIN, **self.options, **at}
        return Recipe(f"kernel/sample/{name}", "13.1", parameters, inputs, note=self.note)


def _shares(*shares: float) -> F32:
    return log(array32(shares))


def _equal(count: int) -> F32:
    return np.zeros(count, np.float32)


def _draws() -> Iterator[tuple[str, _Draw]]:
    """The word against cumulative weights, and what the word is made of."""
    for side, (forbidden, count, position, rare, what) in EDGES.items():
        logits = np.append(array32([-np.inf] * forbidden + [rare]), _equal(count))
        name = f"draw_{side}_edge" if side == "at_another" else f"draw_{side}_the_edge"
        yield name, _Draw(f"the random number is {what}", logits, position=position)
    tail = np.full(400, -18, np.float32)
    tail[0] = 0
    note = "of 399 tokens that have 6 millionths together one is drawn, top_p 1 or not"
    yield "draw_from_the_tail", _Draw(note, tail, position=TOP_POSITION)
    note = "256 equal tokens show eight bits of the word"
    places: dict[str, dict[str, Any]] = {
        "seed_of_17_bits": {"seed": 2**16 + 1},
        "seed_of_33_bits": {"seed": 2**32 + 1},
        "seed_of_64_bits": {"seed": 2**63 + 2**32 + 5},
        "request_of_9_bits": {"request": 2**8 + 3},
        "request_of_32_bits": {"request": 2**32 - 1},
        "position_of_9_bits": {"position": 2**8 + 17},
        "position_of_17_bits": {"position": 2**16 + 17},
        "position_of_32_bits": {"position": 2**31 + 17},
    }
    for name, place in places.items():
        yield f"draw_{name}", _Draw(note, _equal(256), **place)
    large = np.full(66_000, -np.inf, np.float32)
    large[[3, 1030, 33_000, 65_535, 65_537, 65_999]] = array32([-9, -9, -9, -9, 0, -9])
    yield "large_vocabulary", _Draw("a token beyond 16 bits is drawn", large)
    note = "the best of 1,100 is beyond the first 1,024"
    best = normal("kernel/sample/best_beyond_1024/logits", 1100)
    best[1077] = 9
    yield "best_beyond_1024", _Draw(note, best, {"temperature": 0.0})
    note = "the best of 1,100 negative logits is among the last, which fill no tile of 16 or more"
    negative = -1 - np.abs(normal("kernel/sample/best_of_negative/logits", 1100))
    negative[1093] = -0.5
    yield "best_of_negative", _Draw(note, negative, {"temperature": 0.0})


def _kept() -> Iterator[tuple[str, _Draw]]:
    """What top_k, top_p and min_p keep where weights are equal to a threshold, or nearly.

    Position 1,413,791 draws the last that is kept.
    """
    last: dict[str, Any] = {"position": TOP_POSITION}
    rare = np.append(_equal(1), np.full(8, RARE, np.float32))
    share = RARE_WEIGHT / 2**40
    for name, note, logits, options in (
        ("top_p_equal_half", "two of four equal ones are half", _equal(4), {"top_p": 0.5}),
        ("top_p_equal_0.3", "0.3 in float64 is below 3 of 10", _equal(10), {"top_p": 0.3}),
        ("top_p_equal_0.2", "0.2 in float64 is above 2 of 10", _equal(10), {"top_p": 0.2}),
        ("top_p_tiny", "the first of ten equal ones alone", _equal(10), {"top_p": 1e-9}),
        ("top_k_80", "80 of 100 equal ones", _equal(100), {"top_k": 80}),
        ("top_k_beyond", "all five: there are no more", _equal(5), {"top_k": 50}),
        (
            "top_k_equal_weights",
            "the first: a smaller logit, but of equal weight",
            array32([-(2.0**-27), 0]),
            {"top_k": 1},
        ),
        ("top_k_near", "the larger of two near ones", array32([1, 1.001, 0]), {"top_k": 1}),
        ("min_p_one", "what is equal to the largest", array32([1, 1, 0]), {"min_p": 1.0}),
        ("min_p_equal", "what is equal to the threshold is kept", rare, {"min_p": share}),
        (
            "min_p_float64",
            "the threshold is barely above them, and in float32 is not",
            rare,
            {"min_p": share + 0.001 / 2**40},
        ),
        (
            "top_p_hot",
            "two of four have 0.7 at temperature 1, and three at 2",
            _shares(0.6, 0.2, 0.12, 0.08),
            {"top_p": 0.7, "temperature": 2.0},
        ),
        (
            "top_p_cold",
            "two of four have 0.7 at temperature 1, and the first alone at 0.5",
            _shares(0.6, 0.2, 0.12, 0.08),
            {"top_p": 0.7, "temperature": 0.5},
        ),
        (
            "top_p_then_min_p",
            "top_p is of all four, and min_p drops the last of them",
            _shares(0.4, 0.3, 0.2, 0.1),
            {"top_p": 0.75, "min_p": 0.4},
        ),
    ):
        yield name, _Draw(note, logits, options, **last)


def _chosen() -> Iterator[tuple[str, _Draw]]:
    """Penalties of long and empty histories, and temperatures next to greedy."""
    greedy = {"temperature": 0.0, "repetition_penalty": 2.0}
    others = tuple(2 + i % 7 for i in range(600))
    near = array32([4, 3.5, *[0] * 7])
    for name, note, previous, options in (
        ("penalty_far_back", "it occurred 601 tokens ago", (0, *others), greedy),
        ("penalty_of_nothing", "nothing occurred", (), greedy),
        ("penalty_of_others", "token 0 is no padding", (1, 5), greedy),
        ("penalty_below_one", "it is made likelier", (1,), {**greedy, "repetition_penalty": 0.5}),
    ):
        yield name, _Draw(note, near, options, previous)
    note = "with two equal ones a temperature near zero is not greedy"
    yield "cold_tie", _Draw(note, array32([0, 1, 1]), {"temperature": 1e-6}, position=TOP_POSITION)
    small = {"temperature": 0.004}
    note = "shares of 0.27 and 0.73, and the word between 0.27 and 0.40"
    yield "temperature_small", _Draw(note, array32([0, 0.004]), small, seed=SMALL_SEED)
    note = "z is a difference, rounded, and then a quotient, rounded: no other z has this weight"
    warm = array32([DIVIDED, 3.3, 3.3, 3.3])
    yield "temperature_divides", _Draw(note, warm, {"temperature": 0.3}, position=LOW_POSITION)


LOW_POSITION, DIVIDED = 1_775_158, float.fromhex("-0x1.cb2c98p-2")
"""The word of this position, seed 1 and request 3, is 0.0000012 of 2^64: it draws a rare token of
this logit by two units of its weight of 4,119,248. An ulp of z is four of them, one of the weight a
quarter, so that no exponential of float32 decides otherwise."""

SMALL_SEED = 2
"""Its word of request 3 and position 17 is 0.33 of 2^64."""


def _verified() -> Iterator[Recipe]:
    """Acceptance at equality, long drafts and histories, and what the words are made of."""

    def verify(name: str, note: str, draft: Any, weights: Any, logits: F32, **about: Any) -> Recipe:
        previous = np.array(about.pop("previous", ()), np.int64)
        at = {"seed": 1, "request": REQUEST, "position": POSITION}
        inputs = {"logits": logits, "draft": draft, "draft_weights": weights, "previous": previous}
        parameters = {**PLAIN, **at, **about}
        return Recipe(f"kernel/verify_draft/{name}", "13.4", parameters, inputs, note=note)

    def masses(draft: Any, vocabulary: int) -> Any:
        return (np.arange(vocabulary) == draft[:, None]).astype(np.int64)

    for name, (position, equal, law, note) in ACCEPTED.items():
        logits = np.full((2, 5), -np.inf, np.float32)
        logits[0, 1 : 1 + equal], logits[1, 0] = 0, 0
        weights = np.zeros((1, 5), np.int64)
        weights[0, 1 : 1 + len(law)] = law
        about = {"position": position}
        yield verify(f"acceptance_{name}", note, np.array([1]), weights, logits, **about)
    rows = normal("kernel/verify_draft/twelve_drafted/logits", 13, 9)
    draft = rows.argmax(axis=1)[:12].astype(np.int64)
    draft[10] = (draft[10] + 1) % 9
    note = "ten of twelve are accepted"
    greedy: dict[str, Any] = {"temperature": 0.0}
    yield verify("twelve_drafted", note, draft, masses(draft, 9), rows, **greedy)
    rows = np.tile(array32([1.6, 0, 0]), (10, 1))
    draft = np.zeros(9, np.int64)
    note = "six of nine are accepted, each by a word of its own"
    yield verify("nine_drafted", note, draft, masses(draft, 3), rows, seed=77)
    history = (0, *(2 + i % 7 for i in range(600)))
    rows = np.tile(array32([4, 3.5, *[0] * 7]), (2, 1))
    draft, long = np.array([1]), {**greedy, "repetition_penalty": 2.0, "previous": history}
    note = "token 0 occurred 601 tokens ago"
    yield verify("penalty_far_back", note, draft, masses(draft, 9), rows, **long)
    note = "256 equal tokens show eight bits of the correction's word"
    rows = np.zeros((2, 256), np.float32)
    rows[:, 255] = -np.inf
    draft = np.array([255])
    for name, large in (
        ("seed_of_33_bits", {"seed": 2**32 + 1}),
        ("request_of_9_bits", {"request": 2**8 + REQUEST}),
        ("position_of_17_bits", {"position": 2**16 + POSITION}),
    ):
        yield verify(name, note, draft, masses(draft, 256), rows, **large)


def _beside(x: F32) -> F32:
    """Numbers above zero, and the float32 on either side of each, three behind one another."""
    return np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])


def _signed(x: F32) -> F32:
    """With signs in turns."""
    return np.asarray(x * np.where(np.arange(len(x)) % 2, -1, 1).astype(np.float32))


def _codes() -> Iterator[Recipe]:
    """Codes whose quotient is a half, or one float32 beside it; scales between two float16."""
    halves = np.arange(1, 254, 2, dtype=np.float32) / np.float32(2)
    peaks = array32([1, 3, 0.7, 1e-3, 123.25, 1e20])
    near = [_signed(_beside(halves * (peak / np.float32(127)))) for peak in peaks]
    x = np.stack([np.append(row, peak) for row, peak in zip(near, peaks, strict=True)])
    note = "x / s is a half, or a float32 beside it"
    inputs = {"x": x.clip(-peaks[:, None], peaks[:, None])}
    yield Recipe("kernel/quantize_int8/near_halves", "5.4", {}, inputs, note=note)

    w = np.zeros((14, 32), np.float32)
    scales = array32([1.0009766, 1.942, 1.992, 0.0123, 37.1]).astype(np.float16)
    for row, scale in zip(w, scales.astype(np.float32), strict=False):
        row[:21], row[21] = _signed(_beside(halves[:7] * scale)), np.float32(7) * scale
    middles = array32([1 + 2**-11, 1 + 3 * 2**-11, 1.5 + 2**-11])
    w[5:11, 3] = np.delete(_beside(np.float32(7) * middles), np.s_[:3])[:6]
    steps = np.linspace(-1, 1, 32).astype(np.float32) * np.float32(7 * 2.0**-24)
    w[11:] = array32([[1.45], [2.4], [5.45]]) * steps
    note = "w / scale is a half, or a float32 beside it; scales between two float16; tiny scales"
    yield Recipe("kernel/quantize_int4/near_halves", "5.1", {"group": 32}, {"w": w}, note=note)


def recipes() -> Iterator[Recipe]:
    """Every golden at a brink."""
    for draws in (_draws(), _kept(), _chosen()):
        for name, draw in draws:
            yield draw.recipe(name)
    yield from _verified()
    yield from _codes()
