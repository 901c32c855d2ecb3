"""Mistakes in putting a model together (SPEC 10, 14)."""

from __future__ import annotations

import numpy as np

from conformance.backends.reference import Ints
from conformance.faults.fault import SessionFault, cut_to_bfloat16, half
from reference.arithmetic import F32
from reference.model import AttentionKind


class NormAfterRope(SessionFault):
    """q and k are normed after the rotation."""

    name = "model-qk-norm-after-rope"
    reports = ("meta-pytorch/torchtune/issues/2809", "vllm-project/vllm-metal/issues/660")
    severity = "wrong"

    def placed(self, index: int, name: str, x: F32, positions: Ints) -> F32:
        """Rotated, then normed."""
        return self.normed_heads(index, name, self.rotated(x, positions))


class NormSkipped(SessionFault):
    """q and k are not normed."""

    name = "model-qk-norm-skipped"
    reports = ("vllm-project/vllm-metal/issues/660",)
    severity = "broken"

    def normed_heads(self, index: int, name: str, x: F32) -> F32:
        """As they are."""
        return x


class ResidualCut(SessionFault):
    """The residual stream is cut off to bfloat16 at every store: it shrinks layer by layer."""

    name = "model-residual-cut-to-bfloat16"
    reports = ("ROCm/aiter/issues/5151",)
    severity = "wrong"

    def residual(self, x: F32, y: F32) -> F32:
        """Towards zero."""
        return cut_to_bfloat16(super().residual(x, y))


class ResidualOfNormed(SessionFault):
    """The residual is the normed input of attention: the norm worked in place."""

    name = "model-residual-of-normed"
    reports = (
        "GeeeekExplorer/nano-vllm/issues/170",
        "Howuhh/faster-trajectory-transformer/issues/3",
    )
    severity = "broken"

    def layer(self, index: int, x: F32, positions: Ints, attention: AttentionKind) -> F32:
        """The normed row on both ways."""
        h = self.norm(f"model.layers.{index}.input_layernorm", x)
        x = self.residual(h, self.attend(index, h, positions, attention))
        h = self.norm(f"model.layers.{index}.post_attention_layernorm", x)
        return self.residual(x, self.feed_forward(index, h))


class ResidualDoubled(SessionFault):
    """Attention's result is added to itself instead of the residual."""

    name = "model-residual-doubled"
    reports = ("kyegomez/BitNet/issues/32",)
    severity = "broken"

    def layer(self, index: int, x: F32, positions: Ints, attention: AttentionKind) -> F32:
        """x + x after attention."""
        h = self.norm(f"model.layers.{index}.input_layernorm", x)
        x = self.attend(index, h, positions, attention)
        x = self.residual(x, x)
        h = self.norm(f"model.layers.{index}.post_attention_layernorm", x)
        return self.residual(x, self.feed_forward(index, h))


class FinalNormSkipped(SessionFault):
    """The norm before the head is left out."""

    name = "model-final-norm-skipped"
    reports = ("PaddlePaddle/PaddleNLP/pull/7615",)
    severity = "broken"

    def norm(self, name: str, x: F32) -> F32:
        """Not the last one."""
        return x if name == "model.norm" else super().norm(name, x)


class ContextEndsEarly(SessionFault):
    """Generation ends one token before the context does: its last position chooses none."""

    name = "model-context-ends-early"
    reports = ("sgl-project/sglang/pull/33814", "vllm-project/vllm/pull/23683")
    severity = "subtle"
    operations = ("generate",)

    def context(self) -> int:
        """One position less."""
        return super().context() - 1


class ContextEndsLate(SessionFault):
    """Generation ends one token after the context does."""

    name = "model-context-ends-late"
    reports = ("neuralmagic/deepsparse/pull/1447",)
    severity = "subtle"
    operations = ("generate",)

    def context(self) -> int:
        """One position more."""
        return super().context() + 1


