"""A local checkpoint directory as Hugging Face writes it: config.json and safetensors, in one file or in shards.

Tensors are read one layer at a time, so a model that doesn't fit into memory can still be walked through. Only
safetensors is read: a pickled checkpoint (`*.bin`, `*.pt`) could run any code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_ref.compat.blocks import layer_from_state
from moe_ref.compat.families import Family, config_of, dtype_name, family_of
from moe_ref.compat.names import logical_state
from moe_ref.compat.quantised import BLOCKS
from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.layer import MoELayer
from moe_ref.limits import regular_file_size

INDEX = "model.safetensors.index.json"
_EXPERTS = re.compile(r"^(?P<layer>(?:.*\.)?layers\.(?P<index>\d+)\.)(?P<block>mlp|block_sparse_moe)\.experts\.")


class Checkpoint:
    """A checkpoint directory, opened.

    Attributes:
        path: the directory.
        values: its config.json.
        family: of the model.
        layers: index of each MoE layer -> prefix of its block's tensors, ascending.

    Raises:
        UsageError: no such directory, no config.json, an unknown family, no safetensors, a shard that is missing or
            unreadable, or no MoE layer; the message says which.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UsageError(f"{path} is not a directory; expected one with config.json and *.safetensors")
        values = _read_json(self.path / "config.json")
        # Models of several modalities keep their language model's config one level down.
        self.values: dict[str, Any] = values.get("text_config") or values
        if not isinstance(self.values, dict):
            raise UsageError(f"text_config in {self.path / 'config.json'} is {self.values!r}, expected an object")
        self.family: Family = family_of(str(self.values.get("model_type")))
        self._file_of = self._find_tensors()
        self.layers: dict[int, str] = {}
        self._layer_prefix: dict[int, str] = {}
        for name in self._file_of:
            found = _EXPERTS.match(name)
            if found:
                index = int(found["index"])
                self.layers[index] = f"{found['layer']}{found['block']}."
                self._layer_prefix[index] = found["layer"]
        self.layers = dict(sorted(self.layers.items()))
        if not self.layers:
            raise UsageError(f"{path} has no tensor called ...layers.N.mlp.experts... : no MoE layer in it")

    def _find_tensors(self) -> dict[str, Path]:
        """File of every tensor."""
        index = self.path / INDEX
        if index.is_file():
            map_ = _read_json(index).get("weight_map")
            if not isinstance(map_, dict):
                raise UsageError(f"{index} has no object 'weight_map'; expected tensor names -> shards")
            shards = {str(shard) for shard in map_.values()}
            for shard in sorted(shards):
                if Path(shard).name != shard or not (self.path / shard).is_file():
                    raise UsageError(f"{index} names the shard {shard}, which is not in {self.path}; download it again")
            return {name: self.path / shard for name, shard in map_.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            pickled = sorted(p.name for suffix in ("*.bin", "*.pt", "*.pth") for p in self.path.glob(suffix))
            hint = f"; {pickled[0]} is pickled and is never opened here: save it as safetensors" if pickled else ""
            raise UsageError(f"{self.path} has no *.safetensors{hint}")
        result: dict[str, Path] = {}
        for file in files:
            with _opened(file) as handle:
                result |= dict.fromkeys(handle.keys(), file)
        return result

    def block(self, layer: int) -> Mapping[str, Tensor]:
        """Tensors of the MoE block of a layer by their names inside the block; each is read when it is asked for."""
        if layer not in self.layers:
            raise UsageError(f"layer {layer} has no experts; MoE layers of {self.path}: {list(self.layers)}")
        return _Tensors(self._file_of, self.layers[layer])

    def config(self, layer: int, dtype: str | None = None, **buffers: Any) -> MoEConfig:
        """Config of a layer; dtype None is that of the stored experts (bf16 for quantised ones)."""
        if dtype is None:
            tensors = self.block(layer)
            names = [n for n in tensors if n.startswith("experts.") and n.endswith((".weight", "_proj", BLOCKS))]
            if not names:
                raise UsageError(f"layer {layer} of {self.path} has no weights of experts, only {list(tensors)[:4]}")
            stored = tensors[names[0]].dtype
            dtype = "bfloat16" if stored.itemsize == 1 else dtype_name(stored)
        return config_of(self.family.model_type, self.values, dtype, **buffers)

    def tensor(self, name: str) -> Tensor | None:
        """One tensor by its full name or the end of it (`embed_tokens.weight`); None if there is none."""
        full = name if name in self._file_of else next((n for n in self._file_of if n.endswith(f".{name}")), None)
        return None if full is None else _Tensors(self._file_of, "")[full]

    def norm_weight(self, layer: int) -> Tensor | None:
        """Gain of the norm before the MoE of a layer, or None."""
        return self.tensor(f"{self._layer_prefix[layer]}post_attention_layernorm.weight")


def load_layer(
    checkpoint: Checkpoint | Path | str, layer: int, *, dtype: str | None = None, **arguments: Any
) -> MoELayer:
    """The MoE of one decoder layer of a local checkpoint.

    Args:
        checkpoint: opened, or its directory.
        layer: number of the decoder layer.
        dtype: None for the stored one.
        arguments: fields of MoEConfig that are about buffers and the wire (layout, wire_format, max_tokens,
            tile_rows), and backend, world, placement, device of `MoELayer`.

    Raises:
        UsageError: as `Checkpoint`; or tensors are missing or don't fit the config.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    names = ("layout", "wire_format", "max_tokens", "tile_rows")
    buffers = {name: arguments.pop(name) for name in names if name in arguments}
    config = checkpoint.config(layer, dtype, **buffers)
    state = logical_state(checkpoint.block(layer), checkpoint.family, config)
    return layer_from_state(state, checkpoint.family, config, **arguments)


class _Tensors(Mapping[str, Tensor]):
    """Tensors of the files whose names begin with a prefix, without it."""

    def __init__(self, file_of: dict[str, Path], prefix: str) -> None:
        self._file_of = {name[len(prefix) :]: file for name, file in file_of.items() if name.startswith(prefix)}
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        with _opened(file) as handle:
            try:
                return handle.get_tensor(self._prefix + name)
            except SafetensorError as error:
                raise UsageError(f"{file} lacks {self._prefix + name}, which the index says it has: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _opened(file: Path) -> Any:
    regular_file_size(file, "a safetensors file")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is not a readable safetensors file: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    regular_file_size(path, "a file of a checkpoint directory as Hugging Face writes it")
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}, expected an object")
    return value
