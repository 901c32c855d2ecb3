"""Mistakes in verifying drafts (SPEC 13.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from conformance.backends.composed.verification import VerifyBackend
from conformance.backends.reference import Ints, Source
from conformance.faults.fault import Fault
from reference.arithmetic import F32
from reference.sampling import Law, Sampling
from reference.speculation import DRAFT, RESIDUAL, Proposal, acceptance, weight_of


class Verification(Fault, VerifyBackend):
    """A mistake in the operation `verify_draft`."""

    operations: ClassVar[tuple[str, ...]] = ("verify_draft",)


class ResidualIsTarget(Verification):
    """After a rejection the target's law is drawn from, instead of what it has beyond the draft's.

    Rejected tokens come back, and the output no longer has the target's law.
    """

    name = "speculation-correction-from-target"
    reports = ("ShopeeLLM/Spec-RL/issues/14",)
    severity = "subtle"

    def residual(self, target: Law, drafted: Law) -> Law:
        """The target's."""
        return target


class RatioSwapped(Verification):
    """A token is accepted with the draft's probability over the target's."""

    name = "speculation-ratio-swapped"
    reports = ()
    severity = "wrong"

    def ratio(self, target: Law, drafted: Law, token: int) -> tuple[int, int]:
        """Upside down."""
        share, of = super().ratio(target, drafted, token)
        return of, share


class RatioOverTheBest(Verification):
    """A token is accepted with its share of the target's best one, whatever the draft's law."""

    name = "speculation-ratio-over-the-best"
    reports = ("1bit-MONSTER/1bit-MONSTER/issues/637",)
    severity = "wrong"

    def ratio(self, target: Law, drafted: Law, token: int) -> tuple[int, int]:
        """p(x) / max p."""
        return weight_of(target, token), int(target.weights.max())


class TotalsForgotten(Verification):
    """Weights of the two laws are compared as they are, without their totals."""

    name = "speculation-laws-not-normalised"
    reports = ()
    severity = "wrong"

    def ratio(self, target: Law, drafted: Law, token: int) -> tuple[int, int]:
        """w(x) / q(x)."""
        one = [Law(law.ids, law.weights) for law in (target, drafted)]
        w, q = (sum(law.weights[law.ids == token].tolist()) for law in one)
        return int(w), int(q)


class DraftLawRounded(Verification):
    """The draft's law is one of bfloat16, though its tokens were drawn from the unrounded one."""

    name = "speculation-draft-law-rounded"
    reports = ("deepseek-ai/DeepSpec/issues/31",)
    severity = "subtle"

    def draft_law(self, law: Law, token: int) -> Law:
        """Weights of eight significant bits."""
        fraction, exponent = np.frexp(law.weights.astype(np.float64))
        return Law(law.ids, np.ldexp(np.rint(fraction * 256), exponent - 8).astype(np.int64))


class DraftLawIgnored(Verification):
    """A drafted token is taken for certain, whatever law it was drawn from.

    It is accepted with the target's probability alone, and never comes back after a rejection.
    """

    name = "speculation-draft-law-ignored"
    reports = ("vllm-project/vllm/pull/40269", "SafeAILab/EAGLE/issues/329")
    severity = "subtle"

    def draft_law(self, law: Law, token: int) -> Law:
        """All weight on the token."""
        return Law(np.array([token]), np.array([1]))


class ResidualFloat32(Verification):
    """The residual is a difference of float32 probabilities, which cancels."""

    name = "speculation-residual-float32"
    reports = ("vllm-project/vllm/pull/46665",)
    severity = "subtle"

    def residual(self, target: Law, drafted: Law) -> Law:
        """Scaled back to integers."""
        p = (target.weights / target.weights.sum()).astype(np.float32)
        q = np.zeros(len(p), np.float32)
        _, here, there = np.intersect1d(target.ids, drafted.ids, True, return_indices=True)
        q[here] = (drafted.weights[there] / drafted.weights.sum()).astype(np.float32)
        rest = np.rint(np.maximum(p - q, 0).astype(np.float64) * 2.0**40).astype(np.int64)
        return Law(target.ids, rest if rest.any() else target.weights)


class FiltersForgotten(Verification):
    """The target's law is taken before top_k, top_p and min_p."""

    name = "speculation-target-unfiltered"
    reports = ("mlc-ai/mlc-llm/pull/2940",)
    severity = "wrong"

    def target_law(
        self, row: F32, sampling: Sampling, previous: Ints, drafted: Sequence[int]
    ) -> Law:
        """Every token may come."""
        whole = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
        return super().target_law(row, whole, previous, drafted)