class PositionsRestart(SessionFault):
    """Every call starts again at position 0."""

    name = "model-positions-restart"
    reports = ("Blaizzy/mlx-vlm/issues/1983", "RobertCsordas/moeut/pull/6")
    severity = "broken"

    def positions(self, count: int) -> Ints:
        """The cache is forgotten."""
        return np.arange(count)


class DecodeAhead(SessionFault):
    """Decode steps are one position ahead."""

    name = "model-decode-position-ahead"
    reports = ("microsoft/onnxruntime-genai/pull/2354",)
    severity = "subtle"

    def positions(self, count: int) -> Ints:
        """One more, for a single token after others."""
        return super().positions(count) + (count == 1 and self.length > 0)


class UpperLayersAhead(SessionFault):
    """In a decode step, all layers but the first are one position ahead."""

    name = "model-upper-layers-ahead"
    reports = ("fla-org/flash-linear-attention/issues/766",)
    severity = "subtle"

    def attend(self, index: int, h: F32, positions: Ints, attention: AttentionKind) -> F32:
        """The count was raised by the first layer."""
        ahead = index > 0 and len(h) == 1 and self.length > 0
        return super().attend(index, h, positions + ahead, attention)


class PositionsAddTwice(SessionFault):
    """The second call counts the prompt twice."""

    name = "model-prompt-counted-twice"
    reports = ("skyzh/tiny-llm/pull/46",)
    severity = "wrong"

    def positions(self, count: int) -> Ints:
        """Ahead by the length of the first call."""
        if self.length == 0:
            self._first = count
        return super().positions(count) + (self._first if self.length else 0)


class PositionsOfKept(SessionFault):
    """Where every layer has a window, positions count the keys that are kept, not all that came."""

    name = "model-positions-count-kept"
    reports = ("rajveer43/VeloxQuant-MLX/issues/389",)
    severity = "wrong"

    def positions(self, count: int) -> Ints:
        """They stay at the largest window."""
        windows = [window for window in self.config.windows if window is not None]
        whole = len(windows) < len(self.config.windows)
        kept = self.length if whole else min(self.length, max(windows))
        return np.arange(kept, kept + count)


class HoleInCache(SessionFault):
    """The first decode step leaves a position of the cache unwritten, and it is read."""

    name = "model-hole-in-cache"
    reports = ("microsoft/onnxruntime-genai/pull/2354",)
    severity = "wrong"

    def remember(self, index: int, k: F32, v: F32) -> None:
        """Zeros between the prompt and the first single token."""
        if len(k) == 1 and len(self.keys[index]) == 1:
            super().remember(index, np.zeros_like(k), np.zeros_like(v))
        super().remember(index, k, v)


class LastOfChunkLost(SessionFault):
    """A chunk overwrites the last position of the one before."""

    name = "model-chunk-overwrites-last"
    reports = ("huggingface/transformers/issues/30413",)
    severity = "wrong"

    def remember(self, index: int, k: F32, v: F32) -> None:
        """Written one too early; the position that it leaves free repeats it."""
        for store, rows in ((self.keys[index], k), (self.values[index], v)):
            if store:
                store[-1] = np.concatenate([store[-1][:-1], rows[:1]])
            store.append(rows)


class CacheHalf(SessionFault):
    """Keys and values are kept in float16, undeclared."""

    name = "model-cache-half"
    reports = ("kornia/kornia-rs/pull/914",)
    severity = "subtle"

    def remember(self, index: int, k: F32, v: F32) -> None:
        """Rounded."""
        super().remember(index, half(k), half(v))


class ScaleOfHiddenSize(SessionFault):
    """Scores are scaled by hidden_size / heads where head_dim is another."""

    name = "model-scale-of-hidden-size"
    reports = ("ggml-org/llama.cpp/pull/8444",)
    severity = "wrong"

    def scale(self) -> float | None:
        """1 / sqrt(hidden_size / heads)."""
        return float(np.float32((self.config.hidden_size / self.config.heads) ** -0.5))


