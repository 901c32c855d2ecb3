"""A model folder in the layout of Hugging Face: configuration, weights, tokenizer (SPEC 12.1)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.blocks import BlockMatrix
from reference.config import ModelConfig, Section, SparseConfig, parse_config, show
from reference.errors import ConfigError, WeightsError
from reference.families import EMBEDDING, HEAD, NORMS
from reference.loading.safetensors_file import F32, Entry, SafetensorsFile, open_safetensors
from reference.loading.strict_json import read_object
from reference.memory import StoredTensors, row_slices
from reference.tokenizer import Tokenizer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """A model as read from disk; its arrays cannot be written to.

    tensors: float32 arrays by their Hugging Face names, those of `expected_tensors` and no others.
    tokenizer: None if there is none. eos_token_ids: the ids that end a text (SPEC 12.1, 12.2).
    blocks: the projections among the tensors that a GGUF file stores as Q4_0 or Q8_0, as they are
    stored (SPEC 5.7).
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, F32]
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    blocks: Mapping[str, BlockMatrix] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def digest(self) -> str:
        """The sha256, in hex, of the configuration and the float32 tensors.

        So it identifies what a model computes with, however that is stored.
        """
        return _digest(self.config, self.tensors)


def load_folder(path: str | Path, mapped: bool = False) -> Checkpoint:
    """Read and check a model folder (SPEC 12.1).

    mapped: each tensor is read, and its values are checked, when it is asked for (SPEC 12.3).
    Raises ConfigError, WeightsError or TokenizerError, in one line that names the file, the field
    or tensor, and the remedy.
    """
    folder = Path(path)
    raw = read_object(folder / "config.json", ConfigError)
    config = parse_config(raw, str(folder / "config.json"))
    eos = _read_ends(folder, raw, config.vocab_size)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.load(file, config.vocab_size, eos) if file.exists() else None
    tensors = find_tensors(folder, config)
    return Checkpoint(
        path=folder,
        config=config,
        tensors=tensors if mapped else MappingProxyType(tensors.read()),
        tokenizer=tokenizer,
        eos_token_ids=eos,
    )


