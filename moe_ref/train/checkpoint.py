"""Model checkpoints: one safetensors file, the config as JSON in its metadata. Nothing is ever unpickled.

The metadata has a single key, because safetensors writes several in random order: the same model is the same file.

Weights are stored in float16 (the shipped model has to fit a package) and computed with in fp32, so what was evaluated
is the model *after* the round trip.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_ref.errors import UsageError
from moe_ref.train.model import ByteMoE, ByteMoEConfig

METADATA_KEY = "moe_ref"
"""Key of the metadata: a JSON object of `format`, `config` and `notes`."""

FORMAT = "byte model 1"
"""Stands in the metadata of every checkpoint; another number is another format."""


def save_checkpoint(path: Path, model: ByteMoE, notes: dict[str, Any], dtype: torch.dtype = torch.float16) -> None:
    """Write model and config.

    Args:
        path: file to write; its folder must exist.
        notes: what else to say about the model (how it was trained); JSON values.
        dtype: of the stored weights.
    """
    tensors = {name: value.detach().to(dtype).contiguous().cpu() for name, value in model.state_dict().items()}
    about = {"format": FORMAT, "config": model.config.to_dict(), "notes": notes}
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(about)})


def load_checkpoint(path: Path) -> tuple[ByteMoE, dict[str, Any]]:
    """Read a model, in fp32, and the notes about it.

    Raises:
        UsageError: the file is missing, is no safetensors file of this format, or its tensors don't fit its config.
    """
    if not path.is_file():
        raise UsageError(f"no checkpoint {path}; make one with python -m moe_ref.train.pretrain")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error
    try:
        about = json.loads(metadata.get(METADATA_KEY, "{}"))
        if about.get("format") != FORMAT:
            raise UsageError(f"{path} has the format {about.get('format')!r}, expected {FORMAT!r}")
        config, notes = ByteMoEConfig.from_dict(about["config"]), about["notes"]
    except UsageError:
        raise
    except (KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"the metadata of {path} can't be used: {error}") from error
    # The draw of weights that are overwritten at once must not move the caller's random state.
    with torch.random.fork_rng(devices=[]):
        model = ByteMoE(config)
    try:
        model.load_state_dict({name: value.float() for name, value in tensors.items()})
    except RuntimeError as error:
        raise UsageError(f"the tensors of {path} don't fit its config: {' '.join(str(error).split())}") from error
    return model.eval().requires_grad_(False), notes


@cache
def tiny_moe() -> tuple[ByteMoE, dict[str, Any]]:
    """The trained model that ships in the package, fp32 on the CPU, and the notes about its training.

    It is loaded once per process and shared: don't change it in place.
    """
    with as_file(files("moe_ref").joinpath("assets", "tiny_moe.safetensors")) as path:
        return load_checkpoint(path)
