"""Hugging Face MoE blocks and checkpoints in and out.

layer = from_transformers(model.model.layers[0].mlp)      an equal MoELayer, on any world and placement
block = to_transformers(layer, model.config)              and back
layer = load_layer(Checkpoint("path/to/model"), 0)        from a local safetensors checkpoint, without transformers
"""

from moe_ref.compat.blocks import from_transformers, to_transformers
from moe_ref.compat.checkpoint import Checkpoint, load_layer
from moe_ref.compat.families import FAMILIES, config_of
from moe_ref.compat.names import block_state, logical_state

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "block_state",
    "config_of",
    "from_transformers",
    "load_layer",
    "logical_state",
    "to_transformers",
]