class TargetGreedy(Verification):
    """The target's likeliest token is taken where drafts are verified, at any temperature."""

    name = "speculation-target-always-greedy"
    reports = ("EricLBuehler/mistral.rs/pull/2424",)
    severity = "wrong"

    def target_law(
        self, row: F32, sampling: Sampling, previous: Ints, drafted: Sequence[int]
    ) -> Law:
        """All weight on one."""
        law = super().target_law(row, sampling, previous, drafted)
        best = [int(law.weights.argmax())]
        return Law(law.ids[best], law.weights[best])


class PenaltyForgotten(Verification):
    """The repetition penalty is not applied to a pass that verifies."""

    name = "speculation-penalty-ignored"
    reports = ("NVIDIA/TensorRT-LLM/pull/17701", "sgl-project/sglang/issues/28180")
    severity = "wrong"

    def target_law(
        self, row: F32, sampling: Sampling, previous: Ints, drafted: Sequence[int]
    ) -> Law:
        """No penalty."""
        return super().target_law(row, replace(sampling, repetition_penalty=1.0), previous, drafted)


class DraftedNotPenalised(Verification):
    """The repetition penalty does not count the tokens drafted before, in the same pass."""

    name = "speculation-drafted-not-penalised"
    reports = ("sgl-project/sglang/pull/33643",)
    severity = "subtle"

    def target_law(
        self, row: F32, sampling: Sampling, previous: Ints, drafted: Sequence[int]
    ) -> Law:
        """What was there before the pass."""
        return super().target_law(row, sampling, previous, [])


class BonusStream(Verification):
    """The bonus token is drawn with the words of the corrections."""

    name = "speculation-bonus-from-other-stream"
    reports = ()
    severity = "subtle"

    def bonus_stream(self) -> int:
        """3 for 0."""
        return RESIDUAL


class CorrectionStream(Verification):
    """A correction is drawn with the word that its token was drafted with."""

    name = "speculation-correction-from-draft-stream"
    reports = ("vllm-project/vllm/pull/54282",)
    severity = "subtle"

    def correction_stream(self) -> int:
        """1 for 3: what is drawn depends on what was drafted."""
        return DRAFT


class AcceptanceStream(Verification):
    """A token is accepted by the word that it was drafted with."""

    name = "speculation-acceptance-from-draft-stream"
    reports = ("vllm-project/vllm/pull/47386",)
    severity = "subtle"

    def acceptance_word(self, place: int) -> int:
        """Not independent of the draft."""
        return int(self.philox(*self._seeds, np.array([place]), DRAFT)[0])


class OnePosition(Verification):
    """All drafted tokens of a pass are judged with the random word of the first."""

    name = "speculation-one-word-a-pass"
    reports = ()
    severity = "subtle"

    def place(self, position: int, index: int) -> int:
        """That of the first."""
        return position


class BonusRowEarly(Verification):
    """The bonus token is chosen from the row before its own."""

    name = "speculation-bonus-one-row-early"
    reports = ()
    severity = "wrong"

    def bonus_row(self, logits: F32, accepted: int) -> F32:
        """The last drafted token's."""
        return super().bonus_row(logits, max(0, accepted - 1))


class BonusForgotten(Verification):
    """After a draft that is accepted as a whole no bonus token is given."""

    name = "speculation-no-bonus"
    reports = ("ohdearquant/lattice/pull/509",)
    severity = "subtle"

    def bonus(self, law: Law, place: int) -> list[int]:
        """None, but where nothing was drafted."""
        return super().bonus(law, place) if not self._accepted else []


class AcceptedLeaveTheLaw(Verification):
    """Drafted tokens are struck from the target's law for the rest of the pass: worked in place."""

    name = "speculation-target-law-spoilt"
    reports = ("vllm-project/vllm-ascend/pull/2881",)
    severity = "wrong"

    def target_law(
        self, row: F32, sampling: Sampling, previous: Ints, drafted: Sequence[int]
    ) -> Law:
        """Without what was drafted before, where anything else is left."""
        law = super().target_law(row, sampling, previous, drafted)
        left = ~np.isin(law.ids, drafted)
        return Law(law.ids[left], law.weights[left]) if left.any() else law


class TieToHighest(Verification):
    """Greedy verification takes the last of equal logits."""

    name = "speculation-greedy-takes-last-tie"
    reports = ("vllm-project/vllm/issues/7627",)
    severity = "subtle"

    def target_law(
        self, row: F32, sampling: Sampling, previous: Ints, drafted: Sequence[int]
    ) -> Law:
        """From the end."""
        law = super().target_law(row[::-1].copy(), sampling, np.zeros(0, np.int64), [])
        if sampling.temperature > 0 or sampling.repetition_penalty != 1:
            return super().target_law(row, sampling, previous, drafted)
        return Law(len(row) - 1 - law.ids, law.weights)


