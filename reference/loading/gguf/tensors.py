"""Tensors of a GGUF file under their Hugging Face names, dequantized one by one (SPEC 12.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import F32
from reference.blocks import BLOCK_BYTES, BlockMatrix, BlockType, read_blocks
from reference.config import ModelConfig, show
from reference.errors import WeightsError
from reference.loading.gguf.architectures import Architecture
from reference.loading.gguf.file import GGUFFile
from reference.loading.huggingface import each_tensor
from reference.memory import StoredTensors

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
"""Tensors that hold constants; the configuration has been made from them."""

Element = TypeVar("Element", bound=np.generic)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: tensor `name` of the file, or its part `expert`.

    other: a tensor whose rows alternate with those of `name`, if any. heads: the number of heads
    whose rows are permuted, 0 for none. plus_one: whether 1 was added to norm weights. transposed:
    whether the file has input features last, and the Hugging Face tensor has not.
    """

    name: str
    other: str | None
    expert: int | None
    heads: int
    plus_one: bool
    transposed: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the file, one or two."""
        return (self.name,) if self.other is None else (self.name, self.other)

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the file's tensors that make a tensor of this shape."""
        *outer, last = shape
        last //= len(self.names)
        return (*outer[:-1], last, outer[-1]) if self.transposed else (*outer, last)


class Tensors(StoredTensors):
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
        if source.other is not None:
            tensor = _by_turns(tensor, self._file.read(source.other))
        if source.transposed:
            tensor = tensor.swapaxes(1, 2)
        if source.heads:
            tensor = unpermuted(tensor, source.heads)
        if source.plus_one:
            tensor = self._less_one(source.name, tensor)
        tensor = tensor.reshape(self._shapes[name])
        tensor.flags.writeable = False
        return tensor

    def rows(self, name: str, rows: slice | NDArray[np.int64]) -> F32:
        """Rows of the embedding or the output head, which are stored unchanged."""
        return self._file.read(self._sources[name].name, rows=rows)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def block_type(self, name: str) -> BlockType | None:
        """How a projection is stored, where it has a native form (SPEC 5.7, 10.1)."""
        stored = self._file.entries[self._sources[name].name].kind
        if not name.endswith("proj.weight") and not _EXPERT.search(name):
            return None
        return next((kind for kind in BLOCK_BYTES if kind == stored), None)

    def blocks(self, name: str, kind: BlockType) -> BlockMatrix:
        """A matrix of blocks as stored, its rows in the order of the dequantized tensor's."""
        source = self._sources[name]
        rows = self._file.rows(source.name, source.expert)
        if source.heads:
            rows = unpermuted(rows, source.heads)
        return read_blocks(rows.reshape(len(rows), -1, BLOCK_BYTES[kind]), kind)

    def _less_one(self, name: str, w: F32) -> F32:
        """w' = RN32(g - 1), for which `RN32(1 + w')` is the stored norm g again (SPEC 12.2)."""
        less: F32 = w - np.float32(1)
        if not np.array_equal(np.float32(1) + less, w):
            raise WeightsError(
                f"{self._file.path}: tensor {show(name)} holds what is not 1 + w for any float32 "
                "w; convert the model again, with norms in F32"
            )
        return less


def _by_turns(first: F32, second: F32) -> F32:
    """Rows of two tensors (E, I, ...) alternating, (E, 2 I, ...)."""
    both = np.stack([first, second], axis=2)
    return both.reshape(len(first), -1, *first.shape[2:])


class Blocks(Mapping[str, BlockMatrix]):
    """The projections that have a native form; each is read when it is asked for."""

    def __init__(self, tensors: Tensors) -> None:
        types = {name: tensors.block_type(name) for name in tensors}
        self._tensors = tensors
        self._types = {name: kind for name, kind in types.items() if kind is not None}

    def __getitem__(self, name: str) -> BlockMatrix:
        return self._tensors.blocks(name, self._types[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)


def unpermuted(w: NDArray[Element], heads: int) -> NDArray[Element]:
    """Undo a converter's permutation of rows, (H D, ...) -> the same shape (SPEC 7.4, 12.2).

    Rows that rotate together are neighbours in the file, and D/2 rows apart in the result.
    """
    neighbours = w.reshape(heads, -1, 2, *w.shape[1:])
    return np.ascontiguousarray(neighbours.swapaxes(1, 2)).reshape(w.shape)


def find_tensors(file: GGUFFile, config: ModelConfig, row: Architecture) -> Tensors:
    """The tensors of `expected_tensors`, all of which the file must have, and no others.

    Raises WeightsError for one that is missing, misshapen or not expected.
    """
    shapes, sources = dict[str, tuple[int, ...]](), dict[str, Source]()
    for name, shape in each_tensor(config):
        source = _source(name, config, row)
        for part in source.names:
            _check_shape(file, part, source.expert, source.stored(shape))
        shapes[name], sources[name] = shape, source
    used = {name for source in sources.values() for name in source.names}
    for name, entry in file.entries.items():
        if name not in used and name not in IGNORED:
            raise WeightsError(
                f"{file.path}: tensor {show(name)} of shape {list(entry.shape)} is not expected; "
                "check that the metadata belongs to these weights"
            )
    return Tensors(file, sources, shapes)


def _source(name: str, config: ModelConfig, row: Architecture) -> Source:
    """Where a tensor of a Hugging Face name comes from."""
    stem, ending = _stem(name)
    layer, expert = _LAYER.fullmatch(stem), _EXPERT.search(stem)
    if layer is None:
        places = [WHOLE[stem]]
    else:
        within = _EXPERT.sub(".experts.*.", layer[2])
        names = {**IN_LAYER, **row.tensors}[within].split()
        places = [f"blk.{layer[1]}.{place}" for place in names]
    turning = {"q_proj": config.heads, "k_proj": config.kv_heads} if row.by_turns else {}
    return Source(
        f"{places[0]}.{ending}",
        f"{places[1]}.{ending}" if len(places) > 1 else None,
        int(expert[1]) if expert else None,
        turning.get(stem.rpartition(".")[2], 0),
        row.plus_one and stem.endswith("norm"),
        stem == name and ".experts." in name,
    )


def _stem(name: str) -> tuple[str, str]:
    """A name without its ending, and its ending in the file: sinks, say, have one only there."""
    stem, _, ending = name.rpartition(".")
    if ending in ("weight", "bias"):
        return stem, ending
    return (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")


def _check_shape(file: GGUFFile, name: str, expert: int | None, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is missing or misshapen; converters drop dimensions of 1."""
    entry = file.entries.get(name)
    if entry is None:
        raise WeightsError(
            f"{file.path}: there is no tensor {show(name)}, expected with shape "
            f"{list(shape)}; check that the metadata belongs to these weights"
        )
    whole = entry.shape
    held = whole if expert is None else whole[1:]
    if [n for n in held if n > 1] != [n for n in shape if n > 1]:
        raise WeightsError(
            f"{file.path}: tensor {show(name)} has shape {list(whole)}, expected "
            f"{list(shape)}{'' if expert is None else ' for each expert'}; check that the "
            "metadata belongs to these weights"
        )
    if expert is not None and expert >= whole[0]:
        raise WeightsError(
            f"{file.path}: tensor {show(name)} holds {whole[0]} experts, and expert "
            f"{expert} is expected; check that the metadata belongs to these weights"
        )
