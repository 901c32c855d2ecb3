"""Tensors of a GGUF file under their Hugging Face names, dequantized one by one (SPEC 12.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from reference.arithmetic import F32
from reference.config import ModelConfig, show
from reference.errors import WeightsError
from reference.loading.gguf.architectures import Architecture
from reference.loading.gguf.file import GGUFFile
from reference.loading.huggingface import expected_tensors

WHOLE: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
IN_LAYER: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
"""Names within `model.layers.N.` and within `blk.N.`; experts are parts of one tensor there."""

IGNORED = ("rope_freqs.weight",)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: a tensor of the file, or its part `expert`.

    heads: whose rows are permuted, 0 for none. plus_one: whether 1 was added.
    """

    name: str
    expert: int | None
    heads: int
    plus_one: bool


class Tensors(Mapping[str, F32]):
    """Tensors by their Hugging Face names; each is read and dequantized when it is asked for.

    Asking raises WeightsError where the file cannot be read, or holds a NaN or an infinity.
    """

    def __init__(
        self,
        file: GGUFFile,
        sources: Mapping[str, Source],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._file, self._sources, self._shapes = file, sources, shapes

    def __getitem__(self, name: str) -> F32:
        source = self._sources[name]
        tensor = self._file.read(source.name, source.expert)
        if source.heads:
            tensor = unpermuted(tensor, source.heads)
        if source.plus_one:
            tensor = self._less_one(source.name, tensor)
        tensor = tensor.reshape(self._shapes[name])
        tensor.flags.writeable = False
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def _less_one(self, name: str, w: F32) -> F32:
        """The w of `RN32(1 + w)`, which has one for every weight that such an addition gives."""
        less: F32 = w - np.float32(1)
        if not np.array_equal(np.float32(1) + less, w):
            raise WeightsError(
                f"{self._file.path}: tensor {show(name)} holds what is not 1 + w for any float32 "
                "w; convert the model again, with norms in F32"
            )
        return less


def unpermuted(w: F32, heads: int) -> F32:
    """Rows (Hq D, ...) of neighbours that rotate together, to halves of a head (SPEC 7.4, 12.2)."""
    neighbours = w.reshape(heads, -1, 2, *w.shape[1:])
    return np.ascontiguousarray(neighbours.swapaxes(1, 2)).reshape(w.shape)


def find_tensors(file: GGUFFile, config: ModelConfig, row: Architecture) -> Tensors:
    """The tensors of `expected_tensors`, all of which the file must have, and no others.

    Raises WeightsError for one that is missing, misshapen or not expected.
    """
    _check_layers(file, config)
    shapes = expected_tensors(config)
    sources = {name: _source(name, config, row) for name in shapes}
    for name, source in sources.items():
        _check_shape(file, source, shapes[name])
    used = {source.name for source in sources.values()}
    for name, entry in file.entries.items():
        if name not in used and name not in IGNORED:
            raise WeightsError(
                f"{file.path}: tensor {show(name)} of shape {list(entry.shape)} is not expected; "
                "check that the metadata belongs to these weights"
            )
    return Tensors(file, sources, shapes)


def _check_layers(file: GGUFFile, config: ModelConfig) -> None:
    """Refuse more layers, or experts, than the file can hold, before they are counted up."""
    experts = 1 if config.sparse is None else config.sparse.router.experts
    held = sum(entry.shape[0] if len(entry.shape) > 2 else 1 for entry in file.entries.values())
    if config.layers * experts > held:
        raise WeightsError(
            f"{file.path}: {config.layers} layers of {experts} experts need more tensors than the "
            f"{len(file.entries)} that it holds; convert the model again"
        )


def _source(name: str, config: ModelConfig, row: Architecture) -> Source:
    """Where a tensor of a Hugging Face name comes from."""
    stem, _, ending = name.rpartition(".")
    layer, expert = _LAYER.fullmatch(stem), _EXPERT.search(stem)
    if layer is None:
        place = WHOLE[stem]
    else:
        within = _EXPERT.sub(".experts.*.", layer[2])
        place = f"blk.{layer[1]}.{ {**IN_LAYER, **row.tensors}[within] }"
    turning = {"q_proj": config.heads, "k_proj": config.kv_heads} if row.by_turns else {}
    return Source(
        f"{place}.{ending}",
        int(expert[1]) if expert else None,
        turning.get(stem.rpartition(".")[2], 0),
        row.plus_one and stem.endswith("norm"),
    )


def _check_shape(file: GGUFFile, source: Source, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is missing or misshapen; converters drop dimensions of 1."""
    entry = file.entries.get(source.name)
    if entry is None:
        raise WeightsError(
            f"{file.path}: there is no tensor {show(source.name)}, expected with shape "
            f"{list(shape)}; check that the metadata belongs to these weights"
        )
    whole = entry.shape
    held = whole if source.expert is None else whole[1:]
    if [n for n in held if n > 1] != [n for n in shape if n > 1]:
        raise WeightsError(
            f"{file.path}: tensor {show(source.name)} has shape {list(whole)}, expected "
            f"{list(shape)}{'' if source.expert is None else ' for each expert'}; check that the "
            "metadata belongs to these weights"
        )
    if source.expert is not None and source.expert >= whole[0]:
        raise WeightsError(
            f"{file.path}: tensor {show(source.name)} holds {whole[0]} experts, and expert "
            f"{source.expert} is expected; check that the metadata belongs to these weights"
        )
