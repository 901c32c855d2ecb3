"""Verification of drafts in steps, over the composed backend (SPEC 13.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.backends.composed import ComposedBackend
from conformance.backends.reference import Ints, Source
from reference.arithmetic import F32
from reference.sampling import Law, Sampling, draw, law_of
from reference.speculation import ACCEPTANCE, RESIDUAL, Proposal, acceptance, residual


class VerifyBackend(ComposedBackend):
    """`verify_draft` one step at a time; the draws are the reference's own."""

    def _verdict(
        self, logits: F32, proposal: Proposal, sampling: Sampling, previous: Ints, source: Source
    ) -> list[int]:
        """SPEC 13.4."""
        seed, request, position = self.verified_by(source)
        self._seeds = seed, request
        self._accepted: list[int] = []
        out = self._accepted
        for token, law in zip(proposal.tokens, proposal.laws, strict=True):
            drafted = self.draft_law(law, token)
            target = self.target_law(logits[len(out)], sampling, previous, out)
            if not self.accepts(target, drafted, token, self.place(position, len(out))):
                return [*out, *self.correction(logits, target, drafted, position)]
            out.append(token)
        law = self.target_law(self.bonus_row(logits, len(out)), sampling, previous, out)
        return [*out, *self.bonus(law, position + len(out))]

    def verified_by(self, source: Source) -> Source:
        """The seed, the request and the position that the words of a pass are made of."""
        return source

    def place(self, position: int, index: int) -> int:
        """The position of a drafted token."""
        return position + index

    def draft_law(self, law: Law, token: int) -> Law:
        """The law that a token is taken to be drawn from."""
        return law

    def target_law(
        self, row: F32, sampling: Sampling, previous: Ints, drafted: Sequence[int]
    ) -> Law:
        """Step 1: the target's law after the drafted tokens."""
        return law_of(row, sampling, np.append(previous, np.array(drafted, np.int64)))

    def acceptance_word(self, place: int) -> int:
        """u of step 2."""
        return int(self.philox(*self._seeds, np.array([place]), ACCEPTANCE)[0])

    def accepts(self, target: Law, drafted: Law, token: int, place: int) -> bool:
        """Step 2."""
        share, of = self.ratio(target, drafted, token)
        return self.acceptance_word(place) * of < share << 64

    def ratio(self, target: Law, drafted: Law, token: int) -> tuple[int, int]:
        """With which probability a token is accepted."""
        return acceptance(target, drafted, token)

    def correction(self, logits: F32, target: Law, drafted: Law, position: int) -> list[int]:
        """Step 3: what stands in place of the rejected token."""
        place = self.place(position, len(self._accepted))
        law = self.residual(target, drafted)
        return [draw(law, *self._seeds, place, self.correction_stream())]

    def residual(self, target: Law, drafted: Law) -> Law:
        """What the correction is drawn from."""
        return residual(target, drafted)

    def correction_stream(self) -> int:
        """The stream of the correction."""
        return RESIDUAL

    def bonus_row(self, logits: F32, accepted: int) -> F32:
        """The logits that the bonus token is drawn by."""
        return np.asarray(logits[accepted])

    def bonus(self, law: Law, place: int) -> list[int]:
        """The token after all that were accepted."""
        return [draw(law, *self._seeds, place, self.bonus_stream())]

    def bonus_stream(self) -> int:
        """The stream of the bonus token."""
        return 0
