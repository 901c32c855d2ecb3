"""A composed model that offers its trace: made of SPEC 10.2's steps, apart from `tracing`."""

from __future__ import annotations

import re
from typing import Any

from conformance.backends.composed import ComposedBackend, ComposedSession
from conformance.backends.reference import Ints
from conformance.faults import AnyFault, applied
from conformance.golden import Array
from reference.arithmetic import F32
from reference.model import AttentionKind


class Traced(ComposedSession):
    """Notes the result of each step, a fault's too, for it comes before the fault in the MRO."""

    noted: dict[str, Array]

    def trace(self, tokens: Ints, attention: AttentionKind) -> dict[str, Array]:
        self.noted = {}
        logits = self.forward(tokens, attention)
        return {**self.noted, "logits": logits}

    def forward(self, *arguments: Any, **named: Any) -> F32:
        self.__dict__.setdefault("noted", {})
        return super().forward(*arguments, **named)

    def embed(self, ids: Ints) -> F32:
        x = super().embed(ids)
        self.noted["embedding"] = x
        return x

    def norm(self, name: str, x: F32) -> F32:
        y = super().norm(name, x)
        names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
        layer = re.search(r"layers\.(\d+)\.(\w+)$", name)
        if name == "model.norm":
            self.noted["final_norm"] = y
        elif layer is not None and layer[2] in names:
            self.noted[f"layer.{layer[1]}.{names[layer[2]]}"] = y
        return y

    def heads(self, index: int, name: str, h: F32) -> F32:
        y = super().heads(index, name, h)
        if name == "v":
            self.noted[f"layer.{index}.v"] = y
        return y

    def placed(self, index: int, name: str, x: F32, positions: Ints) -> F32:
        y = super().placed(index, name, x, positions)
        self.noted[f"layer.{index}.{name}"] = y
        return y

    def project(self, index: int, name: str, x: F32) -> F32:
        y = super().project(index, name, x)
        if name == "self_attn.o":
            self.noted[f"layer.{index}.attention"] = x.reshape(len(x), -1, self.config.head_dim)
            self.noted[f"layer.{index}.o"] = y
        return y

    def feed_forward(self, index: int, h: F32) -> F32:
        y = super().feed_forward(index, h)
        self.noted[f"layer.{index}.mlp"] = y
        return y

    def residual(self, x: F32, y: F32) -> F32:
        total = super().residual(x, y)
        done = [n for n in self.noted if n.endswith("residual")]
        layer, second = divmod(len(done), 2)
        self.noted[f"layer.{layer}.{'residual' if second else 'attention_residual'}"] = total
        return total


def traced(fault: AnyFault | None, base: type[ComposedBackend] = ComposedBackend) -> Any:
    """A backend, with a fault or without, whose sessions offer a trace."""
    backend = base() if fault is None else applied(fault, base)
    backend.session = type("Session", (Traced, backend.session), {})
    return backend
