"""Hugging Face transformers as it is: whole models in float32 with eager attention (SPEC 17).

It is given the folder and nothing else: its own reading of the configuration, its own constants of
rope, its own cache and its own `generate`. A model that it cannot load or run is not implemented,
for its own reason, and so is one that it would complete with random weights.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conformance.operations import NotImplementedByBackendError

transformers: Any = importlib.import_module("transformers")
"""Its annotations are partial, so none are used."""

Array = NDArray[Any]


class TransformersBackend:
    """`AutoModelForCausalLM` in float32, on one CPU thread, which is enough for the fixtures."""

    name = "transformers"
    numerics: Mapping[str, Any] = {
        "operands": "float32",
        "accumulator": "float32",
        "fma": True,
        "flush_to_zero": False,
        "kv": "float32",
    }

    def __init__(self, device: str = "cpu") -> None:
        """Compute on device "cpu" or "cuda"."""
        self.device = torch.device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def load(self, model: str | Path, weights: str = "float32") -> TransformersSession:
        """Load a model folder; weights other than float32 are not implemented."""
        if weights != "float32":
            raise NotImplementedByBackendError(f"weights as {weights}")
        folder = Path(model)
        try:
            session = TransformersSession(*_loaded(folder, self.device))
            session.forward(np.zeros(1, np.int64))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise NotImplementedByBackendError(
                f"{folder.name} in transformers {transformers.__version__} ({reason})"
            ) from error
        return session


def _loaded(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """The model of a folder, and what it reads as the ids that end a text.

    Raises ValueError where a weight is not the folder's.
    """
    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and pad >= config.vocab_size:
        config.pad_token_id = None  # A default of the family, where nothing is padded.
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder),
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in about.items() if names}
    if wrong:
        raise ValueError(f"weights do not fit: {wrong}")
    ends = model.generation_config.eos_token_id
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    return model.to(device).eval(), ends


class TransformersSession:
    """A model, and the sequence fed to it (SPEC 17)."""

    def __init__(self, model: Any, ends: Any = None) -> None:
        self.model, self.ends = model, ends
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.reset()

    def reset(self) -> None:
        """Forget what was fed."""
        self.cache = transformers.DynamicCache(config=self.model.config)

    def forward(self, tokens: Array, attention: str = "exact") -> Array:
        """Logits (T, V) of tokens (T,) int64, continuing the sequence; one kind of attention."""
        return _array(self._fed(tokens).logits)

    def trace(self, tokens: Array, attention: str = "exact") -> dict[str, Array]:
        """What it shows of `forward`: its hidden states, and its cache (SPEC 19.2).

        Its last hidden state is that of the final norm; layers with a window keep only what the
        next token sees, and are left out where that is less than what was fed.
        """
        output, count = self._fed(tokens, output_hidden_states=True), len(tokens)
        first, *rest, last = map(_array, output.hidden_states)
        steps = {"embedding": first, "final_norm": last, "logits": _array(output.logits)}
        steps |= {f"layer.{i}.residual": x for i, x in enumerate(rest)}
        for i, layer in enumerate(self.cache.layers):
            for name, x in (("k", layer.keys), ("v", layer.values)):
                if x.shape[2] >= count:
                    steps[f"layer.{i}.{name}"] = _array(x[:, :, -count:].transpose(1, 2))
        return steps

    def _fed(self, tokens: Array, **options: Any) -> Any:
        """The model's output for the next tokens."""
        with torch.no_grad():
            return self.model(
                self._ids(tokens), **{self._cache_name: self.cache}, use_cache=True, **options
            )

    def generate(
        self, prompt: Array, max_new_tokens: int, exact_prefill: bool
    ) -> tuple[Array, Array]:
        """Greedy tokens (m,) by its own `generate`, and the logits (m, V) that they come from."""
        return self._generated(prompt, max_new_tokens)

    def complete(self, prompt: Array, max_new_tokens: int) -> tuple[Array, Array]:
        """The same up to an end token, of those that it found in the folder itself."""
        return self._generated(prompt, max_new_tokens, eos_token_id=self.ends)

    def _generated(self, prompt: Array, max_new_tokens: int, **options: Any) -> tuple[Array, Array]:
        self.reset()
        count = min(max_new_tokens, self.model.config.max_position_embeddings - len(prompt) + 1)
        ids = self._ids(prompt)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        return _array(output.sequences[:, len(prompt) :]), _array(torch.stack(output.logits, 1))

    def _ids(self, tokens: Array) -> torch.Tensor:
        return torch.tensor(np.asarray(tokens), device=self.model.device)[None]


def _array(x: torch.Tensor) -> Array:
    """The only sequence of a batch (1, ...)."""
    array: Array = x[0].cpu().contiguous().numpy()
    return array