def _digest(config: ModelConfig, tensors: Mapping[str, F32]) -> str:
    """Sha256 of the configuration and of name, shape and float32 bytes of each tensor, by name."""
    digest = hashlib.sha256(repr(config).encode())
    for name in sorted(tensors):
        digest.update(f"\n{name} {tensors[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(tensors[name], "<f4").data)
    return digest.hexdigest()


# ----------------------------------------------------------------------------- the tensors it needs


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the architecture needs (SPEC 10.2, 12).

    Linear weights are (N, K), output features first.
    """
    return dict(each_tensor(config))


Named = Iterator[tuple[str, tuple[int, ...]]]


def each_tensor(config: ModelConfig) -> Named:
    """The tensors of `expected_tensors`, one by one.

    A configuration may, in one line, ask for more of them than memory has room to list. So it is
    compared with a file one by one, up to the first tensor that the file lacks.
    """
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    for index in range(config.layers):
        for name, shape in _layer_tensors(config, index):
            yield f"model.layers.{index}.{name}", shape
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tied:
        yield HEAD, (config.vocab_size, config.hidden_size)


def _layer_tensors(config: ModelConfig, index: int) -> Named:
    """Name within the layer, and shape, of each tensor of one layer."""
    hidden, family = config.hidden_size, config.family
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for name in NORMS[family.norms]:
        if name is not None:
            yield f"{name}.weight", (hidden,)
    sizes = (queries, keys, keys)
    yield from _parts("self_attn", family.qkv, sizes, hidden, config.qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, queries, config.o_bias)
    if config.qk_norm is not None:
        whole = config.qk_norm == "row"
        yield "self_attn.q_norm.weight", (queries if whole else config.head_dim,)
        yield "self_attn.k_norm.weight", (keys if whole else config.head_dim,)
    if family.sinks:
        yield "self_attn.sinks", (config.heads,)
    sparse = config.sparse_of(index)
    if sparse is not None:
        yield from _expert_tensors(sparse, hidden)
    else:
        bias, inner = config.mlp_bias, config.intermediate_size
        yield from _gated("mlp", family.gate_up, "down_proj", inner, hidden, bias)


def _expert_tensors(config: SparseConfig, hidden: int) -> Named:
    """The same for the router and experts of a layer (SPEC 9.2, 9.3)."""
    count, width, sparse = config.router.experts, config.width, config.stored
    yield from _linear(sparse.router, count, hidden, sparse.biases)
    if config.shared_width is not None:
        names = ("gate_proj", "up_proj")
        yield from _gated("mlp.shared_expert", names, "down_proj", config.shared_width, hidden)
        yield "mlp.shared_expert_gate.weight", (1, hidden)
    if sparse.stacked:
        for name, inputs, outputs in (
            (sparse.gate_up[0], hidden, 2 * width),
            (sparse.down, width, hidden),
        ):
            yield f"{sparse.experts}.{name}", (count, inputs, outputs)
            yield f"{sparse.experts}.{name}_bias", (count, outputs)
        return
    for expert in range(count):
        at = f"{sparse.experts}.{expert}"
        yield from _gated(at, sparse.gate_up, sparse.down, width, hidden)


def _gated(
    prefix: str, gate_up: tuple[str, ...], down: str, inner: int, hidden: int, bias: bool = False
) -> Named:
    """The projections of a gated layer (SPEC 9.1)."""
    yield from _parts(prefix, gate_up, (inner, inner), hidden, bias)
    yield from _linear(f"{prefix}.{down}", hidden, inner, bias)


def _parts(
    prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], inputs: int, bias: bool
) -> Named:
    """Projections of these sizes, each under its name, or all fused under one."""
    if len(names) == 1:
        sizes = (sum(sizes),)
    for name, size in zip(names, sizes, strict=True):
        yield from _linear(f"{prefix}.{name}", size, inputs, bias)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Named:
    """The weight of a linear layer, and its bias where it has one."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


# ------------------------------------------------------------------------------- the tensors it has


class FolderTensors(StoredTensors):
    """The tensors of a folder, by name. home: the file that holds each."""

    def __init__(self, home: Mapping[str, SafetensorsFile]) -> None:
        self._home = home

    def __getitem__(self, name: str) -> F32:
        return self._home[name].rows(name)

    def rows(self, name: str, rows: slice | NDArray[np.int64]) -> F32:
        """Rows of a tensor, as `StoredTensors.rows`."""
        return self._home[name].rows(name, rows)

    def read(self) -> dict[str, F32]:
        """All tensors, each in an array of its own."""
        tensors: dict[str, F32] = {}
        for file in {id(file): file for file in self._home.values()}.values():
            tensors |= file.read([name for name, home in self._home.items() if home is file])
        return tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


def find_tensors(folder: Path, config: ModelConfig) -> FolderTensors:
    """The tensors of `expected_tensors`, all of which the folder must have (SPEC 12.1).

    All headers are checked before any tensor is read. Raises WeightsError for a missing, misshapen
    or unknown tensor, and for files that contradict themselves or one another.
    """
    files = _open_files(folder)
    home = {name: file for file in files for name in file.entries}
    wanted = _wanted(folder, home, config)
    _check_unknown(home, wanted)
    for name, shape in wanted.items():
        _check_shape(home[name].path, home[name].entries[name], shape)
    _check_dtypes(home, wanted)
    if config.tied and HEAD in home:
        _check_tied_head(home[HEAD], home[EMBEDDING])
        del wanted[HEAD]
    return FolderTensors({name: home[name] for name in wanted})


def _wanted(
    folder: Path, home: Mapping[str, SafetensorsFile], config: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that is needed, and of a stored head that is tied."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in each_tensor(config):
        if name not in home:
            raise WeightsError(
                f"{folder}: no weight file holds tensor {show(name)}, expected with shape "
                f"{list(shape)}; check that config.json belongs to these weights"
            )
        wanted[name] = shape
    if config.tied and HEAD in home:
        wanted[HEAD] = wanted[EMBEDDING]
    return wanted


def _check_unknown(home: Mapping[str, SafetensorsFile], wanted: Iterable[str]) -> None:
    """Refuse the first tensor that is there but is not wanted or known to be unused."""
    for name, file in home.items():
        if name not in wanted and not _is_unused(name):
            shape = file.entries[name].shape
            raise WeightsError(
                f"{file.path}: tensor {show(name)} of shape {list(shape)} is not expected; check "
                "that config.json belongs to these weights, or remove the tensor"
            )


def _is_unused(name: str) -> bool:
    """Whether a tensor takes no part: a constant, or one of layers that draft (SPEC 12.1)."""
    return name.endswith("rotary_emb.inv_freq") or name.startswith("mtp.")


def _check_shape(path: Path, entry: Entry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise WeightsError(
            f"{path}: tensor {show(entry.name)} has shape {list(entry.shape)}, expected "
            f"{list(shape)}; check that config.json belongs to these weights"
        )


def _check_dtypes(home: Mapping[str, SafetensorsFile], wanted: Iterable[str]) -> None:
    """Refuse shards that store tensors of one name but for its numbers in several dtypes."""
    first: dict[str, str] = {}
    for name in wanted:
        other = first.setdefault(re.sub(r"\d+", "*", name), name)
        dtypes = [home[n].entries[n].dtype for n in (other, name)]
        if dtypes[0] != dtypes[1] and home[other] is not home[name]:
            raise WeightsError(
                f"{home[name].path}: tensor {show(name)} is {dtypes[1]}, but {show(other)} in "
                f"{home[other].path.name} is {dtypes[0]}; fetch the shards of one model again"
            )


def _check_tied_head(head: SafetensorsFile, embedding: SafetensorsFile) -> None:
    """Refuse a stored head of a tied model that does not equal the embedding."""
    shape = head.entries[HEAD].shape
    for rows in row_slices(*shape):
        if not np.array_equal(head.rows(HEAD, rows), embedding.rows(EMBEDDING, rows)):
            raise WeightsError(
                f"{head.path}: tensor {HEAD!r} differs from {EMBEDDING!r}, though config.json ties "
                "them; set tie_word_embeddings to false, or remove the tensor"
            )


# ------------------------------------------------------------------------------------ the files


def _open_files(folder: Path) -> list[SafetensorsFile]:
    """Open the one weight file, or the shards that the index lists."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise WeightsError(f"{single}: {INDEX} lies beside it; remove the one that is out of date")
    if single.exists():
        return [open_safetensors(single)]
    if index.exists():
        return _open_shards(folder, index)
    raise WeightsError(
        f"{folder}: it holds neither {SINGLE} nor {INDEX}; save the model in safetensors format"
    )


def _open_shards(folder: Path, index: Path) -> list[SafetensorsFile]:
    """Open the shards of an index, and compare each with it."""
    placed = _read_index(index)
    shards = []
    for name in sorted(set(placed.values())):
        if not (folder / name).exists():
            raise WeightsError(f"{index}: shard {show(name)} is not in the folder; fetch it")
        shards.append(open_safetensors(folder / name))
    holders: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.entries:
            _check_placement(index, tensor, shard.path.name, placed, holders)
    for tensor, name in placed.items():
        if tensor not in holders:
            raise WeightsError(
                f"{folder / name}: tensor {show(tensor)} is missing, though {INDEX} places it "
                "there; fetch the shard and the index again"
            )
    return shards


def _check_placement(
    index: Path, tensor: str, shard: str, placed: Mapping[str, str], holders: dict[str, str]
) -> None:
    """Note that a shard holds a tensor; refuse a second one, and one the index does not name."""
    if tensor in holders:
        raise WeightsError(
            f"{index}: tensor {show(tensor)} is in two shards, {holders[tensor]!r} and {shard!r}; "
            "keep one of them"
        )
    if placed.get(tensor) != shard:
        where = show(placed[tensor]) if tensor in placed else "nowhere"
        raise WeightsError(
            f"{index}: tensor {show(tensor)} is in shard {shard!r}, but the index places it "
            f"{where}; fetch the shards and the index again"
        )
    holders[tensor] = shard


def _read_index(index: Path) -> dict[str, str]:
    """Shard of each tensor, from the `weight_map` of an index."""
    raw = read_object(index, WeightsError)
    placed = raw.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise WeightsError(
            f"{index}: weight_map is {show(placed)}; it must name the shard of every tensor"
        )
    for tensor, name in placed.items():
        if not _is_plain_name(name):
            raise WeightsError(
                f"{index}: weight_map places tensor {show(tensor)} in {show(name)}; give the plain "
                "name of a .safetensors file of this folder"
            )
    return placed


def _is_plain_name(name: Any) -> bool:
    """Whether this names a file of the folder itself: printable ASCII, and no separator."""
    if not isinstance(name, str) or not name.isascii() or not name.isprintable():
        return False
    return len(name) <= 255 and name.endswith(".safetensors") and not set(name) & set("/\\:")


# ------------------------------------------------------------------------------------ special ids


def _read_ends(folder: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text, of `generation_config.json` before `config.json` (SPEC 12.1).

    Either holds one id or a list; where both are absent or null there is none.
    """
    path, key = folder / "generation_config.json", "eos_token_id"
    keys = Section(read_object(path, ConfigError), str(path)) if path.exists() else Section({}, "")
    if not keys.has(key):
        keys = Section(config, str(folder / "config.json"))
    if not keys.has(key):
        return ()
    value = keys.value(key)
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            keys.refuse(key, f"a token id is an integer from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))