class EmbeddingScaled(SessionFault):
    """Embeddings are multiplied by sqrt(hidden_size), as another family does."""

    name = "model-embedding-scaled"
    reports = ("huggingface/transformers/pull/29402",)
    severity = "broken"

    def embed(self, ids: Ints) -> F32:
        """Too large."""
        return super().embed(ids) * np.float32(self.config.hidden_size**0.5)


class RotaryHalvedPerLayer(SessionFault):
    """Every layer halves the rotary dimension that it shares with the others."""

    name = "model-rotary-halved-per-layer"
    reports = ("vllm-project/vllm/issues/16904",)
    severity = "broken"

    def attend(self, index: int, h: F32, positions: Ints, attention: AttentionKind) -> F32:
        """Remember the layer."""
        self._layer = index
        return super().attend(index, h, positions, attention)

    def rotated(self, x: F32, positions: Ints) -> F32:
        """The first elements alone, and fewer in each layer."""
        kept = max(2, x.shape[-1] >> self._layer)
        turned = super().rotated(x, positions)
        return np.concatenate([turned[..., :kept], x[..., kept:]], axis=-1)


class HalvesCrossed(SessionFault):
    """The second half of a rotated query is computed from the key beside it."""

    name = "model-rope-halves-crossed"
    reports = ("hpcaitech/ColossalAI/pull/6429",)
    severity = "broken"

    def placed(self, index: int, name: str, x: F32, positions: Ints) -> F32:
        """k is looked up again for q."""
        placed = super().placed(index, name, x, positions)
        if name == "k":
            return placed
        middle = x.shape[-1] // 2
        key = super().placed(index, "k", self._key, positions)
        beside = np.repeat(key, x.shape[1] // key.shape[1], axis=1)
        return np.concatenate([placed[..., :middle], beside[..., middle:]], axis=-1)

    def heads(self, index: int, name: str, h: F32) -> F32:
        """Remember k."""
        if name == "q":
            self._key = super().heads(index, "k", h)
        return super().heads(index, name, h)


class LogitsOneRowEarly(SessionFault):
    """The first token is chosen from the logits of the prompt's last token but one."""

    name = "model-logits-one-row-early"
    reports = ("mlx-node/mlx-node/pull/47",)
    severity = "broken"
    operations = ("generate",)

    def forward(self, tokens: Ints, attention: AttentionKind = "exact") -> F32:  # type: ignore[override]
        """Rows moved down by one, where there are several."""
        logits = super().forward(tokens, attention)
        return logits if len(logits) == 1 else logits[:-1]


class LastOfPromptTwice(SessionFault):
    """The prompt's last token is computed again before the first token is chosen."""

    name = "model-last-of-prompt-twice"
    reports = ("utensils/mold/issues/1690",)
    severity = "wrong"
    operations = ("generate",)

    def forward(self, tokens: Ints, attention: AttentionKind = "exact") -> F32:  # type: ignore[override]
        """Behind itself, after the first call and where there is room."""
        first = self.length == 0
        logits = super().forward(tokens, attention)
        if not first or self.length >= self.config.max_positions:
            return logits
        return np.concatenate([logits[:-1], super().forward(tokens[-1:], attention)])


class FloorOneEarly(SessionFault):
    """Fast attention begins at 511 tokens."""

    name = "model-fast-floor-one-early"
    reports = ()
    severity = "subtle"
    operations = ("generate",)
    contract = True

    def prefill(self, prompt_n: int, exact_prefill: bool) -> AttentionKind:
        """One token counts twice."""
        return super().prefill(prompt_n + 1, exact_prefill)


class ExactPrefillIgnored(SessionFault):
    """A long prompt that must be exact is computed by fast attention."""

    name = "model-exact-prefill-ignored"
    reports = ()
    severity = "subtle"
    operations = ("generate",)
    contract = True

    def prefill(self, prompt_n: int, exact_prefill: bool) -> AttentionKind:
        """By length alone."""
        return super().prefill(prompt_n, False)