class GreedyByChance(Verification):
    """Greedy requests accept a drafted token that is among the target's two best."""

    name = "speculation-greedy-accepts-second"
    reports = ()
    severity = "wrong"

    def target_law(
        self, row: F32, sampling: Sampling, previous: Ints, drafted: Sequence[int]
    ) -> Law:
        """Remember the row."""
        self._row = row
        return super().target_law(row, sampling, previous, drafted)

    def ratio(self, target: Law, drafted: Law, token: int) -> tuple[int, int]:
        """Certain, for the second too."""
        second = int(np.argsort(-self._row, kind="stable")[1])
        if len(target.ids) == 1 and token == second:
            return 1, 1
        return acceptance(target, drafted, token)


class RunnersUp(Verification):
    """Greedy rows are judged by the first row's best, second, third: rows and top_k exchanged."""

    name = "speculation-runners-up-of-the-first-row"
    reports = ("antirez/ds4/pull/358",)
    severity = "wrong"

    def _verdict(
        self, logits: F32, proposal: Proposal, sampling: Sampling, previous: Ints, source: Source
    ) -> list[int]:
        """Each row is the first without the tokens of those before."""
        if sampling.temperature == 0:
            ranked = np.argsort(-logits[0], kind="stable")
            logits = np.repeat(logits[:1], len(logits), axis=0)
            for row in range(1, len(logits)):
                logits[row, ranked[: min(row, len(ranked) - 1)]] = -np.inf
        return super()._verdict(logits, proposal, sampling, previous, source)


class AcceptsEqual(Verification):
    """A drafted token is accepted where the test is equal, too."""

    name = "speculation-accepts-at-equality"
    reports = ()
    severity = "subtle"

    def accepts(self, target: Law, drafted: Law, token: int, place: int) -> bool:
        """<= for <."""
        share, of = self.ratio(target, drafted, token)
        return self.acceptance_word(place) * of <= share << 64


class RatioFloat32(Verification):
    """A drafted token is accepted by a float32 ratio and 24 bits of the word."""

    name = "speculation-ratio-float32"
    reports = ("vllm-project/vllm/pull/46665",)
    severity = "subtle"

    def accepts(self, target: Law, drafted: Law, token: int, place: int) -> bool:
        """Rounded."""
        share, of = self.ratio(target, drafted, token)
        u = np.float32((self.acceptance_word(place) >> 40) * 2.0**-24)
        return bool(u < np.float32(share / of))


class RatioFloat64(Verification):
    """A drafted token is accepted by a float64 ratio and 53 bits of the word."""

    name = "speculation-ratio-float64"
    reports = ()
    severity = "subtle"

    def accepts(self, target: Law, drafted: Law, token: int, place: int) -> bool:
        """Rounded."""
        share, of = self.ratio(target, drafted, token)
        return (self.acceptance_word(place) >> 11) * 2.0**-53 < share / of


class EightDrafted(Verification):
    """Of a draft the first eight tokens are verified."""

    name = "speculation-eight-drafted-at-most"
    reports = ()
    severity = "wrong"

    def _verdict(
        self, logits: F32, proposal: Proposal, sampling: Sampling, previous: Ints, source: Source
    ) -> list[int]:
        """The rest is dropped."""
        first = Proposal(proposal.tokens[:8], proposal.laws[:8])
        return super()._verdict(logits, first, sampling, previous, source)


class VerifyPenalty(Verification):
    """Where drafts are verified the repetition penalty looks at the last 64 tokens alone."""

    name = "speculation-penalty-of-64-tokens"
    reports = ("ohdearquant/lattice/issues/387",)
    severity = "wrong"

    def target_law(self, row: F32, sampling: Sampling, previous: Ints, drafted: Any) -> Law:
        """What came before is forgotten."""
        return super().target_law(row, sampling, previous[-64:], drafted)


class VerifySeed(Verification):
    """The seed is cut to 32 bits where drafts are verified."""

    name = "speculation-seed-of-32-bits"
    reports = ()
    severity = "wrong"

    def verified_by(self, source: Source) -> Source:
        """The lower half."""
        seed, request, position = source
        return seed & 0xFFFFFFFF, request, position


class VerifyRequest(Verification):
    """A request's number is cut to 8 bits where drafts are verified."""

    name = "speculation-request-of-8-bits"
    reports = ()
    severity = "wrong"

    def verified_by(self, source: Source) -> Source:
        """Modulo 256."""
        seed, request, position = source
        return seed, request & 0xFF, position


class VerifyPosition(Verification):
    """The position is cut to 16 bits where drafts are verified."""

    name = "speculation-position-of-16-bits"
    reports = ()
    severity = "wrong"

    def verified_by(self, source: Source) -> Source:
        """Modulo 65,536."""
        seed, request, position = source
        return seed, request, position & 0xFFFF


class FourWords(Verification):
    """The words of a pass are those of four positions, again and again."""

    name = "speculation-words-of-four-positions"
    reports = ()
    severity = "wrong"

    def place(self, position: int, index: int) -> int:
        """Modulo four."""
        return position + index % 4
