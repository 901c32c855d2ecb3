"""Routing and experts in steps, over the composed backend (SPEC 9.2, 9.3)."""

from __future__ import annotations

import numpy as np

from conformance.backends.composed import ComposedBackend
from conformance.backends.reference import Ints
from reference.arithmetic import F32, NAN, one_nan, to_float32
from reference.experts import Router


class ExpertsBackend(ComposedBackend):
    """`route` and `moe` one step at a time."""

    def _routing(self, logits: F32, router: Router) -> tuple[Ints, F32]:
        """SPEC 9.2."""
        sound = np.isfinite(logits.max(axis=1))
        usable = np.where(sound[:, None], logits, np.float32(0))
        with np.errstate(all="ignore"):
            scores = self.scored(usable, router)
            experts = self.chosen(self.selection(scores, usable, router), router)
            gates = self.weighed(scores, usable, experts, router)
            gates = self.scaled(self.renormalised(gates, router), router)
        experts[~sound], gates[~sound] = np.arange(router.top_k), NAN
        return experts, one_nan(gates)

    def scored(self, logits: F32, router: Router) -> F32:
        """Step 1 of SPEC 9.2."""
        if router.score == "logits":
            return logits
        return self.softmax(logits) if router.score == "softmax" else self.sigmoid(logits)

    def selection(self, scores: F32, logits: F32, router: Router) -> F32:
        """Step 2 of SPEC 9.2."""
        bias = router.selection_bias
        biased = scores if bias is None else scores + bias
        return np.where(logits == -np.inf, np.float32(-np.inf), biased)

    def chosen(self, selection: F32, router: Router) -> Ints:
        """Steps 3 and 4 of SPEC 9.2: (T, k) in rank order."""
        kept = np.sort(self.kept_groups(selection, router), axis=1)
        size = router.experts // router.groups
        candidates = (kept[..., None] * size + np.arange(size)).reshape(len(kept), -1)
        best = self.largest(np.take_along_axis(selection, candidates, axis=1), router.top_k)
        return np.take_along_axis(candidates, best, axis=1)

    def kept_groups(self, selection: F32, router: Router) -> Ints:
        """Step 3 of SPEC 9.2: the groups whose experts are candidates, (T, kept)."""
        groups = selection.reshape(len(selection), router.groups, -1)
        return self.largest(self.group_scores(groups, router), router.kept_groups)

    def group_scores(self, groups: F32, router: Router) -> F32:
        """Scores (T, groups, size) to one a group (SPEC 9.2, step 3)."""
        best: F32 = np.sort(groups, axis=2)[..., -router.group_best :].sum(axis=2)
        return best

    def largest(self, scores: F32, count: int) -> Ints:
        """The `count` largest of each row, in rank order (SPEC 9.2)."""
        return np.argsort(-scores, axis=1, kind="stable")[:, :count]

    def weighed(self, scores: F32, logits: F32, experts: Ints, router: Router) -> F32:
        """Step 5 of SPEC 9.2."""
        gates = np.take_along_axis(scores, experts, axis=1)
        return self.softmax(gates) if router.score == "logits" else gates

    def renormalised(self, gates: F32, router: Router) -> F32:
        """Step 6 of SPEC 9.2."""
        if not router.renormalise:
            return gates
        total = np.cumsum(gates, axis=1, dtype=np.float64)[:, -1:] + router.epsilon
        return to_float32(gates / total)

    def scaled(self, gates: F32, router: Router) -> F32:
        """Step 7 of SPEC 9.2."""
        return gates * np.float32(router.scale)

    def moe(
        self,
        x: F32,
        experts: Ints,
        gates: F32,
        gate: F32,
        up: F32,
        down: F32,
        activation: str,
        shared_gate: F32 | None = None,
        shared_up: F32 | None = None,
        shared_down: F32 | None = None,
        shared_router: F32 | None = None,
    ) -> F32:
        """SPEC 9.3."""
        outputs = np.zeros((*experts.shape, x.shape[1]), np.float32)
        with np.errstate(all="ignore"):
            for expert in np.unique(experts).tolist():
                tokens, ranks = self.tokens_of(experts, expert, len(gate))
                weights = gate[expert], up[expert], down[expert]
                rows = self.expert_input(x[tokens], gates[tokens, ranks])
                if len(rows):
                    outputs[tokens, ranks] = self.gated_mlp(rows, *weights, activation)
            shared = None
            if shared_gate is not None and shared_up is not None and shared_down is not None:
                shared = self.gated_mlp(x, shared_gate, shared_up, shared_down, activation)
                if shared_router is not None:
                    shared = self.shared_weighed(shared, self.linear(x, shared_router))
            return self.summed(outputs, gates, experts, shared)

    def tokens_of(self, experts: Ints, expert: int, count: int) -> tuple[Ints, Ints]:
        """Which tokens an expert of `count` computes, and at which ranks (SPEC 9.3)."""
        tokens, ranks = np.nonzero(experts == expert)
        return tokens, ranks

    def expert_input(self, x: F32, gates: F32) -> F32:
        """What an expert is fed, (n, K)."""
        return x

    def shared_weighed(self, y: F32, v: F32) -> F32:
        """The shared expert's output by its gate (SPEC 9.3)."""
        return one_nan(self.sigmoid(v) * y)

    def summed(self, outputs: F32, gates: F32, experts: Ints, shared: F32 | None) -> F32:
        """Outputs (T, k, K) by gate, in rank order, the shared one last (SPEC 9.3)."""
        total = np.zeros_like(outputs[:, 0])
        for rank in range(outputs.shape[1]):
            total = self.added(total, outputs[:, rank], gates[:, rank, None])
        return total if shared is None else one_nan(total + shared)

    def added(self, total: F32, y: F32, gate: F32) -> F32:
        """RN32(total + RN32(gate * y)) (SPEC 9.3)."""
        return one_nan(total + one_nan(gate * y))
