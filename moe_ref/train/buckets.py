"""Which numbers are the same on which ranks: one flat bucket per replica set.

An expert lives on the ranks of its replica set, a dense parameter on all ranks: it is treated as an expert that lives
everywhere, so one mechanism sums gradients, shards optimisers and writes checkpoints for both. Replica sets overlap
(with symmetric placements nearly every expert has its own), so a rank has several buckets, and an expert of one layer
shares a bucket with the experts of other layers that live on the same ranks.

All ranks have their buckets in one global order, and pieces in the order of parameters and experts; what two replicas
exchange is therefore described completely by its position.

Letters: N numbers of a bucket, P ranks, X local expert slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moe_ref.experts import accumulate_dtype
from moe_ref.layer import MoELayer
from moe_ref.world import World


@dataclass(frozen=True)
class Piece:
    """A dense parameter, or one expert's row of an expert parameter.

    Attributes:
        key: logical name, the same on every rank and in every placement: the parameter's name, and for an expert
            "/" and its logical id.
        parameter: the parameter in this process; slot: row of it, None for all of it.
    """

    key: str
    parameter: nn.Parameter
    slot: int | None

    @property
    def data(self) -> Tensor:
        """View of the values."""
        value = self.parameter.detach()
        return value if self.slot is None else value[self.slot]

    @property
    def gradient(self) -> Tensor | None:
        """View of the gradient, or None."""
        value = self.parameter.grad
        return value if value is None or self.slot is None else value[self.slot]


@dataclass
class Bucket:
    """All pieces that live on one set of ranks.

    Attributes:
        ranks: the set, in replica order. place: this rank's position in it.
        dtype: of sums and of the optimiser's masters: fp32, or fp64 for fp64 parameters.
        trainable: whether gradients are summed; frozen pieces only move and are saved.
    """

    ranks: tuple[int, ...]
    place: int
    dtype: torch.dtype
    trainable: bool
    pieces: list[Piece] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """Numbers of each piece."""
        return [piece.data.numel() for piece in self.pieces]

    @property
    def size(self) -> int:
        """N."""
        return sum(self.sizes)

    def bounds(self, place: int) -> slice:
        """Part of the bucket that replica `place` sums and optimises: parts differ by at most one number."""
        count, size = len(self.ranks), self.size
        return slice(size * place // count, size * (place + 1) // count)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat [N], one per piece, in the piece's shape."""
        parts = flat.split(self.sizes)
        return [part.view(piece.data.shape) for part, piece in zip(parts, self.pieces, strict=True)]

    def values(self) -> Tensor:
        """All pieces' values, [N] in `dtype`."""
        return torch.cat([piece.data.reshape(-1).to(self.dtype) for piece in self.pieces])

    def gradients(self) -> Tensor:
        """All pieces' gradients, [N] in `dtype`; zeros where there is none (nothing reached the parameter)."""
        first = self.pieces[0].data
        flat = torch.empty(self.size, dtype=self.dtype, device=first.device)
        for piece, part in zip(self.pieces, flat.split(self.sizes), strict=True):
            gradient = piece.gradient
            part.zero_() if gradient is None else part.copy_(gradient.reshape(-1))
        return flat


def expert_parameters(layer: MoELayer) -> dict[str, nn.Parameter]:
    """The parameters of a layer whose first dimension is experts, by their names in the layer."""
    named = {
        "gate_up_proj" if layer.config.gated else "up_proj": layer.up_parameter,
        "gate_up_proj_bias" if layer.config.gated else "up_proj_bias": layer.up_bias_parameter,
        "down_proj": layer.down_proj,
        "down_proj_bias": layer.down_proj_bias,
    }
    return {name: value for name, value in named.items() if value is not None}


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """All MoE layers of a model by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def make_buckets(model: nn.Module, world: World) -> list[Bucket]:
    """The buckets of this process, in the global order.

    In a simulated world the one process holds all replicas at once: every set is this process alone.
    """
    here = world.local_ranks[0]
    distributed = len(world.local_ranks) < world.num_ranks
    everyone = tuple(range(world.num_ranks)) if distributed else (here,)
    experts: dict[int, tuple[MoELayer, str]] = {}
    for name, layer in moe_layers(model).items():
        for inner, parameter in expert_parameters(layer).items():
            experts[id(parameter)] = (layer, f"{name}.{inner}" if name else inner)
    buckets: dict[tuple, Bucket] = {}

    def add(ranks: tuple[int, ...], piece: Piece) -> None:
        dtype, trainable = accumulate_dtype(piece.parameter.dtype), piece.parameter.requires_grad
        key = (ranks, str(dtype), trainable)
        if key not in buckets:
            buckets[key] = Bucket(ranks, ranks.index(here), dtype, trainable)
        buckets[key].pieces.append(piece)

    for name, parameter in model.named_parameters():
        if id(parameter) not in experts:
            add(everyone, Piece(name, parameter, None))
            continue
        layer, key = experts[id(parameter)]
        for slot, expert in enumerate(layer.held_experts):
            ranks = layer.placement.ranks_of_expert[expert] if distributed else (here,)
            add(ranks, Piece(f"{key}/{expert}", parameter, slot))
    return [buckets[key] for key in sorted(buckets)]
