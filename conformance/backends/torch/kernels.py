"""What the parts of a model ask of the arithmetic that they are computed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from conformance.backends.torch.attention import Cache, Options

Rows = Callable[[Tensor], Tensor]
"""A function of the rows of a tensor, such as a prepared linear layer: (T, K) to (T, N)."""

Note = Callable[[str, Tensor], None]
"""Is shown the steps of a forward pass by name (19.2)."""


class Kernels(Protocol):
    """The arithmetic that a model is computed in."""

    functions: Mapping[str, Rows]

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax of each row (4.3)."""

    def linear(self, w: Tensor, bias: Tensor | None, mode: str) -> Rows:
        """Prepare a linear layer from w (N, K) and bias (N,) (10.1)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension (6)."""

    def cos_sin(self, angle: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of angles (7.3)."""

    def attention(self, q: Tensor, cache: Cache, options: Options, mode: str) -> Tensor:
        """Attention of the last T positions (8)."""

    def activate(self, name: str, gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
        """Return RN32(act(gate) * up), both clamped where there is a limit (9.1)."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return RN32(x + y)."""

    def cap(self, x: Tensor, c: float) -> Tensor:
        """Return RN32(c * tanh(RN32(x / c))) (10.2)."""

    def renormalise(self, gates: Tensor, epsilon: float) -> Tensor:
        """Return gates (T, k) divided by their sum (9.2)."""

    def combine(self, x: Tensor, experts: Tensor, gates: Tensor, layers: Sequence[Rows]) -> Tensor:
        """Sum of gate times output over each token's experts (9.3)."""


def gated_mlp(
    kernels: Kernels, layers: Iterable[Rows], activation: str, limit: float | None = None
) -> Rows:
    """The feed-forward layer of linear ones: gate, up and down (9.1)."""
    gate, up, down = layers
    return lambda x: down(kernels.activate(activation, gate(x), up(x), limit))
